"""Products of a tile by integers: what `integer` makes of queries and probabilities times codes, on AMX tiles.

Arguments are as in `tiles`, `rows` excepted: a count here. a: bytes of `integer`, at `ROW_BYTES` from row to row.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from windowquant.kernels.cpu.amx import TileEmitter
from windowquant.kernels.cpu.emit import BYTES, F32, FLOATS, LANES, WORDS, bytes_of
from windowquant.kernels.cpu.integer import (
    B_BYTES,
    CHUNK_CHANNELS,
    FIRST,
    K_CODES,
    K_CODES_2,
    K_ROWS,
    ROW_BYTES,
    SECOND,
    V_CODES,
    V_DEPTH,
    V_ROWS,
    each,
)
from windowquant.kernels.cpu.kinds import AHEAD, CHANNEL_STRIDE, KINDS, TOKEN_STRIDE, TOKENS
from windowquant.kernels.cpu.tiles import prefetch, token_words


def _store_planes(e: TileEmitter, words: Any, planes: int, out: Any, step: Any) -> None:
    """Store the codes of packed bytes as bytes, a plane behind the other by `step` bytes."""
    bits = 8 // planes
    mask = e.words(int.from_bytes(bytes([(1 << bits) - 1] * 4), "little", signed=True))
    for plane in range(planes):
        moved = e.builder.lshr(words, e.words(plane * bits)) if plane else words
        e.store(e.builder.and_(moved, mask), out, 0, 64)
        out = e.builder.add(out, step)


def _by_planes(e: TileEmitter, planes: Any, write: Callable[[int], None]) -> None:
    """Write code for each number of planes that there is, and run that for `planes`."""
    for count in (1, 2, 4, 8):
        with e.builder.if_then(e.builder.icmp_signed("==", planes, e.i64(count))):
            write(count)


@intrinsic
def k_products(
    typing: Any, planes: Any, codes: Any, stride: Any, a: Any, b: Any, sums: Any, blocks: Any, chunks: Any
) -> Any:
    """sums[row, token] (int32 [16, 32]) = a[row] . codes[token], for 32 tokens."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        planes, codes, stride, a, b, sums, blocks, chunks = args
        e, half = TileEmitter(builder), B_BYTES // 2

        def write_codes(count: int) -> None:
            with e.loop(blocks) as block:
                own = e.at(b, block, 4 * 64)
                for part, words in enumerate(token_words(e, codes, stride, block)):
                    for index, word in enumerate(words):
                        place = builder.add(own, e.i64(part * half + 64 * index))
                        _store_planes(e, word, count, place, builder.mul(blocks, e.i64(4 * 64)))

        _by_planes(e, planes, write_codes)
        for tile in (FIRST, SECOND):
            e.clear_tile(tile)
        with each(e, chunks, (a, CHUNK_CHANNELS), (b, 16 * 64)) as (rows, own):
            e.load_tile(K_ROWS, rows, ROW_BYTES)
            for part, tile in enumerate((K_CODES, K_CODES_2)):
                e.load_tile(tile, builder.add(own, e.i64(part * half)), 64)
                e.add_tile_product(part, K_ROWS, tile)
        for tile in (FIRST, SECOND):
            e.store_tile(tile, builder.add(sums, e.i64(64 * tile)), 4 * TOKENS)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


def _number(e: TileEmitter, high: Any, low: Any) -> Any:
    """Sums of high and of low bytes at two addresses as floats."""
    b = e.builder
    return b.sitofp(b.add(b.shl(e.load(high, WORDS, 0, 64), e.words(8)), e.load(low, WORDS, 0, 64)), FLOATS)


@intrinsic
def scores_of(typing: Any, rows: Any, sums: Any, steps: Any, dots: Any, scores: Any) -> Any:
    """scores[row, token] = (sums[row, token] + dots[row]) * steps[row]; steps lie as far apart as rows of queries."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, sums, steps, dots, scores = args
        e = TileEmitter(builder)
        places = (sums, 4 * TOKENS), (steps, 4 * CHANNEL_STRIDE), (dots, 64), (scores, 4 * TOKEN_STRIDE)
        with each(e, rows, *places) as (own, step, dot, out):
            factor = e.splat(e.load(step, F32))
            shift = e.splat(e.reduce(e.load(dot, FLOATS), builder.fadd))
            low = e.at(own, rows, 4 * TOKENS)
            for part in range(2):
                number = _number(e, *(builder.add(x, e.i64(64 * part)) for x in (own, low)))
                e.store(builder.fmul(builder.fadd(number, shift), factor), out, 64 * part, 64)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _four_tokens(e: TileEmitter, codes: Any, stride: Any) -> Any:
    """16 words: bytes of a token, and of those 8, 16 and 24 after it."""
    mixed = [LANES * token + channel for channel in range(LANES) for token in range(4)]
    four = [e.load(e.at(codes, stride, V_DEPTH * token), BYTES) for token in range(4)]
    pairs = [e.shuffle(four[first], four[first + 1], range(2 * LANES)) for first in (0, 2)]
    return e.builder.bitcast(e.shuffle(pairs[0], pairs[1], mixed), WORDS)


@intrinsic
def v_codes_as_bytes(typing: Any, planes: Any, codes: Any, stride: Any, b: Any, blocks: Any) -> Any:
    """Write the codes of 32 tokens for products by 16 channels: uint8 [planes * blocks, 8, 16 channels, 4 tokens]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        planes, codes, stride, b, blocks = args
        e, tile_bytes = TileEmitter(builder), 64 * V_DEPTH

        def write_codes(count: int) -> None:
            with e.loop(blocks) as block:
                prefetch(e, codes, stride, block)
                first, target = e.at(codes, block, LANES), e.at(b, block, tile_bytes)
                with e.loop(e.i64(V_DEPTH)) as depth:
                    words = _four_tokens(e, builder.add(first, builder.mul(depth, stride)), stride)
                    _store_planes(e, words, count, e.at(target, depth, 64), builder.mul(blocks, e.i64(tile_bytes)))

        _by_planes(e, planes, write_codes)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _add_sums(
    e: TileEmitter, rows: Any, sums: Any, steps: Any, factors: Any, weights: Any, shifts: Any, out: Any
) -> None:
    """16 channels of `add_values`."""
    places = (sums, 64), (out, 4 * CHANNEL_STRIDE), (steps, 4), (weights, 4)
    with each(e, rows, *places) as (number, target, step, weight):
        value = e.fma(e.splat(e.load(weight, F32)), shifts, e.load(target, FLOATS))
        scaled = e.builder.fmul(_number(e, number, e.at(number, rows, 64)), e.splat(e.load(step, F32)))
        e.store(e.fma(scaled, factors, value), target)


@intrinsic
def add_values(
    typing: Any,
    kv: Any,
    rows: Any,
    a: Any,
    b: Any,
    sums: Any,
    steps: Any,
    scale: Any,
    weights: Any,
    shift: Any,
    factor: Any,
    out: Any,
    blocks: Any,
) -> Any:
    """out[row] += sums[row] * steps[row] * scale + weights[row] * shift * factor, for `blocks` * 16 channels.

    sums: of a[row, token] * b[token] over 32 tokens, written here (int32 [blocks, 2 * rows, 16]). scale, shift: as in
    `query_bytes`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows, a, b, sums, steps, scale, weights, shift, factor, out, blocks = args
        e, kind = TileEmitter(builder), KINDS[kv.dtype]
        size, own_factor = LANES * bytes_of(kind), e.splat(factor)

        def multiply(block: Any) -> None:
            e.clear_tile(FIRST)
            e.load_tile(V_CODES, e.at(b, block, 64 * V_DEPTH), 64)
            e.add_tile_product(FIRST, V_ROWS, V_CODES)
            e.store_tile(FIRST, e.at(sums, block, 1024), 64)

        e.load_tile(V_ROWS, a, ROW_BYTES)
        multiply(e.i64(0))
        with e.loop(blocks) as block:
            ahead = builder.add(block, e.i64(1))  # a product's latency is spent on the sums of the one before
            with builder.if_then(builder.icmp_signed("<", ahead, blocks)):
                multiply(ahead)
            places = [e.at(values, block, size) for values in (scale, shift)]
            for place in places:
                e.prefetch(e.at(place, blocks, AHEAD * size), 1)
            factors, shifts = (e.load_values(place, kind) for place in places)
            target, shifts = e.at(out, block, 4 * LANES), builder.fmul(shifts, own_factor)
            _add_sums(e, rows, e.at(sums, block, 1024), steps, factors, weights, shifts, target)
        return context.get_dummy_value()

    numbers = [types.int64] * 8
    return types.void(kv, *numbers, types.float32, *numbers[:2]), generate
