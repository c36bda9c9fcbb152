"""What a decode step costs a layer in Python, next to `DynamicCache`: everything but the attention kernel itself.

`python -m windowquant.bench.overhead <file.json>` measures it alone, to compare versions.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from windowquant.attention import windowquant_attention
from windowquant.bench import record
from windowquant.bench.contenders import Attention
from windowquant.bench.shapes import TextShape, mixed_bits
from windowquant.bench.synthetic import AFTER, BEFORE, packed_layer, random_kv
from windowquant.bench.timing import Step, interleaved, summary, threads
from windowquant.core.packed import PackedLayer
from windowquant.kernels import get_backend

CPU = torch.device("cpu")
WINDOW, WINDOWS, STEPS, EPISODES = 32, 8, 64, 20
SHAPE = TextShape(layers=1, hidden=128, intermediate=128, heads=4, kv_heads=2, vocabulary=32)


def no_kernel(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """Instead of a backend, so that only what surrounds it is timed."""
    return q


def measure_overhead(episodes: int) -> list[dict[str, Any]]:
    """Rows `part`, `seconds`: update of the cache and attention of one token in a layer of 288 tokens, one thread.

    An episode is `STEPS` steps from there on. "without kernel": what surrounds the backend. DynamicCache's row is its
    update and SDPA, as stock.
    """
    torch.manual_seed(0)
    k, v = (random_kv(1, SHAPE, BEFORE + WINDOW * WINDOWS + AFTER, torch.float32, CPU) for _ in range(2))
    times: dict[str, list[float]] = {}
    with torch.no_grad(), threads(1):
        for _ in range(episodes):
            for steps in _steps(k, v):
                for name, seconds in interleaved(steps, STEPS, warm=2).items():
                    times.setdefault(name, []).extend(seconds)
    return [{"part": name, "seconds": summary(values)} for name, values in times.items()]


def _steps(k: Tensor, v: Tensor) -> tuple[dict[str, Step], dict[str, Step]]:
    """One token's update and attention in layers that hold k and v: light steps, and those that run a kernel, apart,
    for these leave cold caches behind."""
    q, new = torch.randn(1, SHAPE.heads, 1, SHAPE.channels), random_kv(1, SHAPE, 1, torch.float32, CPU)
    module, bits, scaling = Attention(SHAPE.group), mixed_bits(WINDOWS, "paper"), SHAPE.channels**-0.5

    def step(layer: Any, attention: Any) -> Step:
        def run() -> None:
            key, value = layer.update(new, new)
            attention(module, q, key, value, None, scaling=scaling)

        return run

    stock = DynamicLayer()
    stock.update(k, v)
    bare, whole = (packed_layer(bits, WINDOW, k, v, attend) for attend in (no_kernel, get_backend(None, CPU)))
    light = {
        "ours without kernel": step(bare, windowquant_attention),
        "DynamicCache": step(stock, sdpa_attention_forward),
    }
    return light, {"ours": step(whole, windowquant_attention)}


def main(path: Path) -> None:
    """Write a record of the overhead alone, to be kept beside those of later versions."""
    record.write(path, "overhead", {"episodes": EPISODES}, CPU, {"overhead": measure_overhead(EPISODES)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
