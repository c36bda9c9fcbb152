"""Attention over packed layers, end to end, against the stock model fed with the values that the codes stand for.

The oracle never touches our attention: it runs transformers' own model and cache, after putting dequantized K and V
into that cache column by column, and compares logits of the tokens that follow.
"""

import warnings

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.cache.oracle import restored
from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.method import get_method

GIVEN = {"sensitivity": (0.45, 0.6)}
METHODS = {
    "windowquant": {"name": "windowquant", "window_size": 8, **GIVEN},
    "windowquant, odd windows": {"name": "windowquant", "window_size": 5, "alpha": 4.0, **GIVEN},
    "random plan": {"name": "random_plan", "window_size": 4, **GIVEN},
    "in place": {"name": "windowquant", "window_size": 4, "reorder": False, **GIVEN},
    "four widths, other bits of V": {
        "name": "windowquant",
        "window_size": 4,
        "widths": (16, 8, 4, 2),
        "v_widths": (16, 4, 4, 1),
        **GIVEN,
    },
    "V in 16 bit, in place": {
        "name": "windowquant",
        "window_size": 4,
        "v_widths": (16, 16, 16),
        "reorder": False,
        **GIVEN,
    },
    "V of all windows quantized": {"name": "windowquant", "window_size": 4, "v_widths": (4, 4, 2), **GIVEN},
    "single tokens": {"name": "windowquant", "search": "token", "granularity": "token", **GIVEN},
    "int4": {"name": "uniform_int4", "window_size": 8},
    "int2, float zero point": {"name": "uniform_int2", "window_size": 8, "zero_point": "float"},
    "int8 per token": {"name": "uniform", "bits_per_code": 8, "granularity": "token", "window_size": 1},
    "int2 per tensor": {"name": "rtn_int2", "window_size": 3},
    "one window": {"name": "uniform_int2", "window_size": 32},
}
SHAPES = [(6, 2, 8), (7, 1, 8), (2, 2, 32)]


def position_ids(mask: Tensor, start: int, stop: int) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:stop]


def run(model, ids: Tensor, mask: Tensor, start: int, stop: int, cache, keyword: str, **extras) -> Tensor:
    """Logits [B, stop - start, V] of columns start to stop."""
    positions = position_ids(mask, start, stop)
    with torch.no_grad():
        return model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions,
            **{keyword: cache},
            **extras,
        ).logits


def restored_cache(packed) -> DynamicCache:
    oracle = DynamicCache()
    for index, layer in enumerate(packed.layers):
        k, v = restored(layer, layer.order())
        oracle.update(k.nan_to_num(), v.nan_to_num(), index)
    return oracle


def check(model, inputs: dict[str, Tensor], method, split: int, hidden: Tensor | None = None) -> None:
    """Prefill `split` columns packed; the rest in one pass, then two single tokens, against the oracle."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = torch.tensor([words(2, seed=7)] * len(ids))
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    pixels = {key: inputs[key] for key in ("pixel_values_videos", "pixel_values", "image_sizes") if key in inputs}
    ends = [end for end in (ids.shape[1] - 2, ids.shape[1] - 1, ids.shape[1]) if end > split]
    with method.bind(model) as bound:
        cache = bound.new_cache(inputs)
        keyword = bound.cache_keyword
        run(model, ids, mask, 0, split, cache, keyword, **pixels)
        oracle, have, start = restored_cache(cache), [], split
        for end in ends:
            have.append(run(model, ids, mask, start, end, cache, keyword))
            start = end
    visible = (
        mask if hidden is None else torch.cat([mask[:, : hidden.shape[1]] * ~hidden, mask[:, hidden.shape[1] :]], 1)
    )
    start = split
    for end, logits in zip(ends, have, strict=True):
        with torch.no_grad():
            want = model(
                input_ids=ids[:, start:end],
                attention_mask=visible[:, :end],
                position_ids=position_ids(mask, start, end),
                **{keyword: oracle},
            ).logits
        real = mask[:, start:end].bool()
        error = (logits - want)[real].abs().max() / want[real].abs().max()
        assert error < 1e-5, f"columns {start} to {end}: relative error {error:.1e}"
        start = end


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_question_and_decode_read_the_packed_values(name: str, shape) -> None:
    model, inputs = tiny_model(*shape), video_inputs()
    check(model, inputs, get_method(kv_dtype="model", **METHODS[name]), split=36)


@pytest.mark.parametrize("split", [37, 42, 43])
def test_any_split_after_the_video(split: int) -> None:
    model, inputs = tiny_model(), video_inputs()
    check(model, inputs, get_method(kv_dtype="model", **METHODS["windowquant"]), split)


BATCHES = {
    "padded, other text": ([video_ids(8, 3, 12), video_ids(8, 2, 5, seed=4)], 8),
    "fewer windows": ([video_ids(2, 3, 6) + video_ids(2, 1, 3), video_ids(2, 2, 20, seed=4)], 2),
    "fewer windows, no padding": ([video_ids(2, 3, 6) + video_ids(2, 0, 3), video_ids(2, 2, 16, seed=4)], 2),
    "no video in one": ([video_ids(4, 3, 7), words(9)], 4),
    "three": ([video_ids(4, 3, 7), video_ids(4, 9, 2, seed=2), video_ids(4, 1, 1, seed=3)], 4),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "name", ["windowquant", "int2, float zero point", "int2 per tensor", "in place", "four widths, other bits of V"]
)
def test_batches_with_padding_and_unequal_videos(name: str, batch: str) -> None:
    rows, frames = BATCHES[batch]
    inputs = batch_inputs(rows, frames)
    model = tiny_model()
    end = int((inputs["input_ids"] == 3).any(0).nonzero().max()) + 1
    check(model, inputs, get_method(kv_dtype="model", **METHODS[name]), split=min(end, inputs["input_ids"].shape[1]))


@pytest.mark.parametrize("batch", [None, "padded, other text", "fewer windows, no padding"])
def test_dropping_the_video_equals_hiding_it(batch: str | None) -> None:
    inputs = video_inputs() if batch is None else batch_inputs(*BATCHES[batch])
    hidden = inputs["input_ids"] == 3
    end = int(hidden.any(0).nonzero().max()) + 1
    check(tiny_model(), inputs, get_method("no_video", kv_dtype="model"), min(end, hidden.shape[1]), hidden[:, :end])


def test_image_only_prompts() -> None:
    model = tiny_model()
    # one 16 x 16 image: the base picture (16 tokens), then 4 rows of 4 tokens and a newline each
    ids = torch.tensor([words(3) + [2] * (16 + 4 * 5) + words(6, seed=1)])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        "image_sizes": torch.tensor([[16, 16]]),
    }
    check(model, inputs, get_method(kv_dtype="model", **METHODS["windowquant"]), split=39)


def test_storage_in_half_precision_is_close_to_the_oracle_too() -> None:
    """With float16 storage the tail is rounded as well, so only the first pass compares."""
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHODS["windowquant"]).bind(model) as bound:
        cache = bound.new_cache(inputs)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        run(model, ids, mask, 0, 42, cache, bound.cache_keyword, pixel_values_videos=inputs["pixel_values_videos"])
        oracle = restored_cache(cache)
        have = run(model, ids, mask, 42, 43, cache, bound.cache_keyword)
    want = run(model, ids, mask, 42, 43, oracle, bound.cache_keyword)
    assert (have - want).abs().max() / want.abs().max() < 5e-3


def test_a_batch_row_is_answered_as_if_it_were_alone() -> None:
    model, method = tiny_model(), get_method("uniform_int2", window_size=8, kv_dtype="model")
    rows = [video_ids(4, 3, 12), video_ids(4, 2, 5, seed=4)]
    inputs = batch_inputs(rows, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with method.bind(model) as bound:
            together = model.generate(
                **inputs, **{bound.cache_keyword: bound.new_cache(inputs)}, max_new_tokens=6, do_sample=False
            )
            for row, ids in enumerate(rows):
                alone = batch_inputs([ids], 4)
                alone["pixel_values_videos"] = inputs["pixel_values_videos"][row : row + 1]
                out = model.generate(
                    **alone, **{bound.cache_keyword: bound.new_cache(alone)}, max_new_tokens=6, do_sample=False
                )
                assert out[0, -6:].tolist() == together[row, -6:].tolist()


def test_the_oracle_tells_quantized_from_exact_values() -> None:
    """Were the codes ignored, the comparison above would fail by orders of magnitude."""
    model, inputs = tiny_model(), video_inputs()
    logits = []
    for name in ("fp16", "uniform_int4", "uniform_int2"):
        with get_method(name, window_size=8, kv_dtype="model").bind(model) as bound:
            cache, ids, mask = bound.new_cache(inputs), inputs["input_ids"], inputs["attention_mask"]
            run(model, ids, mask, 0, 36, cache, bound.cache_keyword, pixel_values_videos=inputs["pixel_values_videos"])
            logits.append(run(model, ids, mask, 36, 43, cache, bound.cache_keyword))
    exact, int4, int2 = logits
    errors = [float((x - exact).abs().max() / exact.abs().max()) for x in (int4, int2)]
    assert 1e-3 < errors[0] < errors[1]
