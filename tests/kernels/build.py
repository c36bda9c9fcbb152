"""Packed layers for the tests, and attention written plainly in float64 to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer, Segment
from windowquant.core.quantizer import Granularity, ZeroPoint, dequantize, quantize


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
) -> Case:
    """A layer whose columns are: the windows with the given `bits`, then the tail.

    With `shuffle`, windows are stored in random order within a segment, and so are the 16-bit windows; each row of the
    batch has the same order, as in a real layer.
    """
    generator = torch.Generator().manual_seed(seed)
    size, columns = shape.window, len(bits) * shape.window + shape.tail
    k, v = (torch.randn(shape.batch, shape.heads, columns, shape.channels, generator=generator) for _ in range(2))
    k[..., 3] += 4  # an outlier channel, as real keys have
    k, v = k.to(dtype), v.to(dtype)
    k_read, v_read = k.double(), v.double()
    segments, order = [], []
    for width in (8, 4, 2, 1):
        windows = [i for i, b in enumerate(bits) if b == width]
        if shuffle:
            windows = [windows[i] for i in torch.randperm(len(windows), generator=generator).tolist()]
        taken = torch.tensor([i * size + n for i in windows for n in range(size)], dtype=torch.long)
        blocks = []
        for plain, read in ((k, k_read), (v, v_read)):
            block = quantize(plain[:, :, taken].unflatten(2, (len(windows), size)), width, granularity, zero_point)
            read[:, :, taken] = dequantize(block).flatten(2, 3).double()
            blocks.append(block)
        segments.append(Segment(blocks[0], blocks[1], tuple(windows)))
        order += taken.tolist()
    kept = [i for i, b in enumerate(bits) if b == 16]
    if shuffle:
        kept = [kept[i] for i in torch.randperm(len(kept), generator=generator).tolist()]
    fp = [i * size + n for i in kept for n in range(size)] + list(range(len(bits) * size, columns))
    stored = torch.tensor(order + fp).expand(shape.batch, -1)
    return Case(PackedLayer(k[:, :, fp], v[:, :, fp], tuple(segments), stored), k_read, v_read)


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
