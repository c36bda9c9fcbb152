"""A table's files say the same thing, and say it of what they are."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.records import make_record
from windowquant.errors import UserError
from windowquant.report.figure import sweep_figure
from windowquant.report.paper import FOLDER, paper_rows
from windowquant.report.table import LEGEND, PAPER_BLOCK, Table, build, show, to_csv, to_markdown, write


@pytest.fixture
def table() -> Table:
    records = [
        make_record(),
        make_record(method="no_video", accuracy=79.0, kl=3.0),
        *(
            make_record(
                method="random_plan", params={"alpha": 2.0, "window_size": 32, "seed": s}, seed=s, accuracy=70.0 + s
            )
            for s in range(5)
        ),
        make_record(
            method="rtn_int2", errors=[{"doc_id": 1, "reason": "Video v.mp4 has no frames."}], kl=None, kl_se=None
        ),
    ]
    return build(
        "Table 1", [(r, Path(f"runs/{r.method}-{r.seed}.json")) for r in records], paper_rows("table1_videoqa")
    )


def test_the_json_is_the_long_form(table: Table, tmp_path: Path) -> None:
    write(table, tmp_path, "table1")
    found = json.loads((tmp_path / "table1.json").read_text())
    assert list(found)[:5] == ["title", "stand_in", "created", "rows", "paper"]
    assert found["stand_in"] is True
    assert "stand-in" in found["title"]
    assert [row["method"] for row in found["rows"]] == ["fp16", "no_video", "random_plan", "rtn_int2"]
    assert found["paper"][9] == {
        "model": "LLaVA-OneVision-Qwen2",
        "llm_size": "7B",
        "vision_encoder": "SigLIP",
        "nextqa": 67.8,
        "egoschema": 59.8,
        "intentqa": 64.9,
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table1.csv", "table1.json", "table1.md"]


def test_real_models_are_not_called_stand_ins() -> None:
    table = build("Table 1", [(make_record(stand_in=False), Path("r.json"))])
    assert (table.title, table.stand_in) == ("Table 1", False)


def test_the_csv_holds_every_measured_row(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [row["method"] for row in rows] == ["fp16", "no_video", "random_plan", "rtn_int2"]
    assert float(rows[2]["accuracy"]) == 72.0
    assert float(rows[0]["ci95_low"]) == 49.0
    assert rows[3]["kl"] == ""


def test_the_markdown_has_measured_and_printed_rows_apart(table: Table) -> None:
    text = to_markdown(table)
    measured, printed = text.split(f"## {PAPER_BLOCK}")
    assert "| random_plan (alpha=2, window_size=32) x5 | control | 72.0 ± 1.6 |" in measured
    assert "WindowQuant" not in measured
    assert "| LLaVA-OneVision-Qwen2+WindowQuant | 7B | SigLIP | 78.9 |" in printed
    assert "stand-in" in measured.splitlines()[0]
    assert "nextqa (tiny, protocol context, n = 10, blind)" in measured


def test_notes_tell_blindness_errors_and_spread(table: Table) -> None:
    *legend, blind, spread, errors = table.notes
    assert legend == list(LEGEND)
    assert blind.startswith(
        "Blind: on nextqa under protocol context, tiny loses nothing when the visual cache is dropped"
    )
    assert "mean of 5 seeds, standard deviation between them 1.6 points of accuracy" in spread
    assert errors.startswith("Errors: 1 documents of nextqa with rtn_int2 had unreadable videos")


def test_every_view_has_status_and_the_columns_of_equal_memory() -> None:
    sizes = {"fp16": (80.0, 1000.0), "kivi": (79.0, 250.0), "skvq": (70.0, 300.0), "windowquant": (80.0, 400.0)}
    records = [
        make_record(method=name, params={}, accuracy=accuracy, kv_bytes=held, kv_ratio=1000 / held)
        for name, (accuracy, held) in sizes.items()
    ]
    table = build("Table 1", [(record, Path(f"runs/{record.method}.json")) for record in records])
    found = {row["method"]: (row["status"], row["cache_bits"], row["unbeaten"]) for row in table.rows}
    assert found == {
        "fp16": ("control", 16.0, False),
        "kivi": ("official", 4.0, True),
        "skvq": ("official", 4.8, False),
        "windowquant": ("paper", 6.4, True),
    }
    (line,) = [line for line in to_markdown(table).splitlines() if line.startswith("| kivi")]
    assert line.split(" | ")[1] == "official" and line.split(" | ")[9:] == ["4.00", "250", "4.00", "yes", "20 |"]
    (row,) = [row for row in csv.DictReader(io.StringIO(to_csv(table))) if row["method"] == "kivi"]
    assert (row["status"], row["cache_bits"], row["unbeaten"]) == ("official", "4.0", "True")


def test_the_terminal_shows_the_same(table: Table) -> None:
    stream = io.StringIO()
    show(table, Console(file=stream, width=200))
    text = stream.getvalue()
    assert all(
        name in text for name in ("fp16", "random_plan", "no_video", PAPER_BLOCK, "Video-LLaVA", table.notes[-1])
    )


def test_an_empty_table_is_still_a_table() -> None:
    table = build("Nothing", [])
    assert to_csv(table).startswith("ci95_low")
    assert "# Nothing" in to_markdown(table)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda path: path.stem)
def test_every_table_of_the_paper_reads(path: Path) -> None:
    rows = paper_rows(path.stem)
    header = path.read_text().splitlines()[0].split(",")
    assert len(rows) == len(path.read_text().splitlines()) - 1
    assert all(list(row) == header for row in rows)


def test_an_unknown_table_of_the_paper_is_told() -> None:
    with pytest.raises(UserError, match="'table99' is not here: the known ones are table10_granularity"):
        paper_rows("table99")


def test_the_figure_has_a_panel_for_each_quantity(tmp_path: Path) -> None:
    from matplotlib import image

    records = [make_record(kl=0.0, params={"window_size": 32})]
    records += [
        make_record(
            method="windowquant",
            params={"alpha": a, "window_size": s},
            kl=0.01 * a,
            kv_bytes=1000.0 / a,
            accuracy=80.0 - a,
        )
        for a in (4.0, 1.0, 2.0)
        for s in (16, 32)
    ]
    table = build("Sweep", [(r, Path("r.json")) for r in records])
    path = tmp_path / "figures" / "sweep.png"
    sweep_figure(table.title, table.rows, path)
    pixels = image.imread(path)
    assert pixels.shape[1] > 2.5 * pixels.shape[0]
    thirds = [pixels[:, k * pixels.shape[1] // 3 : (k + 1) * pixels.shape[1] // 3, :3] for k in range(3)]
    assert all((third < 0.9).mean() > 0.01 for third in thirds)  # something is drawn in each
    assert [p.name for p in path.parent.iterdir()] == ["sweep.png"]
