"""Choosing alpha for a budget of bits, against looking at many alphas."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.budget import alpha_for, check_target
from windowquant.core.plan import average_bits
from windowquant.core.search import search_plan
from windowquant.errors import UserError

GRID = [0.0, *(10 ** (step / 10) for step in range(-10, 31))]


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    layers=st.integers(1, 4),
    windows=st.integers(2, 40),
    widths=st.sampled_from([(16, 4, 2), (16, 8, 4, 2)]),
    share=st.floats(0, 1),
)
def test_the_plan_is_the_closest_at_or_below_the_target(
    seed: int, layers: int, windows: int, widths: tuple[int, ...], share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, s = torch.rand(windows, generator=generator), torch.rand(layers, generator=generator)

    def average(alpha: float) -> float:
        plan = search_plan(scores, s, alpha, widths=widths)
        return average_bits(plan, plan, 32)

    every = [average(alpha) for alpha in GRID]
    target = min(every) + share * (max(every) - min(every))
    alpha = alpha_for(average, target, preferred=2.0)
    assert max(value for value in every if value <= target) <= average(alpha) <= target
    for other in _below_each_crossing(average, target):
        assert average(alpha) >= average(other)


def _below_each_crossing(average: Callable[[float], float], target: float) -> list[float]:
    """Where neighbours of the grid lie on either side of the target: the alpha that meets it, by halving 14 times."""
    found = []
    for low, high in pairwise(GRID):
        if (average(low) <= target) == (average(high) <= target):
            continue
        meets, misses = (low, high) if average(low) <= target else (high, low)
        for _ in range(14):
            middle = (meets + misses) / 2
            meets, misses = (middle, misses) if average(middle) <= target else (meets, middle)
        found.append(meets)
    return found


def test_a_step_between_scanned_alphas_is_found() -> None:
    for step in (0.003, 0.7712, 3.3, 501.7):
        for before, after in ((8.0, 4.0), (4.0, 8.0)):
            alpha = alpha_for(lambda a, s=step, b=before, c=after: b if a < s else c, 5.0, 2.0)
            assert (before if alpha < step else after) == 4.0
    slope = alpha_for(lambda alpha: 10 - alpha, 8.98765, 2.0)  # as if there were a step everywhere
    assert 10 - slope == pytest.approx(8.98765, abs=1e-4) and 10 - slope <= 8.98765


def test_of_equally_good_alphas_the_preferred_one_is_taken() -> None:
    assert alpha_for(lambda alpha: 5.0, 5.0, 2.0) == 2.0
    assert alpha_for(lambda alpha: 5.0, 16.0, 1.2345) == 1.2345
    assert alpha_for(lambda alpha: 5.0 if alpha > 3 else 6.0, 5.5, 2.0) == pytest.approx(3, abs=0.01)


def test_a_target_out_of_reach_names_the_range() -> None:
    with pytest.raises(UserError, match=r"target_bits is 3, but alpha reaches 4 to 9\.5 bits for this request"):
        alpha_for(lambda alpha: 4 + 5.5 / (1 + alpha) if alpha < 900 else 4.0, 3.0, 2.0)


@pytest.mark.parametrize("target", [None, 4, 4.5, 16, 0.5])
def test_targets_that_can_be(target) -> None:
    check_target(target)


@pytest.mark.parametrize("target", [0, -1, 16.5, float("nan"), float("inf"), True, "4", [4]])
def test_targets_that_cannot_be_are_refused(target) -> None:
    with pytest.raises(UserError, match="target_bits is .*; give a number of bits above 0 and up to 16"):
        check_target(target)
