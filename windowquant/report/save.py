"""Figures as files."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from windowquant.errors import UserError
from windowquant.harness.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


def figure_format(path: str | PathLike[str]) -> str:
    """The format that a file's ending asks for; UserError, naming the known ones, for another."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UserError(
            f"{path} does not end in {', '.join(f'.{f}' for f in FORMATS[:-1])} or .{FORMATS[-1]}: rename it."
        )
    return suffix


def save_figure(figure: "Figure", path: str | PathLike[str], dpi: int = 150) -> None:
    """Write a figure whole or not at all; text stays text in SVG.

    Raises UserError for an ending that is none of `FORMATS`, and for a place that cannot be written.
    """
    import matplotlib  # here, because commands check the ending before they import anything heavy

    form = figure_format(path)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        try:
            write_atomically(Path(path), lambda temporary: figure.savefig(temporary, format=form, dpi=dpi))
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): name another place.") from error
