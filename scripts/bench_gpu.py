"""Both benchmarks on a CUDA device, with 7B shapes: python scripts/bench_gpu.py [decode.shape=llava_1_5_7b]."""

from windowquant.harness.command import command

if __name__ == "__main__":
    command("bench_gpu", "windowquant.bench.commands.gpu_command")
