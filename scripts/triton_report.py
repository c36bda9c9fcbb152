"""Compile every Triton kernel ahead of time and write results/triton/aot.{json,md}: python scripts/triton_report.py."""

from windowquant.report.triton_report import main

if __name__ == "__main__":
    raise SystemExit(main())
