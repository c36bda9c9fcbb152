"""Token rows of a training batch, and which of their tokens see each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.mini import scenes as sc

IGNORE = -100


@dataclass
class Rows:
    """Token rows of one batch, all [B, T]: ids, targets of the next token, its weight, per-position hints (-100 where
    none), the part of the row that a token belongs to (-1: padding), and rotary positions ([B, T] or [axes, B, T])."""

    ids: Tensor
    labels: Tensor
    weights: Tensor
    hints: Tensor
    part: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Asked:
    question: sc.Question
    task: str


def rows_of(rows: Sequence[tuple], pad_token: int) -> Rows:
    """Pads rows of ids, labels, weights, hints and parts, and counts their positions."""
    fill = (pad_token, IGNORE, 0.0, IGNORE, -1)
    ids, labels, weights, hints, part = (_pad([row[k] for row in rows], value) for k, value in enumerate(fill))
    return Rows(ids, labels, weights, hints, part, counted(part))


def _pad(rows: Sequence[Sequence[float]], value: float) -> Tensor:
    size = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (size - len(row))] for row in rows])


def visible(part: Tensor) -> Tensor:
    """[B, T] -> bool [B, T, T], causal: part 0 is common, every other part sees it and itself only."""
    at = torch.arange(part.shape[1])
    return ((part[:, None, :] == 0) | (part[:, :, None] == part[:, None, :])) & (at[:, None] >= at)


def counted(part: Tensor) -> Tensor:
    """[B, T] -> positions [B, T]: each part counts on from the common part."""
    at = torch.arange(part.shape[1])
    start = torch.stack([torch.where(part == j, at, part.shape[1]).amin(1) for j in range(1, int(part.max()) + 1)], 1)
    common = (part == 0).sum(1, keepdim=True)
    return torch.where(part > 0, at - start.gather(1, (part - 1).clamp_min(0)) + common, at)
