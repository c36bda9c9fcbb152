"""Thresholds: the paper's formula where it can be computed plainly, its limits where it cannot."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.thresholds import thresholds
from windowquant.errors import UserError


@settings(deadline=None)
@given(s=st.floats(0, 1), alpha=st.floats(0.05, 30))
def test_equations_10_and_11(s: float, alpha: float) -> None:
    low, high = thresholds(s, alpha)
    assert float(low) == pytest.approx((math.exp(alpha * s) - 1) / (math.exp(alpha) - 1), abs=1e-12)
    assert float(high) == pytest.approx((math.exp(-alpha * s) - 1) / (math.exp(-alpha) - 1), abs=1e-12)


@settings(deadline=None)
@given(s=st.lists(st.floats(-2, 3), min_size=1, max_size=8), alpha=st.floats(0, allow_infinity=False))
def test_ordered_within_the_unit_interval_at_any_alpha(s: list[float], alpha: float) -> None:
    low, high = thresholds(s, alpha)
    clamped = torch.tensor(s, dtype=torch.float64).clamp(0, 1)
    assert low.shape == high.shape == clamped.shape
    assert bool(((low >= 0) & (low <= clamped) & (clamped <= high) & (high <= 1)).all())


@pytest.mark.parametrize("alpha", [0.0, 5e-324, 1e-300, 1e-17, 1e-12, 1e-9])
def test_both_tend_to_s_for_small_alpha(alpha: float) -> None:
    s = torch.linspace(0, 1, 21, dtype=torch.float64)
    for limit in thresholds(s, alpha):
        torch.testing.assert_close(limit, s, atol=1e-9, rtol=0)


@pytest.mark.parametrize("alpha", [1e3, 1e5, 1e308])
def test_huge_alpha_leaves_int4_only(alpha: float) -> None:
    low, high = thresholds([0.0, 0.25, 0.75, 1.0], alpha)
    torch.testing.assert_close(low, torch.tensor([0, 0, 0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(high, torch.tensor([0, 1, 1, 1.0], dtype=torch.float64))


@settings(deadline=None)
@given(s=st.floats(0.01, 0.99), alphas=st.tuples(st.floats(0, 50), st.floats(0, 50)))
def test_larger_alpha_widens_the_int4_band(s: float, alphas: tuple[float, float]) -> None:
    (low_a, high_a), (low_b, high_b) = (thresholds(s, alpha) for alpha in sorted(alphas))
    assert float(low_b) <= float(low_a) + 1e-12 and float(high_b) >= float(high_a) - 1e-12


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf])
def test_alpha_that_is_not_finite_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match="not a finite number"):
        thresholds(0.5, alpha)


def test_negative_alpha_and_nan_sensitivity_are_refused() -> None:
    with pytest.raises(UserError, match=r"alpha is -1\.0, which would put T_low above T_high"):
        thresholds(0.5, -1.0)
    with pytest.raises(UserError, match="sensitivity is NaN"):
        thresholds([0.5, math.nan], 2.0)
