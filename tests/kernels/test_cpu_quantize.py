"""Quantizing windows in place on the CPU gives what core.quantizer gives, bit for bit."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import ZeroPoint, quantize
from windowquant.errors import UserError
from windowquant.kernels.cpu.quantize import quantize_windows, takes

KINDS = [
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
]


def _gathered(x: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Windows [B, H, W, S, D], token by token."""
    rows = [[x[b, :, column] for column in own.clamp(min=0).flatten().tolist()] for b, own in enumerate(columns)]
    return torch.stack([torch.stack(row, 1) for row in rows]).to(dtype).unflatten(2, columns.shape[1:])


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


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 2, 7, 32])),
    channels=st.sampled_from([16, 24, 32, 64, 80, 136, 256]),
    bits=st.sampled_from([8, 4, 2, 1]),
    zero_point=st.sampled_from(get_args(ZeroPoint)),
    slot=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_same_as_the_reference(
    kind: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int, int],
    channels: int,
    bits: int,
    zero_point: ZeroPoint,
    slot: bool,
    seed: int,
) -> None:
    (batch, heads, windows, size), (dtype, stored) = sizes, kind
    x = _tensor((batch, heads, 2 * windows * size, channels), dtype, seed)
    orders = [torch.randperm(2 * windows * size)[: windows * size] for _ in range(batch)]
    columns = torch.stack(orders).view(batch, windows, size)
    if slot:
        columns[-1, 0] = -1
    bits = 2 if zero_point == "symmetric" and bits == 1 else bits
    expected = quantize(_gathered(x, columns, stored), bits, "window_channel", zero_point)
    _assert_same(quantize_windows(x, columns, bits, zero_point=zero_point, dtype=stored), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_peak_known_beforehand(dtype: torch.dtype) -> None:
    x, columns = _tensor((1, 2, 64, 32), dtype, 0), torch.arange(64).view(1, 2, 32)
    expected = quantize(_gathered(x, columns, dtype), 4, "window_channel", "symmetric", peak=2.713)
    _assert_same(quantize_windows(x, columns, 4, zero_point="symmetric", peak=2.713), expected)


def test_values_of_any_strides() -> None:
    x, columns = _tensor((2, 3, 64, 32), torch.float16, 1), torch.arange(64).view(1, 2, 32).repeat(2, 1, 1)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    _assert_same(quantize_windows(turned, columns, 2), quantize_windows(x, columns, 2))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, columns = _tensor((1, 4, 1024, 64), torch.float16, 2), torch.randperm(1024)[:960].view(1, 30, 32)
    _assert_same(quantize_windows(x, columns, 2), quantize(_gathered(x, columns, x.dtype), 2))


def test_no_window() -> None:
    x, columns = _tensor((1, 2, 8, 32), torch.float16, 3), torch.empty(1, 0, 4, dtype=torch.int64)
    _assert_same(quantize_windows(x, columns, 2), quantize(x.new_empty(1, 2, 0, 4, 32), 2))


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity"), (70000.0, "infinity")]
)
@pytest.mark.parametrize("channel", [0, 23, 31])
def test_values_that_are_not_finite_are_refused(value: float, kind: str, channel: int) -> None:
    x, columns = torch.zeros(1, 2, 64, 32), torch.arange(64).view(1, 2, 32)
    x[0, 1, 40, channel] = value
    with pytest.raises(UserError, match=f"layer 3 V holds {kind}"):
        quantize_windows(x, columns, 2, dtype=torch.float16, label="layer 3 V")
    assert quantize_windows(x, columns[:, :1], 2, dtype=torch.float16).bits == 2


def test_what_it_does_not_take() -> None:
    x = torch.zeros(1, 1, 8, 32)
    assert takes(x, "window_channel", torch.float16)
    assert not takes(x, "token", torch.float16)
    assert not takes(x, "window_channel", torch.bfloat16)
    assert not takes(x[..., :8], "window_channel", torch.float16)
    assert not takes(x.expand(1, 1, 8, 32).double(), "window_channel", torch.float64)
    with pytest.raises(UserError, match="cannot be quantized in place"):
        quantize_windows(x[..., :8], torch.zeros(1, 1, 4, dtype=torch.int64), 2, dtype=torch.float16)
    with pytest.raises(UserError, match="Symmetric codes of 1 bit"):
        quantize_windows(x, torch.zeros(1, 1, 4, dtype=torch.int64), 1, zero_point="symmetric", dtype=torch.float16)
    with pytest.raises(UserError, match="zero_point is 'none'; use one of integer, float, symmetric"):
        quantize_windows(x, torch.zeros(1, 1, 4, dtype=torch.int64), 2, zero_point="none", dtype=torch.float16)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Codes of 3 bits cannot be packed"):
        quantize_windows(x, torch.zeros(1, 1, 4, dtype=torch.int64), 3, dtype=torch.float16)
