"""What the loop knows of a layer: a table of integers, one row for each segment that holds a window."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from windowquant.core.packed import PackedLayer, Segment, WindowBlock, middle
from windowquant.core.quantizer import PER_TOKEN
from windowquant.errors import UserError
from windowquant.kernels.cpu.emit import LANES
from windowquant.kernels.cpu.integer import CHUNK_CHANNELS
from windowquant.kernels.cpu.kinds import MAX_CHANNELS, TOKENS
from windowquant.kernels.cpu.tiles import code_factors

# Columns of a row: tiles before it and in it, tiles and tokens of a window, tokens before it, then those of K and V.
FIRST_TILE, TILES, WINDOW_TILES, WINDOW, FIRST_TOKEN, K, V, COLUMNS = 0, 1, 2, 3, 4, 5, 26, 47
# Columns of K or of V, from its first on. Strides are in bytes; those of scales are those of shifts too. A shift is an
# offset times its factor; symmetric codes take their scale, times minus the middle code.
CODES, BATCH, HEAD, ONE_WINDOW, TOKEN, BITS, PLANES, BLOCKS, ROW_BYTES, PADDED, FACTORS = range(11)
TOKEN_GROUPS, SCALE, SHIFT, SHIFT_FACTORS, SCALE_BATCH, SCALE_HEAD, SCALE_WINDOW, SCALE_TOKEN = range(11, 19)
# Whether products can be those of integers, and then, of K, the address of the largest scales, float32 [B, H, D].
INTEGERS, LARGEST = 19, 20

_NO_GROUPS = (0,) * 10


UNBOUNDED = 2**40
"""Tiles, and tokens of a window, in the row for the 16-bit tokens; how many there really are, the call knows."""


class Table(NamedTuple):
    """What is known of a layer.

    rows: int64 [segments that hold a window, and one for 16-bit tokens if there are any, COLUMNS]. address: of the
    rows. tiles, tokens: how many the segments hold.
    """

    rows: np.ndarray
    address: int
    tiles: int
    tokens: int


class _Known(NamedTuple):
    """Rows of some segments, these but for the first, and tensors made for the rows to point to."""

    segments: Table
    dtype: torch.dtype
    rest: tuple[Segment, ...]
    copies: list[Tensor]
    whole: dict[tuple[Any, ...], Table]  # by where the 16-bit tokens lie; the latest only


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the first segment, which they must not keep alive


def table_of(layer: PackedLayer) -> Table:
    """The table of a layer, made once for as long as its segments live and its 16-bit tokens grow in place.

    Raises UserError if its blocks are not all of one dtype.
    """
    k, v, known = layer.fp_k, layer.fp_v, _segments(layer.segments, layer.fp_k.dtype)
    if not k.shape[2]:
        return known.segments
    place = k.data_ptr(), v.data_ptr(), k.stride(), v.stride()
    table = known.whole.get(place)
    if table is None:
        rows, _, tiles, tokens = known.segments
        counts = [tiles, UNBOUNDED, UNBOUNDED, UNBOUNDED, tokens]
        row = [*counts, *_value_columns(k, True), *_value_columns(v, False)]
        table = _table(np.concatenate((rows, np.array([row], np.int64))), tiles, tokens)
        known.whole.clear()
        known.whole[place] = table
    return table


def _table(rows: np.ndarray, tiles: int, tokens: int) -> Table:
    return Table(rows, int(rows.ctypes.data), tiles, tokens)


def _segments(segments: tuple[Segment, ...], dtype: torch.dtype) -> _Known:
    if not segments:
        return _make(segments, dtype)
    known = _known.get(segments[0])
    if known is None or known.dtype != dtype or not _same(known.rest, segments[1:]):
        known = _known[segments[0]] = _make(segments, dtype)
    return known


def _same(some: tuple[Segment, ...], others: tuple[Segment, ...]) -> bool:
    return len(some) == len(others) and all(x is y for x, y in zip(some, others, strict=True))


def _make(segments: tuple[Segment, ...], dtype: torch.dtype) -> _Known:
    rows: list[list[int]] = []
    copies: list[Tensor] = []
    tiles, tokens = 0, 0
    for segment in segments:
        _, _, windows, size, _ = segment.k.shape
        if windows == 0:
            continue
        k, v = (_columns(block, is_k, dtype, copies) for block, is_k in ((segment.k, True), (segment.v, False)))
        own = -(-size // TOKENS)
        rows.append([tiles, windows * own, own, size, tokens, *k, *v])
        tiles, tokens = tiles + windows * own, tokens + windows * size
    table = _table(np.array(rows, dtype=np.int64).reshape(len(rows), COLUMNS), tiles, tokens)
    return _Known(table, dtype, segments[1:], copies, {})


def _columns(block: WindowBlock, is_k: bool, dtype: torch.dtype, copies: list[Tensor]) -> list[int]:
    values = block.codes if block.bits == 16 else block.scale
    if values.dtype != dtype:
        raise UserError(
            f"A layer holds values of {dtype} and of {values.dtype}, but backend=cpu takes one dtype; use "
            "backend=reference."
        )
    if block.bits == 16:
        return _value_columns(values, is_k)
    size = block.codes.shape[-1]
    blocks = -(-size // LANES)
    layout = [block.bits, 8 // block.bits, blocks, size, int(size % LANES > 0)]
    factors = _factors(block.bits, blocks, is_k).ctypes.data
    return [block.codes.data_ptr(), *block.codes.stride()[:4], *layout, factors, *_groups(block, is_k, copies)]


def _value_columns(x: Tensor, is_k: bool) -> list[int]:
    """Columns of 16-bit tokens [B, H, T, D] or [B, H, W, S, D]; K is read by 16 bytes at a time, V by 16 channels."""
    width, steps = x.element_size(), x.stride()
    size = x.shape[-1] * width
    chunk = LANES if is_k else LANES * width
    strides = (steps[0] * width, steps[1] * width, steps[2] * width if x.ndim == 5 else 0, steps[-2] * width)
    return [x.data_ptr(), *strides, 16, 1, -(-size // chunk), size, int(size % chunk > 0), 0, *_NO_GROUPS]


def _groups(block: WindowBlock, is_k: bool, copies: list[Tensor]) -> list[int]:
    by_token, channels = block.granularity in PER_TOKEN, block.shape[4]
    scale, shift = block.scale, block.scale if block.symmetric else block.offset
    if not by_token and scale.shape[4] < channels or _strides(scale) != _strides(shift):
        scale, shift = (x.expand(*x.shape[:4], 1 if by_token else channels).contiguous() for x in (scale, shift))
        copies += [scale, shift]
    factors = _constant(-middle(block.bits) if block.symmetric else 1.0).ctypes.data
    integers, largest = not by_token and channels % CHUNK_CHANNELS == block.codes.shape[-1] % LANES == 0, 0
    if integers and is_k:
        copies.append(block.scale.abs().amax((2, 3)).float().expand(*block.shape[:2], channels).contiguous())
        largest = copies[-1].data_ptr()
    return [int(by_token), scale.data_ptr(), shift.data_ptr(), factors, *_strides(scale), int(integers), largest]


def _strides(x: Tensor) -> list[int]:
    """Of the groups, but for channels; 0 along what shares them."""
    return [0 if x.shape[i] == 1 else x.stride(i) * x.element_size() for i in range(4)]


@lru_cache
def _factors(bits: int, blocks: int, is_k: bool) -> np.ndarray:
    return code_factors(8 // bits, blocks * LANES, is_k)


@lru_cache
def _constant(value: float) -> np.ndarray:
    return np.full(MAX_CHANNELS, value, dtype=np.float32)
