"""Quantizing and copying 16 channels at a time; for `quantize`.

`given` and `stored` are as `kv` in `tiles`: of x, and of scales. The arithmetic is that of `core.quantizer`, operation
by operation.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from windowquant.kernels.cpu.emit import F32, FLOATS, I8, I32, I64, LANES, WORDS, Emitter, bytes_of
from windowquant.kernels.cpu.kinds import KINDS

INTEGER, FLOAT, SYMMETRIC = range(3)
"""Kinds of zero point."""

_BYTES = ir.VectorType(I8, LANES)


def _read(e: Emitter, address: Any, given: Any, stored: Any) -> Any:
    """16 values as they are stored, as floats."""
    values = e.load_values(address, KINDS[given.dtype])
    return values if given.dtype == stored.dtype else _rounded(e, values, stored)


def _rounded(e: Emitter, values: Any, stored: Any) -> Any:
    kind = KINDS[stored.dtype]
    return e.widen(e.narrow(values, kind), kind)


def _clamped(e: Emitter, x: Any, low: Any, high: Any) -> Any:
    return e.minimum(e.maximum(x, low), high)


def _larger(e: Emitter, a: Any, b: Any) -> Any:
    return e.builder.select(e.builder.icmp_signed(">", a, b), a, b)


def _noted(e: Emitter, values: Any, worst: Any) -> None:
    """Raise the variable `worst`, int32s, to the bit patterns of the absolute values: infinity and NaN are largest."""
    size = e.builder.and_(e.builder.bitcast(values, WORDS), e.words(0x7FFFFFFF))
    e.builder.store(_larger(e, size, e.builder.load(worst)), worst)


def _report(e: Emitter, worst: Any, flaw: Any) -> None:
    """Raise the int32 at address `flaw` to the largest of `worst`."""
    largest = e.reduce(e.builder.load(worst), lambda a, b: _larger(e, a, b))
    e.store(_larger(e, largest, e.load(flaw, I32)), flaw)


def _row(e: Emitter, x: Any, stride: Any, columns: Any, token: Any) -> Any:
    """Address of the token at a column, of the first if that is negative."""
    column = e.load(e.at(columns, token, 8), I64)
    column = e.builder.select(e.builder.icmp_signed("<", column, e.i64(0)), e.i64(0), column)
    return e.builder.add(x, e.builder.mul(column, stride))


@intrinsic
def group_parameters(
    typing: Any,
    given: Any,
    stored: Any,
    x: Any,
    stride: Any,
    columns: Any,
    tokens: Any,
    scale: Any,
    offset: Any,
    step: Any,
    shift: Any,
    flaw: Any,
    bits: Any,
    zero_point: Any,
    limit: Any,
    peak: Any,
) -> Any:
    """Scale and offset, as stored, of 16 channels of a window, and in float32 what codes are made with.

    flaw: int32, raised to the largest bit pattern of an absolute value. limit: the largest stored value. peak: of
    symmetric codes, negative where each group has its own.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x, stride, columns, tokens, scale, offset, step, shift, flaw, bits, zero_point, limit, peak = args
        e = Emitter(builder)
        first = _read(e, _row(e, x, stride, columns, e.i64(0)), given, stored)
        low, high, worst = e.variable(first), e.variable(first), e.variable(e.words(0))
        with e.loop(tokens) as token:
            values = _read(e, _row(e, x, stride, columns, token), given, stored)
            builder.store(e.minimum(values, builder.load(low)), low)
            builder.store(e.maximum(values, builder.load(high)), high)
            _noted(e, values, worst)
        _report(e, worst, flaw)
        lowest, highest, limit = builder.load(low), builder.load(high), e.splat(limit)
        levels = builder.sub(builder.shl(e.i64(1), bits), e.i64(1))
        symmetric = builder.icmp_signed("==", zero_point, e.i64(SYMMETRIC))
        absolute = e.maximum(e.maximum(lowest, builder.fneg(lowest)), e.maximum(highest, builder.fneg(highest)))
        known = builder.fcmp_ordered(">=", peak, F32(0.0))
        absolute = builder.select(known, e.splat(peak), absolute)
        span = builder.select(symmetric, absolute, builder.fsub(highest, lowest))
        levels = builder.select(symmetric, builder.ashr(levels, e.i64(1)), levels)
        wide = builder.fdiv(span, e.splat(builder.sitofp(levels, F32)))
        own = e.narrow(builder.select(symmetric, wide, e.minimum(wide, limit)), KINDS[stored.dtype])
        e.store(own, scale)
        widened = e.widen(own, KINDS[stored.dtype])
        none = builder.fcmp_ordered("==", widened, e.floats(0.0))
        divisor = builder.select(none, e.floats(1.0), widened)
        e.store(divisor, step)
        whole = builder.fmul(divisor, e.rint(builder.fdiv(lowest, divisor)))
        whole = _rounded(e, _clamped(e, whole, builder.fneg(limit), limit), stored)
        integer = builder.icmp_signed("==", zero_point, e.i64(INTEGER))
        zero = builder.select(integer, builder.select(none, lowest, whole), lowest)
        with builder.if_then(builder.not_(symmetric)):
            e.store(e.narrow(zero, KINDS[stored.dtype]), offset)
        e.store(builder.select(symmetric, e.floats(0.0), zero), shift)
        return context.get_dummy_value()

    numbers = [types.int64] * 11 + [types.float32] * 2
    return types.void(given, stored, *numbers), generate


@intrinsic
def codes_of(
    typing: Any,
    given: Any,
    stored: Any,
    x: Any,
    stride: Any,
    columns: Any,
    token: Any,
    step: Any,
    shift: Any,
    codes: Any,
    bits: Any,
    symmetric: Any,
) -> Any:
    """Codes of 16 channels of a token, a byte each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x, stride, columns, token, step, shift, codes, bits, symmetric = args
        e = Emitter(builder)
        values = _read(e, _row(e, x, stride, columns, token), given, stored)
        code = e.rint(builder.fdiv(builder.fsub(values, e.load(shift, FLOATS)), e.load(step, FLOATS)))
        top = builder.sub(builder.shl(e.i64(1), bits), e.i64(1))
        half = builder.mul(builder.ashr(top, e.i64(1)), symmetric)
        top = builder.select(builder.icmp_signed("!=", symmetric, e.i64(0)), half, top)
        lower, upper = (e.splat(builder.sitofp(value, F32)) for value in (builder.neg(half), top))
        code = builder.fadd(_clamped(e, code, lower, upper), builder.fneg(lower))
        e.store(builder.trunc(builder.fptosi(code, WORDS), _BYTES), codes)
        return context.get_dummy_value()

    return types.void(given, stored, *[types.int64] * 9), generate


@intrinsic
def packed(typing: Any, many: Any, codes: Any, out: Any, width: Any, planes: Any, bits: Any) -> Any:
    """Pack planes of `width` codes, len(many) at a time, into `width` bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, codes, out, width, planes, bits = args
        e, kind = Emitter(builder), ir.VectorType(I8, many.count)
        step = builder.trunc(bits, I8)
        with e.loop(builder.sdiv(width, e.i64(many.count))) as part:
            at = builder.mul(part, e.i64(many.count))
            total = e.variable(ir.Constant(kind, [0] * many.count))
            with e.loop(planes) as plane:
                own = e.load(builder.add(builder.add(codes, at), builder.mul(plane, width)), kind)
                shift = builder.mul(builder.trunc(plane, I8), step)
                own = builder.shl(own, e.splat(shift, many.count))
                builder.store(builder.or_(builder.load(total), own), total)
            e.store(builder.load(total), builder.add(out, at))
        return context.get_dummy_value()

    return types.void(many, *[types.int64] * 5), generate


@intrinsic
def copied_tokens(
    typing: Any,
    given: Any,
    stored: Any,
    x: Any,
    stride: Any,
    columns: Any,
    tokens: Any,
    out: Any,
    channels: Any,
    flaw: Any,
) -> Any:
    """Copy all channels of tokens of x, as they are stored, to consecutive rows at `out`; `flaw` as above."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x, stride, columns, tokens, out, channels, flaw = args
        e, kind = Emitter(builder), KINDS[stored.dtype]
        size, out_size = (bytes_of(KINDS[each.dtype]) for each in (given, stored))
        worst = e.variable(e.words(0))
        last = builder.sub(channels, e.i64(LANES))  # the last block may do some channels again
        blocks = builder.sdiv(builder.add(channels, e.i64(LANES - 1)), e.i64(LANES))
        with e.loop(tokens) as token:
            row, target = _row(e, x, stride, columns, token), e.at(out, builder.mul(token, channels), out_size)
            with e.loop(blocks) as block:
                first = builder.mul(block, e.i64(LANES))
                first = builder.select(builder.icmp_signed("<", first, last), first, last)
                values = _read(e, e.at(row, first, size), given, stored)
                _noted(e, values, worst)
                e.store(e.narrow(values, kind), e.at(target, first, out_size))
        _report(e, worst, flaw)
        return context.get_dummy_value()

    return types.void(given, stored, *[types.int64] * 7), generate
