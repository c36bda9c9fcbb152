"""Symmetric codes: the plain formula, zeros, bounds, what is stored, and attention over them."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.packed import PackedLayer, Segment
from windowquant.core.packing import unpack
from windowquant.core.quantizer import Granularity, dequantize, quantize, storage_bytes
from windowquant.errors import UserError
from windowquant.kernels.reference import attend

GRANULARITIES = get_args(Granularity)
GROUPED = {  # dimensions of [B, H, W, S, D] within one group
    "window_channel": (3,),
    "token": (4,),
    "token_all": (1, 4),
    "channel": (2, 3),
    "head": (2, 3, 4),
    "tensor": (1, 2, 3, 4),
}


def test_smoothquants_int8_example() -> None:
    """Per token: [1, -2, .5, .01] has scale 2 / 127 and codes [64, -127, 32, 1]; a row of zeros stays one."""
    x = torch.tensor([[1.0, -2.0, 0.5, 0.01], [0.0, 0.0, 0.0, 0.0]]).view(1, 1, 1, 2, 4)
    block = quantize(x, 8, "token", "symmetric")
    assert (unpack(block.codes, 8)[0, 0, 0, 0].int() - 127).tolist() == [64, -127, 32, 1]
    assert float(block.scale[0, 0, 0, 0, 0]) == pytest.approx(0.015748, abs=5e-7)
    assert dequantize(block)[0, 0, 0].tolist() == [
        pytest.approx([1.007874, -2, 0.503937, 0.015748], abs=1e-6),
        [0, 0, 0, 0],
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 4, 9)), st.sampled_from([8, 24])),
    bits=st.sampled_from([8, 4, 2]),
    granularity=st.sampled_from(GRANULARITIES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_values_are_the_plain_formulas(seed: int, shape, bits: int, granularity: Granularity, dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1).to(dtype)
    x[0, 0, 0, 0, 0] = 0
    block = quantize(x, bits, granularity, "symmetric")
    half = 2 ** (bits - 1) - 1
    scale = (x.float().abs().amax(GROUPED[granularity], keepdim=True) / half).to(dtype).double()
    step = torch.where(scale == 0, 1, scale).float()
    want = scale * (x.float() / step).round().clamp(-half, half)  # in float32: ties must fall alike
    torch.testing.assert_close(dequantize(block).double(), want, atol=1e-5, rtol=0)
    assert bool((dequantize(block)[x == 0] == 0).all())
    room = scale * (0.5 + half * 2**-8)  # the scale's own rounding, in bfloat16 at worst
    assert bool(((dequantize(block).double() - x.double()).abs() <= room + 1e-6).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_offset_is_stored(granularity: Granularity) -> None:
    x = torch.randn(2, 3, 4, 5, 8).half()
    symmetric, other = (quantize(x, 4, granularity, zero_point) for zero_point in ("symmetric", "integer"))
    assert symmetric.symmetric and not other.symmetric
    assert symmetric.offset.numel() == 0 and symmetric.scale.shape == other.scale.shape
    held = (symmetric.codes.nbytes, symmetric.scale.nbytes)
    assert storage_bytes((2, 3, 4, 5, 8), 4, granularity, "symmetric") == held
    assert symmetric.shift().shape == other.shift().shape


def test_a_given_peak_cuts_what_is_larger() -> None:
    x = torch.tensor([0.4, -0.5, 1.0, -3.0]).view(1, 1, 1, 1, 4)
    block = quantize(x, 4, "tensor", "symmetric", peak=0.7)
    assert dequantize(block).flatten().tolist() == pytest.approx([0.4, -0.5, 0.7, -0.7], abs=1e-6)
    assert float(block.scale) == pytest.approx(0.1)


def test_codes_of_one_bit_are_refused() -> None:
    with pytest.raises(UserError, match="Symmetric codes of 1 bit"):
        quantize(torch.randn(1, 1, 1, 2, 8), 1, "token", "symmetric")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_attention_reads_what_dequantize_gives(granularity: Granularity) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, fp_k, fp_v = (torch.randn(2, 2, n, 8, generator=generator) for n in (12, 12, 3, 3))
    blocks = [quantize(each.unflatten(2, (3, 4)), 4, granularity, "symmetric") for each in (x, y)]
    order = torch.arange(15).expand(2, -1)
    q = torch.randn(2, 14, 3, 8, generator=generator)
    got = attend(q, PackedLayer(fp_k, fp_v, (Segment(*blocks, (0, 1, 2)),), order), None, 0.3)
    k, v = (torch.cat([dequantize(b).flatten(2, 3), fp], 2) for b, fp in zip(blocks, (fp_k, fp_v), strict=True))
    mask = torch.ones(3, 15, dtype=torch.bool).tril(12)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
