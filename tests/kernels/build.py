"""Packed layers for the tests, and attention written plainly in float64 to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer, Segment
from windowquant.core.quantizer import Granularity, ZeroPoint, dequantize, quantize, unquantized


@dataclass(frozen=True)
class Case:
    """A packed layer, and the K and V it stands for, float64 [B, H, T, D] in original column order."""

    layer: PackedLayer
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: requests, KV heads, query heads per KV head, head_dim, tokens a window, 16-bit tail."""

    batch: int = 1
    heads: int = 2
    group: int = 3
    channels: int = 32
    window: int = 4
    tail: int = 5


def build(
    shape: Shape,
    bits: Sequence[int],
    granularity: Granularity = "window_channel",
    zero_point: ZeroPoint = "integer",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    shuffle: bool = True,
    v_bits: Sequence[int] | None = None,
    in_place: bool = False,
) -> Case:
    """A layer whose columns are: the windows with the given `bits` (V: `v_bits`), then the tail.

    With `shuffle`, windows are stored in random order within a segment, and so are the 16-bit windows; each row of the
    batch has the same order, as in a real layer. With `in_place`, windows are stored in their own order, as runs of
    equal bits, those of 16 bits included.
    """
    generator = torch.Generator().manual_seed(seed)
    size, columns = shape.window, len(bits) * shape.window + shape.tail
    k, v = (torch.randn(shape.batch, shape.heads, columns, shape.channels, generator=generator) for _ in range(2))
    k[..., 3] += 4  # an outlier channel, as real keys have
    k, v = k.to(dtype), v.to(dtype)
    k_read, v_read = k.double(), v.double()
    widths = list(zip(bits, bits if v_bits is None else v_bits, strict=True))
    kept = [] if in_place else _drawn([i for i, pair in enumerate(widths) if pair == (16, 16)], shuffle, generator)
    segments, order = [], []
    for (k_width, v_width), members in _runs(widths) if in_place else _groups(widths):
        windows = members if in_place else _drawn(members, shuffle, generator)
        taken = torch.tensor([i * size + n for i in windows for n in range(size)], dtype=torch.long)
        blocks = []
        for plain, read, width in ((k, k_read, k_width), (v, v_read, v_width)):
            x = plain[:, :, taken].unflatten(2, (len(windows), size))
            block = unquantized(x, granularity) if width == 16 else quantize(x, width, granularity, zero_point)
            read[:, :, taken] = dequantize(block).flatten(2, 3).double()
            blocks.append(block)
        segments.append(Segment(blocks[0], blocks[1], tuple(windows)))
        order += taken.tolist()
    fp = [i * size + n for i in kept for n in range(size)] + list(range(len(bits) * size, columns))
    stored = torch.tensor(order + fp).expand(shape.batch, -1)
    return Case(PackedLayer(k[:, :, fp], v[:, :, fp], tuple(segments), stored), k_read, v_read)


def _drawn(windows: list[int], shuffle: bool, generator: torch.Generator) -> list[int]:
    return [windows[i] for i in torch.randperm(len(windows), generator=generator).tolist()] if shuffle else windows


def _groups(widths: list[tuple[int, int]]) -> list[tuple[tuple[int, int], list[int]]]:
    """Windows of each pair of bit-widths; one that no window has makes an empty segment, which is allowed."""
    pairs = sorted({*widths, *((b, b) for b in (8, 4, 2, 1))} - {(16, 16)}, reverse=True)
    return [(pair, [i for i, own in enumerate(widths) if own == pair]) for pair in pairs]


def _runs(widths: list[tuple[int, int]]) -> list[tuple[tuple[int, int], list[int]]]:
    runs: list[tuple[tuple[int, int], list[int]]] = []
    for i, pair in enumerate(widths):
        if not runs or runs[-1][0] != pair:
            runs.append((pair, []))
        runs[-1][1].append(i)
    return runs


def queries(shape: Shape, count: int, seed: int = 1) -> Tensor:
    """Random queries [B, Hq, count, D], float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.batch, shape.heads * shape.group, count, shape.channels, generator=generator)


def causal(count: int, columns: int) -> Tensor:
    """Bool [1, 1, count, columns]: the queries are the last `count` columns, each sees itself and what is before it."""
    rows = [[column <= columns - count + i for column in range(columns)] for i in range(count)]
    return torch.tensor(rows)[None, None]


def plain_attention(q: Tensor, case: Case, mask: Tensor, scaling: float) -> Tensor:
    """Attention in float64, one query at a time over the columns it may see; NaN where it sees none.

    `mask`: bool or additive, [B or 1, 1, Tq, T], in original column order.
    """
    out = torch.full(q.shape, torch.nan, dtype=torch.float64)
    group = q.shape[1] // case.k.shape[1]
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        row = mask[b if len(mask) > 1 else 0, 0, t]
        bias = torch.zeros(row.shape, dtype=torch.float64) if row.dtype == torch.bool else row.double()
        seen = (row if row.dtype == torch.bool else row > -1e30).nonzero().flatten()
        if len(seen) == 0:
            continue
        k, v = case.k[b, h // group, seen], case.v[b, h // group, seen]
        weights = torch.exp((s := scaling * (k @ q[b, h, t].double()) + bias[seen]) - s.max())
        out[b, h, t] = (weights / weights.sum()) @ v
    return out


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest deviation over the largest expected value."""
    return float((got.double() - expected).abs().max() / expected.abs().max())
