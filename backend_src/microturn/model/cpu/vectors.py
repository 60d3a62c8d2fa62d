"""Building blocks of LLVM code (vectors, loops, memory) for functions in Numba kernels.

A function is written as an ``emit(b, *args)`` that appends instructions to the builder `b`; LLVM maps the vectors to
the CPU's registers. A *matrix* is a
contiguous float32 array of rows, each of so many whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from microturn.model.cpu import kernel_cache

# All kernels made of these blocks import this file before they are decorated.
kernel_cache.watch_all_sources()

# The target of compilation, in LLVM's names.
CPU_FEATURES = frozenset((config.CPU_FEATURES or get_host_cpu_features()).split(","))

# 32 registers of 16 floats with AVX-512; otherwise 16 of 8 floats as with AVX2, or LLVM's equivalent.
HAS_AVX512 = "+avx512f" in CPU_FEATURES
LANES = 16 if HAS_AVX512 else 8

# The target cache of prefetches: 3 is L1, 2 is L2. Intel's L1 can have few outstanding lines, so that L2 is faster
# there; on AMD's Zen 3 L1 is faster by 5 to 15 %.
_NEARNESS = 2 if HAS_AVX512 else 3

INT = ir.IntType(64)
_INT32, _BYTE = ir.IntType(32), ir.IntType(8)
_VECTOR, _INT_VECTOR = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT32, LANES)
_UNDEFINED = _VECTOR(ir.Undefined)

# Allows fused multiply-add, and nothing else: the order of a sum is as written.
_FUSED = ("contract",)

# 2**x for -1/2 <= x <= 1/2 by interpolation at Chebyshev nodes, highest power first; relative error 2.4e-7.
_EXP2 = (0.001339086336353527, 0.009676031918255982, 0.05550357114222094, 0.2402210748530968, 0.6931471880262273, 1.0)
_LEAST_EXPONENT = -126.0
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23

Values = list[ir.Value]


def callable_by_kernels(emit: Callable[..., None]) -> Any:
    """Makes a function that kernels can call; `emit` gets each array's data pointer, and 64-bit integers."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        (kinds,), (packed,) = signature.args, args
        values = cgutils.unpack_tuple(builder, packed)
        for index, kind in enumerate(kinds):
            if isinstance(kind, types.Array):
                values[index] = context.make_array(kind)(context, builder, values[index]).data
        emit(builder, *values)
        return context.get_dummy_value()

    def infer(typing_context: Any, *kinds: Any) -> tuple[Any, Any]:  # noqa: ARG001  Numba's protocol
        arguments = [kind if isinstance(kind, types.Array) else types.int64 for kind in kinds]
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


def load(b: ir.IRBuilder, matrix: ir.Value, row: ir.Value, num_vectors: int) -> Values:
    return [b.load(address, align=4) for address in _addresses(b, matrix, row, num_vectors)]


def store(b: ir.IRBuilder, matrix: ir.Value, row: ir.Value, values: Values) -> None:
    for value, address in zip(values, _addresses(b, matrix, row, len(values)), strict=True):
        b.store(value, address, align=4)


def widen(b: ir.IRBuilder, address: ir.Value, lanes: int) -> ir.Value:
    """Loads `lanes` elements as floats: float32, int8 by value, or bfloat16 stored as int16."""
    narrow = address.type.pointee
    if isinstance(narrow, ir.FloatType):
        return b.load(b.bitcast(address, ir.VectorType(narrow, lanes).as_pointer()), align=4)
    wide = ir.VectorType(_INT32, lanes)
    floats = ir.VectorType(ir.FloatType(), lanes)
    numbers = b.load(b.bitcast(address, ir.VectorType(narrow, lanes).as_pointer()), align=narrow.width // 8)
    if narrow.width == 8:
        return b.sitofp(b.sext(numbers, wide), floats)
    return b.bitcast(b.shl(b.zext(numbers, wide), wide([16] * lanes)), floats)


def fetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetches a cache line (see `_NEARNESS`)."""
    pointer = b.bitcast(address, _BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(prefetch, [pointer, _INT32(0), _INT32(_NEARNESS), _INT32(1)])  # for reading, data


def splat(value: float) -> ir.Constant:
    return _VECTOR([value] * LANES)


def broadcast(b: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    undefined = ir.VectorType(value.type, lanes)(ir.Undefined)
    first = b.insert_element(undefined, value, _INT32(0))
    return b.shuffle_vector(first, undefined, ir.VectorType(_INT32, lanes)(None))


def in_all_lanes(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads one float into all lanes."""
    return broadcast(b, b.load(address))


def load_repeated(b: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    """Loads `count` floats and repeats them to fill the lanes."""
    few = b.load(b.bitcast(address, ir.VectorType(ir.FloatType(), count).as_pointer()), align=4)
    return b.shuffle_vector(few, few.type(ir.Undefined), _INT_VECTOR([lane % count for lane in range(LANES)]))


def store_first(b: ir.IRBuilder, vector: ir.Value, address: ir.Value, count: int) -> None:
    """Stores the first lanes."""
    few = b.shuffle_vector(vector, _UNDEFINED, ir.VectorType(_INT32, count)(list(range(count))))
    b.store(few, b.bitcast(address, few.type.as_pointer()), align=4)


def fold(b: ir.IRBuilder, vector: ir.Value, period: int, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combines all lanes that are a multiple of `period` apart; each of them gets the result."""
    distance = LANES // 2
    while distance >= period:
        rotation = _INT_VECTOR([(lane + distance) % LANES for lane in range(LANES)])
        vector = combine(vector, b.shuffle_vector(vector, _UNDEFINED, rotation))
        distance //= 2
    return vector


def split_runs(b: ir.IRBuilder, x: ir.Value, y: ir.Value, run_len: int) -> tuple[ir.Value, ir.Value]:
    """Two vectors of interleaved runs of `run_len` lanes: the even runs of x and y, and the odd ones."""
    starts = range(0, LANES, 2 * run_len)
    even = [start + i for start in starts for i in (*range(run_len), *range(LANES, LANES + run_len))]
    odd = [lane + run_len for lane in even]
    return b.shuffle_vector(x, y, _INT_VECTOR(even)), b.shuffle_vector(x, y, _INT_VECTOR(odd))


def sums_of_lanes(b: ir.IRBuilder, vectors: Values) -> ir.Value:
    """The sum over the lanes of each of LANES vectors, as one vector: a tree of pairwise sums, for all at once."""
    run_len = 1
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(*split_runs(b, x, y, run_len)) for x, y in pairs]
        run_len *= 2
    return vectors[0]


def add_products(b: ir.IRBuilder, factors: Values, vectors: Values, sums: Values) -> Values:
    """sums[factor, vector] + factor * vector, for every factor with every vector."""
    products = [b.fmul(factor, vector, flags=_FUSED) for factor in factors for vector in vectors]
    return [b.fadd(product, total, flags=_FUSED) for product, total in zip(products, sums, strict=True)]


def maximum(b: ir.IRBuilder, x: ir.Value, known: ir.Value) -> ir.Value:
    """The greater one; `known` where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, known), x, known)


def exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x for x <= 0: 0 where it would be subnormal, NaN for NaN."""
    floor = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VECTOR, [_VECTOR]), f"llvm.floor.v{LANES}f32")
    whole = b.call(floor, [b.fadd(x, splat(0.5))])
    part = b.fsub(x, whole)
    result = splat(_EXP2[0])
    for coefficient in _EXP2[1:]:
        result = b.fadd(b.fmul(result, part, flags=_FUSED), splat(coefficient), flags=_FUSED)
    biased = b.add(b.fptosi(whole, _INT_VECTOR), _INT_VECTOR([_EXPONENT_BIAS] * LANES))
    power = b.bitcast(b.shl(biased, _INT_VECTOR([_MANTISSA_BITS] * LANES)), _VECTOR)
    too_small = b.fcmp_ordered("<", x, splat(_LEAST_EXPONENT))
    return b.select(too_small, splat(0.0), b.fmul(result, power))


def _addresses(b: ir.IRBuilder, matrix: ir.Value, row: ir.Value, num_vectors: int) -> Values:
    vectors = b.bitcast(matrix, _VECTOR.as_pointer())
    start = b.mul(row, INT(num_vectors))
    return [b.gep(vectors, [b.add(start, INT(vector))]) for vector in range(num_vectors)]
