"""Joining what the parts of a job have of each head."""

import math
from typing import Any

import numpy as np

from windowquant.kernels.cpu import job as j
from windowquant.kernels.cpu.compiled import compiled
from windowquant.kernels.cpu.steps import LOWEST, ROW, TOP, TOTAL
from windowquant.kernels.cpu.tiles import number


@compiled
def combined(job: Any, result: Any) -> None:
    """Join the pieces of each head that the parts of a job left; result: float32 [B * H, rows, D]."""
    for head in range(len(result)):
        first, last = j.part_of(job, head * job[j.TILES]), j.part_of(job, (head + 1) * job[j.TILES] - 1)
        for row in range(result.shape[1]):
            target, high, whole = result[head, row], LOWEST, np.float32(0)
            for part in range(first, last + 1):
                high = max(high, number(j.piece(job, head, part) + ROW * row + TOP))
            target[:] = 0
            for part in range(first, last + 1):
                source = j.piece(job, head, part) + ROW * row
                weight = np.float32(math.exp(number(source + TOP) - high))
                whole += weight * number(source + TOTAL)
                for channel in range(len(target)):
                    target[channel] += weight * number(source + 4 * channel)
            for channel in range(len(target)):
                target[channel] /= whole
