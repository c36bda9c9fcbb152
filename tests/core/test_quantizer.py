"""The quantizer: the paper's formula on single groups, error bounds, exact cases, bytes, and refusals."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.packing import unpack
from windowquant.core.quantizer import (
    WITHIN_WINDOWS,
    Granularity,
    ZeroPoint,
    dequantize,
    quantize,
    storage_bytes,
    unquantized,
)
from windowquant.errors import UserError

GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
ZERO_POINTS: tuple[ZeroPoint, ...] = ("integer", "float")  # symmetric codes have tests of their own
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Written out here again: the dimensions of [B, H, W, S, D] along which scale and offset have one entry.
SHARED = {
    "window_channel": {3},
    "token": {4},
    "token_all": {1, 4},
    "channel": {2, 3},
    "head": {2, 3, 4},
    "tensor": {1, 2, 3, 4},
}


def _paper(group: list[float], bits: int) -> list[float]:
    """Equations 14 to 16 on one group, in double precision."""
    levels = 2**bits - 1
    s = (max(group) - min(group)) / levels
    z = -round(min(group) / s)
    codes = [min(max(round(x / s) + z, 0), levels) for x in group]
    return [s * (code - z) for code in codes]


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_integer_zero_point_is_the_papers_formula(bits: int) -> None:
    torch.manual_seed(bits)
    x = torch.randn(1, 2, 3, 9, 8) * 3 + 1
    got = dequantize(quantize(x, bits))
    for h in range(2):
        for w in range(3):
            for d in range(8):
                expected = torch.tensor(_paper(x[0, h, w, :, d].tolist(), bits))
                torch.testing.assert_close(got[0, h, w, :, d], expected, atol=2e-5, rtol=1e-5)


def test_example_by_hand() -> None:
    x = torch.tensor([-1.0, 0.0, 0.6, 2.0]).view(1, 1, 1, 4, 1).expand(1, 1, 1, 4, 8)
    for zero_point in ZERO_POINTS:  # scale 1 and minimum -1: both kinds of zero point agree
        block = quantize(x, 2, "window_channel", zero_point)
        assert unpack(block.codes, 2)[0, 0, 0, :, 0].tolist() == [0, 1, 2, 3]
        assert (float(block.scale[0, 0, 0, 0, 0]), float(block.offset[0, 0, 0, 0, 0])) == (1, -1)
        assert dequantize(block)[0, 0, 0, :, 0].tolist() == [-1, 0, 1, 2]


def test_zero_points_differ_at_the_ends() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, 3.5]).view(1, 1, 1, 4, 1).expand(1, 1, 1, 4, 8)
    exact, rounded = (dequantize(quantize(x, 2, "window_channel", z))[0, 0, 0, :, 0] for z in ("float", "integer"))
    assert exact.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert (rounded - exact).abs().max() == 0.5


def _bound(block: WindowBlock, x: Tensor, zero_point: str) -> Tensor:
    """The documented bound, per element; the last terms are float32 arithmetic and float16's smallest step."""
    limits, levels = torch.finfo(block.scale.dtype), 2**block.bits - 1
    scale, offset, roundoff = block.scale.double(), block.offset.double().abs(), limits.eps / 2
    bound = scale * (0.5 + levels * roundoff * (1 + roundoff)) + levels * limits.tiny * limits.eps / 2
    if zero_point == "integer":
        bound = bound + roundoff * (offset + scale)
    return bound + 1e-6 * (x.double().abs() + scale * levels)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 4, 9)), st.sampled_from([8, 24, 32])),
    bits=st.sampled_from([8, 4, 2, 1]),
    granularity=st.sampled_from(GRANULARITIES),
    zero_point=st.sampled_from(ZERO_POINTS),
    dtype=st.sampled_from(DTYPES),
    spread=st.floats(-6, 2),
    centre=st.floats(-30, 30),
)
def test_error_bound(
    seed: int,
    shape: tuple[int, ...],
    bits: int,
    granularity: Granularity,
    zero_point: ZeroPoint,
    dtype: torch.dtype,
    spread: float,
    centre: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator) * 10**spread + centre).to(dtype)
    block = quantize(x, bits, granularity, zero_point)
    error = (dequantize(block).double() - x.double()).abs()
    assert bool((error <= _bound(block, x, zero_point)).all())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 4, 9)), st.sampled_from([8, 24, 32])),
    bits=st.sampled_from([8, 4, 2, 1]),
    granularity=st.sampled_from(GRANULARITIES),
    zero_point=st.sampled_from(["integer", "float"]),
    centre=st.floats(-3, 3),
    constant=st.booleans(),
)
def test_plain_error_bound_in_float32(
    seed: int,
    shape: tuple[int, ...],
    bits: int,
    granularity: Granularity,
    zero_point: ZeroPoint,
    centre: float,
    constant: bool,
) -> None:
    """Half a scale with the float zero point, a whole one with the integer, but for a few units in the last place."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + centre
    if constant:
        x = torch.full(shape, centre)
    block = quantize(x, bits, granularity, zero_point)
    error, scale = (dequantize(block) - x).abs(), block.scale
    assert bool((error <= scale * (0.5 if zero_point == "float" else 1.0) * (1 + 1e-4) + 1e-5).all())
    if constant:
        assert torch.equal(dequantize(block), x)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("zero_point", ZERO_POINTS)
def test_codes_are_the_nearest_for_scale_and_offset_as_stored(bits: int, zero_point: ZeroPoint) -> None:
    torch.manual_seed(bits)
    x = (torch.randn(1, 2, 3, 16, 8) + 5).to(torch.bfloat16)
    block = quantize(x, bits, "window_channel", zero_point)
    choices = block.scale.double() * torch.arange(2**bits).view(-1, 1, 1, 1, 1, 1) + block.offset.double()
    nearest = (choices - x.double()).abs().amin(0)
    torch.testing.assert_close((dequantize(block).double() - x.double()).abs(), nearest, atol=1e-5, rtol=0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_point", ZERO_POINTS)
def test_constant_groups_are_exact(granularity: Granularity, dtype: torch.dtype, zero_point: ZeroPoint) -> None:
    kept = [1 if dim in SHARED[granularity] else size for dim, size in enumerate((2, 3, 4, 5, 8))]
    x = (torch.randn(kept) * 40).to(dtype).expand(2, 3, 4, 5, 8)
    assert torch.equal(dequantize(quantize(x, 2, granularity, zero_point)), x.float())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_groups_are_as_named_and_never_span_the_batch(granularity: Granularity) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, 8)
    block = quantize(x, 4, granularity)
    expected = tuple(1 if dim in SHARED[granularity] else size for dim, size in enumerate(x.shape))
    assert block.scale.shape == block.offset.shape == expected
    alone = quantize(x[1:], 4, granularity)
    assert torch.equal(dequantize(block)[1:], dequantize(alone))


@pytest.mark.parametrize("upper", [1, 0])
def test_widest_float16_groups_stay_finite(upper: int) -> None:
    limit = torch.finfo(torch.float16).max
    x = torch.tensor([-limit, upper * limit], dtype=torch.float16).view(1, 1, 1, 2, 1).expand(1, 1, 1, 2, 8)
    for bits in (8, 4, 2, 1):
        for zero_point in ZERO_POINTS:
            assert bool(dequantize(quantize(x, bits, "window_channel", zero_point)).isfinite().all())


def test_group_narrower_than_float16_scales_becomes_its_minimum() -> None:
    x = torch.tensor([0.0, 6e-8], dtype=torch.float16).view(1, 1, 1, 2, 1).expand(1, 1, 1, 2, 8)
    assert float(dequantize(quantize(x, 4)).abs().max()) == 0


@pytest.mark.parametrize("bad, word", [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infinity")])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_that_are_not_finite_are_refused_by_name(bad: float, word: str, granularity: Granularity) -> None:
    x = torch.randn(1, 2, 3, 4, 8)
    x[0, 1, 2, 3, 4] = bad
    with pytest.raises(UserError, match=f"layer 3 K holds {word} and cannot be quantized"):
        quantize(x, 2, granularity, label="layer 3 K")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_16_bits_is_the_tensor_itself(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 5, 8).to(dtype)
    block = unquantized(x, "token")
    assert (block.bits, block.shape, block.granularity) == (16, (2, 3, 4, 5, 8), "token")
    assert torch.equal(dequantize(block), x.float())
    assert block.scale.numel() == block.offset.numel() == 0
    assert storage_bytes((2, 3, 4, 5, 8), 16) == (2 * x.numel(), 0)


def test_granularities_whose_groups_stay_within_a_window() -> None:
    assert {name for name in GRANULARITIES if 2 not in SHARED[name]} == set(WITHIN_WINDOWS)


def test_unknown_options_are_refused() -> None:
    x = torch.randn(1, 1, 1, 4, 8)
    with pytest.raises(UserError, match="granularity is 'row'; use one of window_channel, token"):
        quantize(x, 2, "row")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="zero_point is 'none'; use one of integer, float"):
        quantize(x, 2, "token", "none")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Codes of 3 bits"):
        quantize(x, 3)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(*(st.integers(low, n) for low, n in ((1, 2), (1, 3), (0, 4), (1, 9))), st.sampled_from([8, 80])),
    bits=st.sampled_from([8, 4, 2, 1]),
    granularity=st.sampled_from(GRANULARITIES),
)
def test_bytes_held_are_the_formula(shape: tuple[int, int, int, int, int], bits: int, granularity: Granularity) -> None:
    block = quantize(torch.zeros(shape, dtype=torch.float16), bits, granularity)
    elements = groups = 1
    for dim, size in enumerate(shape):
        elements *= size
        groups *= 1 if dim in SHARED[granularity] else size
    held = (block.codes.nbytes, block.scale.nbytes + block.offset.nbytes)
    assert held == (elements * bits // 8, 2 * 2 * groups)
    assert storage_bytes(shape, bits, granularity) == held
    assert block.shape == shape and dequantize(block).shape == shape


@pytest.mark.parametrize("bits, held", [(2, 3), (4, 5)])
def test_bits_an_element_at_32_tokens_a_window(bits: int, held: int) -> None:
    shape = (1, 4, 7, 32, 128)
    assert sum(storage_bytes(shape, bits)) * 8 == held * torch.Size(shape).numel()
