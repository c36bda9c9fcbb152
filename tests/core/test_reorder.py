"""Grouping windows by bit-width, and leaving them in place."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.reorder import grouping, in_place

BITS = st.lists(st.sampled_from([16, 8, 4, 2]), max_size=40)


@settings(max_examples=50, deadline=None)
@given(BITS)
def test_stable_sort_widest_first(bits: list[int]) -> None:
    result = grouping(bits)
    assert list(result.permutation) == sorted(range(len(bits)), key=lambda i: (-bits[i], i))
    expected = {width: [i for i, b in enumerate(bits) if b == width] for width in (16, 8, 4, 2)}
    found = {width: list(result.permutation[start:end]) for width, start, end in result.groups}
    assert found == {width: windows for width, windows in expected.items() if windows}
    assert list(found) == sorted(found, reverse=True)


@settings(max_examples=50, deadline=None)
@given(BITS)
def test_in_place_is_the_windows_order_in_runs_as_long_as_can_be(bits: list[int]) -> None:
    result = in_place(bits)
    assert list(result.permutation) == list(range(len(bits)))
    assert [width for width, start, end in result.groups for _ in range(start, end)] == bits
    assert all(before[2] == after[1] and before[0] != after[0] for before, after in pairwise(result.groups))
