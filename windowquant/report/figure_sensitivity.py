"""The figure of layer sensitivities: one row a model, one cell a layer (paper, Figure 8)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_WRITTEN = 16  # layers up to which a cell has room for its number


def sensitivity_figure(title: str, values: Mapping[str, Sequence[float]]) -> Figure:
    """Draw s_l (equation 9) of each model's layers [L]; models may differ in L.

    The darker a cell, the less its layer changes the hidden state, and the harder it may be quantized.
    """
    layers = max(map(len, values.values()))
    grid = np.full((len(values), layers), np.nan)
    for row, own in zip(grid, values.values(), strict=True):
        row[: len(own)] = own
    figure = Figure(figsize=(max(7, 3 + 0.3 * layers), 1.7 + 0.45 * len(values)), layout="constrained")
    axes = figure.subplots()
    low = float(np.floor(np.nanmin(grid) * 20) / 20)
    drawn = axes.imshow(grid, cmap="YlGnBu", vmin=low, vmax=1, aspect="auto", interpolation="nearest")
    axes.set(xlabel="layer", yticks=range(len(values)))
    axes.set_yticklabels(list(values), parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if layers <= _WRITTEN:
        for (row, layer), value in np.ndenumerate(grid):
            if not np.isnan(value):
                dark = value > (low + 1) / 2
                axes.text(layer, row, f"{value:.3f}", ha="center", va="center", color="white" if dark else "black")
    figure.colorbar(drawn, ax=axes, label="sensitivity s", aspect=12)
    figure.suptitle(title, fontsize="medium")
    return figure
