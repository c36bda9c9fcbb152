"""Thumbnails of the frames along the visual tokens."""

from itertools import accumulate

import numpy as np
from matplotlib.axes import Axes

from windowquant.explain.explanation import Explanation

MOST = 20


def slots(explanation: Explanation, most: int = MOST) -> list[tuple[float, float, int]]:
    """Where thumbnails go: (start, end) in visual tokens, and the frame shown there.

    Each frame over its own tokens, or its share of them where the architecture merges several; more than `most` of them
    over equal parts of the video, each the frame at the part's middle.
    """
    assert explanation.frames is not None
    frames, tokens = len(explanation.frames), explanation.picture_tokens
    starts, indices = [0, *accumulate(tokens)], np.linspace(0, frames, len(tokens) + 1)
    if frames <= most:
        edges = np.interp(range(frames + 1), indices, starts)
        shown = list(range(frames))
    else:
        edges = np.linspace(0, explanation.visual_tokens, most + 1)
        shown = np.interp((edges[:-1] + edges[1:]) / 2, starts, indices).astype(int).tolist()
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), shown, strict=True))


def window_axis(explanation: Explanation, token: float) -> float:
    """Where a visual token lies on an axis on which window i is centred at i."""
    return token / explanation.window_size - 0.5


def draw_strip(axes: Axes, explanation: Explanation) -> None:
    """Draw the thumbnails, each with its frame's number, on axes that `window_axis` speaks of."""
    axes.set_axis_off()
    axes.set_ylim(0, 1)
    if explanation.frames is None:
        axes.text(0.5, 0.2, "no frames were given", ha="center", transform=axes.transAxes, color="0.4")
        return
    axes.text(-0.008, 0, "frame", ha="right", va="bottom", rotation=90, transform=axes.transAxes)
    for start, end, frame in slots(explanation):
        left, width = window_axis(explanation, start), (end - start) / explanation.window_size
        place = axes.inset_axes((left + 0.03 * width, 0, 0.94 * width, 1), transform=axes.transData)
        place.imshow(explanation.frames[frame], interpolation="lanczos")
        place.set(xticks=[], yticks=[], anchor="S")
        place.set_title(str(frame), fontsize=7, pad=2, color="0.35")
        for spine in place.spines.values():
            spine.set_visible(False)
