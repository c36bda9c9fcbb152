"""Decoded tokens per second on the CPU, side by side: python scripts/bench_decode.py [decode.dtype=float32]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("bench_decode", "windowquant.bench.commands.decode_command")
