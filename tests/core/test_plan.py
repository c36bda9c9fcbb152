"""The plan as a value: validation, conversions, and its averages."""

from dataclasses import FrozenInstanceError
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.plan import BitPlan, KVShape, check_widths, v_bits_of
from windowquant.core.quantizer import Granularity, quantize
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


WIDTHS = st.sampled_from([16, 8, 4, 2, 1])


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    layers=st.integers(1, 3),
    windows=st.integers(1, 5),
    size=st.integers(1, 6),
    kv=st.tuples(st.integers(1, 3), st.sampled_from([8, 24])),
    granularity=st.sampled_from(get_args(Granularity)),
)
def test_average_bits_are_those_of_the_blocks_that_a_plan_leads_to(
    data: st.DataObject, layers: int, windows: int, size: int, kv: tuple[int, int], granularity: Granularity
) -> None:
    """Oracle: quantize windows of zeros, all those of a layer with the same bits of K and of V together."""
    k, v = ([[data.draw(WIDTHS) for _ in range(windows)] for _ in range(layers)] for _ in "kv")
    held = 0.0
    for pairs in (list(zip(*rows, strict=True)) for rows in zip(k, v, strict=True)):
        for pair in set(pairs):
            for bits in pair:
                x = torch.zeros(1, kv[0], pairs.count(pair), size, kv[1], dtype=torch.float16)
                block = None if bits == 16 else quantize(x, bits, granularity)
                held += x.nbytes if block is None else block.codes.nbytes + block.scale.nbytes + block.offset.nbytes
    plan = BitPlan.from_tensor(torch.tensor(k), size, "x", torch.tensor(v))
    elements = 2 * layers * windows * size * kv[0] * kv[1]
    assert plan.average_bits(True, granularity, KVShape(*kv)) == pytest.approx(8 * held / elements)
    codes = sum(map(sum, [*k, *v])) / (2 * layers * windows)
    assert plan.average_bits(False, granularity, KVShape(*kv)) == pytest.approx(codes)


def test_bits_of_v_count_in_averages_and_shares() -> None:
    plan = BitPlan(((16, 4, 2, 2),), 32, "x", ((16, 2, 2, 2),))
    assert plan.tensor().tolist() == [[16, 4, 2, 2]] and plan.v_tensor().tolist() == [[16, 2, 2, 2]]
    assert plan.average_bits() == pytest.approx((16 + 5 + 3 + 3 + 16 + 3 + 3 + 3) / 8)
    assert plan.histogram() == {16: 0.25, 4: 0.125, 2: 0.625}
    assert PLAN.v_tensor().tolist() == PLAN.tensor().tolist()


def test_bits_of_v_follow_those_of_k() -> None:
    k = torch.tensor([[16, 4, 2], [4, 4, 8]], dtype=torch.int8)
    assert v_bits_of(k, [(16, 4), (4, 2)]).tolist() == [[4, 2, 2], [2, 2, 8]]
    assert v_bits_of(k, []).tolist() == k.tolist()


@pytest.mark.parametrize("widths", [(16, 4, 2), (16, 8, 4, 2), (8, 4, 1)])
def test_widths_may_be_any_three_or_four_that_fall(widths: tuple[int, ...]) -> None:
    check_widths(widths, None)
    check_widths(widths, widths)
    check_widths(widths, (16,) * len(widths))


@pytest.mark.parametrize(
    ("widths", "v_widths", "message"),
    [
        ((16, 4), None, r"widths is \[16, 4\]; give three or four of 16, 8, 4, 2, 1, the largest first"),
        ((16, 8, 4, 2, 1), None, "widths is"),
        ((2, 4, 16), None, "widths is"),
        ((16, 4, 4), None, "widths is"),
        ((16, 6, 2), None, "widths is"),
        ((16, 4, 2), (16, 2), r"v_widths is \[16, 2\]; give one bit-width .* for each of the widths \[16, 4, 2\]"),
        ((16, 4, 2), (2, 2, 16), "v_widths is"),
        ((16, 4, 2), (16, 3, 2), "v_widths is"),
    ],
)
def test_widths_that_cannot_be_are_refused(widths, v_widths, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_widths(widths, v_widths)


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
    with pytest.raises(UserError, match="Layer 0 of the plan of V has 1 windows and layer 0 has 2"):
        BitPlan(((16, 4),), 32, "x", ((16,),))
    with pytest.raises(UserError, match="2 layers for V and 1 for K"):
        BitPlan(((16,),), 32, "x", ((16,), (16,)))
    with pytest.raises(UserError, match="at least one layer"):
        BitPlan((), 32, "x")
    with pytest.raises(UserError, match="window_size of a plan is 0"):
        BitPlan(((16,),), 0, "x")
