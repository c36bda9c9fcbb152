"""Prefill to packed cache, layer by layer: what is alive at the worst moment."""

import gc
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.generation.common import NAMES, WINDOWQUANT, asked, generate, loaded
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.recipe import Recipe
from windowquant.cache.request import CacheRequest
from windowquant.kernels import get_backend
from windowquant.method import get_method
from windowquant.models import Prompt

LAYERS, HEADS, D, SIZE, WINDOWS, TEXT = 4, 4, 128, 32, 64, 16
MIXED = (16,) * 12 + (4,) * 8 + (2,) * 44
WORKSPACE = 0.1  # of a layer's K and V: one thirty-second of its windows, in float32


def peak_and_left(work) -> tuple[int, int]:
    """Bytes allocated above the start while `work` runs: at most, and at its end; temporaries of operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def new_layers(bits, options) -> list[PackedCacheLayer]:
    length = WINDOWS * SIZE + 2 * TEXT
    visual = torch.zeros(1, length, dtype=torch.bool)
    visual[:, TEXT:-TEXT] = True
    prompt = Prompt(torch.zeros(1, length, dtype=torch.int64), torch.ones_like(visual), visual)
    request = CacheRequest(prompt, Recipe(SIZE, **options), lambda _: bits, get_backend("reference"), lambda: None)
    return [PackedCacheLayer(index, request) for index in range(LAYERS)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (MIXED, {}),
        ((2,) * WINDOWS, {}),
        ((2,) * WINDOWS, {"granularity": "tensor"}),
        ((4,) * WINDOWS, {"granularity": "token", "zero_point": "float"}),
        (MIXED, {"reorder": False}),
        ((), {}),
    ],
    ids=["mixed", "INT2", "INT2 per tensor", "INT4 per token", "in place", "16 bit"],
)
def test_at_most_one_layer_in_full_precision_above_the_packed_total(bits, options, dtype: torch.dtype) -> None:
    layers, length = new_layers(bits, options), WINDOWS * SIZE + 2 * TEXT
    one_layer = 2 * HEADS * D * length * dtype.itemsize

    def prefill() -> None:
        for layer in layers:
            k, v = (torch.empty(1, HEADS, length, D, dtype=dtype).normal_() for _ in range(2))
            layer.update(k, v)
            del k, v  # attention is done with them before the next layer makes its own

    peak, left = peak_and_left(prefill)
    packed = sum(layer.nbytes().total for layer in layers)
    assert left >= packed > 0, "the measure sees what is stored"
    assert peak <= packed + (1 + WORKSPACE) * one_layer
    if bits:
        assert LAYERS * one_layer > packed + (1 + WORKSPACE) * one_layer, "or the measure would be blind"


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_lets_go_of_its_full_precision_before_the_next_is_packed(name: str, monkeypatch) -> None:
    (model, _), inputs = loaded(name), asked(name)
    alive: list[weakref.ref] = []
    update = PackedCacheLayer.update

    def watched(self, key_states, value_states, *args, **kwargs):
        if self.stored is None:
            gc.collect()
            assert [ref() for ref in alive] == [None] * len(alive), f"K or V before layer {self.index} is still there"
            alive.extend(weakref.ref(x.untyped_storage()) for x in (key_states, value_states))
        return update(self, key_states, value_states, *args, **kwargs)

    monkeypatch.setattr(PackedCacheLayer, "update", watched)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        generate(model, inputs, bound.new_cache(inputs), max_new_tokens=2)
    assert len(alive) == 2 * 2
