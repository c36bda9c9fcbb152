"""Evaluate every cell of an experiment and build its table: python scripts/table.py experiment=table1 [scale=paper]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("table", "windowquant.harness.main.table_command")
