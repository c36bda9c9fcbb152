"""Bringing windows of one bit-width together (paper, Algorithm 2), or leaving them in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from windowquant.core.plan import PLAN_BITS


@dataclass(frozen=True)
class Grouping:
    """The order in which a layer's windows are stored.

    permutation: [W]; the window at place i is permutation[i] of the original.
    groups: (bits, start, end) of neighbours of one bit-width; these windows are permutation[start:end], in their
        original order.
    """

    permutation: tuple[int, ...]
    groups: tuple[tuple[int, int, int], ...]


def grouping(bits: Sequence[int]) -> Grouping:
    """Group the windows of one layer by their `bits` [W], FP16 | INT8 | INT4 | INT2: a stable sort, widest first."""
    permutation = tuple(sorted(range(len(bits)), key=bits.__getitem__, reverse=True))  # stable in reverse, too
    groups, start = [], 0
    for width in PLAN_BITS:
        count = bits.count(width)
        if count:
            groups.append((width, start, start + count))
            start += count
    return Grouping(permutation, tuple(groups))


def in_place(bits: Sequence[int]) -> Grouping:
    """The windows of one layer as they are, in groups wherever their `bits` [W] change."""
    groups, start = [], 0
    for width, run in groupby(bits):
        end = start + len(list(run))
        groups.append((width, start, end))
        start = end
    return Grouping(tuple(range(len(bits))), tuple(groups))
