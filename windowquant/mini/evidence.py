"""Which windows of a mini video hold the answer to a question, and how well a score finds them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from windowquant.errors import UserError
from windowquant.mini.corpus import Intervals


def load_evidence(root: Path, task: str) -> list[Intervals]:
    """For each row of the task's table, in order, the frame intervals [start, end) that hold its answer."""
    path = Path(root) / task / "evidence.json"
    if not path.is_file():
        raise UserError(
            f"no evidence for the task {task!r}: {path} is missing; python -m windowquant.mini.data writes it"
        )
    return [[(start, end) for start, end in row["frames"]] for row in json.loads(path.read_text())]


def windows_with_evidence(
    intervals: Intervals, windows: int, window_size: int = 32, tokens_per_frame: int = 4
) -> np.ndarray:
    """[windows] bool: whether any visual token of the window belongs to a frame of the intervals."""
    frames = max((end for _, end in intervals), default=0)
    tokens = np.zeros(max(windows * window_size, frames * tokens_per_frame), dtype=bool)
    for start, end in intervals:
        tokens[start * tokens_per_frame : end * tokens_per_frame] = True
    return np.any(tokens[: windows * window_size].reshape(windows, window_size), axis=1)


def auc(scores: Sequence[float], holds: Sequence[bool]) -> float:
    """The chance that a window with evidence scores above one without it, ties counting half; nan where one of the
    two is missing."""
    values, mask = np.asarray(scores, float), np.asarray(holds, bool)
    with_it, without = values[mask], values[~mask]
    if not len(with_it) or not len(without):
        return float("nan")
    difference = with_it[:, None] - without[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())
