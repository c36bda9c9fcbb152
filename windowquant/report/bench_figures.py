"""Figures of benchmark records."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from windowquant.report.bench_rows import Row, measured, most_threads

KERNEL_LINES = (
    ("windowquant int2", "float32"),
    ("windowquant int4", "float32"),
    ("windowquant int8", "float32"),
    ("windowquant fp16", "float32"),
    ("windowquant paper", "float32"),
    ("windowquant paper", "bfloat16"),
    ("unfused", "float32"),
    ("SDPA as transformers calls it", "bfloat16"),
    ("SDPA as transformers calls it", "float32"),
    ("SDPA, query group as rows", "bfloat16"),
    ("SDPA, query group as rows", "float32"),
    ("QuantizedCache hf_quanto, step", "float32"),
)
_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "black", "navy")


def kernel_figure(title: str, rows: Sequence[Row]) -> Figure:
    """Latency against visual tokens, one panel a shape of heads, one line a contender, at the most threads measured."""
    own = measured(rows, threads=most_threads(rows))
    shapes = list(dict.fromkeys(row["shape"] for row in own))
    figure = Figure(figsize=(5.2 * max(2, len(shapes)), 5.6), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for index, (contender, dtype) in enumerate(KERNEL_LINES):
            line = measured(own, shape=shape, contender=contender, dtype=dtype)
            ours = contender.startswith("windowquant")
            _line(axes, line, f"{contender}, {dtype}", "visual_tokens", _COLOURS[index], "-" if ours else "--")
        axes.set(xscale="log", yscale="log", xlabel="visual tokens", ylabel="ms a step", title=f"heads of {shape}")
    figure.legend(*_all_labels(figure), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(f"{title}\n{most_threads(rows)} threads", fontsize="medium")
    return figure


def context_figure(title: str, rows: Sequence[Row]) -> Figure | None:
    """Decode latency against visual tokens and against bytes held (paper, Figure 2); None if only one size is there."""
    own = measured(rows, section="cache_size", threads=most_threads(rows))
    if len({row["visual_tokens"] for row in own}) < 2:
        return None
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for index, name in enumerate(dict.fromkeys(row["contender"] for row in own)):
        line = [{**row, "megabytes": row["kv_bytes"] / 1e6} for row in measured(own, contender=name)]
        _line(panels[0], line, name, "visual_tokens", f"C{index}")
        _line(panels[1], line, name, "megabytes", f"C{index}")
    panels[0].set(xlabel="visual tokens", ylabel="ms a token", ylim=(0, None))
    panels[1].set(xlabel="K and V held (MB)", ylabel="ms a token", ylim=(0, None))
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{title}\nbatch {own[0]['batch']}, {own[0]['threads']} threads", fontsize="medium")
    return figure


def alpha_figure(title: str, rows: Sequence[Row]) -> Figure | None:
    """Decode latency against alpha, and the share of the tokens at each bit-width (paper, Figures 13a and 13b)."""
    own = measured(rows, section="alpha", threads=most_threads(rows))
    if not own:
        return None
    points = sorted(({**row, "alpha": float(row["contender"].partition("=")[2])} for row in own), key=_alpha)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    latency, shares = figure.subplots(1, 2)
    _line(latency, points, "WindowQuant", "alpha", "C0")
    latency.set(xlabel="alpha", ylabel="ms a token", ylim=(0, None))
    places, bottom = range(len(points)), [0.0] * len(points)
    for width in ("16", "4", "2"):
        heights = [point["bits"].get(width, 0.0) for point in points]
        shares.bar(places, heights, bottom=bottom, label=f"{width} bits")
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    shares.set(xlabel="alpha", ylabel="share of the visual tokens", xticks=places)
    shares.set_xticklabels([f"{point['alpha']:g}" for point in points])
    shares.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3)
    sizes = f"{own[0]['visual_tokens']:,} visual tokens, {own[0]['threads']} threads"
    figure.suptitle(f"{title}\n{sizes}", fontsize="medium")
    return figure


def batch_figure(title: str, rows: Sequence[Row]) -> Figure | None:
    """Bytes of K and V, and tokens per second, against the batch size, at the section's largest video."""
    found = measured(rows, section="batch", threads=most_threads(rows))
    if not found:
        return None
    own = measured(found, visual_tokens=max(row["visual_tokens"] for row in found))
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    for index, name in enumerate(dict.fromkeys(row["contender"] for row in own)):
        line = measured(own, contender=name)
        batches = [row["batch"] for row in line]
        memory.plot(batches, [row["kv_bytes"] / 1e9 for row in line], "o-", label=name, color=f"C{index}")
        speed.plot(batches, [row["tokens_per_s"] for row in line], "o-", label=name, color=f"C{index}")
    memory.set(xlabel="batch", ylabel="K and V held (GB)", ylim=(0, None))
    speed.set(xlabel="batch", ylabel="tokens/s", ylim=(0, None))
    memory.legend(fontsize="small")
    sizes = f"{own[0]['visual_tokens']:,} visual tokens, {own[0]['threads']} threads"
    figure.suptitle(f"{title}\n{sizes}", fontsize="medium")
    return figure


def _alpha(row: Row) -> float:
    return float(row["alpha"])


def _line(axes: Axes, line: Sequence[Row], label: str, x: str, colour: str, style: str = "-") -> None:
    """Median milliseconds against `x`, with quartiles as bars."""
    if not line:
        return
    middles = [1e3 * row["seconds"]["median"] for row in line]
    below = [middle - 1e3 * row["seconds"]["q25"] for middle, row in zip(middles, line, strict=True)]
    above = [1e3 * row["seconds"]["q75"] - middle for middle, row in zip(middles, line, strict=True)]
    places = [row[x] for row in line]
    axes.errorbar(
        places, middles, yerr=[below, above], label=label, color=colour, linestyle=style, marker="o", capsize=3,
        markersize=4,
    )  # fmt: skip


def _all_labels(figure: Figure) -> tuple[list[Any], list[str]]:
    """Handles and labels of all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
