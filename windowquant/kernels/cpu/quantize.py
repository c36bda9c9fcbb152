"""Storing K or V of a layer on the CPU: windows quantized and packed, other tokens copied, in one call.

Everything is read where it lies, so that nothing of its size exists in between. The same codes, scales and offsets as
`core.quantizer.quantize` makes of the same windows, bit for bit: its float32 arithmetic, operation by operation,
without its temporaries. Only for groups of one window and channel.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import ZeroPoint, check_ends, empty_block, not_finite, unquantized
from windowquant.errors import UserError
from windowquant.kernels.cpu.compiled import compiled_for_c, inlined
from windowquant.kernels.cpu.emit import LANES
from windowquant.kernels.cpu.kinds import MAX_CHANNELS, NUMPY_KINDS
from windowquant.kernels.cpu.primitives import number, taken
from windowquant.kernels.cpu.quantize_tiles import (
    FLOAT,
    INTEGER,
    SYMMETRIC,
    codes_of,
    copied_tokens,
    group_parameters,
    packed,
)
from windowquant.kernels.cpu.threads import run

_ZERO_POINTS = {"integer": INTEGER, "float": FLOAT, "symmetric": SYMMETRIC}
_DTYPES = {(dtype, dtype) for dtype in NUMPY_KINDS} | {(torch.float32, torch.float16)}
"""Of K and V, and of what is stored."""

_GRAIN = 2**15  # elements that are worth a thread of their own
_AT_ONCE = 32  # tokens that are copied without looking up where they go
_INFINITY = 0x7F800000  # as float32; NaN is above it

# Entries of a job, int64. Strides are in bytes; STORED is how many tokens of a row are stored, LIMIT the
# largest stored value, PEAK that of symmetric codes, both float32. Then come the pieces, the columns of the stored
# tokens, row by row, and what each part works with.
NEXT_PART, PARTS, PIECES, X, X_BATCH, X_HEAD, X_TOKEN, BATCH, HEADS, STORED, CHANNELS = range(11)
ZERO_POINT, LIMIT, PEAK, SIZE = range(11, 15)

# Entries of a piece: tokens of each row that are stored together. FIRST is the place in the stored order of its first
# one, TOKENS how many a row has, WINDOW how many of them a window. HEAD is from one head of 16-bit CODES to the next.
BITS, FIRST, TOKENS, WINDOW, CODES, SCALE, OFFSET, HEAD, PIECE_SIZE = range(9)

# What a part works with, in bytes: as float32, the largest absolute value that it quantized and that it copied; step
# and shift of each channel; the codes of a token.
_QUANTIZED, _COPIED, _STEP, _SHIFT = 0, 8, 16, 16 + 4 * MAX_CHANNELS
_TOKEN, _WORKSPACE = 16 + 8 * MAX_CHANNELS, 16 + 9 * MAX_CHANNELS


@inlined
def _windows(piece: Any) -> int:
    """How many windows a row has in a piece; the last one of copied tokens may be shorter."""
    return (piece[TOKENS] + piece[WINDOW] - 1) // piece[WINDOW]


@inlined
def _columns(job: Any) -> int:
    """Address of the columns."""
    return np.int64(job.ctypes.data) + 8 * (SIZE + job[PIECES] * PIECE_SIZE)


@inlined
def _window(given: Any, stored: Any, job: Any, piece: Any, work: int, index: int) -> None:
    """Store window `index` of a piece, counted through all heads of all requests."""
    row, start = index // _windows(piece), index % _windows(piece) * piece[WINDOW]
    tokens = min(piece[WINDOW], piece[TOKENS] - start)
    batch, head = row // job[HEADS], row % job[HEADS]
    x = job[X] + batch * job[X_BATCH] + head * job[X_HEAD]
    columns = _columns(job) + 8 * (batch * job[STORED] + piece[FIRST] + start)
    if piece[BITS] == 16:
        out = piece[CODES] + row * piece[HEAD] + start * job[CHANNELS] * stored.itemsize
        copied_tokens(given, stored, x, job[X_TOKEN], columns, tokens, out, job[CHANNELS], work + _COPIED)
    else:
        _parameters(given, stored, job, piece, work, index, x, columns)
        _codes(given, stored, job, piece, work, index, x, columns)


@inlined
def _parameters(given: Any, stored: Any, job: Any, piece: Any, work: int, index: int, x: int, columns: int) -> None:
    """Scales and offsets of a window."""
    channels, entries = job[CHANNELS], np.int64(job.ctypes.data)
    groups = stored.itemsize * channels * index
    for block in range((channels + LANES - 1) // LANES):
        first = min(LANES * block, channels - LANES)  # the last one may do some channels again
        group_parameters(
            given,
            stored,
            x + first * given.itemsize,
            job[X_TOKEN],
            columns,
            piece[WINDOW],
            piece[SCALE] + groups + first * stored.itemsize,
            piece[OFFSET] + groups + first * stored.itemsize,
            work + _STEP + 4 * first,
            work + _SHIFT + 4 * first,
            work + _QUANTIZED,
            piece[BITS],
            job[ZERO_POINT],
            number(entries + 8 * LIMIT),
            number(entries + 8 * PEAK),
        )


@inlined
def _codes(given: Any, stored: Any, job: Any, piece: Any, work: int, index: int, x: int, columns: int) -> None:
    """Codes of a window, whose steps and shifts are known."""
    channels, bits, tokens = job[CHANNELS], piece[BITS], piece[WINDOW]
    planes = 8 // bits
    width, symmetric = channels // planes, np.int64(job[ZERO_POINT] == SYMMETRIC)
    for token in range(tokens):
        for block in range((channels + LANES - 1) // LANES):
            first = min(LANES * block, channels - LANES)
            codes_of(
                given,
                stored,
                x + first * given.itemsize,
                job[X_TOKEN],
                columns,
                token,
                work + _STEP + 4 * first,
                work + _SHIFT + 4 * first,
                work + _TOKEN + first,
                bits,
                symmetric,
            )
        out = piece[CODES] + width * (index * tokens + token)
        if width % 16 == 0:
            packed(_SIXTEEN, work + _TOKEN, out, width, planes, bits)
        elif width % 4 == 0:
            packed(_FOUR, work + _TOKEN, out, width, planes, bits)
        else:
            packed(_ONE, work + _TOKEN, out, width, planes, bits)


_SIXTEEN, _FOUR, _ONE = (0,) * 16, (0,) * 4, (0,)


@lru_cache
def _store_parts(given: type[np.generic], stored: type[np.generic]) -> Any:
    """A C function that takes the address of a job and works on its parts until none is left: a share of each piece."""
    given_kind, stored_kind = np.empty(0, given), np.empty(0, stored)

    def store(address: Any) -> None:
        job = carray(address, SIZE, np.int64)
        pieces = carray(address, SIZE + job[PIECES] * PIECE_SIZE, np.int64)
        workspaces = _columns(job) + 8 * job[BATCH] * job[STORED]
        part = taken(address, NEXT_PART)
        while part < job[PARTS]:
            for start in range(SIZE, len(pieces), PIECE_SIZE):
                piece = pieces[start : start + PIECE_SIZE]
                windows = job[BATCH] * job[HEADS] * _windows(piece)
                for index in range(windows * part // job[PARTS], windows * (part + 1) // job[PARTS]):
                    _window(given_kind, stored_kind, job, piece, workspaces + part * _WORKSPACE, index)
            part = taken(address, NEXT_PART)

    return compiled_for_c(store)


@lru_cache
def takes(granularity: str, given: torch.dtype, stored: torch.dtype, channels: int) -> bool:
    """Whether `store_tokens` can store K or V of a dtype in another so; the channels must lie next to each other."""
    return granularity == "window_channel" and (given, stored) in _DTYPES and LANES <= channels <= MAX_CHANNELS


def store_tokens(
    x: Tensor,
    columns: NDArray[np.int64],
    segments: Sequence[tuple[int, int]],
    window_size: int,
    zero_point: ZeroPoint = "integer",
    dtype: torch.dtype | None = None,
    label: str = "x",
    peak: float | None = None,
    room: int = 0,
) -> tuple[tuple[WindowBlock, ...], Tensor]:
    """As `kernels.Packer` says, for groups of one window and channel. Raises UserError for what it does not take."""
    dtype = dtype or x.dtype
    if x.stride(3) != 1 or not takes("window_channel", x.dtype, dtype, x.shape[3]):
        raise UserError(
            f"{label}, {list(x.shape)} of {x.dtype} as {dtype}, cannot be stored in one pass; use core.quantizer."
        )
    batch, heads, _, channels = x.shape
    blocks: list[WindowBlock] = []
    pieces: list[int] = []
    first = 0
    for bits, windows in segments:
        shape = (batch, heads, windows, window_size, channels)
        block = _empty_block(x, dtype, shape, bits, zero_point)
        blocks.append(block)
        codes, tokens = block.codes.data_ptr(), windows * window_size
        scale, offset, head = block.scale.data_ptr(), block.offset.data_ptr(), tokens * channels * dtype.itemsize
        pieces += bits, first, tokens, window_size, codes, scale, offset, head
        first += tokens
    tokens = columns.shape[1] - first
    kept = x.new_empty(batch, heads, tokens + room, channels, dtype=dtype)
    pieces += 16, first, tokens, _AT_ONCE, kept.data_ptr(), 0, 0, kept.stride(1) * dtype.itemsize
    worst = _run(x, columns, pieces, zero_point, dtype, peak)
    if worst[0] >= _INFINITY:
        check_ends(torch.tensor(worst[0], dtype=torch.int32).view(torch.float32), label)
    if worst[1] >= _INFINITY:
        raise not_finite(label, dtype)
    return tuple(blocks), kept


def _empty_block(
    x: Tensor, dtype: torch.dtype, shape: tuple[int, int, int, int, int], bits: int, zero_point: ZeroPoint
) -> WindowBlock:
    if bits == 16:
        return unquantized(x.new_empty(shape, dtype=dtype))
    return empty_block(x, dtype, shape, bits, "window_channel", zero_point)


def _run(
    x: Tensor, columns: NDArray[np.int64], pieces: list[int], zero_point: str, dtype: torch.dtype, peak: float | None
) -> tuple[int, int]:
    """Store the pieces; bit patterns of the largest absolute values that were quantized and that were copied."""
    batch, heads, _, channels = x.shape
    parts = max(1, min(torch.get_num_threads(), batch * heads * channels * columns.shape[1] // _GRAIN))
    width, (x_batch, x_head, x_token, _) = x.element_size(), x.stride()
    function, limit = _function(x.dtype, dtype)
    given = x.data_ptr(), width * x_batch, width * x_head, width * x_token, batch, heads, columns.shape[1], channels
    kinds = _ZERO_POINTS[zero_point], limit, _float_bits(-1.0 if peak is None else peak, dtype)
    job = array("q", (0, parts, len(pieces) // PIECE_SIZE, *given, *kinds, *pieces))
    job.frombytes(columns.tobytes())  # takes less time than asking NumPy for the address
    work, step = len(job), _WORKSPACE // 8
    job.frombytes(bytes(parts * _WORKSPACE))
    run(function, job.buffer_info()[0], parts)
    return max(job[work + _QUANTIZED // 8 :: step]), max(job[work + _COPIED // 8 :: step])


@lru_cache
def _function(given: torch.dtype, stored: torch.dtype) -> tuple[int, int]:
    """Address of the function that stores K or V, and the largest stored value."""
    return _store_parts(NUMPY_KINDS[given], NUMPY_KINDS[stored]).address, _float_bits(torch.finfo(stored).max, stored)


@lru_cache
def _float_bits(value: float, dtype: torch.dtype) -> int:
    """Of the value as `dtype` holds it, as float32."""
    return int(torch.tensor(value, dtype=dtype).float().view(torch.int32))
