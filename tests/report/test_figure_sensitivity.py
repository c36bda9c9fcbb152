"""One row a model, one cell a layer."""

import numpy as np

from windowquant.report.figure_sensitivity import sensitivity_figure


def test_rows_are_models_and_cells_are_layers() -> None:
    figure = sensitivity_figure("Layers", {"short": [0.5, 0.75], "long": [0.9, 0.8, 1.0]})
    axes = figure.axes[0]
    grid = np.ma.filled(axes.get_images()[0].get_array(), np.nan)
    np.testing.assert_allclose(grid, [[0.5, 0.75, np.nan], [0.9, 0.8, 1.0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["short", "long"]
    assert [text.get_text() for text in axes.texts] == ["0.500", "0.750", "0.900", "0.800", "1.000"]


def test_the_scale_ends_at_one_and_begins_below_the_lowest() -> None:
    (image,) = sensitivity_figure("Layers", {"a": [0.83] * 28}).axes[0].get_images()
    assert image.get_clim() == (0.8, 1.0)
    assert len(sensitivity_figure("Layers", {"a": [0.83] * 28}).axes[0].texts) == 0
    (image,) = sensitivity_figure("Layers", {"a": [-0.2, 1.0]}).axes[0].get_images()
    assert image.get_clim()[0] <= -0.2
