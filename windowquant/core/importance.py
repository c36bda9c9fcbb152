"""Importance of single tokens, the bit-widths that it earns them, and the balance of queries and keys by channel."""

import torch
from torch import Tensor

_CHUNK = 2**24  # float32 elements of a temporary (64 MiB)


def received_attention(q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, counted: Tensor) -> Tensor:
    """Attention that each token receives in each KV head, summed over queries and the head's query heads.

    q [B, Hq, t, D], k [B, H, T, D]; mask: bool or additive [B or 1, 1, t, T], or None for the last t tokens, causal.
    counted: which queries count (padding does not), bool [B, t]. Returns float32 [B, H, T].
    """
    (batch, heads, queries, _), (kv_heads, tokens) = q.shape, k.shape[1:3]
    total = torch.zeros(batch, kv_heads, tokens, device=q.device)
    keys = k.float().repeat_interleave(heads // kv_heads, 1)
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
        total += (scores.softmax(-1) * weights).sum(2).unflatten(1, (kv_heads, -1)).sum(2)
    return total


def ranked(scores: Tensor, recent: float = 0.0) -> Tensor:
    """Indices of tokens [W] from the most important to the least: int64 of the shape of `scores` [..., W].

    The newest tokens, a share `recent` of all, rounded, come first whatever their score. Of equal ones the earlier
    token is first.
    """
    first = scores.shape[-1] - round(recent * scores.shape[-1])
    kept = scores.clone()
    kept[..., first:] = torch.inf
    return kept.argsort(dim=-1, descending=True, stable=True)


def tiers(count: int, shares: tuple[float, ...], widths: tuple[int, ...]) -> Tensor:
    """Bits of `count` tokens by rank, the most important first: int64 [count].

    The best shares[0] of them get widths[0], the next shares[1] widths[1], and so on, each border rounded; the rest
    gets the last of `widths`, which has one entry more than `shares`.
    """
    bits, start, total = torch.full((count,), widths[-1]), 0, 0.0
    for share, width in zip(shares, widths, strict=False):
        total += share
        stop = min(count, round(total * count))
        bits[start:stop] = width
        start = stop
    return bits


def balance(queries: Tensor, keys: Tensor) -> Tensor:
    """MiKV's balancer: sqrt(queries / keys) of the largest absolute values in each channel, any shape, float32.

    K is multiplied by it before it is coded, and q divided by it, so that q . k stays and the channels of K become as
    wide as those of q. 1 where either has nothing but zeros.
    """
    factors = (queries.float() / keys.float()).sqrt()
    return torch.where((queries > 0) & (keys > 0), factors, torch.ones_like(factors))
