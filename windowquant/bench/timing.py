"""Contenders timed side by side, interleaved round by round, so that what disturbs one disturbs all."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

Step = Callable[[], object]
_FLUSH = 256 * 2**20  # bytes written before a GPU measurement: clears the L2 cache, and lets launches queue up behind


class Clock(Protocol):
    """Seconds that one call of a step takes."""

    def __call__(self, step: Step) -> float: ...


def clock_for(device: torch.device) -> Clock:
    """Wall-clock time on a CPU, time between two events on a CUDA device."""
    return _CudaClock(device) if device.type == "cuda" else _wall


def _wall(step: Step) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(_FLUSH, dtype=torch.int8, device=device)

    def __call__(self, step: Step) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def interleaved(
    steps: Mapping[str, Step], rounds: int, clock: Clock = _wall, budget_s: float = 60.0, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of each step, one value a round; every round runs each step once, beginning with another one each time.

    warm: rounds before, which do not count. Ends early, after three rounds, when `budget_s` is spent: slow contenders
    would otherwise make a long context take minutes.
    """
    for _ in range(warm):
        for step in steps.values():
            step()
    names, times = list(steps), {name: list[float]() for name in steps}
    start = perf_counter()
    for done in range(rounds):
        if done >= 3 and perf_counter() - start > budget_s:
            break
        for name in [*names[done % len(names) :], *names[: done % len(names)]]:
            times[name].append(clock(steps[name]))
    return times


def summary(seconds: list[float]) -> dict[str, Any]:
    """`median`, `q25`, `q75`, `min` in seconds, and `n`."""
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return {"median": float(middle), "q25": float(low), "q75": float(high), "min": min(seconds), "n": len(seconds)}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch, and the kernels that follow it, use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
