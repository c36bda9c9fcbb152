"""Evaluate one method on one task: python scripts/run.py method=windowquant task=nextqa [-m method.alpha=1,2,4]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("run", "windowquant.harness.main.run_command")
