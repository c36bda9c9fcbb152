"""Paired significance against FP16: McNemar by hand, shares by sign flips, and where nothing can be said."""

import json
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pytest

from tests.records import make_record
from windowquant.report.paired import paired_p
from windowquant.report.rows import build_rows


def mcnemar(lost: int, gained: int) -> float:
    n, k = lost + gained, min(lost, gained)
    return min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n)


@pytest.mark.parametrize(("lost", "gained"), [(0, 1), (5, 0), (7, 2), (3, 3), (20, 8)])
def test_right_and_wrong_answers_are_compared_by_mcnemars_exact_test(lost: int, gained: int) -> None:
    reference = np.array([1.0] * lost + [0.0] * gained + [1.0, 1.0, 0.0])
    method = np.array([0.0] * lost + [1.0] * gained + [1.0, 1.0, 0.0])
    assert paired_p(reference, method) == pytest.approx(mcnemar(lost, gained))


def test_shares_are_compared_by_flipping_signs() -> None:
    reference, method = np.array([0.9, 0.8, 1.0, 0.7, 0.6, 0.95]), np.array([0.8, 0.7, 0.5, 0.75, 0.4, 0.9])
    difference = method - reference
    means = [np.mean(difference * signs) for signs in product((1, -1), repeat=len(difference))]
    lower, upper = (np.mean([side * m >= side * difference.mean() - 1e-12 for m in means]) for side in (-1, 1))
    assert paired_p(reference, method) == pytest.approx(min(1.0, 2 * min(lower, upper)), abs=1e-9)


def test_equal_scores_say_nothing() -> None:
    same = np.array([1.0, 0.0, 0.4])
    assert paired_p(same, same) == 1.0


def source(folder: Path, official: list[float] | None, **changes):
    record = make_record(**changes)
    path = folder / f"{record.method}-{record.fingerprint}.json"
    if official is not None:
        lines = [{"doc_id": doc, "official": value} for doc, value in enumerate(official)]
        lines.append({"doc_id": 99, "error": "unreadable"})
        path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return record, path


def test_rows_carry_what_was_lost_gained_and_its_p(tmp_path: Path) -> None:
    rows = build_rows(
        [
            source(tmp_path, [1, 1, 1, 0, 1]),
            source(tmp_path, [0, 0, 1, 1, 1], method="rtn_int2"),
            source(tmp_path, None, method="windowquant"),
            source(tmp_path, [1, 1, 1, 1, 1], method="kivi", params={}, task="intentqa"),
            *(source(tmp_path, [1] * 5, method="random_plan", seed=s, params={"seed": s}) for s in (0, 1)),
        ]
    )
    found = [(row["method"], row["lost"], row["gained"], row["p_fp16"]) for row in rows]
    assert found[0] == ("fp16", None, None, None)
    assert found[1] == ("rtn_int2", 2, 1, pytest.approx(mcnemar(2, 1)))
    assert [row[1:] for row in found[2:]] == [(None, None, None)] * 3
