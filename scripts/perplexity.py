"""Perplexity of a small pretrained language model through packed caches: python scripts/perplexity.py [documents=4]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("perplexity", "windowquant.harness.perplexity.command.perplexity_command")
