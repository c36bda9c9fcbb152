"""Measure a checkpoint's layer sensitivities: python scripts/calibrate.py model=llava_onevision_7b data=hub."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("calibrate", "windowquant.harness.calibrate.calibrate_command")
