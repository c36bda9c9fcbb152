"""Storing K or V on the CPU in one pass: windows as core.quantizer makes them, bit for bit, and tokens as they are."""

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import ZeroPoint, quantize
from windowquant.errors import UserError
from windowquant.kernels.cpu.quantize import store_tokens, takes

KINDS = [
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
]


def _tokens(x: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens of x [B, H, T, D] at columns [B, n], one by one; an empty slot takes the first."""
    out = torch.empty(*x.shape[:2], columns.shape[1], x.shape[3], dtype=dtype)
    for row, own in enumerate(columns.tolist()):
        for place, column in enumerate(own):
            out[row, :, place] = x[row, :, max(column, 0)].to(dtype)
    return out


def _assert_as_the_reference(
    x: Tensor, columns: Tensor, segments: list[tuple[int, int]], size: int, dtype: torch.dtype, **options: Any
) -> None:
    """Every segment and the other tokens, against core.quantizer and a copy."""
    blocks, kept = store_tokens(x, columns.numpy(), segments, size, dtype=dtype, **options)
    room, start = options.pop("room", 0), 0
    for block, (bits, windows) in zip(blocks, segments, strict=True):
        tokens = _tokens(x, columns[:, start : start + windows * size], dtype).unflatten(2, (windows, size))
        if bits == 16:
            assert (block.bits, block.shape, block.granularity) == (16, tuple(tokens.shape), "window_channel")
            assert torch.equal(block.codes, tokens) and block.codes.dtype == dtype
            assert block.scale.shape == block.offset.shape == (x.shape[0], 0)
        else:
            _assert_same(block, quantize(tokens, bits, "window_channel", **options))
        start += windows * size
    expected = _tokens(x, columns[:, start:], dtype)
    assert kept.shape == (*x.shape[:2], expected.shape[2] + room, x.shape[3]) and kept.dtype == dtype
    assert torch.equal(kept[:, :, : expected.shape[2]], expected)


def _assert_same(got: WindowBlock, expected: WindowBlock) -> None:
    for name in ("codes", "scale", "offset"):
        one, other = getattr(got, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert (got.bits, got.shape, got.granularity) == (expected.bits, expected.shape, expected.granularity)


def _tensor(shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Channels of very different size, a constant one, one of zeros, values below zero only and above only."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-6, 4, (shape[3],), generator=generator)
    x[..., 3], x[..., 5] = 1.7, 0
    x[..., 7], x[..., 9] = x[..., 7].abs() + 40, -x[..., 9].abs() - 3
    return x.to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 7, 32])),
    segments=st.lists(st.tuples(st.sampled_from([16, 8, 4, 2, 1]), st.integers(0, 4)), max_size=4),
    others=st.sampled_from([0, 1, 5, 31, 32, 33, 70]),
    room=st.integers(0, 3),
    channels=st.sampled_from([16, 24, 32, 64, 80, 136, 256]),
    zero_point=st.sampled_from(get_args(ZeroPoint)),
    slots=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_same_as_the_reference(
    kind: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int],
    segments: list[tuple[int, int]],
    others: int,
    room: int,
    channels: int,
    zero_point: ZeroPoint,
    slots: bool,
    seed: int,
) -> None:
    (batch, heads, size), (dtype, stored) = sizes, kind
    if zero_point == "symmetric":
        segments = [(max(bits, 2), windows) for bits, windows in segments]
    count = size * sum(windows for _, windows in segments) + others
    x = _tensor((batch, heads, count + 3, channels), dtype, seed)
    columns = torch.stack([torch.randperm(count + 3)[:count] for _ in range(batch)])
    if slots:
        columns[-1, : min(size, count)] = -1  # a window that the row does not have
        columns[-1, count - others : count - others // 2] = -1
    _assert_as_the_reference(x, columns, segments, size, stored, zero_point=zero_point, room=room)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_peak_known_beforehand(dtype: torch.dtype) -> None:
    x = _tensor((1, 2, 64, 32), dtype, 0)
    _assert_as_the_reference(x, torch.arange(64)[None], [(4, 2)], 32, dtype, zero_point="symmetric", peak=2.713)


def test_values_of_any_strides() -> None:
    x, columns = _tensor((2, 3, 70, 32), torch.float16, 1), torch.arange(70).repeat(2, 1)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    _assert_as_the_reference(turned, columns, [(2, 2)], 32, torch.float16)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = _tensor((1, 4, 1024, 64), torch.float16, 2)
    _assert_as_the_reference(x, torch.randperm(1024)[None], [(4, 7), (2, 21)], 32, torch.float16)


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity"), (70000.0, "infinity")]
)
@pytest.mark.parametrize("channel", [0, 23, 31])
@pytest.mark.parametrize("threads", [1, 3])
def test_values_that_are_not_finite_are_refused(
    value: float, kind: str, channel: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, columns = torch.zeros(1, 8, 512, 32), torch.arange(512)[None].numpy()
    x[0, 5, 140, channel] = value
    options: dict[str, Any] = {"dtype": torch.float16, "label": "layer 3 V"}
    with pytest.raises(UserError, match=f"layer 3 V holds {kind} and cannot be quantized"):
        store_tokens(x, columns, [(4, 2), (2, 4)], 32, **options)
    with pytest.raises(UserError, match=r"layer 3 V holds NaN or infinity in torch\.float16; look for overflow"):
        store_tokens(x, columns, [(4, 4)], 32, **options)
    with pytest.raises(UserError, match=r"layer 3 V holds NaN or infinity in torch\.float16"):
        store_tokens(x, columns, [(4, 4), (16, 1), (2, 3)], 32, **options)
    store_tokens(x, columns[:, :128], [(4, 2)], 32, **options)  # it is not among what is stored


def test_what_it_does_not_take() -> None:
    x, columns, half = torch.zeros(1, 1, 8, 32), torch.arange(4)[None].numpy(), torch.float16
    assert takes("window_channel", x.dtype, half, 32)
    assert not takes("token", x.dtype, half, 32)
    assert not takes("window_channel", x.dtype, torch.bfloat16, 32)
    assert not takes("window_channel", x.dtype, half, 8)
    assert not takes("window_channel", torch.float64, torch.float64, 32)
    with pytest.raises(UserError, match="cannot be stored in one pass"):
        store_tokens(x.transpose(2, 3), columns, [(2, 1)], 4, dtype=half)
    with pytest.raises(UserError, match="cannot be stored in one pass"):
        store_tokens(x[..., :8], columns, [(2, 1)], 4, dtype=half)
    with pytest.raises(UserError, match="Symmetric codes of 1 bit"):
        store_tokens(x, columns, [(1, 1)], 4, zero_point="symmetric", dtype=half)
    with pytest.raises(UserError, match="zero_point is 'none'; use one of integer, float, symmetric"):
        store_tokens(x, columns, [(2, 1)], 4, zero_point="none", dtype=half)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Codes of 3 bits cannot be packed"):
        store_tokens(x, columns, [(3, 1)], 4, dtype=half)
