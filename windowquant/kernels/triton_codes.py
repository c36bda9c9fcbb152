"""Expanding packed codes in registers, as Triton device functions.

`core.packing` has the layout: a byte holds one channel of each plane. Where head_dim is a power of two, a tile of codes
is loaded as 16-bit words of two neighbouring bytes, and each field of all words is taken out by one mask: a channel of
one plane. Numbers are made of codes without converting integers, which is slow: in the low bits of the mantissa of a
power of two, a code adds itself to that, which is then taken off, exactly.
"""

import triton
import triton.language as tl


@triton.jit
def _number(words, AT: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Bits AT .. AT + BITS of 16-bit words, as numbers in DTYPE."""
    MANTISSA: tl.constexpr = 7 if DTYPE.is_bf16() else 10
    if BITS > MANTISSA or DTYPE.is_fp32():
        number = _number(words, AT, BITS, tl.float16).to(DTYPE)
    else:
        # Left where it is within a byte, if that fits in the mantissa, it needs no shift, but a factor.
        LEFT: tl.constexpr = AT % 8 if AT % 8 + BITS <= MANTISSA else 0
        ONE: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400  # 2**MANTISSA in DTYPE
        field = ((words >> (AT - LEFT)) & ((2**BITS - 1) << LEFT)) | ONE
        number = field.to(DTYPE, bitcast=True) * (1.0 / 2**LEFT) - 2.0 ** (MANTISSA - LEFT)
    return number


@triton.jit
def _fields(words, FIRST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Fields FIRST, FIRST + STEP, ... of words [T, W], one axis of two for each bit of their number: [T, W, 2, ...]."""
    if STEP * BITS >= 16:
        fields = _number(words, FIRST * BITS, BITS, DTYPE)
    else:
        even = _fields(words, FIRST, 2 * STEP, BITS, DTYPE)
        fields = tl.join(even, _fields(words, FIRST + STEP, 2 * STEP, BITS, DTYPE))
    return fields


@triton.jit
def _by_words(pointer, stride, tokens, valid, D: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    WORDS: tl.constexpr = D * BITS // 16
    TOKENS: tl.constexpr = tokens.shape[0]
    rows = (pointer + tokens * stride).to(tl.pointer_type(tl.uint16), bitcast=True)
    words = tl.load(rows[:, None] + tl.arange(0, WORDS)[None, :], mask=valid[:, None], other=0)
    fields = tl.reshape(_fields(words, 0, 1, BITS, DTYPE), (TOKENS, WORDS, 2, 8 // BITS))
    return tl.reshape(tl.permute(fields, (0, 3, 1, 2)), (TOKENS, D))


@triton.jit
def _by_bytes(
    pointer, stride, tokens, valid, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr
):
    ROW: tl.constexpr = D * BITS // 8
    channels = tl.arange(0, DP)
    mask = valid[:, None] & (channels < D)[None, :]
    packed = tl.load(pointer + tokens[:, None] * stride + (channels % ROW)[None, :], mask=mask, other=0)
    codes = (packed >> ((channels // ROW) * BITS).to(tl.uint8)[None, :]) & (2**BITS - 1)
    return _number(codes.to(tl.uint16), 0, BITS, DTYPE)


@triton.jit
def load_codes(
    pointer,
    stride,
    tokens,
    valid,
    D: tl.constexpr,
    DP: tl.constexpr,
    BITS: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Codes of `tokens` [T] from `pointer`, exactly, as numbers in DTYPE: [T, DP]; with 16 bits the values.

    stride: from token to token, in elements of `pointer`. ALIGN: bytes that addresses are multiples of.
    """
    if BITS == 16:
        channels = tl.arange(0, DP)
        mask = valid[:, None] & (channels < D)[None, :]
        codes = tl.load(pointer + tokens[:, None] * stride + channels[None, :], mask=mask, other=0).to(DTYPE)
    elif D == DP and D * BITS >= 16 and ALIGN > 1:
        codes = _by_words(pointer, stride, tokens, valid, D, BITS, DTYPE)
    else:
        codes = _by_bytes(pointer, stride, tokens, valid, D, DP, BITS, DTYPE)
    return codes
