"""The plan as a value: validation, conversions, and its averages."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from windowquant.core.plan import BitPlan
from windowquant.errors import UserError

PLAN = BitPlan(((16, 4, 2, 2), (16, 8, 4, 2)), 32, "by hand")


def test_tensor_round_trip() -> None:
    assert PLAN.tensor().dtype == torch.int8
    assert PLAN.tensor().tolist() == [[16, 4, 2, 2], [16, 8, 4, 2]]
    assert BitPlan.from_tensor(PLAN.tensor(), 32, "by hand") == PLAN
    assert (PLAN.layers, PLAN.windows) == (2, 4)


def test_average_bits_counts_scale_and_offset_of_quantized_windows() -> None:
    assert PLAN.average_bits(metadata=False) == pytest.approx((16 + 4 + 2 + 2 + 16 + 8 + 4 + 2) / 8)
    assert PLAN.average_bits() == pytest.approx((16 + 5 + 3 + 3 + 16 + 9 + 5 + 3) / 8)
    assert BitPlan(((2,),), 16, "x").average_bits() == 4
    assert BitPlan(((16,),), 1, "x").average_bits() == 16


def test_histogram_is_shares_of_windows() -> None:
    assert PLAN.histogram() == {16: 0.25, 8: 0.125, 4: 0.25, 2: 0.375}


def test_plan_without_windows_is_all_16_bit() -> None:
    plan = BitPlan(((), (), ()), 32, "nothing to quantize")
    assert plan.tensor().shape == (3, 0)
    assert plan.average_bits() == 16 and plan.histogram() == {}
    assert BitPlan.from_tensor(plan.tensor(), 32, "nothing to quantize") == plan


def test_plan_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PLAN.window_size = 16  # type: ignore[misc]


def test_bad_plans_are_refused() -> None:
    with pytest.raises(UserError, match=r"Layer 1 of the plan asks for \[3, 5\] bits; use one of \[16, 8, 4, 2, 1\]"):
        BitPlan(((16, 4), (5, 3)), 32, "x")
    with pytest.raises(UserError, match="Layer 1 of the plan has 1 windows and layer 0 has 2"):
        BitPlan(((16, 4), (4,)), 32, "x")
    with pytest.raises(UserError, match="at least one layer"):
        BitPlan((), 32, "x")
    with pytest.raises(UserError, match="window_size of a plan is 0"):
        BitPlan(((16,),), 0, "x")
