"""Picking the rows of benchmark records."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def measured(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Rows that were measured (not skipped) and have the wanted values."""
    return [row for row in rows if "skipped" not in row and all(row.get(key) == value for key, value in wanted.items())]


def skipped(rows: Sequence[Row]) -> list[str]:
    """A sentence for each cell that was left out."""
    found = []
    for row in rows:
        if "skipped" in row:
            who = row.get("contender", row.get("shape"))
            found.append(f"Left out: {who}, {row['batch']} x {row['visual_tokens']} visual tokens: {row['skipped']}.")
    return found


def median(rows: Sequence[Row], **wanted: Any) -> float | None:
    """Median seconds of the only row with these values; None if there is none."""
    found = measured(rows, **wanted)
    return found[0]["seconds"]["median"] if found else None


def most_threads(rows: Sequence[Row]) -> int:
    """The largest number of threads that was measured."""
    return max((row["threads"] for row in rows if "threads" in row), default=1)
