"""Tables of benchmark records: long-form JSON, and Markdown and CSV views of it."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windowquant.harness.files import write_json, write_text

Row = Mapping[str, Any]
PAPER_BLOCK = "The paper's own rows (a 7B model on its own GPU; copied, not measured here)"


@dataclass(frozen=True)
class BenchTable:
    """`rows` as measured; `columns`: heading, and what stands under it; `paper`: the paper's rows, untouched."""

    title: str
    columns: Mapping[str, Callable[[Row], str]]
    rows: Sequence[Row]
    source: Mapping[str, Any]
    paper: Sequence[Row] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def write(table: BenchTable, folder: Path, name: str) -> list[Path]:
    """Write `<name>.json`, `<name>.md` and `<name>.csv`; their paths."""
    paths = [folder / f"{name}.{ending}" for ending in ("md", "csv", "json")]
    write_text(paths[0], to_markdown(table))
    write_text(paths[1], _csv(table))
    kept = {key: value for key, value in asdict(table).items() if key != "columns"}
    write_json(paths[2], kept)
    return paths


def to_markdown(table: BenchTable) -> str:
    """Title, source, the measured rows, notes, and the paper's rows under a heading of their own."""
    parts = [f"# {table.title}", _source(table.source), _grid(list(table.columns), _cells(table))]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    if table.paper:
        names = list(table.paper[0])
        parts += [f"## {PAPER_BLOCK}", _grid(names, [[_plain(row[name]) for name in names] for row in table.paper])]
    return "\n\n".join(parts) + "\n"


def source_of(record: Mapping[str, Any], file: str) -> dict[str, Any]:
    """What a table says about the record that it was made from."""
    machine = record["machine"]
    return {
        "record": file,
        "created": record["created"],
        "data": record["data"],
        "processor": machine["gpu"] or machine["cpu"],
        "cores": machine["cores"],
        "packages": machine["packages"],
        "git_commit": machine["git_commit"],
        "git_dirty": machine["git_dirty"],
    }


def milliseconds(seconds: Mapping[str, float]) -> str:
    """`4.52 (4.49 to 4.60)`: median and quartiles."""
    middle, low, high = (1e3 * seconds[name] for name in ("median", "q25", "q75"))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _source(source: Mapping[str, Any]) -> str:
    packages = source["packages"]
    tree = " (tree changed)" if source["git_dirty"] else ""
    return (
        f"From {source['record']} of {source['created']}: {source['data']}. {source['processor']}, {source['cores']} "
        f"cores, torch {packages['torch']}, transformers {packages['transformers']}, "
        f"commit {str(source['git_commit'])[:10]}{tree}."
    )


def _cells(table: BenchTable) -> list[list[str]]:
    return [[cell(row) for cell in table.columns.values()] for row in table.rows]


def _grid(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _csv(table: BenchTable) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(_cells(table))
    return text.getvalue()


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
