"""The growing 16-bit buffers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.cache.growing import GrowingKV


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 30), st.integers(0, 50))
def test_appending_equals_concatenating(sizes: list[int], start: int, expected: int) -> None:
    k, v = torch.randn(2, 3, start, 4), torch.randn(2, 3, start, 6)
    buffer = GrowingKV(k, v, expected)
    for size in sizes:
        more_k, more_v = torch.randn(2, 3, size, 4), torch.randn(2, 3, size, 6)
        buffer.append(more_k, more_v)
        k, v = torch.cat([k, more_k], 2), torch.cat([v, more_v], 2)
    assert torch.equal(buffer.k, k) and torch.equal(buffer.v, v)
    assert buffer.length == k.shape[2] and buffer.slack == buffer.tensors()[0].shape[2] - k.shape[2]


def test_a_token_is_copied_rarely_and_little_is_wasted() -> None:
    buffer, moved = GrowingKV(torch.zeros(1, 1, 100, 2), torch.zeros(1, 1, 100, 2)), 0
    for _ in range(5000):
        before = buffer.tensors()[0].data_ptr()
        buffer.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
        moved += buffer.length if buffer.tensors()[0].data_ptr() != before else 0
        assert buffer.slack <= max(8, buffer.length / 8)
    assert moved < 12 * buffer.length


def test_truncate_then_append_overwrites() -> None:
    buffer = GrowingKV(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    buffer.append(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    buffer.truncate(5)
    buffer.append(torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1, 2), 8.0))
    assert buffer.k[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 7]
    assert buffer.v[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 8]


def test_values_are_stored_in_the_first_ones_dtype() -> None:
    buffer = GrowingKV(torch.zeros(1, 1, 1, 2, dtype=torch.float16), torch.zeros(1, 1, 1, 2, dtype=torch.float16))
    buffer.append(torch.full((1, 1, 1, 2), 1 / 3), torch.zeros(1, 1, 1, 2))
    assert buffer.k.dtype == torch.float16 and buffer.k[0, 0, 1, 0] == torch.tensor(1 / 3).half()


def test_select_repeats_and_drops_rows() -> None:
    buffer = GrowingKV(torch.arange(3.0)[:, None, None, None], torch.arange(3.0)[:, None, None, None])
    buffer.select(torch.tensor([2, 0, 2, 1]))
    assert buffer.k.flatten().tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("used", [False, True])
def test_reserved_room_holds_zeros_and_is_not_moved_until_it_is_full(used: bool) -> None:
    buffer = GrowingKV(torch.ones(1, 2, 5, 3), torch.ones(1, 2, 5, 4))
    if used:
        buffer.append(torch.full((1, 2, 6, 3), float("nan")), torch.full((1, 2, 6, 4), float("nan")))
        buffer.truncate(5)
    buffer.reserve(20)
    k, v = buffer.tensors()
    assert buffer.length == 5 and buffer.slack >= 20
    assert torch.equal(buffer.k, torch.ones(1, 2, 5, 3)) and torch.equal(buffer.v, torch.ones(1, 2, 5, 4))
    assert not k[:, :, 5:].any() and not v[:, :, 5:].any()
    buffer.append(torch.ones(1, 2, 20, 3), torch.ones(1, 2, 20, 4))
    assert buffer.tensors()[0] is k and buffer.tensors()[1] is v
