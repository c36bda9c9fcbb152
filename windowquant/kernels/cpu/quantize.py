"""Quantizing and packing windows on the CPU, in one pass over them where they lie in K or V.

The same codes, scales and offsets as `core.quantizer.quantize` makes of the same windows, bit for bit: its float32
arithmetic, operation by operation, without its temporaries. Only for groups of one window and channel.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import Granularity, ZeroPoint, check_ends, empty_block
from windowquant.errors import UserError
from windowquant.kernels.cpu.compiled import compiled_for_c, inlined
from windowquant.kernels.cpu.emit import LANES
from windowquant.kernels.cpu.kinds import MAX_CHANNELS, NUMPY_KINDS
from windowquant.kernels.cpu.primitives import number, taken
from windowquant.kernels.cpu.quantize_tiles import FLOAT, INTEGER, SYMMETRIC, codes_of, group_parameters, packed
from windowquant.kernels.cpu.threads import run

_ZERO_POINTS = {"integer": INTEGER, "float": FLOAT, "symmetric": SYMMETRIC}
_GRAIN = 2**15  # elements that are worth a thread of their own

# Entries of a job, int64. Strides are in bytes; LIMIT is the largest stored value, PEAK that of symmetric codes, both
# float32; FLAWS is where each part notes, as float32, the largest absolute value it saw.
NEXT_PART, PARTS, X, X_BATCH, X_HEAD, X_TOKEN, COLUMNS, CODES, SCALE, OFFSET, FLAWS, WORK = range(12)
BATCH, HEADS, WINDOWS, TOKENS, CHANNELS, BITS, ZERO_POINT, LIMIT, PEAK, SIZE = range(12, 22)

# What a part works with, in bytes: step and shift of each channel, and the codes of a token.
_STEP, _SHIFT, _TOKEN, _WORKSPACE = 0, 4 * MAX_CHANNELS, 8 * MAX_CHANNELS, 9 * MAX_CHANNELS


@inlined
def _window(given: Any, stored: Any, job: Any, part: int, index: int) -> None:
    """Quantize window `index`, counted through all heads of all requests."""
    heads, windows, tokens, channels = job[HEADS], job[WINDOWS], job[TOKENS], job[CHANNELS]
    bits, work, entries = job[BITS], job[WORK] + part * _WORKSPACE, np.int64(job.ctypes.data)
    batch, head, window = index // (heads * windows), index // windows % heads, index % windows
    x = job[X] + batch * job[X_BATCH] + head * job[X_HEAD]
    columns, groups = job[COLUMNS] + 8 * tokens * (batch * windows + window), stored.itemsize * channels * index
    starts = (channels + LANES - 1) // LANES
    for block in range(starts):
        first = min(LANES * block, channels - LANES)  # the last one may do some channels again
        group_parameters(
            given,
            stored,
            x + first * given.itemsize,
            job[X_TOKEN],
            columns,
            tokens,
            job[SCALE] + groups + first * stored.itemsize,
            job[OFFSET] + groups + first * stored.itemsize,
            work + _STEP + 4 * first,
            work + _SHIFT + 4 * first,
            job[FLAWS] + 4 * part,
            bits,
            job[ZERO_POINT],
            number(entries + 8 * LIMIT),
            number(entries + 8 * PEAK),
        )
    planes = 8 // bits
    width, symmetric = channels // planes, np.int64(job[ZERO_POINT] == SYMMETRIC)
    for token in range(tokens):
        for block in range(starts):
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
        out = job[CODES] + width * (index * tokens + token)
        if width % 16 == 0:
            packed(_SIXTEEN, work + _TOKEN, out, width, planes, bits)
        elif width % 4 == 0:
            packed(_FOUR, work + _TOKEN, out, width, planes, bits)
        else:
            packed(_ONE, work + _TOKEN, out, width, planes, bits)


_SIXTEEN, _FOUR, _ONE = (0,) * 16, (0,) * 4, (0,)


@lru_cache
def _quantize_parts(given: type[np.generic], stored: type[np.generic]) -> Any:
    """A C function that takes the address of a job and works on its parts until none is left."""
    given_kind, stored_kind = np.empty(0, given), np.empty(0, stored)

    def quantize(address: Any) -> None:
        job = carray(address, SIZE, np.int64)
        windows = job[BATCH] * job[HEADS] * job[WINDOWS]
        part = taken(address, NEXT_PART)
        while part < job[PARTS]:
            for index in range(windows * part // job[PARTS], windows * (part + 1) // job[PARTS]):
                _window(given_kind, stored_kind, job, part, index)
            part = taken(address, NEXT_PART)

    return compiled_for_c(quantize)


def takes(x: Tensor, granularity: str, dtype: torch.dtype) -> bool:
    """Whether `quantize_windows` can quantize K or V `x` [B, H, T, D] so; else `core.quantizer` does."""
    known = x.dtype in NUMPY_KINDS and (dtype == x.dtype or (x.dtype, dtype) == (torch.float32, torch.float16))
    return granularity == "window_channel" and known and LANES <= x.shape[3] <= MAX_CHANNELS and x.stride(3) == 1


@torch.no_grad()
def quantize_windows(
    x: Tensor,
    columns: Tensor,
    bits: int,
    granularity: Granularity = "window_channel",
    zero_point: ZeroPoint = "integer",
    dtype: torch.dtype | None = None,
    label: str = "x",
    peak: float | None = None,
) -> WindowBlock:
    """The windows of K or V `x` [B, H, T, D] at `columns` (int64 [B, W, S]), quantized to `bits` bits and packed.

    A negative column reads column 0: a slot that holds no token. `dtype`: that of the storage, to which x is rounded
    first (None: its own). The rest as in `core.quantizer.quantize`, which makes the same block of the same windows.
    Raises UserError as that does, and for what it does not take (`takes`).
    """
    dtype = dtype or x.dtype
    if not takes(x, granularity, dtype):
        raise UserError(
            f"{label}, {list(x.shape)} of {x.dtype} as {dtype} with granularity {granularity!r}, cannot be quantized "
            "in place; use core.quantizer."
        )
    (batch, heads, _, channels), (_, windows, size) = x.shape, columns.shape
    shape, columns = (batch, heads, windows, size, channels), columns.contiguous()
    block = empty_block(x, dtype, shape, bits, granularity, zero_point)
    parts = max(1, min(torch.get_num_threads(), block.codes[..., 0].numel() * channels // _GRAIN))
    flaws, work = np.zeros(parts, np.float32), np.empty(parts * _WORKSPACE, np.uint8)
    strides = [step * x.element_size() for step in x.stride()[:3]]
    job = np.zeros(SIZE, np.int64)
    job[PARTS], job[X], job[X_BATCH:COLUMNS], job[COLUMNS] = parts, x.data_ptr(), strides, columns.data_ptr()
    job[CODES:BATCH] = (
        *(each.data_ptr() for each in (block.codes, block.scale, block.offset)),
        *(each.ctypes.data for each in (flaws, work)),
    )
    job[BATCH:ZERO_POINT] = *shape, bits
    job[ZERO_POINT] = _ZERO_POINTS[zero_point]
    floats = job.view(np.float32)
    floats[2 * LIMIT], floats[2 * PEAK] = torch.finfo(dtype).max, -1
    if peak is not None:
        floats[2 * PEAK] = float(torch.tensor(peak, dtype=dtype))
    if block.codes.numel():
        run(_quantize_parts(NUMPY_KINDS[x.dtype], NUMPY_KINDS[dtype]).address, job.ctypes.data, parts)
        if not np.isfinite(flaws).all():
            check_ends(torch.from_numpy(flaws), label)
    return block
