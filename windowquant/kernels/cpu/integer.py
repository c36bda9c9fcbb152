"""Products of a tile by integers: queries and probabilities in 16 bits, as two bytes, times codes, on AMX tiles.

A number x is written as a whole number of steps, 256 * high + low, both signed bytes, with a step for each row: the
largest it can be, divided by `STEPS`. So a product of tiles takes rows of high bytes, then as many of low ones, and
codes are bytes as they are, four of which lie next to each other: channels of a token for K, tokens for V.

Arguments are as in `tiles`, `rows` excepted: a count here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from windowquant.kernels.cpu.amx import CONFIGURATION, TileEmitter, configuration
from windowquant.kernels.cpu.emit import BYTES, F32, FLOATS, I8, I32, I64, LANES, WORDS
from windowquant.kernels.cpu.kinds import AHEAD, CHANNEL_STRIDE, KINDS, MAX_CHANNELS, TOKEN_STRIDE, TOKENS
from windowquant.kernels.cpu.tiles import prefetch, token_words

STEPS = 32512.0
"""Steps of the largest number; a high byte is 127 at most."""

CHUNK_CHANNELS = 64
"""Channels that one product of tiles takes."""

ROW_BYTES = MAX_CHANNELS + 64
"""Bytes from a row of bytes to the next."""
A_BYTES = 16 * ROW_BYTES
"""Bytes that two times eight rows take."""
B_BYTES = 2 * (MAX_CHANNELS // 4) * 64
"""Bytes that the codes of 32 tokens take."""
SUMS_BYTES = MAX_CHANNELS // LANES * 1024
"""Bytes that products of a tile take, int32 [32 channels' or tokens' halves, 16 rows, 16]."""

_FIRST, _SECOND, _K_ROWS, _K_CODES, _K_CODES_2, _V_ROWS, _V_CODES = range(7)
_V_DEPTH = TOKENS // 4
CONFIGS = {
    rows: configuration(
        {tile: (2 * rows, 64) for tile in (_FIRST, _SECOND, _K_ROWS)}
        | {tile: (16, 64) for tile in (_K_CODES, _K_CODES_2)}
        | {_V_ROWS: (2 * rows, TOKENS), _V_CODES: (_V_DEPTH, 64)}
    )
    for rows in range(1, 9)
}
"""What the tiles are for a number of query rows."""

_WHOLE = 12582912.0 + 128.0  # added to a float, leaves its nearest whole number plus 128 in its lowest 16 bits


@intrinsic
def tiles_begun(typing: Any, configuration: Any) -> Any:
    """Take the configuration at an address; returns where in the caller's frame the one before is kept."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = TileEmitter(builder)
        place = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(I8, CONFIGURATION)), I64)
        e.save_configuration(place)
        e.configure(args[0])
        return place

    return types.int64(types.int64), generate


@intrinsic
def tiles_ended(typing: Any, before: Any) -> Any:
    """Undo `tiles_begun`: other libraries believe that their configuration still holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        TileEmitter(builder).configure(args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _picked(e: TileEmitter, words: list[Any]) -> Any:
    """Byte i of every word from vector i."""
    out = words[0]
    for byte in range(1, 4):
        mask = ir.Constant(out.type, [0xFF << 8 * byte if byte < 3 else -(1 << 24)] * out.type.count)
        out = e.builder.or_(e.builder.and_(words[byte], mask), e.builder.and_(out, e.builder.not_(mask)))
    return out


def _two_bytes(e: TileEmitter, numbers: list[Any]) -> tuple[Any, Any]:
    """High and low bytes of four vectors of steps, with those of vector i as byte i of every word."""
    b, kind = e.builder, ir.VectorType(I32, numbers[0].type.count)
    words = [b.bitcast(x, kind) for x in numbers]

    def moved(word: Any, bits: int) -> Any:
        amount = ir.Constant(kind, [abs(bits)] * kind.count)
        return word if bits == 0 else b.shl(word, amount) if bits > 0 else b.lshr(word, amount)

    high = _picked(e, [moved(word, 8 * i - 8) for i, word in enumerate(words)])
    low = _picked(e, [moved(word, 8 * i) for i, word in enumerate(words)])
    return high, b.xor(low, ir.Constant(kind, [0x80808080 - (1 << 32)] * kind.count))


@contextmanager
def _each(e: TileEmitter, count: Any, *places: tuple[Any, int]) -> Iterator[list[Any]]:
    """A loop; gives addresses that start at the first of each pair and go on by the second."""
    with e.loop(count) as index:
        yield [e.at(address, index, step) for address, step in places]


def _dealt(e: TileEmitter, address: Any, kind: str = "float32") -> list[Any]:
    """64 values as four vectors of floats: vector i holds those whose index is i modulo 4."""
    even, odd = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
    size = LANES * (4 if kind == "float32" else 2)
    parts = [e.load_values(e.builder.add(address, e.i64(size * part)), kind) for part in range(4)]
    pairs = [[e.shuffle(parts[i], parts[i + 1], lanes) for i in (0, 2)] for lanes in (even, odd)]
    return [e.shuffle(pairs[i % 2][0], pairs[i % 2][1], odd if i >= 2 else even) for i in range(4)]


@intrinsic
def spread_query(typing: Any, q: Any, largest: Any, target: Any, chunks: Any) -> Any:
    """Write a query in steps, in the order of `_dealt`; returns the step.

    largest: the most that each channel is going to be multiplied with.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, largest, target, chunks = args
        e, size = TileEmitter(builder), 4 * CHUNK_CHANNELS
        most = e.variable(e.floats(0.0))
        with e.loop(builder.mul(chunks, e.i64(4))) as block:
            x, y = (e.load(e.at(address, block, 4 * LANES), FLOATS) for address in (q, largest))
            product = builder.fmul(x, y)
            builder.store(e.maximum(e.maximum(product, builder.fneg(product)), builder.load(most)), most)
        top = e.reduce(builder.load(most), e.maximum)
        some = builder.fcmp_ordered(">", top, F32(0.0))
        per_step = builder.fdiv(F32(STEPS), builder.select(some, top, F32(1.0)))
        with _each(e, chunks, (q, size), (target, size)) as (x, y):
            for part, values in enumerate(_dealt(e, x)):
                e.store(builder.fmul(values, e.splat(per_step)), y, 4 * LANES * part)
        return builder.fdiv(top, F32(STEPS))

    return types.float32(*[types.int64] * 4), generate


@intrinsic
def query_bytes(
    typing: Any, kv: Any, rows: Any, q: Any, scale: Any, shift: Any, factor: Any, a: Any, dots: Any, chunks: Any
) -> Any:
    """Bytes of q[row] * scale, for queries of `spread_query`, and q[row] . shift * factor, as 16 sums of parts of it.

    scale, shift: as stored, those of other windows following them. dots: float32 [rows, 16].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows, q, scale, shift, factor, a, dots, chunks = args
        e, kind = TileEmitter(builder), KINDS[kv.dtype]
        size, row_size = CHUNK_CHANNELS * (4 if kind == "float32" else 2), 4 * CHUNK_CHANNELS
        factor = e.splat(factor)
        with _each(e, rows, (dots, 64)) as (total,):
            e.store(e.floats(0.0), total, 0, 64)
        places = (q, row_size), (scale, size), (shift, size), (a, CHUNK_CHANNELS)
        with _each(e, chunks, *places) as (q, scale, shift, a):
            for values in (scale, shift):
                e.prefetch(e.at(values, chunks, AHEAD * size), size // 64)
            factors, shifts = (_dealt(e, values, kind) for values in (scale, shift))
            shifts = [builder.fmul(values, factor) for values in shifts]
            with _each(e, rows, (q, 4 * CHANNEL_STRIDE), (a, ROW_BYTES), (dots, 64)) as (row, out, total):
                own = [e.load(row, FLOATS, 4 * LANES * part) for part in range(4)]
                high, low = _two_bytes(e, [e.fma(x, y, e.floats(_WHOLE)) for x, y in zip(own, factors, strict=True)])
                e.store(high, out, 0, 64)
                e.store(low, e.at(out, rows, ROW_BYTES), 0, 64)
                dot = e.load(total, FLOATS)
                for x, y in zip(own, shifts, strict=True):
                    dot = e.fma(x, y, dot)
                e.store(dot, total)
        return context.get_dummy_value()

    numbers = [types.int64] * 4
    return types.void(kv, *numbers, types.float32, *numbers[1:]), generate


@intrinsic
def prob_bytes(typing: Any, rows: Any, probs: Any, step: Any, per_step: Any, weights: Any, a: Any) -> Any:
    """Bytes of probs[row], in steps, for 32 tokens: of tokens 0, 8, 16, 24, then of 1, 9, 17, 25, and so on.

    weights: the sums of what the bytes stand for, so that rounding errors weigh a token's value, not its code.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, probs, step, per_step, weights, a = args
        e, kind = TileEmitter(builder), ir.VectorType(F32, 8)
        whole = ir.Constant(kind, [_WHOLE] * 8)
        places = (probs, 4 * TOKEN_STRIDE), (step, 4), (per_step, 4), (weights, 4), (a, ROW_BYTES)
        with _each(e, rows, *places) as (probs, step, per_step, weight, out):
            own = e.splat(e.load(per_step, F32), 8)
            numbers = [builder.fadd(builder.fmul(e.load(probs, kind, 32 * i), own), whole) for i in range(4)]
            high, low = _two_bytes(e, numbers)
            steps = [builder.fsub(number, whole) for number in numbers]
            total = builder.fadd(builder.fadd(*steps[:2]), builder.fadd(*steps[2:]))
            e.store(builder.fmul(e.reduce(total, builder.fadd), e.load(step, F32)), weight)
            e.store(high, out, 0, 32)
            e.store(low, e.at(out, rows, ROW_BYTES), 0, 32)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


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
        for tile in (_FIRST, _SECOND):
            e.clear_tile(tile)
        with _each(e, chunks, (a, CHUNK_CHANNELS), (b, 16 * 64)) as (rows, own):
            e.load_tile(_K_ROWS, rows, ROW_BYTES)
            for part, tile in enumerate((_K_CODES, _K_CODES_2)):
                e.load_tile(tile, builder.add(own, e.i64(part * half)), 64)
                e.add_tile_product(part, _K_ROWS, tile)
        for tile in (_FIRST, _SECOND):
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
        with _each(e, rows, *places) as (own, step, dot, out):
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
    four = [e.load(e.at(codes, stride, _V_DEPTH * token), BYTES) for token in range(4)]
    pairs = [e.shuffle(four[first], four[first + 1], range(2 * LANES)) for first in (0, 2)]
    return e.builder.bitcast(e.shuffle(pairs[0], pairs[1], mixed), WORDS)


@intrinsic
def v_codes_as_bytes(typing: Any, planes: Any, codes: Any, stride: Any, b: Any, blocks: Any) -> Any:
    """Write the codes of 32 tokens for products by 16 channels: uint8 [planes * blocks, 8, 16 channels, 4 tokens]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        planes, codes, stride, b, blocks = args
        e, tile_bytes = TileEmitter(builder), 64 * _V_DEPTH

        def write_codes(count: int) -> None:
            with e.loop(blocks) as block:
                prefetch(e, codes, stride, block)
                first, target = e.at(codes, block, LANES), e.at(b, block, tile_bytes)
                with e.loop(e.i64(_V_DEPTH)) as depth:
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
    with _each(e, rows, *places) as (number, target, step, weight):
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
        size, own_factor = LANES * (4 if kind == "float32" else 2), e.splat(factor)

        def multiply(block: Any) -> None:
            e.clear_tile(_FIRST)
            e.load_tile(_V_CODES, e.at(b, block, 64 * _V_DEPTH), 64)
            e.add_tile_product(_FIRST, _V_ROWS, _V_CODES)
            e.store_tile(_FIRST, e.at(sums, block, 1024), 64)

        e.load_tile(_V_ROWS, a, ROW_BYTES)
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
