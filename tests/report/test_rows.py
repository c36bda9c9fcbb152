"""Rows: fields of the long form, runs of several seeds, and what makes a task blind."""

from pathlib import Path
from statistics import stdev

import pytest

from tests.records import make_record
from windowquant.report.rows import build_rows

FIELDS = {"model", "method", "task", "protocol", "accuracy", "n", "ci95", "kl", "agreement", "avg_bits", "kv_bytes"}
FIELDS |= {"tokens_per_s", "record"}


def source(**changes):
    record = make_record(**changes)
    return record, Path("results/runs") / f"{record.method}-{record.fingerprint}.json"


def test_a_row_has_the_fields_of_the_long_form() -> None:
    record, path = source()
    (row,) = build_rows([(record, path)])
    assert set(row) >= FIELDS
    assert row["record"] == str(path)
    assert row["ci95"] == [49.0, 94.0]
    assert all(row[name] == getattr(record, name) for name in FIELDS - {"record", "ci95"})
    assert (row["runs"], row["accuracy_sd"], row["blind"]) == (1, None, None)


def test_runs_that_differ_in_the_seed_are_one_row() -> None:
    accuracies = [70.0, 80.0, 90.0, 60.0, 75.0]
    sources = [
        source(
            method="random_plan", params={"alpha": 2.0, "seed": seed}, seed=seed, accuracy=accuracy, kl=accuracy / 1e3
        )
        for seed, accuracy in enumerate(accuracies)
    ]
    (row,) = build_rows(reversed(sources))
    assert row["accuracy"] == pytest.approx(75)
    assert row["kl"] == pytest.approx(0.075)
    assert row["accuracy_sd"] == pytest.approx(stdev(accuracies))
    assert row["kl_sd"] == pytest.approx(stdev(accuracies) / 1e3)
    assert row["runs"] == 5
    assert row["n"] == 10
    assert row["records"] == [str(path) for _, path in sources]
    assert row["record"] == row["records"][0]
    assert row["params"] == {"alpha": 2.0}


def test_rows_keep_the_order_of_their_records_and_tell_parameters_apart() -> None:
    rows = build_rows(source(method="windowquant", params={"alpha": alpha}) for alpha in (4.0, 1.0, 2.0))
    assert [row["params"]["alpha"] for row in rows] == [4.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("no_video", "blind"), [(20.0, False), (48.9, False), (49.0, True), (80.0, True), (95.0, True)]
)
def test_blind_is_where_dropping_the_video_stays_within_fp16s_interval(no_video: float, blind: bool) -> None:
    rows = build_rows(
        [source(), source(method="no_video", accuracy=no_video), source(method="windowquant", params={"alpha": 2.0})]
    )
    assert [row["blind"] for row in rows] == [blind] * 3


def test_blindness_is_of_one_task_under_one_protocol() -> None:
    rows = build_rows(
        [
            source(),
            source(method="no_video", accuracy=10.0),
            source(protocol="paper"),
            source(method="no_video", protocol="paper"),
            source(task="describe"),
        ]
    )
    assert [row["blind"] for row in rows] == [False, False, True, True, None]


def test_what_was_not_measured_is_none() -> None:
    (row,) = build_rows([source(kl=None, kl_se=None, kl_n=0, agreement=None, tokens_per_s=None)])
    assert (row["kl"], row["agreement"], row["tokens_per_s"]) == (None, None, None)
