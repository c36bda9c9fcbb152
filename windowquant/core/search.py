"""The window-level bit-width search (paper, Algorithm 1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windowquant.core.plan import PLAN_BITS
from windowquant.core.thresholds import thresholds
from windowquant.errors import UserError


def search_plan(
    scores: Tensor, sensitivity: Tensor | Sequence[float], alpha: float = 2.0, fix_first: bool = True
) -> Tensor:
    """Bits of every window in every layer: int8 [L, W] of 16, 4 or 2.

    scores [W]: similarity of each window to the prompt; sensitivity [L]: equation 9 per layer. A window whose score is
    above the layer's T_high stays in 16 bit, below T_low it takes 2 bits, between them (ends included) 4. `fix_first`
    keeps window 0 in 16 bit, as the paper does. Raises UserError as `thresholds` does.
    """
    low, high = (limit.to(scores.device)[:, None] for limit in thresholds(sensitivity, alpha))
    bits = torch.full((low.shape[0], scores.shape[0]), 4, dtype=torch.int8, device=scores.device)
    bits[scores > high] = 16
    bits[scores < low] = 2
    if fix_first:
        bits[:, :1] = 16
    return bits


def majority_vote(plans: Sequence[Tensor]) -> Tensor:
    """One plan int8 [L, max W_b] for a batch from each request's own [L, W_b].

    Every window index takes, in each layer, the bit-width that most requests chose; a tie takes the higher precision,
    and a request too short to have that window does not vote on it. Raises UserError if there is no plan to vote on.
    """
    if not plans:
        raise UserError("There is no plan to vote on; give at least one request.")
    widths = torch.tensor(PLAN_BITS, dtype=torch.int8, device=plans[0].device)
    windows = max(plan.shape[1] for plan in plans)
    votes = torch.zeros(len(PLAN_BITS), plans[0].shape[0], windows, dtype=torch.long, device=plans[0].device)
    for plan in plans:
        votes[:, :, : plan.shape[1]] += plan == widths[:, None, None]
    # The widest comes first in PLAN_BITS and argmax may return any maximum, so look for the first one explicitly.
    winner = (votes == votes.amax(0)).int().argmax(0)
    return widths[winner]
