"""From a layer's full-precision K and V to what is stored of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from windowquant.cache.arrange import Arrangement
from windowquant.cache.growing import ROOM, GrowingKV
from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.cache.recipe import Recipe
from windowquant.core.packed import Segment, WindowBlock
from windowquant.core.quantizer import (
    Granularity,
    ZeroPoint,
    check_finite,
    quantize_pieces,
    storage_bytes,
    unquantized,
    window_parts,
)
from windowquant.kernels import get_packer, get_quantizer


@dataclass(eq=False)
class StoredLayer:
    """One packed layer: its windows in segments, and the 16-bit tokens, which grow.

    The first `prefix` tokens of `kept` were there when the layer was packed: `kept_visual` of them (over all rows) are
    visual tokens and `empty` are slots that hold no token.
    """

    segments: tuple[Segment, ...]
    kept: GrowingKV
    prefix: int
    kept_visual: int
    empty: int

    def blocks(self) -> Iterator[WindowBlock]:
        """Every block, K and V of each segment."""
        for segment in self.segments:
            yield from (segment.k, segment.v)

    def nbytes(self) -> KVBytes:
        """Bytes held, by kind."""
        codes = sum(tensor_bytes(block.codes) for block in self.blocks() if block.bits < 16)
        plain = sum(tensor_bytes(block.codes) for block in self.blocks() if block.bits == 16)
        scales = sum(tensor_bytes(block.scale, block.offset) for block in self.blocks())
        buffers = self.kept.tensors()
        rows, heads = buffers[0].shape[:2]
        token = sum(heads * x.shape[3] * x.element_size() for x in buffers)
        visual, empty = self.kept_visual * token, self.empty * token
        slack = self.kept.slack * rows * token + empty
        return KVBytes(codes, scales, visual + plain, tensor_bytes(*buffers) - visual - slack, slack)

    def predicted(self) -> int:
        """Bytes by formula: b / 8 a code, 4 a group (symmetric: 2), 2 an unquantized element; no room, no index."""
        windows = sum(_predicted(block) for block in self.blocks())
        rows, heads = self.kept.k.shape[:2]
        channels = self.kept.k.shape[3] + self.kept.v.shape[3]
        tokens = rows * self.kept.length - self.empty
        return windows + tokens * heads * channels * self.kept.k.element_size()

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64 [B'])."""
        before = self.kept.k.shape[0]
        self.segments = tuple(Segment(_select(s.k, rows), _select(s.v, rows), s.windows) for s in self.segments)
        self.kept.select(rows)
        self.kept_visual = self.kept_visual * len(rows) // before
        self.empty = self.empty * len(rows) // before


def _predicted(block: WindowBlock) -> int:
    if block.bits == 16:
        return torch.Size(block.shape).numel() * block.codes.element_size()
    zero_point: ZeroPoint = "symmetric" if block.symmetric else "integer"  # one of two kinds that store an offset
    return sum(storage_bytes(block.shape, block.bits, cast(Granularity, block.granularity), zero_point))


def _select(block: WindowBlock, rows: Tensor) -> WindowBlock:
    rows = rows.to(block.codes.device)
    codes, scale, offset = (x.index_select(0, rows) for x in (block.codes, block.scale, block.offset))
    return WindowBlock(codes, scale, offset, block.bits, (len(rows), *block.shape[1:]), block.granularity)


@dataclass(frozen=True, eq=False)
class PackedHalf:
    """What is stored of K, or of V: a block for each segment, and the 16-bit tokens [B, H, T16 + room, D]."""

    blocks: tuple[WindowBlock, ...]
    kept: Tensor


def pack_k(k: Tensor, arrangement: Arrangement, recipe: Recipe, layer: int, expected: int = 0) -> PackedHalf:
    """Store k [B, H, T, D] of a layer as `arrangement` says, with room for `expected` tokens to come.

    Raises UserError, naming the layer, if a value is NaN or infinite in the storage dtype.
    """
    bits = [place.k_bits for place in arrangement.segments]
    return _pack(k, bits, arrangement, recipe, f"layer {layer} K", recipe.peaks_of(layer)[0], expected)


def pack_v(v: Tensor, arrangement: Arrangement, recipe: Recipe, layer: int, expected: int = 0) -> PackedHalf:
    """The same for V."""
    bits = [place.v_bits for place in arrangement.segments]
    return _pack(v, bits, arrangement, recipe, f"layer {layer} V", recipe.peaks_of(layer)[1], expected)


def _pack(
    x: Tensor, bits: list[int], arrangement: Arrangement, recipe: Recipe, label: str, peak: float | None, expected: int
) -> PackedHalf:
    dtype, room = recipe.storage_dtype(x.dtype), expected + ROOM
    pack = get_packer(x, recipe.granularity, dtype)
    if pack is not None:
        segments = [(width, len(place.windows)) for width, place in zip(bits, arrangement.segments, strict=True)]
        columns, size = arrangement.columns, arrangement.window_size
        return PackedHalf(*pack(x, columns, segments, size, recipe.zero_point, dtype, label, peak, room))
    x, places = x.detach(), zip(arrangement.segment_columns(), bits, strict=True)
    blocks = tuple(_block(x, columns, width, recipe, label, peak) for columns, width in places)
    return PackedHalf(blocks, _copied(x, arrangement.kept_columns(), recipe, label, room))


def joined(k: PackedHalf, v: PackedHalf, arrangement: Arrangement) -> StoredLayer:
    """A layer from what `pack_k` and `pack_v` made of it with the same arrangement."""
    places = zip(k.blocks, v.blocks, arrangement.segments, strict=True)
    segments = tuple(Segment(k_block, v_block, place.windows) for k_block, v_block, place in places)
    kept = GrowingKV.of_buffers(k.kept, v.kept, arrangement.kept)
    return StoredLayer(segments, kept, kept.length, arrangement.kept_visual, arrangement.empty)


def _gather(x: Tensor, columns: Tensor) -> Tensor:
    """Tokens of x [B, H, T, D] at columns [B, n]; an empty slot (-1) takes column 0, a finite value nobody reads."""
    columns = columns.clamp(min=0).to(x.device)
    if len(columns) == 1:
        return x.index_select(2, columns[0])
    return x.take_along_dim(columns[:, None, :, None], dim=2)


def _copied(x: Tensor, columns: Tensor, recipe: Recipe, label: str, room: int = 0) -> Tensor:
    """Tokens of x [B, H, T, D] at columns [B, n] in the storage dtype, then room for more: [B, H, n + room, D].

    A part of them at a time, so that nothing of their size exists twice. Raises UserError if one is not finite.
    """
    length, (batch, heads, _, channels) = columns.shape[1], x.shape
    out = x.new_empty(batch, heads, length + room, channels, dtype=recipe.storage_dtype(x.dtype))
    for part in window_parts((batch, heads, length, 1, channels)):
        tokens = _gather(x, columns[:, part]).to(out.dtype)
        check_finite(tokens, label)
        out[:, :, part.start : part.start + tokens.shape[2]] = tokens
    return out


def _block(x: Tensor, columns: Tensor, bits: int, recipe: Recipe, label: str, peak: float | None = None) -> WindowBlock:
    """The windows of x [B, H, T, D] at columns [B, W, S], in `bits` bits."""
    windows, size = columns.shape[1:]
    if bits == 16:
        tokens = _copied(x, columns.flatten(1), recipe, label)
        return unquantized(tokens.unflatten(2, (windows, size)), recipe.granularity)
    granularity, zero_point, dtype = recipe.granularity, recipe.zero_point, recipe.storage_dtype(x.dtype)
    quantize = get_quantizer(x, granularity, dtype)
    if quantize is not None:
        return quantize(x, columns, bits, granularity, zero_point, dtype, label, peak)

    def piece(part: slice) -> Tensor:
        chosen = columns[:, part]
        tokens = _gather(x, chosen.flatten(1)).to(dtype)
        return tokens.unflatten(2, chosen.shape[1:])

    shape = (x.shape[0], x.shape[1], windows, size, x.shape[3])
    return quantize_pieces(piece, shape, bits, granularity, zero_point, label, peak)
