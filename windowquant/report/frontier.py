"""Which rows of a table nobody beats."""

from collections.abc import Sequence
from typing import Any


def frontier(rows: Sequence[dict[str, Any]], size: str = "avg_bits") -> list[dict[str, Any]]:
    """The rows that no other one beats: none is at least as accurate with at most as much of `size` (a field of the
    rows), and better in one of the two. By ascending size; rows without it are left out."""
    known = sorted((r for r in rows if r[size] is not None), key=lambda r: (r[size], -r["accuracy"]))
    best: list[dict[str, Any]] = []
    for row in known:
        if not best or row["accuracy"] > best[-1]["accuracy"]:
            best.append(row)
    return best
