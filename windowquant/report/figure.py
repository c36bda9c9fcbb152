"""The figure of a sweep: accuracy, divergence and bytes against alpha."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from windowquant.harness.files import write_atomically

PANELS = (
    ("accuracy", "accuracy (%)"),
    ("kl", "KL divergence from FP16 (nats)"),
    ("kv_bytes", "KV cache (bytes a request)"),
)


def sweep_figure(title: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw three panels against alpha, one line per task, method and window size, and write a PNG.

    Rows without alpha (FP16, uniform bit-widths) are horizontal lines. Accuracy carries its 95 % interval, divergence
    its standard error.
    """
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    lines = _lines(rows)
    for axes, (name, label) in zip(panels, PANELS, strict=True):
        for index, (legend, points) in enumerate(lines.items()):
            shift = 0.02 * (index - len(lines) / 2)  # so that error bars do not cover each other
            _draw(axes, name, legend, points, f"C{index % 10}", shift)
        axes.set(xlabel="alpha", ylabel=label)
        if name == "kl" and any((row["kl"] or 0) > 0 for row in rows):
            axes.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["params"].get("alpha", 0.0)):
        size = f", S = {row['params']['window_size']}" if "alpha" in row["params"] else ""
        found.setdefault(f"{row['task']}: {row['method']}{size}", []).append(row)
    return found


def _draw(axes: Axes, name: str, legend: str, points: Sequence[dict[str, Any]], colour: str, shift: float) -> None:
    if "alpha" not in points[0]["params"]:
        value = points[0][name]
        if value is not None and (value or name != "kl"):  # a log axis has no place for 0
            axes.axhline(value, label=legend, color=colour, linestyle="--", linewidth=1)
        return
    alphas = [point["params"]["alpha"] + shift for point in points]
    values = [point[name] for point in points]
    axes.errorbar(alphas, values, yerr=_errors(name, points), label=legend, color=colour, marker="o", capsize=3)


def _errors(name: str, points: Sequence[dict[str, Any]]) -> list[list[float]]:
    """How far the bars reach below and above each point."""
    if name == "accuracy":
        low = [point[name] - point["ci95"][0] for point in points]
        return [low, [point["ci95"][1] - point[name] for point in points]]
    own = [(point["kl_se"] or 0.0) if name == "kl" else 0.0 for point in points]
    return [own, own]
