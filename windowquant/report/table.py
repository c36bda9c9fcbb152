"""A table: long-form JSON, and Markdown, CSV and terminal views of it."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from windowquant.harness.files import write_json, write_text
from windowquant.report.label import label
from windowquant.report.rows import Source, build_rows

WIDTH = 185
STAND_IN = "stand-in models on generated videos, not the paper's numbers"
LEGEND = (
    "status: paper, the method of the paper; official, a published method as its authors run it, with the deviations "
    "its class names; variant, a published idea applied where the publication leaves open what becomes of a KV cache; "
    "control.",
    "At equal memory: bits are held per element of the visual K and V, scales and offsets included; cache bits, per "
    "element of all tokens' K and V, room to grow included; unbeaten rows score at least as high as every other row "
    "with at most as many KV bytes (which may be chance: see the intervals).",
)
PAPER_BLOCK = "The paper's own rows (7B models on the real benchmarks; copied, not measured here)"
COLUMNS = (
    "method", "status", "accuracy %", "95 % interval", "strict %", "p", "KL to FP16", "same top-1 %", "bits",
    "cache bits", "KV bytes", "KV ratio", "unbeaten", "tokens/s",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """`rows` as `rows.build_rows` makes them; `paper` holds the paper's own rows, untouched; `notes` are sentences."""

    title: str
    stand_in: bool
    created: str
    rows: list[dict[str, Any]]
    paper: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def build(title: str, sources: Iterable[Source], paper: Sequence[dict[str, Any]] = ()) -> Table:
    """A table from records. Its title says so if any of the models is a stand-in."""
    sources = list(sources)
    stand_in = any(record.stand_in for record, _ in sources)
    rows = build_rows(sources)
    return Table(
        title=f"{title} ({STAND_IN})" if stand_in else title,
        stand_in=stand_in,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        rows=rows,
        paper=list(paper),
        notes=_notes(rows),
    )


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    notes = list(LEGEND) if rows else []
    if any(row["p_fp16"] is not None for row in rows):
        notes.append(
            "p: two-sided, that the method scores as FP16 does on the same documents (McNemar's exact test; sign flips "
            "where a document's score is a share)."
        )
    for model, task, protocol in dict.fromkeys((r["model"], r["task"], r["protocol"]) for r in rows if r["blind"]):
        notes.append(
            f"Blind: on {task} under protocol {protocol}, {model} loses nothing when the visual cache is dropped; "
            "its accuracies say nothing about the cache."
        )
    for row in rows:
        if row["errors"]:
            notes.append(
                f"Errors: {row['errors']} documents of {row['task']} with {row['method']} had unreadable videos and "
                "are in no score; the records name them."
            )
        if row["runs"] > 1:
            notes.append(
                f"{row['method']} on {row['task']}: mean of {row['runs']} seeds, standard deviation between them "
                f"{_number(row['accuracy_sd'], '.1f')} points of accuracy and {_number(row['kl_sd'], '.2g')} of KL."
            )
    return notes


def write(table: Table, folder: Path, name: str) -> None:
    """Write `<name>.json`, `<name>.md` and `<name>.csv` into `folder`."""
    write_text(folder / f"{name}.csv", to_csv(table))
    write_text(folder / f"{name}.md", to_markdown(table))
    write_json(folder / f"{name}.json", asdict(table))


def to_csv(table: Table) -> str:
    """The measured rows, one line each; lists and dictionaries are left to the JSON."""
    names = [name for name, value in table.rows[0].items() if not isinstance(value, list | dict)] if table.rows else []
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, "ci95_low", "ci95_high"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        writer.writerow({**row, "ci95_low": row["ci95"][0], "ci95_high": row["ci95"][1]})
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """One block per task and protocol, the notes, and the paper's rows under a heading of their own."""
    parts = [f"# {table.title}", f"Created {table.created}."]
    for heading, rows in _blocks(table):
        parts += [f"## {heading}", _markdown(COLUMNS, [_cells(row) for row in rows])]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    if table.paper:
        names = list(table.paper[0])
        parts += [f"## {PAPER_BLOCK}", _markdown(names, [[_text(row[n]) for n in names] for row in table.paper])]
    return "\n\n".join(parts) + "\n"


def wide_console() -> Console:
    """The terminal, or, where the output goes to a file or pipe, a page wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def show(table: Table, console: Console) -> None:
    """Print the table."""
    console.print(f"[bold]{table.title}[/bold]")
    for heading, rows in _blocks(table):
        _print(console, heading, COLUMNS, [_cells(row) for row in rows])
    for note in table.notes:
        console.print(note, markup=False)
    if table.paper:
        names = list(table.paper[0])
        _print(console, PAPER_BLOCK, names, [[_text(row[n]) for n in names] for row in table.paper])


def _blocks(table: Table) -> list[tuple[str, list[dict[str, Any]]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table.rows:
        blind = ", blind" if row["blind"] else ""
        heading = f"{row['task']} ({row['model']}, protocol {row['protocol']}, n = {row['n']}{blind})"
        found.setdefault(heading, []).append(row)
    return list(found.items())


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["ci95"]
    runs = f" x{row['runs']}" if row["runs"] > 1 else ""
    spread = f" ± {row['accuracy_sd']:.1f}" if row["accuracy_sd"] is not None else ""
    kl = _number(row["kl"], ".2g") + (f" ± {row['kl_se']:.1g}" if row["kl_se"] else "")
    return [
        f"{label(row)}{runs}",
        row["status"],
        f"{row['accuracy']:.1f}{spread}",
        f"{low:.1f} to {high:.1f}",
        f"{row['strict_accuracy']:.1f}",
        _number(row["p_fp16"], ".2g"),
        kl,
        _number(row["agreement"], ".1f"),
        _number(row["avg_bits"], ".2f"),
        _number(row["cache_bits"], ".2f"),
        f"{row['kv_bytes']:,.0f}",
        f"{row['kv_ratio']:.2f}",
        "yes" if row["unbeaten"] else "",
        _number(row["tokens_per_s"], ".0f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _print(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    grid = RichTable(title=title, title_justify="left")
    for i, name in enumerate(names):
        grid.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
