"""One layer of the cache, without a model."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from tests.cache.oracle import restored
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.recipe import Recipe
from windowquant.cache.request import CacheRequest
from windowquant.cache.view import PackedView
from windowquant.core.quantizer import dequantize, quantize
from windowquant.errors import UserError
from windowquant.kernels import get_backend
from windowquant.models.prompt import Prompt

B, H, D, SIZE = 2, 2, 8, 4
VISUAL = [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]
BITS = (16, 2, 4)


def make_layer(visual: list[list[int]] = VISUAL, bits=BITS, recipe: Recipe | None = None) -> PackedCacheLayer:
    mask = torch.tensor(visual, dtype=torch.bool)
    prompt = Prompt(torch.zeros(mask.shape, dtype=torch.int64), torch.ones_like(mask), mask)
    backend = get_backend("reference")
    request = CacheRequest(prompt, recipe or Recipe(SIZE, kv_dtype="model"), lambda layer: bits, backend, lambda: None)
    return PackedCacheLayer(0, request)


def fill(layer: PackedCacheLayer, k: Tensor, v: Tensor):
    """Take in K and V as a bound model does: what attention gets, packing once it is done."""
    got = layer.update(k, v)
    layer.pack_if_ready()
    return got


def kv(tokens: int, batch: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, H, tokens, D, generator=generator), torch.randn(batch, H, tokens, D, generator=generator)


def by_hand(x: Tensor, visual: list[list[int]], bits, size: int) -> Tensor:
    """x with every quantized window replaced by what its codes stand for, window by window."""
    out = x.clone()
    for row, on in enumerate(visual):
        columns = [i for i, flag in enumerate(on) if flag]
        for window, width in enumerate(bits):
            inside = columns[window * size : (window + 1) * size]
            if width < 16 and len(inside) == size:
                block = quantize(x[row : row + 1, :, inside].unsqueeze(2), width, label="oracle")
                out[row, :, inside] = dequantize(block)[0, :, 0].to(x.dtype)
    return out


@pytest.mark.parametrize("pieces", [[16], [14, 2], [5, 6, 5], [14, 1, 1]])
def test_stored_is_each_window_quantized_and_everything_else_as_it_was(pieces: list[int]) -> None:
    layer, (k, v), start = make_layer(), kv(16), 0
    for size in pieces:
        got_k, got_v = fill(layer, k[:, :, start : start + size], v[:, :, start : start + size])
        start += size
        if start - size < 14:  # the prefill attends to plain, exact tensors
            assert torch.equal(got_k, k[:, :, :start]) and torch.equal(got_v, v[:, :, :start])
        else:
            assert isinstance(got_k, PackedView) and got_v is got_k
    have_k, have_v = restored(layer, layer.order())
    assert torch.equal(have_k, by_hand(k, VISUAL, BITS, SIZE))
    assert torch.equal(have_v, by_hand(v, VISUAL, BITS, SIZE))
    assert layer.get_seq_length() == 16 and layer.get_mask_sizes(3) == (19, 0)


def test_full_precision_copy_is_gone_once_attention_let_go_of_it() -> None:
    layer, (k, v) = make_layer(), kv(16)
    alive = [weakref.ref(k), weakref.ref(v)]
    returned = fill(layer, k, v)
    del k, v, returned
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert layer.keys is None and layer.values is None


def test_bytes_by_kind() -> None:
    layer, (k, v) = make_layer(), kv(16)
    fill(layer, k, v)
    element = 4  # float32, kv_dtype "model"
    token = 2 * H * D * element
    have = layer.nbytes()
    assert have.codes == B * 2 * H * D * SIZE * (2 + 4) // 8
    assert have.scale_zero == B * 2 * H * D * 2 * 2 * element
    assert have.fp16_windows == token * (13 + 9 - (2 + 1) * SIZE)
    assert have.tail == token * (3 + 7)
    assert have.index == 0
    layer.order()
    assert layer.nbytes().index == 8 * (16 + SIZE) * B  # row 1 has a slot for the window it lacks, row 0 for text


def test_dropped_tokens_keep_their_positions() -> None:
    layer, (k, v) = make_layer(bits=(), recipe=Recipe(SIZE, kv_dtype="model", drops_visual=True)), kv(16)
    fill(layer, k, v)
    assert layer.get_seq_length() == 16
    have_k, _ = restored(layer, layer.order())
    seen = ~torch.isnan(have_k).any(-1).any(1)
    assert seen.tolist() == [[not on for on in row] for row in VISUAL]
    assert layer.nbytes().fp16_windows == 0


def test_crop_goes_back_to_the_packed_prefix_and_no_further() -> None:
    layer, (k, v) = make_layer(), kv(16)
    fill(layer, k[:, :, :14], v[:, :, :14])
    fill(layer, k[:, :, 14:], v[:, :, 14:])
    layer.crop(0)
    layer.crop(-1)
    assert layer.get_seq_length() == 15
    more_k, more_v = kv(2, seed=9)
    fill(layer, more_k, more_v)
    have_k, have_v = restored(layer, layer.order())
    want_k, want_v = torch.cat([k[:, :, :15], more_k], 2), torch.cat([v[:, :, :15], more_v], 2)
    assert torch.equal(have_k[:, :, 14:], want_k[:, :, 14:]) and torch.equal(have_v[:, :, 14:], want_v[:, :, 14:])
    with pytest.raises(UserError, match="cannot be cropped to 13"):
        layer.crop(-4)
    with pytest.raises(UserError, match="negative"):
        layer.crop(3)


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0, 1, 0]])
def test_rows_are_selected_whole(rows: list[int]) -> None:
    layer, (k, v) = make_layer(), kv(18)
    fill(layer, k[:, :, :16], v[:, :, :16])
    fill(layer, k[:, :, 16:], v[:, :, 16:])
    before_k, before_v = restored(layer, layer.order())
    layer.reorder_cache(torch.tensor(rows))
    have_k, have_v = restored(layer, layer.order())
    assert torch.equal(have_k, before_k[rows]) and torch.equal(have_v, before_v[rows])


def test_rows_are_repeated_in_place() -> None:
    layer, (k, v) = make_layer(), kv(16)
    fill(layer, k, v)
    before_k, _ = restored(layer, layer.order())
    layer.batch_repeat_interleave(2)
    have_k, _ = restored(layer, layer.order())
    assert torch.equal(have_k, before_k[[0, 0, 1, 1]])
    layer.batch_select_indices(torch.tensor([3]))
    assert torch.equal(restored(layer, layer.order())[0], before_k[[1]])


def test_a_prefill_of_repeated_rows_is_packed_as_such() -> None:
    layer, (k, v) = make_layer(), kv(16)
    fill(layer, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0))
    have_k, have_v = restored(layer, layer.order())
    assert torch.equal(have_k, by_hand(k, VISUAL, BITS, SIZE).repeat_interleave(3, 0))
    assert torch.equal(have_v, by_hand(v, VISUAL, BITS, SIZE).repeat_interleave(3, 0))


@pytest.mark.parametrize(("column", "value"), [(0, float("nan")), (6, float("inf")), (15, float("-inf"))])
@pytest.mark.parametrize("which", ["K", "V"])
def test_values_that_are_not_finite_name_the_layer(column: int, value: float, which: str) -> None:
    layer, (k, v) = make_layer(), kv(16)
    (k if which == "K" else v)[0, 1, column, 3] = value
    with pytest.raises(UserError, match=f"layer 0 {which} holds"):
        fill(layer, k, v)
    with pytest.raises(UserError, match="could not be packed|layer 0 K holds"):  # and it does not go on without them
        fill(layer, *kv(1))


def test_a_layer_that_nobody_packed_packs_itself_when_more_comes() -> None:
    layer, (k, v) = make_layer(), kv(18)
    layer.update(k[:, :, :16], v[:, :, :16])
    got, _ = layer.update(k[:, :, 16:], v[:, :, 16:])
    assert isinstance(got, PackedView)
    have_k, _ = restored(layer, layer.order())
    assert torch.equal(have_k, torch.cat([by_hand(k[:, :, :16], VISUAL, BITS, SIZE), k[:, :, 16:]], 2))


def test_overflow_of_the_16_bit_dtype_is_refused() -> None:
    layer, (k, v) = make_layer(recipe=Recipe(SIZE)), kv(16)
    k[0, 0, 0, 0] = 1e6
    with pytest.raises(UserError, match="layer 0 K holds NaN or infinity in torch.float16"):
        fill(layer, k, v)


def test_what_cannot_be_done_is_said() -> None:
    layer = make_layer()
    with pytest.raises(UserError, match="run the prefill first"):
        layer.reorder_cache(torch.tensor([0]))
    with pytest.raises(UserError, match="belongs to one prompt"):
        layer.reset()
    k, v = kv(3)
    fill(layer, k, v)
    with pytest.raises(UserError, match="cannot be cropped"):
        layer.crop(-1)


@pytest.mark.parametrize(
    ("model", "option", "want"),
    [
        (torch.float32, "auto", torch.float16),
        (torch.float64, "auto", torch.float16),
        (torch.float16, "auto", torch.float16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "model", torch.float32),
    ],
)
def test_storage_dtype(model: torch.dtype, option: str, want: torch.dtype) -> None:
    assert Recipe(4, kv_dtype=option).storage_dtype(model) == want


@pytest.mark.parametrize("ordered", [False, True])
def test_text_after_the_video_can_be_cropped_even_if_it_was_there_at_packing(ordered: bool) -> None:
    """Rows have different videos; the columns after the last of them are kept as text in every row."""
    layer, (k, v) = make_layer(), kv(16)
    fill(layer, k, v)
    if ordered:
        layer.order()
    layer.crop(-1)
    assert layer.get_seq_length() == 15
    more_k, more_v = kv(3, seed=9)
    fill(layer, more_k, more_v)
    have_k, have_v = restored(layer, layer.order())
    want_k, want_v = (by_hand(x, VISUAL, BITS, SIZE)[:, :, :15] for x in (k, v))
    assert torch.equal(have_k, torch.cat([want_k, more_k], 2)) and torch.equal(have_v, torch.cat([want_v, more_v], 2))
    layer.crop(-4)
    assert torch.equal(restored(layer, layer.order())[0], want_k[:, :, :14])
    with pytest.raises(UserError, match="cannot be cropped to 13"):
        layer.crop(-1)


def test_more_rows_than_are_packed_repeat_them_and_others_are_refused() -> None:
    layer, (k, v) = make_layer(), kv(16)
    fill(layer, k, v)
    before_k, _ = restored(layer, layer.order())
    more_k, more_v = kv(1, batch=3 * B, seed=9)
    fill(layer, more_k, more_v)
    have_k, _ = restored(layer, layer.order())
    assert torch.equal(have_k, torch.cat([before_k.repeat_interleave(3, 0), more_k], 2))
    for rows in (B, 4):
        with pytest.raises(UserError, match=f"holds 6 rows .* used with {rows}; take it back"):
            fill(layer, *kv(1, batch=rows))
    assert layer.get_seq_length() == 17


def test_tokens_beyond_the_prompt_may_come_with_it() -> None:
    """As assisted decoding does: they are no part of what is arranged, and can be cropped."""
    layer, (k, v) = make_layer(), kv(19)
    fill(layer, k, v)
    have_k, have_v = restored(layer, layer.order())
    for have, x in ((have_k, k), (have_v, v)):
        assert torch.equal(have, torch.cat([by_hand(x[:, :, :16], VISUAL, BITS, SIZE), x[:, :, 16:]], 2))
    layer.crop(-3)
    assert torch.equal(restored(layer, layer.order())[0], have_k[:, :, :16])
