"""Tokens per second end to end: a random-weight language model of a real size over a long video's cache."""

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import nn
from transformers import Cache

from windowquant.bench import unfused
from windowquant.bench.shapes import TextShape, text_shape
from windowquant.bench.synthetic import AFTER, BEFORE, TEXT_ID, filled, ids_of, sharing, stand_in_sensitivity
from windowquant.bench.timing import Step, clock_for, interleaved, summary, threads
from windowquant.cache.kv_bytes import kv_bytes
from windowquant.cache.packed_cache import PackedCache
from windowquant.errors import UserError
from windowquant.harness.machine import PeakMemory
from windowquant.method import Method, get_method
from windowquant.stock_method import StockMethod

_SPARE = 1.15  # of a cache's bytes: what filling it takes beside it


@dataclass(frozen=True)
class Spec:
    """A contender: a method with hyper-parameters, by name; `unfused`: with the unfused path for a kernel."""

    name: str
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    unfused: bool = False


SPECS = {
    spec.name: spec
    for spec in (
        Spec("dynamic", "dynamic"),
        Spec("hf_quanto", "hf_quanto"),
        Spec("hf_hqq", "hf_hqq"),
        Spec("hf_fp8", "hf_fp8"),
        Spec("uniform_int4", "uniform", {"bits_per_code": 4}),
        Spec("uniform_int2", "uniform", {"bits_per_code": 2}),
        Spec("windowquant", "windowquant"),
        Spec("unfused", "windowquant", unfused=True),
        Spec("no_first", "windowquant", {"fix_first": False}),
        Spec("random_plan", "windowquant", {"search": "random"}),
        Spec("no_reorder", "windowquant", {"reorder": False}),
    )
}
"""Contenders by name; `windowquant alpha=1` is one, too."""


def spec(name: str) -> Spec:
    """The contender called `name`; UserError, listing the known ones, for another."""
    known, _, alpha = name.partition(" alpha=")
    try:
        if known == "windowquant" and alpha:
            return Spec(name, "windowquant", {"alpha": float(alpha)})
        return SPECS[name]
    except (KeyError, ValueError):
        names = ", ".join(SPECS)
        raise UserError(f"There is no contender '{name}': use one of {names}, windowquant alpha=<number>.") from None


@dataclass(frozen=True)
class Section:
    """Cells of one purpose: every batch size with every number of visual tokens, and the contenders of each."""

    contenders: Sequence[str]
    batches: Sequence[int]
    visual_tokens: Sequence[int]

    def __post_init__(self) -> None:
        for name in self.contenders:
            spec(name)
        if not self.contenders or min([*self.batches, *self.visual_tokens, 1]) < 1:
            raise UserError("A section needs contenders, and batches and visual_tokens of 1 or more.")


@dataclass(frozen=True)
class DecodeSettings:
    """What to measure: a language model's shape, its dtype, and sections by name.

    steps: decode steps of each contender (rounds of `timing.interleaved`, whose budget_s this is). threads: see
    `kernels.KernelSettings`. backend: attention kernel of ours, None for the device's default.
    """

    shape: str
    dtype: torch.dtype
    sections: dict[str, Section]
    threads: Sequence[int]
    backend: str | None
    steps: int
    budget_s: float


def measure_decode(
    settings: DecodeSettings, model: nn.Module, device: torch.device, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each section, cell, number of threads and contender. `tell` hears of each cell as it starts."""
    counts = settings.threads if device.type == "cpu" else [torch.get_num_threads()]
    rows: list[dict[str, Any]] = []
    for name, section in settings.sections.items():
        for batch in section.batches:
            for visual in section.visual_tokens:
                tell(f"{name}: {batch} x {visual} visual tokens")
                about = {"section": name, "shape": settings.shape, "batch": batch, "visual_tokens": visual}
                cell = _Cell(settings, model, device, batch, visual)
                rows += [{**about, **row} for row in cell.measure(section.contenders, counts)]
    return rows


@dataclass(frozen=True)
class _Cell:
    settings: DecodeSettings
    model: nn.Module
    device: torch.device
    batch: int
    visual: int

    @property
    def shape(self) -> TextShape:
        return text_shape(self.settings.shape)

    def token_bytes(self, width: int) -> int:
        """Bytes of K and V of one token of one request, all layers, `width` bytes an element."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.channels * width

    def measure(self, names: Sequence[str], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Rows of the contenders: taking turns, but for those that have room only once the others are gone."""
        left = list(names)
        while left:
            steps: dict[str, Step] = {}
            facts: dict[str, dict[str, Any]] = {}
            with torch.no_grad(), ExitStack() as undo:
                while left:
                    _give_back()
                    complaint = self._too_large(spec(left[0]))
                    if complaint and steps:
                        break
                    name = left.pop(0)
                    if complaint:
                        yield {"contender": name, "skipped": complaint}
                    else:
                        steps[name], facts[name] = self._contender(spec(name), undo)
                yield from self._timed(steps, facts, counts)

    def _timed(
        self, steps: dict[str, Step], facts: dict[str, dict[str, Any]], counts: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        for count in counts if steps else ():
            with threads(count):
                times = interleaved(steps, self.settings.steps, clock_for(self.device), self.settings.budget_s)
            for name, own in facts.items():
                seconds = summary(times[name])
                rate = self.batch / seconds["median"]
                yield {"contender": name, **own, "threads": count, "seconds": seconds, "tokens_per_s": rate}

    def _too_large(self, contender: Spec) -> str | None:
        """Why the contender has no room, if so: for what it holds, and a layer in full precision while it is filled."""
        whole = self.batch * (BEFORE + self.visual + AFTER) * self.token_bytes(self.settings.dtype.itemsize)
        share = 1.0 if contender.method == "dynamic" else 0.5
        wanted = int(_SPARE * whole * share + 4 * whole / self.shape.layers)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available
        return f"needs about {wanted} bytes and {free} are free" if wanted > 0.9 * free else None

    def _contender(self, contender: Spec, undo: ExitStack) -> tuple[Step, dict[str, Any]]:
        """A contender's decode step, and what is known of its cache once it is filled."""
        method = self._method(contender)
        model: Any = sharing(self.model)
        bound = undo.enter_context(method.bind(model))
        peak, before = PeakMemory(self.device), psutil.Process().memory_info().rss
        peak.start()
        start = perf_counter()
        cache = bound.new_cache({"input_ids": ids_of(self.batch, self.visual)})
        if contender.unfused:
            cache.request.attend = unfused.attend
        with threads(1):  # another process would hold up all threads of a many-threaded fill
            filled(cache, self.batch, self.shape, self.visual, self.settings.dtype, self.device)
        fill_s, read = perf_counter() - start, peak.read()
        held, grown = kv_bytes(cache), read["rss"]
        assert grown is not None
        tokens = BEFORE + self.visual + AFTER
        known = {
            "method": method.described(),
            "unfused": contender.unfused,
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "kv_bytes": held.total,
            "kv_breakdown": vars(held),
            "kv_ratio_16_bit": held.total / (self.batch * tokens * self.token_bytes(2)),
            "fill_s": fill_s,
            "peak_rss_growth": grown - before,
            "peak_cuda": read["cuda"],
            **_plan_facts(cache),
        }
        return self._step(model, bound.cache_keyword, cache), known

    def _method(self, contender: Spec) -> Method:
        params = dict(contender.params)
        if contender.method == "windowquant":
            params["sensitivity"] = stand_in_sensitivity(self.shape.layers)
        method = get_method(contender.method, **params)
        if isinstance(method, StockMethod) or self.settings.backend is None:
            return method
        return get_method(contender.method, **params, backend=self.settings.backend)

    def _step(self, model: Any, keyword: str, cache: Cache) -> Step:
        tokens = torch.full((self.batch, 1), TEXT_ID, device=self.device)

        def step() -> None:
            nonlocal tokens
            tokens = model(input_ids=tokens, **{keyword: cache}, logits_to_keep=1).logits.argmax(-1)

        return step


def _give_back() -> None:
    """Return what earlier contenders left, so that memory which this one takes is seen to grow."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _plan_facts(cache: Cache) -> dict[str, Any]:
    if not isinstance(cache, PackedCache):
        return {}
    stats = cache.stats
    shares = {str(width): share for width, share in stats.bits.items()}
    return {"bits": shares, "search_s": stats.search_s, "pack_s": stats.pack_s}
