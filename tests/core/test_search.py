"""Algorithm 1 and the batch's vote against loops written from the paper's text."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.core.search import majority_vote, search_plan, shuffled
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


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.floats(-1, 1, width=32), max_size=12),
    sensitivity=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    alpha=st.floats(0, 10),
    widths=st.sampled_from([(16, 4, 2), (16, 8, 4, 2), (8, 4, 2, 1), (16, 2, 1)]),
)
def test_other_widths(scores: list[float], sensitivity: list[float], alpha: float, widths: tuple[int, ...]) -> None:
    """Of four widths the band's are cut at the sensitivity: above it the wider, at and below it the narrower."""
    expected = []
    for s in sensitivity:
        low, high = (float(limit) for limit in thresholds(s, alpha))
        inside = [widths[-2] if len(widths) == 3 or score <= s else widths[1] for score in scores]
        rows = zip(scores, inside, strict=True)
        expected.append([widths[0] if x > high else widths[-1] if x < low else middle for x, middle in rows])
    assert search_plan(torch.tensor(scores), sensitivity, alpha, False, widths).tolist() == expected
    fixed = search_plan(torch.tensor(scores), sensitivity, alpha, True, widths).tolist()
    assert fixed == [[widths[0], *row[1:]] if row else row for row in expected]


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


def test_the_vote_of_one_request_is_its_own_plan() -> None:
    plan = torch.tensor([[16, 4, 2]], dtype=torch.int8)
    voted = majority_vote([plan])
    assert torch.equal(voted, plan) and voted is not plan


def test_a_batch_without_windows_and_no_plan_at_all() -> None:
    assert majority_vote([torch.empty(3, 0, dtype=torch.int8)] * 2).shape == (3, 0)
    with pytest.raises(UserError, match="no plan to vote on"):
        majority_vote([])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([16, 4, 2]), max_size=12), st.integers(1, 3), st.integers(0, 2**31), st.booleans())
def test_a_shuffled_plan_keeps_each_layers_counts(bits: list[int], layers: int, seed: int, fix_first: bool) -> None:
    plan = torch.tensor([bits] * layers, dtype=torch.int8).reshape(layers, len(bits))
    drawn = shuffled(plan, seed, fix_first)
    assert torch.equal(drawn.sort(1).values, plan.sort(1).values) and drawn.dtype == torch.int8
    assert torch.equal(shuffled(plan, seed, fix_first), drawn)
    if fix_first:
        assert torch.equal(drawn[:, :1], plan[:, :1])


def test_every_window_may_be_drawn_and_layers_are_drawn_apart() -> None:
    plan = torch.tensor([[16, 2, 2, 2, 2]] * 40, dtype=torch.int8)
    places = (shuffled(plan, 0, fix_first=False) == 16).int().argmax(1)
    assert set(places.tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(shuffled(plan, 0), plan)
    assert not torch.equal(shuffled(plan, 0, fix_first=False), shuffled(plan, 1, fix_first=False))
