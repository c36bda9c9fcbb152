"""Wall-clock time that means something on an accelerator too."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; nothing to do elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, action: Callable[[], T]) -> tuple[T, float]:
    """What `action()` returns, and the seconds it took on `device`."""
    synchronize(device)
    start = time.perf_counter()
    result = action()
    synchronize(device)
    return result, time.perf_counter() - start
