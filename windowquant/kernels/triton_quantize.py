"""Quantizing and packing the windows of one bit-width in one launch (paper, equations 14 to 16).

The same codes, scales and offsets as `core.quantizer.quantize` makes of the same windows on the CPU, bit for bit: the
arithmetic is its float32 arithmetic, operation by operation, with divisions rounded to the nearest and ties to even.
(Where a tensor is divided by a number, PyTorch on a CUDA device may multiply by the reciprocal instead, so a scale of
the reference's there may differ in its last place.) Windows are read where they lie in K or V, by index, so reordering
costs no copy, and a window that fits in a tile is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import Granularity, ZeroPoint, empty_block
from windowquant.errors import UserError
from windowquant.kernels.triton_common import cast, check_device, configs

_GRANULARITIES = ("window_channel", "token")
_STORED = (torch.float16, torch.bfloat16)
_TILE = 8192  # elements a program holds
_FLAWS = {1: "infinity", 2: "NaN"}


@triton.jit
def _round(x):
    """Nearest integer, ties to even: adding 2**23 leaves float32 no fraction."""
    size = tl.abs(x)
    nearest = (size + 8388608.0) - 8388608.0
    return tl.where((size < 8388608.0) & (x != 0), tl.where(x < 0, -nearest, nearest), x)


@triton.jit
def _tokens(x, columns, strides, begin, size, channels, inside, TILE: tl.constexpr, STORED: tl.constexpr):
    """Tokens begin .. begin + TILE of a window at channels [P, J]: float32 [TILE, P, J], and which are valid."""
    token = begin + tl.arange(0, TILE)
    column = tl.maximum(tl.load(columns + token, mask=token < size, other=0), 0)
    valid = (token < size)[:, None, None] & inside[None, None, :]
    found = tl.load(x + (column * strides[2])[:, None, None] + channels[None, :, :], mask=valid, other=0)
    if found.dtype != STORED:
        found = cast(found.to(tl.float32), STORED)
    return found.to(tl.float32), valid


@triton.jit
def _parameters(low, high, peak, BITS: tl.constexpr, ZERO: tl.constexpr, HAS_PEAK: tl.constexpr, STORED: tl.constexpr):
    """Scale and offset as stored, the step and the shift codes are made with, of groups from low to high."""
    LEVELS: tl.constexpr = 2**BITS - 1
    LARGEST: tl.constexpr = 65504.0 if STORED.is_fp16() else 3.3895313892515355e38
    if ZERO == "symmetric":
        reach = tl.maximum(tl.abs(low), tl.abs(high))
        if HAS_PEAK:
            reach = reach * 0 + peak
        scale = cast(tl.div_rn(reach, reach * 0 + LEVELS // 2), STORED)
    else:
        scale = cast(tl.minimum(tl.div_rn(high - low, low * 0 + LEVELS), LARGEST), STORED)
    wide = scale.to(tl.float32)
    step = tl.where(wide == 0, 1.0, wide)
    offset = cast(low, STORED)
    if ZERO == "integer":
        nearest = step * _round(tl.div_rn(low, step))
        nearest = tl.minimum(tl.maximum(nearest, -LARGEST), LARGEST)
        offset = tl.where(wide == 0, offset, cast(nearest, STORED))
    shift = offset.to(tl.float32)
    if ZERO == "symmetric":
        shift = wide * 0
    return scale, offset, step, shift


@triton.jit
def _packed(values, step, shift, plane, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Bytes [TILE, J] of values [TILE, P, J]; step and shift as wide or broadcastable."""
    codes = _round(tl.div_rn(values - shift, tl.broadcast_to(step, values.shape)))
    HALF: tl.constexpr = 2 ** (BITS - 1) - 1
    if ZERO == "symmetric":
        codes = tl.minimum(tl.maximum(codes, -HALF), HALF) + HALF
    else:
        codes = tl.minimum(tl.maximum(codes, 0), 2**BITS - 1)
    return tl.sum(codes.to(tl.int32) << (plane * BITS)[None, :, None], 1).to(tl.uint8)


@triton.jit
def _report(values, valid, flaw):
    """Note infinity (1) or NaN (2) in `flaw`."""
    kind = tl.where(values != values, 2, tl.where(tl.abs(values) == float("inf"), 1, 0))
    kind = tl.max(tl.max(tl.max(tl.where(valid, kind, 0), 2), 1), 0)
    if kind > 0:
        tl.atomic_max(flaw, kind)


@triton.jit
def _least(values, valid):
    return tl.min(tl.where(valid, values, float("inf")), 0)


@triton.jit
def _most(values, valid):
    return tl.max(tl.where(valid, values, float("-inf")), 0)


@triton.autotune(configs((4, 1), (8, 1), (2, 1)), key=["D", "BITS", "TILE", "BYTES", "ZERO"])
@triton.jit(do_not_specialize=["windows", "peak"])
def quantize_channels_kernel(
    x,
    columns,
    codes,
    scale,
    offset,
    flaw,
    strides,
    heads,
    windows,
    size,
    peak,
    D: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    BYTES: tl.constexpr,
    WHOLE: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_PEAK: tl.constexpr,
):
    """Program (window, bytes of a row, head): groups of one channel. A window longer than TILE tokens is read twice."""
    window, part, at = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    STORED: tl.constexpr = scale.dtype.element_ty
    ROW: tl.constexpr = D * BITS // 8
    batch, head = (at // heads).to(tl.int64), (at % heads).to(tl.int64)
    byte, plane = part * BYTES + tl.arange(0, BYTES), tl.arange(0, 8 // BITS)
    inside, channels = byte < ROW, plane[:, None] * ROW + byte[None, :]
    source = x + batch * strides[0] + head * strides[1]
    wanted = columns + (batch * windows + window) * size
    values, valid = _tokens(source, wanted, strides, 0, size, channels, inside, TILE, STORED)
    _report(values, valid, flaw)
    low, high = _least(values, valid), _most(values, valid)
    if not WHOLE:
        for begin in range(TILE, size, TILE):
            values, valid = _tokens(source, wanted, strides, begin, size, channels, inside, TILE, STORED)
            _report(values, valid, flaw)
            low, high = tl.minimum(low, _least(values, valid)), tl.maximum(high, _most(values, valid))
    group_scale, group_offset, step, shift = _parameters(low, high, peak, BITS, ZERO, HAS_PEAK, STORED)
    place = at.to(tl.int64) * windows + window
    groups = place * D + channels
    kept = tl.broadcast_to(inside[None, :], channels.shape)
    tl.store(scale + groups, group_scale, mask=kept)
    if ZERO != "symmetric":
        tl.store(offset + groups, group_offset, mask=kept)
    for begin in range(0, size, TILE):
        if not WHOLE:
            values, valid = _tokens(source, wanted, strides, begin, size, channels, inside, TILE, STORED)
        packed = _packed(values, step[None, :, :], shift[None, :, :], plane, BITS, ZERO)
        token = begin + tl.arange(0, TILE)
        target = codes + (place * size + token)[:, None] * ROW + byte[None, :]
        tl.store(target, packed, mask=(token < size)[:, None] & inside[None, :])


@triton.autotune(configs((4, 1), (8, 1), (2, 1)), key=["D", "BITS", "TILE", "ZERO"])
@triton.jit(do_not_specialize=["windows", "peak"])
def quantize_tokens_kernel(
    x,
    columns,
    codes,
    scale,
    offset,
    flaw,
    strides,
    heads,
    windows,
    size,
    peak,
    D: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    BYTES: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_PEAK: tl.constexpr,
):
    """Program (window, TILE of its tokens, head): groups of one token's channels."""
    window, part, at = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    STORED: tl.constexpr = scale.dtype.element_ty
    ROW: tl.constexpr = D * BITS // 8
    batch, head = (at // heads).to(tl.int64), (at % heads).to(tl.int64)
    byte, plane = tl.arange(0, BYTES), tl.arange(0, 8 // BITS)
    inside, channels = byte < ROW, plane[:, None] * ROW + byte[None, :]
    source = x + batch * strides[0] + head * strides[1]
    wanted = columns + (batch * windows + window) * size
    values, valid = _tokens(source, wanted, strides, part * TILE, size, channels, inside, TILE, STORED)
    _report(values, valid, flaw)
    low = tl.min(tl.min(tl.where(valid, values, float("inf")), 2), 1)
    high = tl.max(tl.max(tl.where(valid, values, float("-inf")), 2), 1)
    token = part * TILE + tl.arange(0, TILE)
    low, high = tl.where(token < size, low, 0.0), tl.where(token < size, high, 0.0)
    group_scale, group_offset, step, shift = _parameters(low, high, peak, BITS, ZERO, HAS_PEAK, STORED)
    place = (at.to(tl.int64) * windows + window) * size + token
    tl.store(scale + place, group_scale, mask=token < size)
    if ZERO != "symmetric":
        tl.store(offset + place, group_offset, mask=token < size)
    packed = _packed(values, step[:, None, None], shift[:, None, None], plane, BITS, ZERO)
    target = codes + place[:, None] * ROW + byte[None, :]
    tl.store(target, packed, mask=(token < size)[:, None] & inside[None, :])


def takes(x: Tensor, granularity: str, dtype: torch.dtype) -> bool:
    """Whether `quantize_windows` takes K or V like x, stored in `dtype`."""
    return granularity in _GRANULARITIES and dtype in _STORED


def _check(granularity: str, dtype: torch.dtype, label: str) -> None:
    if granularity not in _GRANULARITIES:
        raise UserError(
            f"The Triton quantizer takes the granularities {', '.join(_GRANULARITIES)}, not {granularity!r}; use "
            "core.quantizer.quantize for others."
        )
    if dtype not in _STORED:
        raise UserError(f"{label} would be stored in {dtype}; store scales in float16 or bfloat16.")


def tile_shape(size: int, channels: int, bits: int, granularity: str) -> tuple[int, int]:
    """Tokens and bytes of a row that a program of a window of `size` tokens holds at a time, powers of two."""
    planes, row = 8 // bits, triton.next_power_of_2(channels * bits // 8)
    if granularity == "token":
        return min(triton.next_power_of_2(size), max(1, _TILE // (planes * row))), row
    tokens = min(triton.next_power_of_2(size), _TILE // (planes * 16))
    return tokens, min(row, _TILE // (planes * tokens))


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

    A negative column reads column 0: a slot that holds no token. `dtype`: that of the storage, float16 or bfloat16, to
    which x is rounded first (None: its own). `granularity`: "window_channel" or "token"; the rest as in
    `core.quantizer.quantize`, which makes the same block of the same windows. Waits for the device once, to know that
    all is finite. Raises UserError as that does, for another granularity, and off a CUDA device.
    """
    dtype = dtype or x.dtype
    check_device(x)
    _check(granularity, dtype, label)
    (batch, heads, _, channels), (_, windows, size) = x.shape, columns.shape
    block = empty_block(x, dtype, (batch, heads, windows, size, channels), bits, granularity, zero_point)
    if block.codes.numel() == 0:
        return block
    x = x if x.stride(-1) == 1 else x.contiguous()
    flaw = torch.zeros(1, dtype=torch.int32, device=x.device)
    tile, width = tile_shape(size, channels, bits, granularity)
    columns = columns.to(x.device).contiguous()
    largest = 0.0 if peak is None else float(torch.tensor(peak, dtype=dtype))
    stored = block.codes, block.scale, block.offset
    arguments = (x, columns, *stored, flaw, x.stride()[:3], heads, windows, size, largest)
    options = {
        "D": channels,
        "BITS": bits,
        "TILE": tile,
        "BYTES": width,
        "ZERO": zero_point,
        "HAS_PEAK": peak is not None,
    }
    if granularity == "token":
        quantize_tokens_kernel[windows, -(-size // tile), batch * heads](*arguments, **options)
    else:
        grid = windows, -(-block.codes.shape[-1] // width), batch * heads
        quantize_channels_kernel[grid](*arguments, **options, WHOLE=size <= tile)
    if found := int(flaw):
        kind = _FLAWS[found]
        raise UserError(f"{label} holds {kind} and cannot be quantized; look for overflow in the model's prefill.")
    return block
