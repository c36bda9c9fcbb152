"""Train the stand-in model: python scripts/train_mini.py [recipe.seed=1] [recipe.long_steps=100] [threads=1]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("train_mini", "windowquant.mini.training.main.train_command")
