"""Measure the window search, its quality and its cost: python scripts/search.py [limit=20]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("search", "windowquant.harness.main.search_command")
