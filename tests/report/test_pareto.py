"""The Pareto figure: which methods nobody beats, by a plain double loop, and what is drawn of them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.records import make_record
from windowquant.report.frontier import frontier
from windowquant.report.pareto import pareto_figures
from windowquant.report.rows import build_rows

POINTS = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 100)), max_size=12)


@given(POINTS)
def test_a_frontier_row_is_beaten_by_none_and_every_other_one_by_some(points) -> None:
    rows = [{"avg_bits": float(bits), "accuracy": float(accuracy)} for bits, accuracy in points]
    found = {(row["avg_bits"], row["accuracy"]) for row in frontier(rows)}
    for bits, accuracy in points:
        beaten = any(b <= bits and a >= accuracy and (b < bits or a > accuracy) for b, a in points)
        assert ((bits, accuracy) in found) is not beaten


def test_rows_without_bits_are_left_out() -> None:
    assert frontier([{"avg_bits": None, "accuracy": 99.0}, {"avg_bits": 4.0, "accuracy": 50.0}])[0]["accuracy"] == 50.0


def sources(methods, **changes):
    for bits, method in enumerate(methods, 2):
        record = make_record(method=method, params={}, avg_bits=float(bits), **changes)
        yield record, Path("runs") / f"{method}.json"


def test_one_figure_a_model_and_protocol_with_methods_enough(tmp_path: Path) -> None:
    rows = build_rows(
        [
            *sources(("fp16", "kivi", "rtn_int2")),
            *sources(("fp16", "kivi", "rtn_int2"), task="intentqa"),
            *sources(("fp16", "no_video"), protocol="paper"),
        ]
    )
    written = pareto_figures("Title", rows, tmp_path, "all")
    assert written == [tmp_path / "all_tiny_context.png"]
    assert written[0].read_bytes().startswith(b"\x89PNG") and written[0].stat().st_size > 20_000
    assert [path.name for path in tmp_path.iterdir()] == ["all_tiny_context.png"]
