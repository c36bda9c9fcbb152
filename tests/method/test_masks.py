"""Masks that callers or models bring along."""

import pytest
import torch
from transformers.masking_utils import and_masks, causal_mask_function

from tests.vlm import tiny_model, video_inputs
from windowquant.attention import windowquant_mask
from windowquant.method import get_method


@pytest.mark.parametrize("name", ["uniform_int2", "no_video", "fp16"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("hidden", [None, 5])
def test_four_dimensional_masks_are_read_by_column(name: str, kind: str, hidden: int | None) -> None:
    """hidden: a column of the video that no query may see, in both ways of saying so."""
    model, inputs = tiny_model(), video_inputs()
    ids, rest = inputs["input_ids"], 7
    visible = torch.ones(rest, 43, dtype=torch.bool).tril(36)
    flat = torch.ones_like(ids)
    if hidden is not None:
        visible[:, hidden] = False
        flat[:, hidden] = 0
    square = visible[None, None]
    if kind == "additive":
        square = torch.zeros(1, 1, rest, 43).masked_fill(~square, torch.finfo(torch.float32).min)
    logits = []
    with get_method(name, window_size=8, kv_dtype="model").bind(model) as bound, torch.no_grad():
        for mask in (square, flat):
            cache = {bound.cache_keyword: bound.new_cache(inputs)}
            model(input_ids=ids[:, :36], pixel_values_videos=inputs["pixel_values_videos"], **cache)
            positions = torch.arange(36, 43)[None]
            logits.append(model(input_ids=ids[:, 36:], attention_mask=mask, position_ids=positions, **cache).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_no_mask_is_built_for_plain_causal_attention_only() -> None:
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2}
    assert windowquant_mask(**sizes) is None
    assert windowquant_mask(**sizes, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    causal = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None].expand(2, 1, 3, 5)
    assert torch.equal(windowquant_mask(**sizes, allow_is_causal_skip=False), causal)
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(windowquant_mask(**sizes, attention_mask=padding), causal & padding[:, None, None])
    overlay = and_masks(causal_mask_function, lambda batch, head, q, kv: kv != 1)
    want = causal & (torch.arange(5) != 1)
    assert torch.equal(windowquant_mask(**sizes, mask_function=overlay), want)
