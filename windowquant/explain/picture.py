"""The picture of one explanation: frames, scores, plan, thresholds and bytes."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from windowquant.explain.explanation import Explanation
from windowquant.explain.strip import draw_strip, window_axis
from windowquant.explain.style import KINDS, SCORE, WIDTHS, origin, ratio, said, size, width_name, window_label

_GRID_CELLS = 1500  # above that many, white lines between the cells would hide them


def picture(explanation: Explanation) -> Figure:
    """Frames, scores and plan over each other along the video; bytes and thresholds on the right."""
    layers = explanation.plan.layers if explanation.plan else 1
    figure = Figure(figsize=(13, 5.2 + min(4.0, 0.16 * layers)), layout="constrained")
    heights = (1, 1.3, max(1.6, min(4.5, 0.2 * layers)))
    panels = figure.subplots(3, 2, width_ratios=(4, 1.15), height_ratios=heights)
    (strip, legend), (scores, held), (plan, limits) = panels
    for axes in (strip, scores, plan):
        axes.set_xlim(window_axis(explanation, 0), window_axis(explanation, explanation.visual_tokens))
    draw_strip(strip, explanation)
    draw_scores(scores, explanation)
    used = draw_plan(plan, explanation)
    draw_bytes(held, explanation)
    draw_thresholds(limits, explanation)
    draw_legends(legend, explanation, used)
    heading(figure, [said("Q", explanation.question), said("A", explanation.answer)], origin(explanation))
    return figure


def heading(figure: Figure, lines: list[str], source: str) -> None:
    """What was asked, above the panels, and by what the picture was made, below them."""
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, parse_math=False)
    figure.supxlabel(source, x=0.01, ha="left", fontsize=8, color="0.35", parse_math=False)


def draw_scores(axes: Axes, explanation: Explanation) -> None:
    """A bar for each window."""
    axes.set_ylabel("score")
    axes.tick_params(bottom=False, labelbottom=False)
    if not explanation.scores:
        why = "no window is whole" if explanation.scores is not None else "this method looks at no content: no scores"
        axes.set_yticks([])
        _say(axes, why)
        return
    axes.stairs(explanation.scores, np.arange(len(explanation.scores) + 1) - 0.5, fill=True, color=SCORE)
    low, high = min(explanation.scores), max(explanation.scores)
    if low >= 0 and high <= 1:
        axes.set_ylim(0, 1.03)
    else:
        axes.axhline(0, color="0.5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_plan(axes: Axes, explanation: Explanation) -> list[int]:
    """Layers by windows (the upper half of a layer K, the lower V, where they differ); the bit-widths in use."""
    axes.set(xlabel=window_label(explanation), ylabel="layer")
    if explanation.plan is None:
        axes.set_yticks([])
        _say(axes, "the method cuts no windows: nothing is planned")
        return []
    if explanation.plan.v_bits is not None:
        axes.set_ylabel("layer (K above V)")
    windows, rows, bits = plan_grid(explanation)
    known = sorted(WIDTHS)
    colours, norm = ListedColormap([WIDTHS[width] for width in known]), BoundaryNorm(range(len(known) + 1), len(known))
    lines = {"edgecolors": "white", "linewidth": 0.6} if bits.size <= _GRID_CELLS else {"rasterized": True}
    axes.pcolormesh(windows, rows, np.searchsorted(known, bits), cmap=colours, norm=norm, **lines)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return sorted(np.unique(bits).tolist(), reverse=True)


def plan_grid(explanation: Explanation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of the cells, in windows and in layers, and their bits: the plan's windows, then all tokens outside of it.

    Bits are [L, cells], or [2 L, cells] with K and V in turn where these differ.
    """
    plan = explanation.plan
    assert plan is not None
    parts = [plan.bits] if plan.v_bits is None else [plan.bits, plan.v_bits]
    bits = np.stack([np.array(part, dtype=int) for part in parts], 1).reshape(len(parts) * plan.layers, plan.windows)
    windows, end = np.arange(plan.windows + 1) - 0.5, window_axis(explanation, explanation.visual_tokens)
    if end > windows[-1]:
        rest = np.full((len(bits), 1), 0 if explanation.drops_visual else 16)
        windows, bits = np.append(windows, end), np.append(bits, rest, axis=1)
    return windows, np.linspace(-0.5, plan.layers - 0.5, len(bits) + 1), bits


def held_kinds(explanation: Explanation) -> list[tuple[str, str, int]]:
    """Name, colour and bytes of what the cache holds."""
    kinds = [(name, colour, getattr(explanation.kv, kind)) for kind, (name, colour) in KINDS.items()]
    if explanation.plan is None and not explanation.kv.codes:
        kinds = [("not packed", "0.6", explanation.kv.total)]
    return [kind for kind in kinds if kind[2]]


def draw_bytes(axes: Axes, explanation: Explanation) -> None:
    """What the cache holds, by kind, over what 16 bits would take."""
    left = 0
    for _, colour, width in held_kinds(explanation):
        axes.barh(1, width, left=left, color=colour, height=0.62)
        left += width
    axes.barh(0, explanation.fp16_bytes, color="0.75", height=0.62)
    axes.set_yticks(
        [1, 0], [f"held\n{size(explanation.kv.total)}", f"FP16\n{size(explanation.fp16_bytes)}"], fontsize=8
    )
    axes.set(xticks=[], ylim=(-0.5, 1.5))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(
        f"KV cache: {ratio(explanation)}\nvideo tokens: {explanation.average_bits:.3g} bits an element", fontsize=8
    )


def draw_legends(axes: Axes, explanation: Explanation, widths: list[int]) -> None:
    """What the colours of the plan, and those of the bytes, stand for."""
    axes.set_axis_off()
    plan: list[Artist] = [Patch(facecolor=WIDTHS[bits], edgecolor="0.6", label=width_name(bits)) for bits in widths]
    if explanation.thresholds is not None:
        plan.append(Line2D([], [], color=SCORE, marker="o", linestyle="", markersize=4, label="sensitivity s"))
    held = [Patch(facecolor=colour, label=f"{name}, {size(count)}") for name, colour, count in held_kinds(explanation)]
    common = {"fontsize": 7, "title_fontsize": 8, "frameon": False, "alignment": "left", "borderaxespad": 0}
    if plan:
        axes.add_artist(axes.legend(handles=plan, title="kept in", loc="upper left", **common))
    axes.legend(handles=held, title="held", loc="upper right", **common)


def draw_thresholds(axes: Axes, explanation: Explanation) -> None:
    """Per layer, which bit-width a score leads to, and the sensitivity s between the two thresholds."""
    if explanation.thresholds is None or explanation.sensitivity is None:
        axes.set_axis_off()
        return
    rows = np.arange(len(explanation.thresholds))
    low, high = np.array(explanation.thresholds).T
    middle = [np.clip(explanation.sensitivity, 0, 1)] if len(explanation.widths) == 4 else []
    edges = [np.zeros_like(low), low, *middle, high, np.ones_like(high)]
    for width, left, right in zip(explanation.widths[::-1], edges[:-1], edges[1:], strict=True):
        axes.barh(rows, right - left, left=left, color=WIDTHS[width], height=0.8)
    axes.plot(explanation.sensitivity, rows, "o", color=SCORE, markersize=4)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xlabel="score that leads to each width")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _say(axes: Axes, sentence: str) -> None:
    axes.text(0.5, 0.5, sentence, ha="center", va="center", transform=axes.transAxes, color="0.4")
