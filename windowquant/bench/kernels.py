"""Latency of decode attention over one layer's cache, every contender side by side."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from windowquant.bench.bandwidth import copy_bandwidth
from windowquant.bench.contenders import (
    STOCK,
    Cell,
    Contender,
    dynamic,
    flash_and_flex,
    ours,
    ours_step,
    sdpa,
    stock_quantized,
)
from windowquant.bench.shapes import mix, text_shape
from windowquant.bench.timing import clock_for, interleaved, summary, threads
from windowquant.errors import UserError
from windowquant.kernels import get_backend


@dataclass(frozen=True)
class KernelSettings:
    """What to measure.

    shapes, mixes: names in `shapes`. contexts: visual tokens, cut to whole windows. dtypes: what models run in; with
    the first only, `QuantizedCache` is measured. threads: counts, one after the other (a GPU ignores them).
    max_bytes: a context whose float32 K and V take more in a layer is left out, with a row that says so. stock_up_to:
    visual tokens up to which `QuantizedCache` is measured, for quantizing takes it minutes. rounds, budget_s: see
    `timing.interleaved`. copy_mebibytes: see `bandwidth.copy_bandwidth`.
    """

    shapes: Sequence[str]
    contexts: Sequence[int]
    mixes: Sequence[str]
    dtypes: Sequence[str]
    threads: Sequence[int]
    batch: int
    window: int
    backend: str | None
    max_bytes: int
    stock_up_to: int
    rounds: int
    budget_s: float
    copy_mebibytes: int

    def __post_init__(self) -> None:
        for name in self.shapes:
            text_shape(name)
        for name in self.mixes:
            mix(name)
        for name in self.dtypes:
            dtype_of(name)
        if not self.dtypes:
            raise UserError("dtypes is empty; give a list, such as [float32,bfloat16].")
        if not self.shapes or not self.contexts or min(self.contexts) < self.window:
            raise UserError(f"contexts must name numbers of visual tokens, {self.window} (one window) or more.")


def measure_kernels(settings: KernelSettings, device: torch.device, tell: Callable[[str], None]) -> dict[str, Any]:
    """Sections `bandwidth` (a row for each number of threads) and `kernels` (a row for each contender and cell).

    `tell` hears of each cell as it starts.
    """
    get_backend(settings.backend, device)  # says now what is wrong with it
    counts = settings.threads if device.type == "cpu" else [torch.get_num_threads()]
    bandwidth = []
    for count in counts:
        with threads(count):
            bandwidth.append({"threads": count, **copy_bandwidth(device, settings.copy_mebibytes)})
    copied = {row["threads"]: row["bytes_per_s"] for row in bandwidth}
    rows: list[dict[str, Any]] = []
    for name in settings.shapes:
        for context in settings.contexts:
            tell(f"attention, heads of {name}: {settings.batch} x {context} visual tokens")
            rows += _cell(settings, name, context // settings.window * settings.window, device, copied)
    return {"bandwidth": bandwidth, "kernels": rows}


def _cell(
    settings: KernelSettings, name: str, visual: int, device: torch.device, copied: dict[int, float]
) -> list[dict[str, Any]]:
    shape = text_shape(name)
    cell = Cell(shape, visual, settings.window, settings.batch, dtype_of(settings.dtypes[0]), device, settings.backend)
    about = {"shape": name, "visual_tokens": visual, "batch": settings.batch}
    size = 8 * cell.batch * shape.kv_heads * shape.channels * cell.tokens
    if size > settings.max_bytes:
        return [{**about, "skipped": f"float32 K and V of a layer take {size} bytes, more than max_bytes"}]
    rows = []
    with torch.no_grad(), ExitStack() as undo:
        with threads(1):  # another process would hold up all threads of a many-threaded packing
            contenders = list(_contenders(settings, cell, undo))
        for count in copied:
            with threads(count):
                steps = {f"{c.name} {c.dtype}": c.step for c in contenders}
                times = interleaved(steps, settings.rounds, clock_for(device), settings.budget_s)
            for c in contenders:
                seconds = summary(times[f"{c.name} {c.dtype}"])
                rate = c.needed_bytes / seconds["median"]
                rows.append(
                    {**about, "threads": count, "contender": c.name, "kind": c.kind, "dtype": c.dtype, "mix": c.mix,
                     "seconds": seconds, "needed_bytes": c.needed_bytes, "bytes_per_s": rate,
                     "share_of_copy": rate / copied[count]}
                )  # fmt: skip
    return rows


def _contenders(settings: KernelSettings, cell: Cell, undo: ExitStack) -> Iterator[Contender]:
    for dtype in map(dtype_of, settings.dtypes):
        own = replace(cell, dtype=dtype)
        for name in settings.mixes:
            yield from ours(own, name)
        yield ours_step(own, "paper" if "paper" in settings.mixes else settings.mixes[0])
        yield from sdpa(cell, dtype)
        yield dynamic(cell, dtype)
        if cell.device.type == "cuda":
            yield from flash_and_flex(cell, dtype)
    if cell.visual <= settings.stock_up_to:
        for name in STOCK:
            yield stock_quantized(cell, name, undo)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`; UserError for another than the three that models run in."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UserError(f"dtype is {name!r}; use one of {', '.join(known)}.")
    return known[name]
