"""Algorithm 1 and the batch's vote against loops written from the paper's text."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.search import majority_vote, search_plan
from windowquant.core.thresholds import thresholds
from windowquant.errors import UserError


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.floats(-1, 1, width=32), max_size=12),
    sensitivity=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    alpha=st.floats(0, 10),
    fix_first=st.booleans(),
)
def test_each_window_of_each_layer(
    scores: list[float], sensitivity: list[float], alpha: float, fix_first: bool
) -> None:
    expected = []
    for s in sensitivity:
        low, high = (float(limit) for limit in thresholds(s, alpha))
        row = [16 if score > high else 2 if score < low else 4 for score in scores]
        expected.append([16, *row[1:]] if fix_first and row else row)
    plan = search_plan(torch.tensor(scores), sensitivity, alpha, fix_first)
    assert plan.dtype == torch.int8 and plan.shape == (len(sensitivity), len(scores))
    assert plan.tolist() == expected


def test_score_on_a_threshold_takes_int4() -> None:
    plan = search_plan(torch.tensor([0.0, 0.5, 0.25, 0.75]), [0.5], alpha=0.0)
    assert plan.tolist() == [[16, 4, 2, 16]]


def test_sensitivity_may_be_a_tensor() -> None:
    scores = torch.tensor([0.1, 0.9, 0.4])
    assert torch.equal(search_plan(scores, torch.tensor([0.2, 0.8])), search_plan(scores, [0.2, 0.8]))


def _vote(plans: list[list[list[int]]]) -> list[list[int]]:
    windows = max(len(plan[0]) for plan in plans)
    result = []
    for layer in range(len(plans[0])):
        row = []
        for w in range(windows):
            counts = Counter(plan[layer][w] for plan in plans if w < len(plan[layer]))
            row.append(max(counts, key=lambda bits: (counts[bits], bits)))
        result.append(row)
    return result


@settings(max_examples=50, deadline=None)
@given(data=st.data(), layers=st.integers(1, 3), widths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_majority_vote(data: st.DataObject, layers: int, widths: list[int]) -> None:
    bits = st.sampled_from([16, 8, 4, 2])
    plans = [[[data.draw(bits) for _ in range(width)] for _ in range(layers)] for width in widths]
    voted = majority_vote([torch.tensor(plan, dtype=torch.int8) for plan in plans])
    assert voted.dtype == torch.int8
    assert voted.tolist() == _vote(plans)


def test_ties_take_the_higher_precision_and_short_requests_abstain() -> None:
    plans = [torch.tensor([row], dtype=torch.int8) for row in ([2, 4, 2], [4, 16, 2], [4, 2])]
    assert majority_vote(plans).tolist() == [[4, 16, 2]]


def test_a_batch_without_windows_and_no_plan_at_all() -> None:
    assert majority_vote([torch.empty(3, 0, dtype=torch.int8)] * 2).shape == (3, 0)
    with pytest.raises(UserError, match="no plan to vote on"):
        majority_vote([])
