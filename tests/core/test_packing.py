"""Packed codes: size, layout as documented, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.packing import pack, unpack
from windowquant.errors import UserError


@settings(max_examples=50, deadline=None)
@given(
    bits=st.sampled_from([8, 4, 2, 1]),
    shape=st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 5)),
    channels=st.sampled_from([8, 16, 24, 32, 40, 64, 80, 96, 128, 256]),
    seed=st.integers(0, 2**31),
)
def test_round_trip_and_size(bits: int, shape: tuple[int, int, int], channels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (*shape, channels), dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape, channels * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)
    # A run of windows is a strided view, and must unpack like the whole.
    assert torch.equal(unpack(packed[:, 1:], bits), codes[:, 1:])


@pytest.mark.parametrize("bits", [4, 2, 1])
@pytest.mark.parametrize("channels", [8, 32, 80])
def test_layout_is_planes_of_channels(bits: int, channels: int) -> None:
    codes = torch.randint(0, 2**bits, (3, channels), dtype=torch.uint8)
    planes, width = 8 // bits, channels * bits // 8
    for row, packed in zip(codes.tolist(), pack(codes, bits).tolist(), strict=True):
        assert packed == [sum(row[i * width + j] << (i * bits) for i in range(planes)) for j in range(width)]


def test_unknown_widths_and_partly_filled_bytes_are_refused() -> None:
    with pytest.raises(UserError, match=r"Codes of 3 bits cannot be packed; use one of \[8, 4, 2, 1\]"):
        pack(torch.zeros(8, dtype=torch.uint8), 3)
    with pytest.raises(UserError, match="head_dim 10 is not a multiple of 4, so 2-bit codes"):
        pack(torch.zeros(10, dtype=torch.uint8), 2)
