"""Windows of visual tokens: counts, views, and what is left out."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.windows import split_windows, window_count
from windowquant.errors import UserError


@settings(deadline=None)
@given(tokens=st.integers(0, 300), size=st.integers(1, 64))
def test_every_whole_window_and_no_part_of_the_tail(tokens: int, size: int) -> None:
    x = torch.arange(tokens * 3).view(tokens, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        windows = split_windows(x, size)
    assert len(windows) == tokens // size
    for i, window in enumerate(windows):
        assert torch.equal(window, x[i * size : (i + 1) * size])


def test_leading_dimensions_stay() -> None:
    x = torch.arange(2 * 3 * 7 * 4).view(2, 3, 7, 4)
    windows = split_windows(x, 3)
    assert windows.shape == (2, 3, 2, 3, 4)
    assert torch.equal(windows[1, 2, 1, 0], x[1, 2, 3])


def test_windows_are_a_view() -> None:
    x = torch.zeros(8, 2)
    split_windows(x, 4)[1, 0, 0] = 5
    assert x[4, 0] == 5


@pytest.mark.parametrize("size", [0, -1])
def test_window_below_one_token_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=rf"window_size is {size}.*set it to 1 or more"):
        window_count(10, size)


def test_window_larger_than_the_visual_span_warns_and_quantizes_nothing() -> None:
    with pytest.warns(UserWarning, match="window_size 32 is larger than the visual span of 31 tokens"):
        assert window_count(31, 32) == 0


def test_no_warning_without_a_video_or_with_a_window() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert window_count(0, 32) == 0
        assert window_count(32, 32) == 1
