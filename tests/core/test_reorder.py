"""Grouping windows by bit-width."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.reorder import grouping


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([16, 8, 4, 2]), max_size=40))
def test_stable_sort_widest_first(bits: list[int]) -> None:
    result = grouping(torch.tensor(bits, dtype=torch.int8))
    assert result.permutation.dtype == torch.int64
    assert result.permutation.tolist() == sorted(range(len(bits)), key=lambda i: (-bits[i], i))
    expected = {width: tuple(i for i, b in enumerate(bits) if b == width) for width in (16, 8, 4, 2)}
    assert {width: result.windows(width) for width in expected} == expected
    assert [width for width, _, _ in result.groups] == [width for width, found in expected.items() if found]
    assert [end - start for _, start, end in result.groups] == [len(found) for found in expected.values() if found]
