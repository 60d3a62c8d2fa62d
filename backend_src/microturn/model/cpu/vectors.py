"""Building blocks of LLVM code (vectors, loops, memory) for functions in Numba kernels.

A function is written as an ``emit(b, *args)`` that appends instructions to the builder `b`; LLVM maps the vectors to
the CPU's registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.core.errors import TypingError
from numba.extending import intrinsic

# The target of compilation, in LLVM's names.
CPU_FEATURES = frozenset((config.CPU_FEATURES or get_host_cpu_features()).split(","))

# 32 registers of 16 floats with AVX-512; otherwise 16 of 8 floats as with AVX2, or LLVM's equivalent.
HAS_AVX512 = "+avx512f" in CPU_FEATURES
_HAS_FMA = HAS_AVX512 or "+fma" in CPU_FEATURES
LANES = 16 if HAS_AVX512 else 8

# Target caches of prefetches, as LLVM numbers them.
L1, L2 = 3, 2

INT = ir.IntType(64)
_INT32, _INT16, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_VECTOR, _INT_VECTOR = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT32, LANES)
_UNDEFINED = _VECTOR(ir.Undefined)

# Arguments of AVX-512's functions: no lane is left out, and rounding is as the CPU is set: to nearest, ties to even.
_ALL_LANES, _CURRENT_ROUNDING = _INT16(-1), _INT32(4)

# 2**x for -1/2 <= x <= 1/2 by interpolation at Chebyshev nodes, highest power first; relative error 2.4e-7.
_EXP2 = (0.001339086336353527, 0.009676031918255982, 0.05550357114222094, 0.2402210748530968, 0.6931471880262273, 1.0)
# Smaller powers are 0. Beside 1 they are nothing, and their products with scales would be subnormal.
_LEAST_EXPONENT = -100.0
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23

Values = list[ir.Value]


def callable_by_kernels(emit: Callable[..., None]) -> Any:
    """Makes a function that kernels can call; `emit` gets each array's data pointer, 64-bit integers and floats.

    Compiling a call with an array that is not known to be contiguous fails.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        (kinds,), (packed,) = signature.args, args
        values = cgutils.unpack_tuple(builder, packed)
        for index, kind in enumerate(kinds):
            if isinstance(kind, types.Array):
                values[index] = context.make_array(kind)(context, builder, values[index]).data
        emit(builder, *values)
        return context.get_dummy_value()

    def infer(typing_context: Any, *kinds: Any) -> tuple[Any, Any]:  # noqa: ARG001  Numba's protocol
        arrays = [kind for kind in kinds if isinstance(kind, types.Array)]
        if not all(kind.is_c_contig for kind in arrays):
            raise TypingError(f"an array is not contiguous: {arrays}")
        arguments = [kind if isinstance(kind, types.Array | types.Float) else types.int64 for kind in kinds]
        return types.void(types.StarArgTuple(arguments)), generate

    return intrinsic(infer)


def loop(
    b: ir.IRBuilder,
    count: ir.Value,
    initial: Values,
    body: Callable[[ir.Value, Values], Values],
    *,
    fills_registers: bool = False,
) -> Values:
    """``for index in range(count)`` for a positive count: `body` returns the next values, which stay in registers.

    If they fill the registers, LLVM must not unroll: it would move sums between the copies, and spill some.
    """
    before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(inside)
    b.position_at_end(inside)
    index = b.phi(INT)
    values = [b.phi(value.type) for value in initial]
    results = body(index, values)
    end = b.block  # differs from `inside` if the body branches
    next_index = b.add(index, INT(1))
    for phi, first, result in zip([index, *values], [INT(0), *initial], [next_index, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(result, end)
    again = b.cbranch(b.icmp_signed("<", next_index, count), inside, after)
    if fills_registers:
        again.set_metadata("llvm.loop", _never_unroll(b.module))
    b.position_at_end(after)
    return results


def _never_unroll(module: ir.Module) -> ir.MDValue:
    unroll = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop_id = ir.MDValue(module, [unroll], name=str(len(module.metadata)))
    loop_id.operands = (loop_id, unroll)  # LLVM requires the first operand to be the node itself
    return loop_id


def for_each_choice(b: ir.IRBuilder, value: ir.Value, choices: Iterable[int], emit: Callable[[int], None]) -> None:
    """Emits code for each of the choices; at run time the one that equals `value` runs."""
    for choice in choices:
        with b.if_then(b.icmp_signed("==", value, INT(choice))):
            emit(choice)


def loop_any(b: ir.IRBuilder, count: ir.Value, body: Callable[[ir.Value, Values], Values]) -> None:
    """A `loop` without values whose count may be 0."""
    with b.if_then(b.icmp_signed(">", count, INT(0))):
        loop(b, count, [], body)


def choose(b: ir.IRBuilder, condition: ir.Value, values: Values, body: Callable[[Values], Values]) -> Values:
    """``body(values)`` if the condition holds, otherwise `values`."""
    before = b.block
    with b.if_then(condition):
        results = body(values)
        inside = b.block
    phis = [b.phi(value.type) for value in values]
    for phi, value, result in zip(phis, values, results, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(result, inside)
    return phis


def load_vector(b: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    """Loads `count` elements."""
    kind = ir.VectorType(address.type.pointee, count)
    return b.load(b.bitcast(address, kind.as_pointer()), align=1)


def store_vector(b: ir.IRBuilder, vector: ir.Value, address: ir.Value) -> None:
    b.store(vector, b.bitcast(address, vector.type.as_pointer()), align=1)


def load_first(b: ir.IRBuilder, address: ir.Value, count: int, num_first: ir.Value) -> ir.Value:
    """Loads `num_first` elements, and zeros for the others of `count`, whose memory is not touched."""
    kind = ir.VectorType(address.type.pointee, count)
    mask = b.icmp_signed("<", ir.VectorType(INT, count)(list(range(count))), broadcast(b, num_first, count))
    pointer = b.bitcast(address, kind.as_pointer())
    name = f"llvm.masked.load.v{count}{kind.element.intrinsic_name}.p0"
    signature = ir.FunctionType(kind, [pointer.type, _INT32, mask.type, kind])
    masked_load = cgutils.get_or_insert_function(b.module, signature, name)
    return b.call(masked_load, [pointer, _INT32(1), mask, kind(None)])


def fetch(b: ir.IRBuilder, address: ir.Value, cache: int) -> None:
    """Prefetches a cache line into L1 or L2."""
    pointer = b.bitcast(address, _BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(prefetch, [pointer, _INT32(0), _INT32(cache), _INT32(1)])  # for reading, data


def splat(value: float) -> ir.Constant:
    return _VECTOR([value] * LANES)


def broadcast(b: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    undefined = ir.VectorType(value.type, lanes)(ir.Undefined)
    first = b.insert_element(undefined, value, _INT32(0))
    return b.shuffle_vector(first, undefined, ir.VectorType(_INT32, lanes)(None))


def alternating(period: int) -> ir.Constant:
    """1 in as many lanes, then -1 in as many, and so on."""
    return _VECTOR([-1.0 if lane & period else 1.0 for lane in range(LANES)])


def exchanged(b: ir.IRBuilder, vector: ir.Value, distance: int) -> ir.Value:
    """The vector with lanes exchanged that are a power of two apart."""
    return b.shuffle_vector(vector, _UNDEFINED, _INT_VECTOR([lane ^ distance for lane in range(LANES)]))


def in_all_lanes(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads one float into all lanes."""
    return broadcast(b, b.load(address))


def fold(b: ir.IRBuilder, vector: ir.Value, period: int, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combines all lanes that are a multiple of `period` apart; each of them gets the result."""
    num_lanes = vector.type.count
    distance = num_lanes // 2
    while distance >= period:
        rotation = ir.VectorType(_INT32, num_lanes)([(lane + distance) % num_lanes for lane in range(num_lanes)])
        vector = combine(vector, b.shuffle_vector(vector, vector.type(ir.Undefined), rotation))
        distance //= 2
    return vector


def lanes_within(b: ir.IRBuilder, first: ir.Value, end: ir.Value, offset: int) -> ir.Value:
    """Which lanes, counted from `offset` on, are at least `first` and below `end`; `end` is at least `first`."""
    start, length = (broadcast(b, b.trunc(value, _INT32)) for value in (first, b.sub(end, first)))
    at = b.sub(_INT_VECTOR([offset + lane for lane in range(LANES)]), start)
    return b.icmp_unsigned("<", at, length)


def multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
    """Total + x * y of vectors of floats, rounded once where the CPU can.

    Asked for by its name: where LLVM is only allowed to fuse (``contract``), it does so in one place of the code and
    not in another, as its blocks happen to lie, and a row's bits depend on which of them computes it.
    """
    if not _HAS_FMA:
        return b.fadd(b.fmul(x, y), total)
    return _elementwise(b, "fma", x, y, total)


def square_root(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The square root of each lane, rounded correctly."""
    return _elementwise(b, "sqrt", x)


def maximum(b: ir.IRBuilder, x: ir.Value, known: ir.Value) -> ir.Value:
    """The greater one; `known` where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, known), x, known)


def exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x for x <= 0: 0 below the least exponent, NaN for NaN.

    Nothing subnormal is computed, not even to be dropped: an instruction that meets it takes 200 cycles on Intel's
    CPUs, and each block with keys that are not seen would have several.
    """
    least = splat(_LEAST_EXPONENT)
    too_small = b.fcmp_ordered("<", x, least)
    x = b.select(too_small, least, x)
    whole = _elementwise(b, "rint", x)
    part = b.fsub(x, whole)
    result = splat(_EXP2[0])
    for coefficient in _EXP2[1:]:
        result = multiply_add(b, result, part, splat(coefficient))
    if HAS_AVX512:
        kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR, _INT16, _INT32])
        scale = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
        scaled = b.call(scale, [result, whole, _UNDEFINED, _ALL_LANES, _CURRENT_ROUNDING])
    else:
        biased = b.add(b.fptosi(whole, _INT_VECTOR), _INT_VECTOR([_EXPONENT_BIAS] * LANES))
        power = b.bitcast(b.shl(biased, _INT_VECTOR([_MANTISSA_BITS] * LANES)), _VECTOR)
        scaled = b.fmul(result, power)
    return b.select(too_small, splat(0.0), scaled)


def tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The hyperbolic tangent, up to 2e-7."""
    magnitude = _elementwise(b, "fabs", x)
    power = exp2(b, b.fmul(magnitude, splat(-2 * math.log2(math.e))))
    result = b.fdiv(b.fsub(splat(1.0), power), b.fadd(splat(1.0), power))
    return b.select(b.fcmp_ordered("<", x, splat(0.0)), b.fneg(result), result)


def nearest_ints(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """A vector's floats as int32, ties to even."""
    if HAS_AVX512:
        kind = ir.FunctionType(_INT_VECTOR, [_VECTOR, _INT_VECTOR, _INT16, _INT32])
        convert = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.cvtps2dq.512")
        return b.call(convert, [x, _INT_VECTOR(ir.Undefined), _ALL_LANES, _CURRENT_ROUNDING])
    return b.fptosi(_elementwise(b, "rint", x), _INT_VECTOR)


def _elementwise(b: ir.IRBuilder, name: str, *operands: ir.Value) -> ir.Value:
    """LLVM's function of this name, of vectors of as many floats."""
    kind = operands[0].type
    signature = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(b.module, signature, f"llvm.{name}.v{kind.count}f32")
    return b.call(function, operands)
