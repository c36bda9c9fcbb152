"""Inner products of a tile, up to 32 tokens of one window, with `rows` query rows; what is not a product is in `loop`.

Each function is an intrinsic of Numba. Sizes that the code depends on come as types, so that they need no closures and
compiled code can be cached: `rows` is a tuple whose length is the number of query rows, and `kv` an array (empty) whose
dtype says how values are stored: uint16 is float16, int16 is bfloat16, float32 is itself. All other arguments are
int64: addresses, byte strides and counts.

Codes lie as `core.packing` says: `planes` planes of `blocks` * 16 channels, a token's row having `blocks` * 16 bytes.
Masked in place and converted, a code comes out as its value times a power of two (`code_factors`), for the caller to
fold into what it is multiplied with.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from windowquant.kernels.cpu.emit import BIT, BYTES, F32, FLOATS, HALVES, I32, LANES, SHORTS, WORDS, Emitter, bytes_of
from windowquant.kernels.cpu.kinds import AHEAD, CHANNEL_STRIDE, KINDS, TOKEN_STRIDE, TOKENS

_BYTE_SHIFT = (0, 8, 16, 16)  # where in a word the code of byte 0..3 is when it is converted


def code_factors(planes: int, width: int, words: bool) -> np.ndarray:
    """What undoes the powers of two in converted codes, float32 [planes * width].

    words: of codes converted from words of four bytes, as `k_codes` does; else from single bytes, as `v_codes` does.
    """
    plane, channel = np.divmod(np.arange(planes * width), width)
    shift = plane * (8 // planes) + (np.array(_BYTE_SHIFT)[channel % 4] if words else 0)
    return (0.5**shift).astype(np.float32)


def _mask(e: Emitter, bits: Any) -> tuple[Any, Any]:
    """Vectors of int32: 2**bits - 1, and bits."""
    b = e.builder
    bits = b.trunc(bits, I32)
    one = bits.type(1)
    return e.splat(b.sub(b.shl(one, bits), one)), e.splat(bits)


def _add_outer(e: Emitter, sums: list[list[Any]], rows: Any, stride: int, values: list[Any]) -> None:
    """sums[row][part] += (float of each row, `stride` floats apart) * values[part]."""
    for row, parts in enumerate(sums):
        factor = e.splat(e.load(rows, F32, 4 * row * stride, 4))
        for part, value in zip(parts, values, strict=True):
            e.add_product(part, factor, value)


def _store_scores(e: Emitter, sums: list[list[Any]], out: Any) -> None:
    for row, parts in enumerate(sums):
        for part, place in enumerate(parts):
            e.store(e.builder.load(place), out, 4 * (row * TOKEN_STRIDE + part * LANES), 64)


def prefetch(e: Emitter, codes: Any, stride: Any, block: Any, size: int = 16) -> None:
    """Have a part of what lies AHEAD tiles on in memory brought near, of the next but one as a rule."""
    e.prefetch(
        e.builder.add(e.at(codes, stride, AHEAD * TOKENS), e.at(e.i64(0), block, TOKENS * size)), TOKENS * size // 64
    )


def token_words(e: Emitter, codes: Any, stride: Any, block: Any) -> list[list[Any]]:
    """16 bytes of 32 tokens: [two halves of the tokens][four words]."""
    first = e.at(codes, block, 16)
    prefetch(e, codes, stride, block)
    return [e.transposed(first, stride), e.transposed(e.at(first, stride, LANES), stride)]


@intrinsic
def k_codes(
    typing: Any, rows: Any, codes: Any, stride: Any, q: Any, scores: Any, planes: Any, blocks: Any, bits: Any
) -> Any:
    """scores[row, token] = q[row] . codes[token], for 32 tokens; q in planes, times scale and `code_factors`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, codes, stride, q, scores, planes, blocks, bits = args
        e = Emitter(builder)
        sums = [e.sums(2) for _ in range(rows.count)]
        first_mask, step = _mask(e, bits)
        plane_bytes = builder.mul(blocks, e.i64(4 * 16))
        with e.loop(blocks) as block:
            words = token_words(e, codes, stride, block)
            mask = e.variable(first_mask)
            with e.loop(planes) as plane:
                channels = builder.add(e.at(q, block, 4 * 16), builder.mul(plane, plane_bytes))
                low = builder.load(mask)
                masks = [builder.shl(low, e.words(shift)) for shift in _BYTE_SHIFT]
                for channel in range(16):
                    word, byte = divmod(channel, 4)
                    halves = [half[word] for half in words]
                    if byte == 3:  # one lower, for a sign bit must not become a code's
                        halves = [builder.lshr(half, e.words(8)) for half in halves]
                    values = [builder.sitofp(builder.and_(half, masks[byte]), FLOATS) for half in halves]
                    _add_outer(e, sums, builder.add(channels, e.i64(4 * channel)), CHANNEL_STRIDE, values)
                builder.store(builder.shl(low, step), mask)
        _store_scores(e, sums, scores)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 7), generate


def _channel_of_words(e: Emitter, words: list[Any], channel: int, kind: str) -> Any:
    """A channel of 16 tokens as floats, from the words of their values."""
    b = e.builder
    if kind == "float32":
        return b.bitcast(words[channel], FLOATS)
    word, high = words[channel // 2], channel % 2
    if kind == "bfloat16":
        return b.bitcast(b.and_(word, e.words(-65536)) if high else b.shl(word, e.words(16)), FLOATS)
    return b.fpext(b.bitcast(b.trunc(b.lshr(word, e.words(16)) if high else word, SHORTS), HALVES), FLOATS)


@intrinsic
def k_values(typing: Any, rows: Any, kv: Any, values: Any, stride: Any, q: Any, scores: Any, blocks: Any) -> Any:
    """scores[row, token] = q[row] . values[token], for 32 tokens of `blocks` * 16 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, values, stride, q, scores, blocks = args
        e, kind = Emitter(builder), KINDS[kv.dtype]
        sums = [e.sums(2) for _ in range(rows.count)]
        channels = 4 if kind == "float32" else 8
        with e.loop(blocks) as block:
            words = token_words(e, values, stride, block)
            for channel in range(channels):
                parts = [_channel_of_words(e, half, channel, kind) for half in words]
                _add_outer(
                    e, sums, builder.add(e.at(q, block, 4 * channels), e.i64(4 * channel)), CHANNEL_STRIDE, parts
                )
        _store_scores(e, sums, scores)
        return context.get_dummy_value()

    return types.void(rows, kv, *[types.int64] * 5), generate


def _weighted_sums(
    e: Emitter, rows: int, probs: Any, tokens: Any, count: int, values: Callable[[Any], list[Any]]
) -> list[list[Any]]:
    """Sums [row][part] over tokens of probs[row, token] * values(token), which are `count` vectors."""
    sums = [e.sums(count) for _ in range(rows)]
    with e.loop(tokens) as token:
        _add_outer(e, sums, e.at(probs, token, 4), TOKEN_STRIDE, values(token))
    return [[e.builder.load(part) for part in parts] for parts in sums]


@intrinsic
def v_codes(
    typing: Any,
    rows: Any,
    codes: Any,
    stride: Any,
    tokens: Any,
    probs: Any,
    scale: Any,
    weights: Any,
    offset: Any,
    out: Any,
    planes: Any,
    blocks: Any,
    bits: Any,
) -> Any:
    """out[row] += scale * (sum over tokens of probs[row, token] * codes[token]) + weights[row] * offset; in planes.

    `scale` holds `code_factors` too.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, codes, stride, tokens, probs, scale, weights, offset, out, planes, blocks, bits = args
        e = Emitter(builder)
        first_mask, step = _mask(e, bits)
        plane_bytes = builder.mul(blocks, e.i64(4 * 16))

        def some_planes(first: Any, block: Any, mask: Any, count: int) -> None:
            masks = [mask] if count == 1 else [mask, builder.shl(mask, step)]

            def values(token: Any) -> list[Any]:
                row = builder.add(e.at(codes, block, 16), builder.mul(token, stride))
                wide = builder.zext(e.load(row, BYTES), WORDS)
                return [builder.sitofp(builder.and_(wide, own), FLOATS) for own in masks]

            sums = _weighted_sums(e, rows.count, probs, tokens, count, values)
            place = builder.add(e.at(e.i64(0), block, 4 * 16), builder.mul(first, plane_bytes))
            for part in range(count):
                factor, shift = (e.load(builder.add(x, place), FLOATS) for x in (scale, offset))
                target = builder.add(out, place)
                for row, parts in enumerate(sums):
                    value = e.load(target, FLOATS, 4 * row * CHANNEL_STRIDE)
                    value = e.fma(e.splat(e.load(weights, F32, 4 * row, 4)), shift, value)
                    e.store(e.fma(parts[part], factor, value), target, 4 * row * CHANNEL_STRIDE)
                place = builder.add(place, plane_bytes)

        with e.loop(blocks) as block:
            prefetch(e, codes, stride, block)
            with builder.if_else(builder.icmp_signed("==", planes, e.i64(1))) as (one, more):
                with one:
                    some_planes(e.i64(0), block, first_mask, 1)
                with more:
                    mask = e.variable(first_mask)
                    with e.loop(builder.ashr(planes, e.i64(1))) as pair:
                        own = builder.load(mask)
                        some_planes(builder.shl(pair, e.i64(1)), block, own, 2)
                        builder.store(builder.shl(builder.shl(own, step), step), mask)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 11), generate


@intrinsic
def v_values(
    typing: Any, rows: Any, kv: Any, values: Any, stride: Any, tokens: Any, probs: Any, out: Any, blocks: Any
) -> Any:
    """out[row] += sum over tokens of probs[row, token] * values[token], for `blocks` * 16 channels."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, values, stride, tokens, probs, out, blocks = args
        e, kind = Emitter(builder), KINDS[kv.dtype]
        size = LANES * bytes_of(kind)

        def some_blocks(first: Any, count: int) -> None:
            def loaded(token: Any) -> list[Any]:
                row = builder.add(e.at(values, first, size), builder.mul(token, stride))
                return [e.load_values(builder.add(row, e.i64(size * part)), kind) for part in range(count)]

            for part in range(count):
                prefetch(e, values, stride, builder.add(first, e.i64(part)), size)
            sums = _weighted_sums(e, rows.count, probs, tokens, count, loaded)
            for row, parts in enumerate(sums):
                for part, total in enumerate(parts):
                    target, at = e.at(out, first, 4 * LANES), 4 * (row * CHANNEL_STRIDE + part * LANES)
                    e.store(builder.fadd(e.load(target, FLOATS, at), total), target, at)

        pairs = builder.ashr(blocks, e.i64(1))
        with e.loop(pairs) as pair:
            some_blocks(builder.shl(pair, e.i64(1)), 2)
        with builder.if_then(builder.trunc(blocks, BIT)):
            some_blocks(builder.shl(pairs, e.i64(1)), 1)
        return context.get_dummy_value()

    return types.void(rows, kv, *[types.int64] * 6), generate


@intrinsic
def scaled_queries(typing: Any, rows: Any, q: Any, scale: Any, offset: Any, out: Any, dots: Any, blocks: Any) -> Any:
    """out[row] = q[row] * scale and dots[row] = q[row] . offset, for `blocks` * 16 channels."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, q, scale, offset, out, dots, blocks = args
        e = Emitter(builder)
        sums = e.sums(rows.count)
        with e.loop(blocks) as block:
            factor, shift = (e.load(e.at(x, block, 4 * LANES), FLOATS) for x in (scale, offset))
            for row, total in enumerate(sums):
                at = 4 * row * CHANNEL_STRIDE
                value = e.load(e.at(q, block, 4 * LANES), FLOATS, at)
                e.store(builder.fmul(value, factor), e.at(out, block, 4 * LANES), at)
                e.add_product(total, value, shift)
        for row, total in enumerate(sums):
            e.store(e.reduce(builder.load(total), builder.fadd), dots, 4 * row)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 6), generate


@intrinsic
def add_dots(typing: Any, rows: Any, scores: Any, dots: Any) -> Any:
    """scores[row, token] += dots[row], for 32 tokens."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder)
        for row in range(rows.count):
            dot = e.splat(e.load(args[2], F32, 4 * row))
            for part in range(2):
                at = 4 * (row * TOKEN_STRIDE + part * LANES)
                e.store(builder.fadd(e.load(args[1], FLOATS, at), dot), args[1], at)
        return context.get_dummy_value()

    return types.void(rows, types.int64, types.int64), generate


@intrinsic
def tile_sums(typing: Any, rows: Any, probs: Any, sums: Any) -> Any:
    """sums[row] = sum of probs[row] over 32 tokens."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder)
        for row in range(rows.count):
            first, second = (e.load(args[1], FLOATS, 4 * (row * TOKEN_STRIDE + part * LANES)) for part in range(2))
            e.store(e.reduce(builder.fadd(first, second), builder.fadd), args[2], 4 * row)
        return context.get_dummy_value()

    return types.void(rows, types.int64, types.int64), generate
