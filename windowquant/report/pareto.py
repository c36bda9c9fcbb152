"""Accuracy and divergence against the bits that the cache really holds, and which methods nobody beats."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from windowquant.harness.files import write_atomically
from windowquant.report.frontier import frontier
from windowquant.report.label import label

LEAST_METHODS = 3
SHAPES = "osD^vP*X<>"


def pareto_figures(title: str, rows: Sequence[dict[str, Any]], folder: Path, name: str) -> list[Path]:
    """Draw `<name>_<model>_<protocol>.png` for every model and protocol that has three methods or more with known bits.

    A column for each task; above, accuracy with its 95 % interval and the line of the unbeaten methods; below, KL
    divergence from FP16 on a log scale (FP16's own zero has no place there). Returns what was written.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["avg_bits"] is not None:
            groups.setdefault((row["model"], row["protocol"]), []).append(row)
    written = []
    for (model, protocol), group in groups.items():
        if len({label(row) for row in group}) < LEAST_METHODS:
            continue
        path = folder / f"{name}_{model}_{protocol}.png"
        figure = _figure(f"{title}\n{model}, protocol {protocol}", group)
        write_atomically(path, partial(figure.savefig, format="png", dpi=130))
        written.append(path)
    return written


def _figure(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    labels = list(dict.fromkeys(label(row) for row in rows))
    figure = Figure(figsize=(3.4 * len(tasks) + 1, 7), layout="constrained")
    grid = figure.subplots(2, len(tasks), sharex=True, squeeze=False)
    for task, (accuracy, kl) in zip(tasks, grid.T, strict=True):
        _draw(task, [row for row in rows if row["task"] == task], labels, accuracy, kl)
    for axes, name in zip(grid[:, 0], ("accuracy (%)", "KL divergence from FP16 (nats)"), strict=True):
        axes.set_ylabel(name)
    handles = {text: handle for axes in grid[0] for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw(task: str, rows: Sequence[dict[str, Any]], labels: Sequence[str], accuracy: Axes, kl: Axes) -> None:
    line = frontier(rows)
    accuracy.plot([r["avg_bits"] for r in line], [r["accuracy"] for r in line], color="0.7", zorder=0)
    for row in rows:
        number = labels.index(label(row))
        style: dict[str, Any] = {
            "color": f"C{number % 10}",
            "marker": SHAPES[(number + number // 10) % len(SHAPES)],
            "linestyle": "",
        }
        low, high = row["ci95"]
        bars = [[max(0.0, row["accuracy"] - low)], [max(0.0, high - row["accuracy"])]]
        accuracy.errorbar([row["avg_bits"]], [row["accuracy"]], yerr=bars, label=label(row), elinewidth=0.7, **style)
        if row["kl"]:
            kl.plot([row["avg_bits"]], [row["kl"]], **style)
    accuracy.set_title(task, fontsize="medium")
    kl.set_xlabel("bits held per element, metadata included")
    if any(row["kl"] for row in rows):
        kl.set_yscale("log")
