"""Attention over a packed layer in plain torch: the oracle of the other backends (paper, equation 13).

With X = scale * Q + offset per window and channel, q . K[n] = (q * scale) . Q[n] + q . offset and
sum_n p[n] V[n] = scale * (sum_n p[n] Q[n]) + (sum_n p[n]) * offset. So scale and offset touch the queries and the
output, once per window, and the inner products see codes only; no dequantized K or V exists. One softmax runs over all
segments, which may follow each other in any order of bit-widths, and the 16-bit block together. Codes are widened to
float32 for as many windows at a time as `_CHUNK` allows.

Below, N = B * H (one per KV head and request) and R is the rows that share a KV head: its query heads times Tq.
"""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer, WindowBlock
from windowquant.core.packing import unpack
from windowquant.core.quantizer import PER_TOKEN

_CHUNK = 2**24  # float32 elements of a temporary (64 MiB)
_MASKED = torch.finfo(torch.float32).min  # not -inf: a query that sees nothing must not become NaN


def _runs(blocks: list[WindowBlock], rows: int) -> Iterator[list[tuple[WindowBlock, slice]]]:
    """Cut the windows of `blocks`, in order, into runs that fit in `_CHUNK` for `rows` rows a head."""
    run: list[tuple[WindowBlock, slice]] = []
    room = 0
    for block in blocks:
        batch, heads, windows, size, channels = block.shape
        start = 0
        while start < windows:
            if room == 0:
                if run:
                    yield run
                run, room = [], max(1, _CHUNK // (batch * heads * max(rows, size) * channels))
            stop = min(start + room, windows)
            run.append((block, slice(start, stop)))
            room -= stop - start
            start = stop
    if run:
        yield run


def _unpacked(block: WindowBlock, part: slice) -> Tensor:
    """Codes of some windows, [B, H, w, S, D]; with 16 bits, their values."""
    codes = block.codes[:, :, part]
    return codes if block.bits == 16 else unpack(codes, block.bits)


def _groups(group: Tensor, block: WindowBlock, part: slice) -> Tensor:
    """Scales or offsets of some windows: [B, H, w, S, 1] if each token has its own, else [B, H, w, 1, D]."""
    batch, heads, _, size, channels = block.shape
    own = (size, 1) if block.granularity in PER_TOKEN else (1, channels)
    if group.shape[2] > 1:
        group = group[:, :, part]
    return group.expand(batch, heads, part.stop - part.start, *own)


def _joined(parts: list[Tensor]) -> Tensor:
    """Parts [B, H, w, ...] one behind the other, as float32 [N, w, ...]."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).flatten(0, 1).float()


def _chunks(
    blocks: list[WindowBlock], rows: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor] | tuple[slice, Tensor, None, None]]:
    """Runs of windows: the tokens they hold, their codes [N, w, S, D], scale and offset, all float32.

    Windows of 16 bits come in runs of their own, with their values as codes and without scale and offset.
    """
    start = 0
    for plain, alike in groupby(blocks, lambda block: block.bits == 16):
        for run in _runs(list(alike), rows):
            codes = _joined([_unpacked(block, part) for block, part in run])
            tokens = slice(start, start + codes.shape[1] * codes.shape[2])
            start = tokens.stop
            if plain:
                yield tokens, codes, None, None
                continue
            scale = _joined([_groups(block.scale, block, part) for block, part in run])
            offset = _joined([_groups(block.shift(), block, part) for block, part in run])
            yield tokens, codes, scale, offset


def _write_scores(target: Tensor, rows: Tensor, blocks: list[WindowBlock]) -> None:
    """Write the products of `rows` [N, R, D] with the keys of `blocks` into `target` [N, R, tokens]."""
    for tokens, codes, scale, offset in _chunks(blocks, rows.shape[1]):
        if scale is None or offset is None:
            target[..., tokens] = torch.bmm(rows, codes.flatten(1, 2).mT)
            continue
        if scale.shape[-1] == 1:
            products = torch.bmm(rows, codes.flatten(1, 2).mT) * scale.flatten(1).unsqueeze(1)
            target[..., tokens] = products.addcmul_(rows.sum(-1, keepdim=True), offset.flatten(1).unsqueeze(1))
            continue
        scaled = (rows.unsqueeze(1) * scale).flatten(0, 1)
        products = torch.bmm(scaled, codes.flatten(0, 1).mT).unflatten(0, codes.shape[:2]).transpose(1, 2)
        shift = torch.bmm(rows, offset.squeeze(2).mT).unsqueeze(-1)
        torch.add(products, shift, out=target[..., tokens].unflatten(2, codes.shape[1:3]))


def _add_values(out: Tensor, probs: Tensor, blocks: list[WindowBlock]) -> None:
    """Add the values of `blocks`, weighted by `probs` [N, R, tokens], to `out` [N, R, D]."""
    for tokens, codes, scale, offset in _chunks(blocks, probs.shape[1]):
        weights = probs[..., tokens]
        if scale is None or offset is None:
            out.baddbmm_(weights, codes.flatten(1, 2))
            continue
        if scale.shape[-1] == 1:
            out.baddbmm_(weights * scale.flatten(1).unsqueeze(1), codes.flatten(1, 2))
            out += torch.bmm(weights, offset.flatten(1, 2))
            continue
        weights = weights.unflatten(2, codes.shape[1:3])
        products = torch.bmm(weights.transpose(1, 2).flatten(0, 1), codes.flatten(0, 1)).unflatten(0, codes.shape[:2])
        out += (products * scale).sum(1)
        out.baddbmm_(weights.sum(-1), offset.squeeze(2))


def stored_mask(mask: Tensor | None, order: Tensor, queries: int) -> Tensor | None:
    """The mask in stored order, bool or additive [B or 1, 1, Tq, T]; None if every query sees every token."""
    has_slots = int(order.amin()) < 0
    if mask is None:
        if queries == 1 and not has_slots:
            return None
        stored = order.shape[1]
        causal = torch.ones(1, 1, queries, stored, dtype=torch.bool, device=order.device).tril_(stored - queries)
        return causal & (order >= 0)[:, None, None] if has_slots else causal
    columns = order.clamp(min=0)[:, None, None].expand(-1, -1, mask.shape[2], -1)
    mask = mask.expand(order.shape[0], -1, -1, -1).gather(3, columns)
    if not has_slots:
        return mask
    return mask.masked_fill(order[:, None, None] < 0, False if mask.dtype == torch.bool else -torch.inf)


def _apply_mask(scores: Tensor, mask: Tensor | None) -> None:
    """Mask `scores` [B, Hq, Tq, T] in place with what `stored_mask` gave."""
    if mask is None:
        return
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, _MASKED)
    else:
        scores.add_(mask).clamp_(min=_MASKED)


@torch.no_grad()
def attend(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of queries `q` [B, Hq, Tq, D] over a packed layer: [B, Hq, Tq, D] in the dtype of `q`.

    Query head h reads KV head h // (Hq / H), as in grouped-query attention. `mask`: bool (true: may attend) or
    additive, [B or 1, 1, Tq, columns], its columns in original order (`layer.order` says which stored token is which).
    None: the last Tq stored tokens are the queries' own, causal, and everything before them is visible. A query that
    may attend to nothing gets a finite result of no meaning. `scaling` multiplies q . k. Accumulates in float32; no
    gradient.
    """
    batch, q_heads, queries, channels = q.shape
    kv_heads = batch * layer.fp_k.shape[1]
    rows = (q.float() * scaling).reshape(kv_heads, -1, channels)
    segments = layer.segments
    quantized = sum(segment.k.shape[2] * segment.k.shape[3] for segment in segments)
    scores = rows.new_empty(kv_heads, rows.shape[1], quantized + layer.fp_k.shape[2])
    _write_scores(scores[..., :quantized], rows, [segment.k for segment in segments])
    torch.bmm(rows, layer.fp_k.float().flatten(0, 1).mT, out=scores[..., quantized:])
    _apply_mask(scores.view(batch, q_heads, queries, -1), stored_mask(mask, layer.order, queries))
    probs = scores.softmax(-1)
    out = torch.bmm(probs[..., quantized:], layer.fp_v.float().flatten(0, 1))
    _add_values(out, probs[..., :quantized], [segment.v for segment in segments])
    return out.view(batch, q_heads, queries, -1).to(q.dtype)
