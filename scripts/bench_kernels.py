"""Latency of decode attention on the CPU, side by side: python scripts/bench_kernels.py [kernels.contexts=[1024]]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("bench_kernels", "windowquant.bench.commands.kernels_command")
