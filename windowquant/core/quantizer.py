"""Asymmetric round-to-nearest quantization of windows (paper, equations 14 to 16).

Stored is X = scale * Q + offset with unsigned codes Q in 0 .. 2**bits - 1. The paper's integer zero point z is held as
offset = -scale * z, so that both kinds of zero point have one storage form and one decode kernel. Codes are computed,
in float32, against scale and offset as stored, so their rounding to 16 bit is compensated wherever the code can move.
Symmetric codes have no offset of their own: the middle code stands for zero, exactly, and as many lie on either side.

Error bound of an element, with s the scale, u the unit roundoff of the kv dtype (2**-11 for float16, 2**-8 for
bfloat16) and q = 2**bits - 1: s / 2, plus q * u * s for the part of the range that the rounded scale may fail to cover,
plus u * |offset| if the zero point is an integer (then the ends of a group, which the float zero point meets, are off
by up to s / 2). A constant group is exact. A group whose scale underflows to zero in float16 (below 3e-8) becomes its
minimum.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from windowquant.core.packed import WindowBlock, middle
from windowquant.core.packing import check_bits, pack, packed_bytes, unpack
from windowquant.errors import UserError

Granularity = Literal["window_channel", "token", "token_all", "channel", "head", "tensor"]
ZeroPoint = Literal["integer", "float", "symmetric"]

# The dimensions of [B, H, W, S, D] that one group spans. Never B: a request's codes do not depend on its batch.
_GROUP_DIMS: dict[str, tuple[int, ...]] = {
    "window_channel": (3,),  # the paper's: the S tokens of a window in one channel of one head
    "token": (4,),  # the D channels of one token in one head
    "token_all": (1, 4),  # all channels of one token, over all heads
    "channel": (2, 3),  # the paper's "ungrouped": one channel of one head, over all windows of the block
    "head": (2, 3, 4),
    "tensor": (1, 2, 3, 4),
}
WITHIN_WINDOWS = tuple(name for name, dims in _GROUP_DIMS.items() if 2 not in dims)
"""Granularities whose groups do not reach from one window into the next."""

_PIECE = 2**15  # elements that are worth a kernel of their own

PER_TOKEN = tuple(name for name, dims in _GROUP_DIMS.items() if 3 not in dims)
"""Granularities that tell tokens of a window apart, and not channels of a token."""


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} is {value!r}; use one of {', '.join(known)}.")


def _group_shape(shape: tuple[int, ...], granularity: str) -> list[int]:
    _check_choice("granularity", granularity, get_args(Granularity))
    return [1 if dim in _GROUP_DIMS[granularity] else size for dim, size in enumerate(shape)]


def _group_range(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every group of `x`, kept dimensions, in the dtype of `x`."""
    if x.numel() == 0:
        groups = _group_shape(tuple(x.shape), granularity)
        return x.new_zeros(groups), x.new_zeros(groups)
    dims = _GROUP_DIMS[granularity]
    return x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)


def quantize(
    x: Tensor,
    bits: int,
    granularity: Granularity = "window_channel",
    zero_point: ZeroPoint = "integer",
    label: str = "x",
    peak: float | None = None,
) -> WindowBlock:
    """Quantize `x` [B, H, W, S, D] to `bits` (8, 4, 2 or 1) per element.

    Scale and offset are stored in the dtype of `x`, so hand in the 16-bit kv dtype. `zero_point`: "integer" rounds the
    offset to a multiple of the scale (equation 15), which can clip the ends of a group by half a scale; "float" stores
    the minimum; "symmetric" codes reach as far below zero as above. `label` names the tensor in errors. `peak`: largest
    absolute value that symmetric codes reach, known beforehand; what is larger is cut to it (None: each group's own).
    Raises UserError for NaN or infinity, unknown options, symmetric codes of 1 bit, and a head_dim that does not fill
    whole bytes.
    """
    shape = (x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.shape[4])
    return quantize_pieces(lambda part: x[:, :, part], shape, bits, granularity, zero_point, label, peak)


def quantize_pieces(
    piece: Callable[[slice], Tensor],
    shape: tuple[int, int, int, int, int],
    bits: int,
    granularity: Granularity = "window_channel",
    zero_point: ZeroPoint = "integer",
    label: str = "x",
    peak: float | None = None,
) -> WindowBlock:
    """`quantize` for a tensor of `shape` whose windows are made a few at a time, so that it never exists as a whole.

    piece(windows): those windows, [B, H, w, S, D]; asked for twice if groups reach from one window into the next.
    """
    check_bits(bits)
    _check_choice("granularity", granularity, get_args(Granularity))
    _check_choice("zero_point", zero_point, get_args(ZeroPoint))
    parts, common = list(window_parts(shape)), None
    if granularity not in WITHIN_WINDOWS:
        lows, highs = zip(*(_group_range(piece(part), granularity) for part in parts), strict=True)
        common = torch.cat(lows, 2).amin(2, keepdim=True), torch.cat(highs, 2).amax(2, keepdim=True)
    block: WindowBlock | None = None
    ends: list[Tensor] = []
    for part in parts:
        x = piece(part)
        low, high = common or _group_range(x, granularity)
        if low.numel():
            ends.append(torch.stack([low.min(), high.max()]))
        scale, offset, shift = _scale_and_offset(low, high, bits, zero_point, peak)
        block = block or empty_block(x, x.dtype, shape, bits, granularity, zero_point)
        block.codes[:, :, part] = pack(_codes(x, scale, shift, bits, zero_point), bits)
        block.scale[:, :, _groups_of(part, block.scale)] = scale
        if not block.symmetric:
            block.offset[:, :, _groups_of(part, block.offset)] = offset
    assert block is not None
    if ends:
        check_ends(torch.stack(ends), label)
    return block


def empty_block(
    x: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    bits: int,
    granularity: Granularity,
    zero_point: str,
) -> WindowBlock:
    """A block for a tensor of `shape` (B, H, W, S, D) to be filled in, on the device of x; `dtype` of the scales.

    Raises UserError for options that `quantize` does not take.
    """
    codes, groups, offset = _stored_shapes(shape, bits, granularity, zero_point)
    return WindowBlock(
        x.new_empty(*codes, dtype=torch.uint8),
        x.new_empty(*groups, dtype=dtype),
        x.new_empty(*offset, dtype=dtype),
        bits,
        shape,
        granularity,
    )


@lru_cache(maxsize=512)
def _stored_shapes(
    shape: tuple[int, int, int, int, int], bits: int, granularity: str, zero_point: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of codes, scales and offsets; UserError for what cannot be."""
    _check_choice("zero_point", zero_point, get_args(ZeroPoint))
    if zero_point == "symmetric":
        check_symmetric(bits)
    groups = tuple(_group_shape(shape, granularity))
    return (*shape[:4], packed_bytes(shape[4], bits)), groups, (shape[0], 0) if zero_point == "symmetric" else groups


def _groups_of(part: slice, groups: Tensor) -> slice:
    """Where among the stored groups those of some windows are: the same ones where windows share them."""
    return part if groups.shape[2] > 1 else slice(None)


_REMEDY = (
    "look for overflow in the model's prefill, or set kv_dtype=model if the model's values exceed what float16 holds "
    "(65504)."
)


def check_ends(ends: Tensor, label: str) -> None:
    """Raise UserError unless minima and maxima [n, 2] are finite: a NaN spreads to them and an infinity is one."""
    if not bool(torch.isfinite(ends).all()):
        kind = "NaN" if bool(torch.isnan(ends).any()) else "infinity"
        raise UserError(f"{label} holds {kind} and cannot be quantized; {_REMEDY}")


def check_finite(x: Tensor, label: str) -> None:
    """Raise UserError, naming `label`, if x of any shape holds NaN or infinity."""
    if x.numel() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(x)):
        raise not_finite(label, x.dtype)


def not_finite(label: str, dtype: torch.dtype) -> UserError:
    """What `check_finite` raises."""
    return UserError(f"{label} holds NaN or infinity in {dtype}; {_REMEDY}")


def window_parts(shape: tuple[int, int, int, int, int]) -> Iterator[slice]:
    """Consecutive windows of a tensor of `shape` that are worked on at a time: 1 / 32 of them, but not too few."""
    batch, heads, windows, size, channels = shape
    step = max(1, windows // 32, _PIECE // max(1, batch * heads * size * channels))
    yield from (slice(start, start + step) for start in range(0, max(1, windows), step))


def _scale_and_offset(
    low: Tensor, high: Tensor, bits: int, zero_point: str, peak: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and offset as stored, in the dtype of `low`, and the offset that codes are made against, float32."""
    if zero_point == "symmetric":
        check_symmetric(bits)
        largest = torch.maximum(low.abs(), high.abs()) if peak is None else torch.full_like(low, peak)
        scale = (largest.float() / middle(bits)).to(low.dtype)
        return scale, low.new_empty(low.shape[0], 0), torch.zeros_like(scale, dtype=torch.float32)
    minimum = low.float()
    # The clamp matters only for float16 groups wider than 65504 at 1 bit.
    scale = ((high.float() - minimum) / (2**bits - 1)).clamp(max=torch.finfo(low.dtype).max).to(low.dtype)
    offset = low
    if zero_point == "integer":
        limits, step = torch.finfo(low.dtype), torch.where(scale == 0, 1.0, scale.float())
        rounded = (step * torch.round(minimum / step)).clamp(limits.min, limits.max).to(low.dtype)
        offset = torch.where(scale == 0, low, rounded)
    return scale, offset, offset.float()


def _codes(x: Tensor, scale: Tensor, shift: Tensor, bits: int, zero_point: str) -> Tensor:
    """Unpacked codes of `x`, uint8, with one float32 temporary of its size."""
    step = torch.where(scale == 0, 1.0, scale.float())
    codes = x.to(torch.float32, copy=True).sub_(shift).div_(step).round_()
    if zero_point == "symmetric":
        half = middle(bits)
        return codes.clamp_(-half, half).add_(half).to(torch.uint8)
    return codes.clamp_(0, 2**bits - 1).to(torch.uint8)


def check_symmetric(bits: int) -> None:
    """Raise UserError for symmetric codes of 1 bit."""
    if bits == 1:
        raise UserError("Symmetric codes of 1 bit could say nothing but zero; use 2 bits or more.")


def unquantized(x: Tensor, granularity: Granularity = "window_channel") -> WindowBlock:
    """`x` [B, H, W, S, D] in its own 16-bit dtype, as a block beside quantized ones of that granularity."""
    shape = (x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.shape[4])
    nothing = x.new_empty(x.shape[0], 0)
    return WindowBlock(x, nothing, nothing, 16, shape, granularity)


def dequantize(block: WindowBlock) -> Tensor:
    """The tensor a block stands for, scale * Q + offset, as float32 [B, H, W, S, D]. For tests and for reading back."""
    if block.bits == 16:
        return block.codes.float()
    return unpack(block.codes, block.bits).float() * block.scale.float() + block.shift()


def storage_bytes(
    shape: tuple[int, int, int, int, int],
    bits: int,
    granularity: Granularity = "window_channel",
    zero_point: ZeroPoint = "integer",
) -> tuple[int, int]:
    """Bytes that a block of `shape` (B, H, W, S, D) takes: (codes, scale and offset), 16 bit for each of the latter.

    Symmetric codes have no offset. A block of 16 bits has 2 bytes an element and neither scale nor offset.
    """
    if bits == 16:
        return torch.Size(shape).numel() * 2, 0
    check_bits(bits)
    groups = torch.Size(_group_shape(shape, granularity)).numel()
    return torch.Size(shape).numel() * bits // 8, groups * (2 if zero_point == "symmetric" else 4)
