"""Tables and figures of the benchmark records."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from windowquant.bench.record import load
from windowquant.report.bench_figures import alpha_figure, batch_figure, context_figure, kernel_figure
from windowquant.report.bench_rows import measured, skipped
from windowquant.report.bench_table import BenchTable, Row, milliseconds, source_of, write
from windowquant.report.bench_targets import Target, decode_targets, kernel_targets
from windowquant.report.paper import paper_rows
from windowquant.report.save import save_figure

TABLE8 = {
    "dynamic": "Full precision (DynamicCache)",
    "no_first": "A: first window not fixed",
    "random_plan": "B: random bit-widths",
    "no_reorder": "C: windows stay in place",
    "windowquant": "WindowQuant",
}
_ROW: dict[str, Any] = {
    "threads": lambda row: str(row["threads"]),
    "batch": lambda row: str(row["batch"]),
    "visual tokens": lambda row: f"{row['visual_tokens']:,}",
}


def build_reports(folder: Path, name: str, kind: str) -> list[Path]:
    """Build what the record `<folder>/<name>.json` of this kind shows; paths of all files written.

    What a record is called beyond its kind (decode_float32) ends the names of its tables and figures, too.
    """
    record = load(folder / f"{name}.json", kind)
    source, suffix = source_of(record, f"{name}.json"), _suffix(name, kind)
    builder = {"kernels": _kernels, "decode": _decode}[kind]
    return builder(record, source, folder, suffix)


def _suffix(name: str, kind: str) -> str:
    return name.removeprefix(kind) if name.startswith(kind) else f"_{name}"


def _kernels(record: Mapping[str, Any], source: dict[str, Any], folder: Path, suffix: str) -> list[Path]:
    title = "Decode attention over one layer (synthetic: random K and V)"
    rows = record["kernels"]
    columns = {
        "heads of": lambda row: row["shape"],
        **_ROW,
        "contender": lambda row: row["contender"],
        "dtype": lambda row: row["dtype"],
        "ms, median (quartiles)": lambda row: milliseconds(row["seconds"]),
        "bytes needed": lambda row: f"{row['needed_bytes']:,}",
        "share of copy bandwidth": lambda row: f"{row['share_of_copy']:.3f}",
    }
    copied = [
        f"A plain copy moves {row['bytes_per_s'] / 1e9:.1f} GB/s, read and written, by {row['threads']} thread(s)."
        for row in record["bandwidth"]
    ]
    notes = [
        *copied,
        "Bytes needed are those of K and V that a step has to read once; their share of the copy bandwidth is what a "
        "kernel that did nothing but read them would bring to 1.",
        *skipped(rows),
    ]
    written = write(BenchTable(title, columns, measured(rows), source, notes=notes), folder, f"attention{suffix}")
    figure = folder / f"attention{suffix}.png"
    save_figure(kernel_figure(title, rows), figure)
    return [*written, figure, *_targets(kernel_targets(record), source, folder, f"targets_kernels{suffix}")]


def _decode(record: Mapping[str, Any], source: dict[str, Any], folder: Path, suffix: str) -> list[Path]:
    shape = record["settings"]["decode"]["shape"]
    about = f"random weights of the {shape} size, synthetic cache; no trained model"
    rows = record["decode"]
    before = _before(folder / "overhead_before.json")
    written = write(_all_rows(rows, source, about, record, before), folder, f"decoding{suffix}")
    for name, table in (("table8", _table8(rows, source, about)), ("table9", _table9(record, source, about))):
        if table.rows:
            written += write(table, folder, f"{name}{suffix}")
    figures = {
        "figure2": context_figure(f"Figure 2: decode latency against cache size ({about})", rows),
        "figure13a": alpha_figure(f"Figure 13: decode latency and bit-widths against alpha ({about})", rows),
        "memory_by_batch": batch_figure(f"KV bytes and tokens/s by batch ({about})", rows),
    }
    for name, figure in figures.items():
        if figure is not None:
            save_figure(figure, folder / f"{name}{suffix}.png")
            written.append(folder / f"{name}{suffix}.png")
    return written + _targets(decode_targets(record), source, folder, f"targets_decode{suffix}")


def _all_rows(
    rows: list[dict[str, Any]], source: dict[str, Any], about: str, record: Mapping[str, Any], before: list[str]
) -> BenchTable:
    columns = {
        "section": lambda row: row["section"],
        "contender": lambda row: row["contender"],
        **_ROW,
        "ms a step, median (quartiles)": lambda row: milliseconds(row["seconds"]),
        "tokens/s": _rate,
        "KV bytes": lambda row: f"{row['kv_bytes']:,}",
        "of 16 bits": lambda row: f"{row['kv_ratio_16_bit']:.3f}",
        "peak RSS growth, MiB": _peak,
        "share at 16/4/2 bits": _bits,
    }
    packing = [
        f"Packing {row['shape']}, {row['visual_tokens']:,} visual tokens, {row['dtype']}, "
        f"{row['threads']} thread(s): "
        f"{1e3 * row['pack']['median']:.3g} ms, {100 * row['pack_of_prefill']:.1f} % of the prefill's "
        f"{row['prefill']['median']:.3g} s and {row['pack_of_copy']:.1f} times a plain copy of K and V."
        for row in record["packing"]
    ]
    search = [
        f"Search by {row['search']}, {row['visual_tokens']:,} visual tokens: {milliseconds(row['seconds'])} ms."
        for row in record["search"]
    ]
    notes = [
        "The cache was filled with random K and V, and a packed one planned from random embeddings at the method's own "
        "alpha, with the stand-in's layer sensitivities stretched over the layers.",
        "A step is the forward pass of one token a request and its argmax; generate's own bookkeeping is not in it.",
        *_overhead(record["overhead"], "Decode loop"),
        *before,
        *packing,
        *search,
        *skipped(rows),
    ]
    return BenchTable(f"Decoding ({about})", columns, measured(rows), source, notes=notes)


def _overhead(rows: Iterable[Row], what: str) -> list[str]:
    return [
        f"{what}, {row['part']}: {1e6 * row['seconds']['median']:.1f} us a layer and step "
        f"({1e6 * row['seconds']['q25']:.1f} to {1e6 * row['seconds']['q75']:.1f}, at best "
        f"{1e6 * row['seconds']['min']:.1f})."
        for row in rows
    ]


def _before(path: Path) -> list[str]:
    """What the decode loop cost before it was made lighter, if that record is kept here."""
    if not path.is_file():
        return []
    record = load(path, "overhead")
    return _overhead(record["overhead"], f"At commit {str(record['machine']['git_commit'])[:10]}")


def _table8(rows: list[dict[str, Any]], source: dict[str, Any], about: str) -> BenchTable:
    own = [row for name in TABLE8 for row in measured(rows, section="table8", contender=name)]
    columns = {
        "method": lambda row: TABLE8[row["contender"]],
        **_ROW,
        "KV, MB": lambda row: f"{row['kv_bytes'] / 1e6:.1f}",
        "peak RSS growth, MiB": _peak,
        "tokens/s": _rate,
        "ms a step, median (quartiles)": lambda row: milliseconds(row["seconds"]),
    }
    notes = [
        "Accuracies need a trained model and are in the tables of run records; here is what each costs.",
        *skipped([row for row in rows if row["section"] == "table8"]),
    ]
    return BenchTable(f"Table 8: ablation ({about})", columns, own, source, paper_rows("table8_ablation"), notes)


def _table9(record: Mapping[str, Any], source: dict[str, Any], about: str) -> BenchTable:
    latency = record["attention"]
    rows = [
        {**row, "setting": setting, "attention": attention["seconds"]}
        for setting, contender, kernel in (
            ("fused", "windowquant", "windowquant paper"),
            ("unfused", "unfused", "unfused"),
        )
        for row in measured(record["decode"], section="table9", contender=contender)
        for attention in measured(latency, contender=kernel, threads=row["threads"])
    ]
    columns = {
        "setting": lambda row: row["setting"],
        **_ROW,
        "attention ms, median (quartiles)": lambda row: milliseconds(row["attention"]),
        "decode ms a step, median (quartiles)": lambda row: milliseconds(row["seconds"]),
    }
    notes = [
        "Attention: one layer, the mix that the paper's Table 10 implies. Decode: a step of the whole model with its "
        "own plan; the paper's decode latency is that of a whole answer, whose length it does not say.",
        *skipped([row for row in record["decode"] if row["section"] == "table9"]),
    ]
    return BenchTable(
        f"Table 9: operator fusion ({about})", columns, rows, source, paper_rows("table9_operator_fusion"), notes
    )


def _targets(targets: Iterable[Target], source: dict[str, Any], folder: Path, name: str) -> list[Path]:
    rows = [{**vars(target), "reached": target.reached} for target in targets]
    columns = {
        "ratio": lambda row: row["what"],
        "threads": lambda row: str(row["threads"]),
        "to reach": lambda row: f"{'at most' if row['most'] else 'at least'} {row['wanted']:g}",
        "measured": lambda row: f"{row['value']:.3g}",
        "reached": lambda row: "yes" if row["reached"] else "no",
    }
    return write(BenchTable("Ratios to reach, measured in one run", columns, rows, source), folder, name)


def _rate(row: Row) -> str:
    return f"{row['tokens_per_s']:.3g}"


def _peak(row: Row) -> str:
    return f"{row['peak_rss_growth'] / 2**20:,.0f}"


def _bits(row: Row) -> str:
    if "bits" not in row:
        return ""
    return " / ".join(f"{row['bits'].get(width, 0.0):.2f}" for width in ("16", "4", "2"))
