"""Importance of single tokens, and the bit-widths that it earns them."""

import torch
from torch import Tensor

_CHUNK = 2**24  # float32 elements of a temporary (64 MiB)


def received_attention(q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, counted: Tensor) -> Tensor:
    """Attention that each token receives, summed over queries and query heads (those of a group too): float32 [B, T].

    q [B, Hq, t, D], k [B, H, T, D]; mask: bool or additive [B or 1, 1, t, T], or None for the last t tokens, causal.
    counted: which queries count (padding does not), bool [B, t].
    """
    (batch, heads, queries, _), tokens = q.shape, k.shape[2]
    total = torch.zeros(batch, tokens, device=q.device)
    keys = k.float().repeat_interleave(heads // k.shape[1], 1)
    step = max(1, _CHUNK // (batch * heads * tokens))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        scores = torch.matmul(q[:, :, start:stop].float() * scaling, keys.mT)
        if mask is None:
            seen = torch.ones(stop - start, tokens, dtype=torch.bool, device=q.device).tril(tokens - queries + start)
            scores.masked_fill_(~seen, -torch.inf)
        elif mask.dtype == torch.bool:
            scores.masked_fill_(~mask[:, :, start:stop], torch.finfo(scores.dtype).min)
        else:
            scores += mask[:, :, start:stop]
        weights = counted[:, None, start:stop, None].to(scores.device)
        total += (scores.softmax(-1) * weights).sum((1, 2))
    return total


def tiers(scores: Tensor, shares: tuple[float, ...], widths: tuple[int, ...]) -> Tensor:
    """Bits of each token by the rank of its score [W]: int64 [W].

    The best shares[0] of the tokens get widths[0], the next shares[1] widths[1], and so on, each border rounded; the
    rest gets the last of `widths`, which has one entry more than `shares`. Of equal scores the earlier token is first.
    """
    bits = torch.full((len(scores),), widths[-1])
    order, start, total = scores.cpu().argsort(descending=True, stable=True), 0, 0.0
    for share, width in zip(shares, widths, strict=False):
        total += share
        stop = min(len(scores), round(total * len(scores)))
        bits[order[start:stop]] = width
        start = stop
    return bits
