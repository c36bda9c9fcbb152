"""Measure the window search, its quality and its cost: python scripts/search.py [limit=20]."""

from windowquant.harness.command import command
from windowquant.harness.main import search_command

if __name__ == "__main__":
    command("search", search_command)
