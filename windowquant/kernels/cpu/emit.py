"""LLVM vector code, written from Python: what the tiles are made of.

Numba's own loops are vectorised as LLVM sees fit, with half-wide vectors on most AVX-512 machines and without keeping
sums in registers. Here vectors have 16 lanes of 32 bits; on machines with shorter ones LLVM splits them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
BIT, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
HALVES, SHORTS, BYTES = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), I16, I8))
_QUAD = ir.VectorType(I32, 4)
_EXP2 = (0.001327647129073739, 0.009675540961325169, 0.05550713092088699, 0.24022120237350464, 0.6931469440460205, 1.0)
"""A polynomial for powers of 2 from -1/2 to 1/2."""
_WHOLE = 12582912.0  # 1.5 * 2**23: added to a float, leaves its nearest whole number in the lowest bits


def bytes_of(kind: str) -> int:
    """Bytes of a value of "float16", "bfloat16" or "float32"."""
    return 4 if kind == "float32" else 2


class Emitter:
    """Writes instructions at the place where `builder` stands. Addresses are int64 values, in bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def i64(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def words(self, value: int) -> Any:
        """One int32 in all lanes, known now."""
        return ir.Constant(WORDS, [value] * LANES)

    def floats(self, value: float) -> Any:
        """One float in all lanes, known now."""
        return ir.Constant(FLOATS, [value] * LANES)

    def splat(self, scalar: Any, lanes: int = LANES) -> Any:
        """One scalar in all lanes."""
        none = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.builder.insert_element(none, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def at(self, address: Any, index: Any, step: int) -> Any:
        """address + index * step."""
        return self.builder.add(address, self.builder.mul(index, self.i64(step)))

    def load(self, address: Any, kind: Any, offset: int = 0, align: int = 1) -> Any:
        loaded = self.builder.load(self._pointer(address, kind, offset))
        loaded.align = align
        return loaded

    def store(self, value: Any, address: Any, offset: int = 0, align: int = 1) -> None:
        self.builder.store(value, self._pointer(address, value.type, offset)).align = align

    def prefetch(self, address: Any, lines: int) -> None:
        """Have some cache lines of 64 bytes brought near, whatever lies there."""
        b, pointer = self.builder, I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        for line in range(lines):
            b.call(function, [self._pointer(address, I8, 64 * line), I32(0), I32(3), I32(1)])

    def _pointer(self, address: Any, kind: Any, offset: int) -> Any:
        if offset:
            address = self.builder.add(address, self.i64(offset))
        return self.builder.inttoptr(address, kind.as_pointer())

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """A loop; gives the index, int64 from 0 to `count`."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def variable(self, value: Any) -> Any:
        """A variable that is `value` from here on, each time the code comes past; LLVM keeps it in a register."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    def sums(self, count: int) -> list[Any]:
        """Variables of 16 floats, zero."""
        return [self.variable(self.floats(0.0)) for _ in range(count)]

    def add_product(self, target: Any, x: Any, y: Any) -> None:
        """target += x * y, for a variable."""
        self.builder.store(self.fma(x, y, self.builder.load(target)), target)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self._call("llvm.fma", x, y, z)

    def rint(self, x: Any) -> Any:
        """The nearest whole number, ties to even."""
        return self._call("llvm.rint", x)

    def maximum(self, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", x, y), x, y)

    def _call(self, name: str, *values: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * len(values))
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"{name}.v16f32"), values)

    def shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        """Lanes of x (0 to n - 1) and y (from n on)."""
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def reduce(self, x: Any, combine: Any) -> Any:
        """All lanes to one, by halves."""
        lanes = x.type.count
        half = lanes // 2
        while half:
            x = combine(x, self.shuffle(x, x, [(lane + half) % lanes for lane in range(lanes)]))
            half //= 2
        return self.builder.extract_element(x, ir.Constant(I32, 0))

    def exp2(self, x: Any) -> Any:
        """2 to the power of x, for x <= 0; relative error below 3e-7; that of -125 from there down; NaN of NaN."""
        b, least = self.builder, self.floats(-125.0)
        x = b.select(b.fcmp_ordered("<", x, least), least, x)
        whole = b.fadd(x, self.floats(_WHOLE))
        rest = b.fsub(x, b.fsub(whole, self.floats(_WHOLE)))
        series = self.floats(_EXP2[0])
        for factor in _EXP2[1:]:
            series = self.fma(series, rest, self.floats(factor))
        exponent = b.shl(b.bitcast(whole, WORDS), self.words(23))
        return b.bitcast(b.add(b.bitcast(series, WORDS), exponent), FLOATS)

    def widen(self, values: Any, kind: str) -> Any:
        """16 values of "float16", "bfloat16" (both as int16) or "float32" as floats."""
        b = self.builder
        if kind == "float16":
            return b.fpext(b.bitcast(values, HALVES), FLOATS)
        if kind == "bfloat16":
            return b.bitcast(b.shl(b.zext(values, WORDS), self.words(16)), FLOATS)
        return values

    def narrow(self, values: Any, kind: str) -> Any:
        """Undo `widen`: finite floats rounded to the nearest, ties to even; larger float16 becomes infinite."""
        b = self.builder
        if kind == "float16":
            return b.bitcast(b.fptrunc(values, HALVES), SHORTS)
        if kind == "bfloat16":
            bits = b.bitcast(values, WORDS)
            odd = b.and_(b.lshr(bits, self.words(16)), self.words(1))
            return b.trunc(b.lshr(b.add(b.add(bits, self.words(0x7FFF)), odd), self.words(16)), SHORTS)
        return values

    def load_values(self, address: Any, kind: str) -> Any:
        """16 consecutive values as floats."""
        return self.widen(self.load(address, FLOATS if kind == "float32" else SHORTS), kind)

    def transposed(self, address: Any, stride: Any) -> list[Any]:
        """Four vectors of words: vector j holds word j of each of 16 rows, `stride` bytes apart."""
        rows = []
        for _ in range(LANES):
            rows.append(self.load(address, _QUAD))
            address = self.builder.add(address, stride)
        quads = [self._joined(rows[i::4]) for i in range(4)]
        low, high = (0, 16, 1, 17), (2, 18, 3, 19)
        a, c = (self._by_quads(quads[0], quads[1], lanes) for lanes in (low, high))
        d, e = (self._by_quads(quads[2], quads[3], lanes) for lanes in (low, high))
        return [self._by_quads(x, y, lanes) for x, y in ((a, d), (c, e)) for lanes in ((0, 1, 16, 17), (2, 3, 18, 19))]

    def _joined(self, parts: list[Any]) -> Any:
        while len(parts) > 1:
            count = parts[0].type.count
            parts = [self.shuffle(x, y, range(2 * count)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _by_quads(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        """The same choice of lanes in every group of four."""
        return self.shuffle(x, y, [first + lane for first in range(0, LANES, 4) for lane in lanes])
