"""Attention over tokens that are partly coded, in their original order, decoded piece by piece.

Some tokens exist twice, coded and exact: those that turned from one into the other during the update whose queries are
answered. Each query reads the one that it would have read had the tokens come one at a time.

Below, N = B * H (one per KV head and request) and R is the rows that share a KV head: its query heads times Tq.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**24  # float32 elements of a temporary (64 MiB)
_MASKED = torch.finfo(torch.float32).min  # not -inf: a query that sees nothing must not become NaN


@dataclass(frozen=True, eq=False)
class MixedTokens:
    """K or V of T tokens: `first` exact ones [B, H, sinks, D], coded ones, and the `last` exact ones [B, H, E, D].

    read: coded tokens by position, (start, stop) to float32 [B, H, stop - start, D], from `sinks` up to `coded_end`.
    boundaries: for each query the position up to which it reads coded tokens, not falling, int64 [Tq] on the CPU; the
    exact ones reach back to boundaries[0].
    """

    first: Tensor
    last: Tensor
    read: Callable[[int, int], Tensor]
    boundaries: Tensor

    @property
    def sinks(self) -> int:
        """Tokens at the start that are always exact."""
        return self.first.shape[2]

    @property
    def exact_from(self) -> int:
        """Position of the first token in `last`; what lies below it every query reads coded."""
        return max(self.sinks, int(self.boundaries[0]))

    @property
    def length(self) -> int:
        """T."""
        return self.exact_from + self.last.shape[2]

    def pieces(self, start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
        """Cut positions into pieces that fit in a temporary for `rows` rows a head."""
        batch, heads, _, channels = self.last.shape
        size = max(1, _CHUNK // (batch * heads * max(rows, channels)))
        for begin in range(start, stop, size):
            yield begin, min(begin + size, stop)

    def reads_coded(self, start: int, stop: int, rows: int) -> Tensor:
        """Which of `rows` rows reads which position coded: bool [rows, stop - start]."""
        positions = torch.arange(start, stop)
        return (positions < self.boundaries[:, None]).repeat(rows // len(self.boundaries), 1).to(self.last.device)


def _flat(x: Tensor) -> Tensor:
    return x.float().flatten(0, 1)


def _scores(rows: Tensor, keys: MixedTokens) -> Tensor:
    """Products of `rows` [N, R, D] with all keys, [N, R, T]."""
    turned, count = int(keys.boundaries[-1]), rows.shape[1]
    scores = rows.new_empty(rows.shape[0], count, keys.length)
    torch.bmm(rows, _flat(keys.first).mT, out=scores[..., : keys.sinks])
    torch.bmm(rows, _flat(keys.last).mT, out=scores[..., keys.exact_from :])
    for start, stop in keys.pieces(keys.sinks, keys.exact_from, count):
        torch.bmm(rows, _flat(keys.read(start, stop)).mT, out=scores[..., start:stop])
    for start, stop in keys.pieces(keys.exact_from, turned, count):
        coded = torch.bmm(rows, _flat(keys.read(start, stop)).mT)
        target = scores[..., start:stop]
        target.copy_(torch.where(keys.reads_coded(start, stop, count), coded, target))
    return scores


def _weighted(probs: Tensor, values: MixedTokens) -> Tensor:
    """Sum of all values weighted by `probs` [N, R, T], which it may overwrite: [N, R, D]."""
    turned, count = int(values.boundaries[-1]), probs.shape[1]
    out = torch.bmm(probs[..., : values.sinks], _flat(values.first))
    for start, stop in values.pieces(values.sinks, values.exact_from, count):
        out.baddbmm_(probs[..., start:stop], _flat(values.read(start, stop)))
    for start, stop in values.pieces(values.exact_from, turned, count):
        coded, weights = values.reads_coded(start, stop, count), probs[..., start:stop]
        out.baddbmm_(weights * coded, _flat(values.read(start, stop)))
        weights.mul_(~coded)
    return out.baddbmm_(probs[..., values.exact_from :], _flat(values.last))


def _apply_mask(scores: Tensor, mask: Tensor | None) -> None:
    """Mask `scores` [B, Hq, Tq, T] in place; None is causal, the queries being the last tokens."""
    queries, tokens = scores.shape[2:]
    if mask is None:
        if queries == 1:
            return
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=scores.device).tril(tokens - queries)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, _MASKED)
    else:
        scores.add_(mask).clamp_(min=_MASKED)


@torch.no_grad()
def attend(q: Tensor, keys: MixedTokens, values: MixedTokens, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of queries `q` [B, Hq, Tq, D] over T tokens in order: [B, Hq, Tq, D] in the dtype of `q`.

    Query head h reads KV head h // (Hq / H), as in grouped-query attention. `mask`: bool (true: may attend) or
    additive, [B or 1, 1, Tq, T]; None: the last Tq tokens are the queries' own, causal. A query that may attend to
    nothing gets a finite result of no meaning. `scaling` multiplies q . k. Accumulates in float32; no gradient.
    """
    batch, q_heads, queries, channels = q.shape
    rows = (q.float() * scaling).reshape(batch * keys.last.shape[1], -1, channels)
    scores = _scores(rows, keys)
    _apply_mask(scores.view(batch, q_heads, queries, -1), mask)
    return _weighted(scores.softmax(-1), values).view(batch, q_heads, queries, -1).to(q.dtype)
