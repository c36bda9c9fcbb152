"""Three-valued codes, five to a byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windowquant.core.trits import pack_trits, unpack_trits
from windowquant.errors import UserError


@given(st.lists(st.integers(0, 2), max_size=40))
def test_round_trip(codes: list[int]) -> None:
    packed = pack_trits(torch.tensor([codes, codes[::-1]], dtype=torch.uint8))
    assert packed.shape == (2, -(-len(codes) // 5)) and packed.dtype == torch.uint8
    assert unpack_trits(packed, len(codes)).tolist() == [codes, codes[::-1]]


def test_the_first_code_counts_least() -> None:
    assert pack_trits(torch.tensor([1, 2, 0, 0, 2, 1], dtype=torch.uint8)).tolist() == [1 + 2 * 3 + 2 * 81, 1]


def test_a_fourth_value_is_refused() -> None:
    with pytest.raises(UserError, match="three values"):
        pack_trits(torch.tensor([3], dtype=torch.uint8))
