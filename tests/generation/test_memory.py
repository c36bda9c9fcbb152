"""Prefill to packed cache, layer by layer: what is alive at the worst moment."""

import gc
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.generation.common import NAMES, WINDOWQUANT, asked, generate, loaded
from windowquant.cache import layer as layer_module
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.pack import pack_k, pack_v
from windowquant.cache.recipe import Recipe
from windowquant.cache.request import CacheRequest
from windowquant.kernels import get_backend
from windowquant.method import get_method
from windowquant.models import Prompt

LAYERS, HEADS, D, SIZE, WINDOWS, TEXT = 4, 4, 128, 32, 64, 16
MIXED = (16,) * 12 + (4,) * 8 + (2,) * 44


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
            del k, v  # attention is done with them
            layer.pack_if_ready()

    peak, left = peak_and_left(prefill)
    packed = sum(layer.nbytes().total for layer in layers)
    assert left >= packed > 0, "the measure sees what is stored"
    assert peak <= packed + one_layer
    if bits:
        assert LAYERS * one_layer > packed + one_layer, "or the measure would be blind"


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sensitivity", ["given", "online"])
def test_k_is_gone_before_v_is_packed(name: str, sensitivity: str, monkeypatch) -> None:
    """The model's attention and the hooks around it hold neither when a layer is packed."""
    (model, _), inputs = loaded(name), asked(name)
    keys: list[weakref.ref] = []

    def watched_k(k, *args):
        keys.append(weakref.ref(k.untyped_storage()))
        return pack_k(k, *args)

    def watched_v(v, *args):
        gc.collect()
        assert keys[-1]() is None, f"K is still there when V number {len(keys)} is packed"
        return pack_v(v, *args)

    monkeypatch.setattr(layer_module, "pack_k", watched_k)
    monkeypatch.setattr(layer_module, "pack_v", watched_v)
    options = {**WINDOWQUANT, **({"sensitivity": "online"} if sensitivity == "online" else {})}
    with get_method(**options).bind(model) as bound:
        generate(model, inputs, bound.new_cache(inputs), max_new_tokens=2)
    assert len(keys) == 2
