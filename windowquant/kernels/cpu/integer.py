"""Queries and probabilities in 16 bits, as two bytes, for products with codes on AMX tiles (`integer_tiles`).

A number x is written as a whole number of steps, 256 * high + low, both signed bytes, with a step for each row: the
largest it can be, divided by `STEPS`. So a product of tiles takes rows of high bytes, then as many of low ones, and
codes are bytes as they are, four of which lie next to each other: channels of a token for K, tokens for V.

Arguments are as in `tiles`, `rows` excepted: a count here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from windowquant.kernels.cpu.amx import CONFIGURATION, TileEmitter, configuration
from windowquant.kernels.cpu.emit import F32, FLOATS, I8, I32, I64, LANES, bytes_of
from windowquant.kernels.cpu.kinds import AHEAD, CHANNEL_STRIDE, KINDS, MAX_CHANNELS, TOKEN_STRIDE, TOKENS

STEPS = 32512.0
"""Steps of the largest number; a high byte is 127 at most."""

LEAST = 1e-12
"""What is taken for the largest number if all are smaller, so that queries in steps stay finite."""

CHUNK_CHANNELS = 64
"""Channels that one product of tiles takes."""

ROW_BYTES = MAX_CHANNELS + 64
"""Bytes from a row of bytes to the next."""
A_BYTES = 16 * ROW_BYTES
"""Bytes that two times eight rows take."""
B_BYTES = 2 * (MAX_CHANNELS // 4) * 64
"""Bytes that the codes of 32 tokens take."""
SUMS_BYTES = MAX_CHANNELS // LANES * 1024
"""Bytes that the sums of V take, int32 [D / 16, 16 rows, 16]; those of K take less."""

FIRST, SECOND, K_ROWS, K_CODES, K_CODES_2, V_ROWS, V_CODES = range(7)
"""Tiles: sums of K for the first 16 tokens and the next, or of V; then what is multiplied."""
V_DEPTH = TOKENS // 4
"""Rows of a tile of V's codes."""
CONFIGS = {
    rows: configuration(
        {tile: (2 * rows, 64) for tile in (FIRST, SECOND, K_ROWS)}
        | {tile: (16, 64) for tile in (K_CODES, K_CODES_2)}
        | {V_ROWS: (2 * rows, TOKENS), V_CODES: (V_DEPTH, 64)}
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
def each(e: TileEmitter, count: Any, *places: tuple[Any, int]) -> Iterator[list[Any]]:
    """A loop; gives addresses that start at the first of each pair and go on by the second."""
    with e.loop(count) as index:
        yield [e.at(address, index, step) for address, step in places]


def _dealt(e: TileEmitter, address: Any, kind: str = "float32") -> list[Any]:
    """64 values as four vectors of floats: vector i holds those whose index is i modulo 4."""
    even, odd = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
    size = LANES * bytes_of(kind)
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
        top = builder.select(builder.fcmp_ordered(">", top, F32(LEAST)), top, F32(LEAST))
        per_step = builder.fdiv(F32(STEPS), top)
        with each(e, chunks, (q, size), (target, size)) as (x, y):
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
        size, row_size = CHUNK_CHANNELS * bytes_of(kind), 4 * CHUNK_CHANNELS
        factor = e.splat(factor)
        with each(e, rows, (dots, 64)) as (total,):
            e.store(e.floats(0.0), total, 0, 64)
        places = (q, row_size), (scale, size), (shift, size), (a, CHUNK_CHANNELS)
        with each(e, chunks, *places) as (q, scale, shift, a):
            for values in (scale, shift):
                e.prefetch(e.at(values, chunks, AHEAD * size), size // 64)
            factors, shifts = (_dealt(e, values, kind) for values in (scale, shift))
            shifts = [builder.fmul(values, factor) for values in shifts]
            with each(e, rows, (q, 4 * CHANNEL_STRIDE), (a, ROW_BYTES), (dots, 64)) as (row, out, total):
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
        with each(e, rows, *places) as (probs, step, per_step, weight, out):
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
