"""The window-level bit-width search (paper, Algorithm 1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windowquant.core.plan import PLAN_BITS
from windowquant.core.thresholds import thresholds
from windowquant.errors import UserError

PAPER_WIDTHS = (16, 4, 2)


def search_plan(
    scores: Tensor,
    sensitivity: Tensor | Sequence[float],
    alpha: float = 2.0,
    fix_first: bool = True,
    widths: Sequence[int] = PAPER_WIDTHS,
) -> Tensor:
    """Bits of every window in every layer: int8 [L, W] out of `widths`.

    scores [W]: similarity of each window to the prompt; sensitivity [L]: equation 9 per layer. A window whose score is
    above the layer's T_high takes the first of three widths (the paper's 16), below T_low the last (2), between them,
    ends included, the middle one (4). Of four widths the two in the middle share the band: a score above the layer's
    sensitivity s, which lies between the thresholds, takes the wider one, any other the narrower. `fix_first` gives
    window 0 the first width, as the paper does. Raises UserError as `thresholds` does.
    """
    low, high = (limit.to(scores.device)[:, None] for limit in thresholds(sensitivity, alpha))
    bits = torch.full((low.shape[0], scores.shape[0]), widths[-2], dtype=torch.int8, device=scores.device)
    if len(widths) == 4:
        middle = torch.as_tensor(sensitivity, dtype=torch.float64).clamp(0, 1)
        bits[scores > middle.to(scores.device)[:, None]] = widths[1]
    bits[scores > high] = widths[0]
    bits[scores < low] = widths[-1]
    if fix_first:
        bits[:, :1] = widths[0]
    return bits


def majority_vote(plans: Sequence[Tensor]) -> Tensor:
    """One plan int8 [L, max W_b] for a batch from each request's own [L, W_b].

    Every window index takes, in each layer, the bit-width that most requests chose; a tie takes the higher precision,
    and a request too short to have that window does not vote on it. Raises UserError if there is no plan to vote on.
    """
    if not plans:
        raise UserError("There is no plan to vote on; give at least one request.")
    if len(plans) == 1:  # nobody to disagree with, and at 28 layers of 600 windows counting takes milliseconds
        return plans[0].clone()
    widths = torch.tensor(PLAN_BITS, dtype=torch.int8, device=plans[0].device)
    windows = max(plan.shape[1] for plan in plans)
    votes = torch.zeros(len(PLAN_BITS), plans[0].shape[0], windows, dtype=torch.long, device=plans[0].device)
    for plan in plans:
        votes[:, :, : plan.shape[1]] += plan == widths[:, None, None]
    # The widest comes first in PLAN_BITS and argmax may return any maximum, so look for the first one explicitly.
    winner = (votes == votes.amax(0)).int().argmax(0)
    return widths[winner]


def shuffled(plan: Tensor, seed: int, fix_first: bool = True) -> Tensor:
    """The same bit-widths of each layer [L, W] on windows drawn at random (Table 8, row B); each layer by itself.

    With `fix_first` window 0 keeps what it has, for it does not owe that to its score.
    """
    generator = torch.Generator().manual_seed(seed)
    start = 1 if fix_first else 0
    order = torch.rand(plan.shape[0], max(0, plan.shape[1] - start), generator=generator).argsort(1)
    return torch.cat([plan[:, :start], plan[:, start:].gather(1, order.to(plan.device))], 1)
