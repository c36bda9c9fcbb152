"""The paper's own tables, as printed there (arXiv 2605.02262); percent, megabytes, milliseconds as the columns say."""

import csv
from pathlib import Path

from windowquant.errors import UserError

FOLDER = Path(__file__).parent


def paper_rows(name: str) -> list[dict[str, str | float | None]]:
    """Rows of `<name>.csv`, numbers as floats, blanks as None; UserError, listing the tables, for another name."""
    path = FOLDER / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.csv")))
        raise UserError(f"The paper's table '{name}' is not here: the known ones are {known}.")
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> str | float | None:
    try:
        return float(text)
    except ValueError:
        return text or None
