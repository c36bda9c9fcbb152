"""The picture of several questions about one video: their window scores over each other (paper, Figure 3)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from windowquant.errors import UserError
from windowquant.explain.explanation import Explanation
from windowquant.explain.picture import heading
from windowquant.explain.strip import draw_strip, window_axis
from windowquant.explain.style import asked, origin, window_label


def compare(explanations: Sequence[Explanation]) -> Figure:
    """Frames over one row of window scores a question, with question and answer beside it.

    All must be about one video and by one method. Raises UserError for a method that gives no scores, and where no
    window is whole.
    """
    first = explanations[0]
    if not first.scores:
        raise UserError(
            f"{first.method_name} gives no window scores to compare questions by: use a method that looks at the "
            "content, or ask one question."
        )
    rows = len(explanations)
    figure = Figure(figsize=(13, 2.6 + 0.42 * rows), layout="constrained")
    panels = figure.subplots(2, 2, width_ratios=(2.2, 1), height_ratios=(1, 0.5 * rows))
    (strip, empty), (scores, words) = panels
    draw_strip(strip, first)
    empty.set_axis_off()
    end = window_axis(first, first.visual_tokens)
    strip.set_xlim(-0.5, end)
    values = np.array([explanation.scores for explanation in explanations])
    edges = np.arange(values.shape[1] + 1) - 0.5
    drawn = scores.pcolormesh(edges, np.arange(rows + 1) - 0.5, values, cmap="viridis")
    scores.set(xlim=(-0.5, end), xlabel=window_label(first), yticks=range(rows))
    scores.set_yticklabels([f"Q{row + 1}" for row in range(rows)])
    scores.invert_yaxis()
    scores.xaxis.set_major_locator(MaxNLocator(integer=True))
    words.set_axis_off()
    words.set_ylim(rows - 0.5, -0.5)
    for row, explanation in enumerate(explanations):
        words.text(0, row, asked(explanation), va="center", fontsize=8, parse_math=False)
    figure.colorbar(drawn, cax=empty.inset_axes((0, 0.2, 0.6, 0.2)), orientation="horizontal").set_label(
        "window score", loc="left"
    )
    heading(figure, ["Window scores of several questions about one video"], origin(first))
    return figure
