"""Bytes counted are bytes held, and bytes by formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.method import get_method
from windowquant.protocols import answer

LAYERS, HEADS, D = 2, 2, 8


def tensors_in(thing: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor reachable through attributes and containers of our own and transformers' cache objects."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        children = list(thing)
    elif type(thing).__module__.startswith(("windowquant.cache", "windowquant.core", "transformers.cache")):
        # what the layers share (the prompt's token ids) and what all caches of a method do: no K and no V
        shared = ("_request", "request", "planner", "codec")
        children = [value for key, value in vars(thing).items() if key not in shared]
    else:
        children = []
    return [tensor for child in children for tensor in tensors_in(child, seen)]


def storage_bytes(cache: Any) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(cache, set())}
    return sum(storages.values())


METHODS = {
    "windowquant": {"name": "windowquant", "window_size": 8, "sensitivity": (0.45, 0.6)},
    "windows in place": {"name": "windowquant", "window_size": 4, "sensitivity": (0.45, 0.6), "reorder": False},
    "other bits of V": {
        "name": "windowquant",
        "window_size": 4,
        "sensitivity": (0.45, 0.6),
        "widths": (16, 8, 4, 2),
        "v_widths": (8, 4, 4, 1),
    },
    "V in 16 bit": {"name": "windowquant", "window_size": 8, "sensitivity": (0.45, 0.6), "v_widths": (16, 16, 16)},
    "single tokens": {"name": "windowquant", "sensitivity": (0.45, 0.6), "search": "token", "granularity": "token"},
    "int4": {"name": "uniform_int4", "window_size": 8},
    "int2 per token": {"name": "uniform_int2", "window_size": 8, "granularity": "token"},
    "1 bit": {"name": "uniform", "bits_per_code": 1, "window_size": 8},
    "int8": {"name": "uniform", "bits_per_code": 8, "window_size": 5},
    "per tensor": {"name": "rtn_int2", "window_size": 8},
    "fp16": {"name": "fp16"},
    "no video": {"name": "no_video"},
}


@pytest.mark.parametrize("name", METHODS)
def test_total_equals_the_storages(name: str) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHODS[name]).bind(model) as bound:
        cache = bound.new_cache(inputs)
        assert cache.nbytes().total == 0
        for new in (1, 6, 40):
            cache = bound.new_cache(inputs)
            model.generate(**inputs, **{bound.cache_keyword: cache}, max_new_tokens=new, do_sample=False)
            assert cache.nbytes().total == storage_bytes(cache)
            assert cache.nbytes().total - cache.nbytes().slack == cache.predicted_nbytes()
        _, session = answer(bound, inputs, "context", 4)
        session.logits(words(30))
        assert session.cache.nbytes().total == storage_bytes(session.cache)


def test_total_equals_the_storages_halfway_through_a_prefill() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHODS["int4"]).bind(model) as bound, torch.no_grad():
        cache = bound.new_cache(inputs)
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        model(inputs_embeds=embeds[:, :20], **{bound.cache_keyword: cache})
        assert cache.nbytes().total == storage_bytes(cache) == LAYERS * 2 * HEADS * D * 20 * 4
        assert not cache.packed


@pytest.mark.parametrize(
    "name",
    ["windowquant", "windows in place", "other bits of V", "V in 16 bit", "int4", "per tensor", "fp16", "no video"],
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_total_equals_the_storages_in_a_padded_batch(name: str, options) -> None:
    model = tiny_model()
    inputs = batch_inputs([video_ids(4, 3, 7) + video_ids(4, 0, 2), video_ids(4, 5, 3, seed=2)], 4)
    with get_method(**METHODS[name]).bind(model) as bound:
        cache = bound.new_cache(inputs)
        model.generate(**inputs, **{bound.cache_keyword: cache}, max_new_tokens=5, do_sample=False, **options)
        assert cache.nbytes().total == storage_bytes(cache)
        assert cache.nbytes().index > 0


@pytest.mark.parametrize(
    ("bits", "granularity", "size", "per_element"),
    [
        (2, "window_channel", 32, 3.0),  # the paper's: 2 bits, and 32 bits of scale and offset for 32 elements
        (4, "window_channel", 32, 5.0),
        (8, "window_channel", 32, 9.0),
        (1, "window_channel", 32, 2.0),
        (2, "window_channel", 8, 6.0),
        (2, "token", 32, 2 + 32 / D),
        (2, "head", 32, 2 + 32 / (D * 32)),
        (2, "tensor", 32, 2 + 32 / (D * 32 * HEADS)),
    ],
)
def test_codes_and_scales_match_the_formula(bits: int, granularity, size: int, per_element: float) -> None:
    model, inputs = tiny_model(), video_inputs()
    method = get_method("uniform", bits_per_code=bits, granularity=granularity, window_size=size)
    with method.bind(model) as bound:
        held = answer(bound, inputs, "context", 1)[0].kv
    elements = LAYERS * 2 * HEADS * D * 32
    assert 8 * (held.codes + held.scale_zero) / elements == per_element
    assert 8 * held.codes / elements == bits
    assert held.fp16_windows == LAYERS * 2 * HEADS * D * 2  # the newline, outside the whole windows
    assert held.tail == LAYERS * 2 * HEADS * D * 2 * 10
