"""Bringing windows of one bit-width together (paper, Algorithm 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.core.plan import PLAN_BITS


@dataclass(frozen=True)
class Grouping:
    """A layer's windows ordered FP16 | INT8 | INT4 | INT2.

    permutation: int64 [W]; the window at place i is permutation[i] of the original.
    groups: (bits, start, end) of each bit-width in use, widest first; its windows are permutation[start:end], in their
        original order.
    """

    permutation: Tensor
    groups: tuple[tuple[int, int, int], ...]

    def windows(self, bits: int) -> tuple[int, ...]:
        """Original indices of the windows of one bit-width, ascending; empty if none has it."""
        for width, start, end in self.groups:
            if width == bits:
                return tuple(self.permutation[start:end].tolist())
        return ()


def grouping(bits: Tensor) -> Grouping:
    """Group the windows of one layer by their `bits` [W]: a stable sort, widest first."""
    permutation = torch.argsort(bits, descending=True, stable=True)
    groups, start = [], 0
    for width in PLAN_BITS:
        count = int((bits == width).sum())
        if count:
            groups.append((width, start, start + count))
            start += count
    return Grouping(permutation, tuple(groups))
