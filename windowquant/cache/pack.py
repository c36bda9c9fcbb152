"""From a layer's full-precision K and V to what is stored of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from windowquant.cache.arrange import Arrangement, SegmentPlace
from windowquant.cache.growing import GrowingKV
from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.cache.recipe import Recipe
from windowquant.core.packed import QuantizedBlock, Segment
from windowquant.core.quantizer import Granularity, quantize, storage_bytes
from windowquant.errors import UserError


@dataclass(eq=False)
class StoredLayer:
    """One packed layer: its quantized windows, and the 16-bit tokens, which grow.

    The first `prefix` tokens of `kept` were there when the layer was packed: `kept_visual` of them (over all rows) are
    visual tokens and `empty` are slots that hold no token.
    """

    segments: tuple[Segment, ...]
    kept: GrowingKV
    prefix: int
    kept_visual: int
    empty: int

    def blocks(self) -> Iterator[QuantizedBlock]:
        """Every quantized block, K and V of each segment."""
        for segment in self.segments:
            yield from (segment.k, segment.v)

    def nbytes(self) -> KVBytes:
        """Bytes held, by kind."""
        codes = sum(tensor_bytes(block.codes) for block in self.blocks())
        scales = sum(tensor_bytes(block.scale, block.offset) for block in self.blocks())
        buffers = self.kept.tensors()
        rows, heads = buffers[0].shape[:2]
        token = sum(heads * x.shape[3] * x.element_size() for x in buffers)
        visual, empty = self.kept_visual * token, self.empty * token
        slack = self.kept.slack * rows * token + empty
        return KVBytes(codes, scales, visual, tensor_bytes(*buffers) - visual - slack, slack)

    def predicted(self) -> int:
        """Bytes by formula: b / 8 a code, 4 a group (scale and offset), 2 an unquantized element; no room, no index."""
        blocks = (storage_bytes(b.shape, b.bits, cast(Granularity, b.granularity)) for b in self.blocks())
        quantized = sum(codes + scales for codes, scales in blocks)
        rows, heads = self.kept.k.shape[:2]
        channels = self.kept.k.shape[3] + self.kept.v.shape[3]
        tokens = rows * self.kept.length - self.empty
        return quantized + tokens * heads * channels * self.kept.k.element_size()

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64 [B'])."""
        before = self.kept.k.shape[0]
        self.segments = tuple(Segment(s.bits, _select(s.k, rows), _select(s.v, rows), s.windows) for s in self.segments)
        self.kept.select(rows)
        self.kept_visual = self.kept_visual * len(rows) // before
        self.empty = self.empty * len(rows) // before


def _select(block: QuantizedBlock, rows: Tensor) -> QuantizedBlock:
    rows = rows.to(block.codes.device)
    codes, scale, offset = (x.index_select(0, rows) for x in (block.codes, block.scale, block.offset))
    return QuantizedBlock(codes, scale, offset, block.bits, (len(rows), *block.shape[1:]), block.granularity)


def pack_layer(
    k: Tensor, v: Tensor, arrangement: Arrangement, recipe: Recipe, label: str, expected: int = 0
) -> StoredLayer:
    """Store k, v [B, H, T, D] as `arrangement` says, with room for `expected` tokens to come.

    Raises UserError, naming `label`, if a value is NaN or infinite in the storage dtype.
    """
    dtype = recipe.storage_dtype(k.dtype)
    k, v = k.detach().to(dtype), v.detach().to(dtype)
    if arrangement.identity:
        kept_k, kept_v = k, v
    else:
        kept_k, kept_v = _gather(k, arrangement.kept), _gather(v, arrangement.kept)
    _check_finite(kept_k, f"{label} K")
    _check_finite(kept_v, f"{label} V")
    segments = tuple(
        Segment(
            place.bits,
            _quantize(k, place, recipe, f"{label} K"),
            _quantize(v, place, recipe, f"{label} V"),
            place.windows,
        )
        for place in arrangement.segments
    )
    empty = int((arrangement.kept < 0).sum())
    kept = GrowingKV(kept_k, kept_v, expected)
    return StoredLayer(segments, kept, kept.length, arrangement.kept_visual, empty)


def _gather(x: Tensor, columns: Tensor) -> Tensor:
    """Tokens of x [B, H, T, D] at columns [B, n]; an empty slot (-1) takes column 0, a finite value nobody reads."""
    columns = columns.clamp(min=0).to(x.device)
    if len(columns) == 1:
        return x.index_select(2, columns[0])
    return x.take_along_dim(columns[:, None, :, None], dim=2)


def _quantize(x: Tensor, place: SegmentPlace, recipe: Recipe, label: str) -> QuantizedBlock:
    windows = _gather(x, place.columns.flatten(1)).unflatten(2, place.columns.shape[1:])
    return quantize(windows, place.bits, recipe.granularity, recipe.zero_point, label)


def _check_finite(x: Tensor, label: str) -> None:
    if x.numel() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(x)):
        raise UserError(f"{label} holds NaN or infinity in {x.dtype}; look for overflow in the model's prefill.")
