"""Windows that hold the answer, and the AUC with which a score finds them."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.minidata import tiny_corpus, tiny_root
from windowquant.errors import UserError
from windowquant.mini.corpus import TASKS
from windowquant.mini.evidence import auc, load_evidence, windows_with_evidence


@pytest.mark.parametrize("task", TASKS)
def test_evidence_is_read_back_row_by_row(task: str) -> None:
    assert load_evidence(tiny_root(), task) == list(tiny_corpus()[task].evidence)


def test_missing_evidence_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="evidence.json"):
        load_evidence(tmp_path, "nextqa")


@settings(deadline=None)
@given(
    intervals=st.lists(st.tuples(st.integers(0, 96), st.integers(0, 96)).map(lambda p: tuple(sorted(p))), max_size=4),
    window_size=st.sampled_from([1, 3, 16, 32, 50, 400]),
    tokens_per_frame=st.sampled_from([1, 4, 7]),
)
def test_a_window_holds_evidence_if_one_of_its_tokens_does(
    intervals: list[tuple[int, int]], window_size: int, tokens_per_frame: int
) -> None:
    windows = 96 * tokens_per_frame // window_size
    found = windows_with_evidence(intervals, windows, window_size, tokens_per_frame)
    for w in range(windows):
        frames = {token // tokens_per_frame for token in range(w * window_size, (w + 1) * window_size)}
        assert found[w] == any(start <= frame < end for frame in frames for start, end in intervals)
    assert found.shape == (windows,)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12))
def test_auc_counts_pairs(pairs: list[tuple[int, bool]]) -> None:
    scores, holds = zip(*pairs, strict=True)
    won = [(a > b) + 0.5 * (a == b) for a, x in pairs for b, y in pairs if x and not y]
    measured = auc(scores, holds)
    if won:
        assert math.isclose(measured, float(np.mean(won)))
    else:
        assert math.isnan(measured)
