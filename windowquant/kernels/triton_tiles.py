"""The arithmetic of a tile of tokens, for K and for V, as Triton device functions (paper, equation 13).

With scales per window and channel, scale and offset of K touch the queries, and those of V the output: a tile of codes
only enters the matrix units as it is. Scales of each token have nothing to be folded into before or after the sum over
channels but the token's own score (K) or values (V). Nothing here is written to memory.

A side (K or V) of a run is (codes, scale, offset, window stride of codes, token stride of codes, window stride of
scales, token stride of scales), the first three pointers to the head at hand.
"""

import triton
import triton.language as tl

from windowquant.kernels.triton_codes import load_codes

ROW = tl.constexpr(27)  # numbers in a row of the work table
_SIDE = tl.constexpr(11)  # of which K and V take so many each, after the first five


@triton.jit
def read_side(table, entry, batch, head, like, SIDE: tl.constexpr, KIND: tl.constexpr):
    """A side of the run at row `entry` of the work table; SIDE: 0 for K, 1 for V. `like`: a pointer to the kv dtype."""
    row = table + entry * ROW + 5 + SIDE * _SIDE
    BITS: tl.constexpr = KIND[0]
    ALIGN: tl.constexpr = KIND[3]
    kv = tl.pointer_type(like.dtype.element_ty)
    UNIT: tl.constexpr = max(1, ALIGN * 8 // like.dtype.element_ty.primitive_bitwidth) if BITS == 16 else ALIGN
    over_batch = tl.multiple_of(tl.load(row + 3), UNIT)
    over_heads = tl.multiple_of(tl.load(row + 4), UNIT)
    over_windows = tl.multiple_of(tl.load(row + 5), UNIT)
    over_tokens = tl.multiple_of(tl.load(row + 6), UNIT)
    address = tl.load(row).to(kv if BITS == 16 else tl.pointer_type(tl.uint8))
    codes = tl.multiple_of(address, ALIGN) + batch * over_batch + head * over_heads
    GROUP: tl.constexpr = ALIGN * 8 // like.dtype.element_ty.primitive_bitwidth if KIND[1] == "channel" else 1
    STEP: tl.constexpr = max(1, GROUP)
    groups = batch * tl.multiple_of(tl.load(row + 7), STEP) + head * tl.multiple_of(tl.load(row + 8), STEP)
    scale = tl.multiple_of(tl.load(row + 1).to(kv), ALIGN if KIND[1] == "channel" else 2) + groups
    offset = tl.multiple_of(tl.load(row + 2).to(kv), ALIGN if KIND[1] == "channel" else 2) + groups
    return codes, scale, offset, over_windows, over_tokens, tl.multiple_of(tl.load(row + 9), STEP), tl.load(row + 10)


@triton.jit
def _codes(side, window, tokens, valid, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [T, DP] of the `tokens` of a window in DTYPE, exactly; symmetric ones about zero; 16 bits: the values."""
    codes, _, _, over_windows, over_tokens, _, _ = side
    BITS: tl.constexpr = KIND[0]
    found = load_codes(codes + window * over_windows, over_tokens, tokens, valid, D, DP, BITS, KIND[3], DTYPE)
    if KIND[2]:
        found = found - (2 ** (BITS - 1) - 1)
    return found


@triton.jit
def _groups(side, window, tokens, valid, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    """Scale and offset in the kv dtype: [T] where each token has its own, else [DP]. Symmetric: offset 0."""
    _, scale, offset, _, _, over_windows, over_tokens = side
    channels = tl.arange(0, DP)
    if KIND[1] == "token":
        place, mask = window * over_windows + tokens * over_tokens, valid
    elif KIND[1] == "channel":
        place, mask = window * over_windows + channels, channels < D
    else:
        place, mask = window * over_windows + channels * 0, channels < D
    scales = tl.load(scale + place, mask=mask, other=0)
    offsets = scales * 0 if KIND[2] else tl.load(offset + place, mask=mask, other=0)
    return scales, offsets


@triton.jit
def key_scores(q, side, window, tokens, valid, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    """q . K of queries `q` [R, DP] and the `tokens` [T] of a window, float32 [R, T].

    q . offset, the same for all of a window's tokens, is a product of its own: q, which is at hand, by the offset in
    every column, exact where the product of scaled q and codes has one rounding.
    """
    codes = tl.trans(_codes(side, window, tokens, valid, D, DP, KIND, q.dtype))
    if KIND[0] == 16:
        products = tl.dot(q, codes, input_precision="ieee")
    elif KIND[1] == "token":
        scale, offset = _groups(side, window, tokens, valid, D, DP, KIND)
        products = tl.dot(q, codes, input_precision="ieee") * scale.to(tl.float32)[None, :]
        products += tl.sum(q.to(tl.float32), 1)[:, None] * offset.to(tl.float32)[None, :]
    else:
        scale, offset = _groups(side, window, tokens, valid, D, DP, KIND)
        products = tl.dot(q * scale.to(q.dtype)[None, :], codes, input_precision="ieee")
        if not KIND[2]:
            shift = tl.broadcast_to(offset.to(q.dtype)[:, None], codes.shape)
            products = tl.dot(q, shift, products, input_precision="ieee")
    return products


@triton.jit
def values_of(side, window, tokens, valid, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    """What the `tokens` [T] of a window stand for, scale * Q + offset, float32 [T, DP]."""
    values = _codes(side, window, tokens, valid, D, DP, KIND, tl.float32)
    if KIND[0] < 16:
        scale, offset = _groups(side, window, tokens, valid, D, DP, KIND)
        scale, offset = scale.to(tl.float32), offset.to(tl.float32)
        if KIND[1] == "token":
            values = values * scale[:, None] + offset[:, None]
        else:
            values = values * scale[None, :] + offset[None, :]
    return values


@triton.jit
def weighted_values(p, side, window, tokens, valid, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    """Sum of the values of the `tokens` [T] of a window weighted by `p` [R, T], float32 [R, DP]."""
    if KIND[1] == "token":
        values = values_of(side, window, tokens, valid, D, DP, KIND)
        sums = tl.dot(p, values.to(p.dtype), input_precision="ieee")
    else:
        codes = _codes(side, window, tokens, valid, D, DP, KIND, p.dtype)
        sums = tl.dot(p, codes, input_precision="ieee")
        if KIND[0] < 16:
            scale, offset = _groups(side, window, tokens, valid, D, DP, KIND)
            sums = sums * scale.to(tl.float32)[None, :]
            if not KIND[2]:
                sums += tl.sum(p.to(tl.float32), 1)[:, None] * offset.to(tl.float32)[None, :]
    return sums


@triton.jit
def fp_side(x, strides, batch, head, begin):
    """Token `begin` and what follows of one head of the 16-bit block `x` [B, H, T16, D], as a side."""
    start = x + batch * strides[0] + head * strides[1] + begin.to(tl.int64) * strides[2]
    return start, start, start, 0, strides[2], 0, 0


@triton.jit
def read_entries(first, share):
    """The rows of a program: from, and up to."""
    return tl.load(first + share).to(tl.int32), tl.load(first + share + 1).to(tl.int32)


@triton.jit
def read_extent(table, entry):
    """Of the run at row `entry`: first stored token, windows, tokens a window, stored tokens between windows."""
    work = table + entry * ROW
    start, windows = tl.load(work + 1).to(tl.int32), tl.load(work + 2).to(tl.int32)
    return start, windows, tl.load(work + 3).to(tl.int32), tl.load(work + 4).to(tl.int32)


@triton.jit
def fp_extent(begin, budget, stored, fp_tokens):
    """The same of up to `budget` tokens of the 16-bit block from its token `begin` on."""
    return stored - fp_tokens + begin, 1, tl.minimum(fp_tokens - begin, budget), 0


@triton.jit
def head_at(at, heads):
    """Request and KV head of number `at`, as int64: their strides can be long."""
    return (at // heads).to(tl.int64), (at % heads).to(tl.int64)


@triton.jit
def row_places(x, strides, batch, head, row, group, queries):
    """Where in `x` [B, Hq, Tq, ...] the rows [R] of a KV head begin: row g * Tq + t is query t of its query head g."""
    query_head = head * group + row // queries
    return x + batch * strides[0] + query_head * strides[1] + (row % queries) * strides[2]
