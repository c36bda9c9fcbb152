"""What parts of a job do before and after their pass over the tokens."""

from typing import Any

import numpy as np

from windowquant.kernels.cpu import job as j
from windowquant.kernels.cpu.compiled import compiled, inlined
from windowquant.kernels.cpu.primitives import add_multiple, cleared, multiplied, number, put
from windowquant.kernels.cpu.steps import LOWEST, ROW, TOP, TOTAL


@compiled
def begin(job: Any, head: int, part: int) -> None:
    """The queries of a head, scaled, zero behind channels and rows; and an empty piece."""
    scaled, rows, channels = job[j.SCALED] + j.piece(job, head, part), job[j.ROWS], job[j.CHANNELS]
    cleared(scaled, job[j.PADDED_ROWS] * ROW // 64)
    scaling = number(np.int64(job.ctypes.data) + 8 * j.SCALING)
    for row in range(rows):
        source = job[j.Q] + 4 * channels * (head * rows + row)
        for channel in range(channels):
            put(scaled + ROW * row + 4 * channel, number(source + 4 * channel) * scaling)
    out = job[j.PIECES] + j.piece(job, head, part)
    cleared(out, job[j.PADDED_ROWS] * ROW // 64)
    for row in range(job[j.PADDED_ROWS]):
        put(out + ROW * row + TOP, LOWEST)


@inlined
def _row(job: Any, head: int, part: int, row: int) -> int:
    return job[j.PIECES] + j.piece(job, head, part) + ROW * row


@compiled
def combine(job: Any) -> None:
    """Join the pieces that all parts have of each head, in the first of them; sums of exponentials lie with outputs."""
    rows, channels = job[j.ROWS], job[j.CHANNELS]
    for head in range(job[j.ALL_HEADS]):
        first, last = j.part_of(job, head * job[j.TILES]), j.part_of(job, (head + 1) * job[j.TILES] - 1)
        for row in range(rows):
            joined, target = _row(job, head, first, row), job[j.OUT] + 4 * channels * (head * rows + row)
            high = LOWEST
            for part in range(first, last + 1):
                high = max(high, number(_row(job, head, part, row) + TOP))
            multiplied(joined, np.exp2(number(joined + TOP) - high), ROW // 64)
            for part in range(first + 1, last + 1):
                source = _row(job, head, part, row)
                add_multiple(joined, source, np.exp2(number(source + TOP) - high), ROW // 64)
            per_whole = np.float32(1) / number(joined + TOTAL)
            for at in range(0, 4 * channels, 4):
                put(target + at, number(joined + at) * per_whole)
