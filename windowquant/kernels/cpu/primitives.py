"""Small intrinsics of Numba: numbers and rows of numbers at addresses. Arguments as in `tiles`."""

from typing import Any

from numba import types
from numba.extending import intrinsic

from windowquant.kernels.cpu.emit import BYTES, F32, FLOATS, HALVES, I32, I64, LANES, SHORTS, Emitter, bytes_of
from windowquant.kernels.cpu.kinds import AHEAD, KINDS


@intrinsic
def widened(typing: Any, kv: Any, values: Any, factors: Any, out: Any, blocks: Any) -> Any:
    """out = values * factors, for `blocks` * 16 of them; factors and out are float32. Others follow them in memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values, factors, out, blocks = args
        e, kind = Emitter(builder), KINDS[kv.dtype]
        with e.loop(blocks) as block:
            size = LANES * bytes_of(kind)
            place = e.at(values, block, size)
            e.prefetch(e.at(place, blocks, AHEAD * size), 1)
            value = e.load_values(place, kind)
            factor = e.load(e.at(factors, block, 4 * LANES), FLOATS)
            e.store(builder.fmul(value, factor), e.at(out, block, 4 * LANES))
        return context.get_dummy_value()

    return types.void(kv, *[types.int64] * 4), generate


@intrinsic
def value(typing: Any, kv: Any, address: Any) -> Any:
    """One value as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e, kind = Emitter(builder), KINDS[kv.dtype]
        if kind == "float32":
            return e.load(args[1], F32)
        bits = e.load(args[1], SHORTS.element)
        if kind == "float16":
            return builder.fpext(builder.bitcast(bits, HALVES.element), F32)
        return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)

    return types.float32(kv, types.int64), generate


@intrinsic
def largest(typing: Any, scores: Any, blocks: Any) -> Any:
    """Largest of `blocks` * 16 floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, blocks = args
        e = Emitter(builder)
        top = e.variable(e.load(scores, FLOATS))
        with e.loop(blocks) as block:
            builder.store(e.maximum(builder.load(top), e.load(e.at(scores, block, 4 * LANES), FLOATS)), top)
        return e.reduce(builder.load(top), e.maximum)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exponentials(typing: Any, scores: Any, top: Any, blocks: Any) -> Any:
    """Replace `blocks` * 16 scores, none above `top`, by 2 ** (score - top); returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, top, blocks = args
        e = Emitter(builder)
        total, top = e.variable(e.floats(0.0)), e.splat(top)
        with e.loop(blocks) as block:
            place = e.at(scores, block, 4 * LANES)
            power = e.exp2(builder.fsub(e.load(place, FLOATS), top))
            e.store(power, place)
            builder.store(builder.fadd(builder.load(total), power), total)
        return e.reduce(builder.load(total), builder.fadd)

    return types.float32(types.int64, types.float32, types.int64), generate


@intrinsic
def copied(typing: Any, source: Any, stride: Any, target: Any, target_stride: Any, count: Any, size: Any) -> Any:
    """Copy `count` rows of `size` bytes; both strides are in bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, target, target_stride, count, size = args
        e = Emitter(builder)
        with e.loop(count) as row, e.loop(size) as byte:
            origin = builder.add(builder.add(source, builder.mul(row, stride)), byte)
            place = builder.add(builder.add(target, builder.mul(row, target_stride)), byte)
            e.store(e.load(origin, BYTES.element), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def number(typing: Any, address: Any) -> Any:
    """The float32 at an address."""
    return types.float32(types.int64), lambda context, builder, signature, args: Emitter(builder).load(args[0], F32)


@intrinsic
def put(typing: Any, address: Any, number: Any) -> Any:
    """Store a float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emitter(builder).store(args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def multiplied(typing: Any, address: Any, factor: Any, blocks: Any) -> Any:
    """Multiply `blocks` * 16 floats by a factor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, factor, blocks = args
        e = Emitter(builder)
        factor = e.splat(factor)
        with e.loop(blocks) as block:
            place = e.at(address, block, 4 * LANES)
            e.store(builder.fmul(e.load(place, FLOATS), factor), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic
def add_multiple(typing: Any, address: Any, source: Any, factor: Any, blocks: Any) -> Any:
    """Add `blocks` * 16 floats, times a factor, to as many others."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, source, factor, blocks = args
        e = Emitter(builder)
        factor = e.splat(factor)
        with e.loop(blocks) as block:
            place = e.at(address, block, 4 * LANES)
            added = e.load(e.at(source, block, 4 * LANES), FLOATS)
            e.store(e.fma(added, factor, e.load(place, FLOATS)), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def cleared(typing: Any, address: Any, blocks: Any) -> Any:
    """Set `blocks` * 16 floats to zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder)
        with e.loop(args[1]) as block:
            e.store(e.floats(0.0), e.at(args[0], block, 4 * LANES))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as pointer to int64, for `numba.carray`."""
    kind = types.CPointer(types.int64)
    return kind(types.int64), lambda context, builder, signature, args: builder.inttoptr(args[0], I64.as_pointer())


@intrinsic
def taken(typing: Any, job: Any, entry: Any) -> Any:
    """An entry of int64s that a pointer points to, which grows by one, whatever other threads do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(builder.bitcast(args[0], I64.as_pointer()), [args[1]])
        return builder.atomic_rmw("add", place, I64(1), "acq_rel")

    return types.int64(types.voidptr, types.int64), generate
