"""The arithmetic: a few rows times one panel of a matrix, as LLVM code.

A block of a few tokens is bound by reading the weights, if each weight that was read serves all rows at once. So a tile
keeps the sums of all its rows in registers, reads the panel once from front to back, and asks for what it will need
some lines ahead: with more arithmetic between two reads, the processor on its own looks less far.

Each sum is taken over the `K` inputs in order, one fused multiply-add after the other, whatever the number of rows:
a token's products are the same bits alone, in a block and in a batch.
"""

from functools import cache

import llvmlite.binding as llvm
import llvmlite.ir as ir

ROWS = 6
"""Rows that one pass over a panel serves: 24 of AVX-512's 32 registers hold sums, 12 of AVX2's 16."""
LANES = 16
"""Floats handled together; the compiler splits them where registers are narrower."""
AHEAD = 4096
"""Bytes between what is read and what is asked for.

Compared with none, 1, 2 and 8 KiB on matrices of 250 MB (Intel, AVX-512): one row is fastest with this; a block of 4
costs more steps without any, and about as many with each of the others.
"""
LINE = 64


@cache
def ahead() -> int:
    """Bytes to ask ahead on this processor: 0, nothing is asked for, on AMD's.

    There every line that is asked for takes one of the few places for lines on their way to the first cache, and those
    that the second one fetches by itself are lost: eight matrices of 5 MB read by 2 to 6 rows at 22 to 26 GB/s with
    this, at 38 to 45 without, with one row at 37 and 43 (EPYC 9004, two cores).
    """
    return 0 if llvm.get_host_cpu_name().startswith("znver") else AHEAD


VOID, POINTER = ir.VoidType(), ir.PointerType()
I1, I8, I16, I32, I64 = map(ir.IntType, (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
ELEMENTS = {"float32": (FLOAT, 4), "float16": (ir.HalfType(), 2), "bfloat16": (I16, 2), "int8": (I8, 1)}
"""Kind of weights -> an element's type and bytes."""


def const(value: int) -> ir.Constant:
    """A 64-bit number."""
    return ir.Constant(I64, value)


def tile(module: ir.Module, kind: str, rows: int, width: int) -> ir.Function:
    """`void tile(x, w, scales, y, K, N)`: `rows` rows of `x` times the panel `w` `[K, width]`, into `y`.

    Args (of the function made):
        x: float32 `[rows, K]`; y: float32 `[rows, N]`, from the panel's first column on.
        scales: float32 `[width]`, read for int8 only.
    """
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER] * 4 + [I64] * 2), f"tile_{kind}_{rows}")
    function.linkage = "internal"
    x, w, scales, y, inputs, stride = function.args
    entry, loop, end = (function.append_basic_block(name) for name in ("entry", "loop", "end"))
    build = ir.IRBuilder(entry)
    row_of_x = [build.gep(x, [build.mul(inputs, const(row))], source_etype=FLOAT) for row in range(rows)]
    build.branch(loop)

    build = ir.IRBuilder(loop)
    k = build.phi(I64)
    sums = [[build.phi(FLOATS) for _ in range(width // LANES)] for _ in range(rows)]
    weights = _read(module, build, kind, w, k, width)
    added = []
    for row in range(rows):
        factor = _splat(build, build.load(build.gep(row_of_x[row], [k], source_etype=FLOAT), typ=FLOAT))
        added.append([_fma(module, build, factor, *pair) for pair in zip(weights, sums[row], strict=True)])
    for row in range(rows):
        for phi, value in zip(sums[row], added[row], strict=True):
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
            phi.add_incoming(value, loop)
    following = build.add(k, const(1))
    k.add_incoming(const(0), entry)
    k.add_incoming(following, loop)
    build.cbranch(build.icmp_signed("<", following, inputs), loop, end)

    build = ir.IRBuilder(end)
    for row in range(rows):
        to = build.gep(y, [build.mul(stride, const(row))], source_etype=FLOAT)
        for part, value in enumerate(added[row]):
            at = [const(part * LANES)]
            if kind == "int8":
                value = build.fmul(value, build.load(build.gep(scales, at, source_etype=FLOAT), typ=FLOATS, align=4))
            build.store(value, build.gep(to, at, source_etype=FLOAT), align=4)
    build.ret_void()
    return function


def _read(module: ir.Module, build: ir.IRBuilder, kind: str, w: ir.Value, k: ir.Value, width: int) -> list[ir.Value]:
    """Row `k` of a panel as float32 vectors; what lies `ahead()` bytes further is asked for."""
    element, size = ELEMENTS[kind]
    row = build.gep(w, [build.mul(k, const(width))], source_etype=element)
    prefetch = declared(module, "llvm.prefetch.p0", VOID, [POINTER, I32, I32, I32])
    for line in range(0, width * size if ahead() else 0, LINE):
        further = build.gep(row, [const(ahead() + line)], source_etype=I8)
        build.call(prefetch, [further, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])
    places = [build.gep(row, [const(at)], source_etype=element) for at in range(0, width, LANES)]
    vector = ir.VectorType(element, LANES)
    return [_widened(build, kind, build.load(place, typ=vector, align=size)) for place in places]


def _widened(build: ir.IRBuilder, kind: str, held: ir.Value) -> ir.Value:
    """A vector of weights as float32: exact for every kind (int8 before its scales)."""
    if kind == "float16":
        return build.fpext(held, FLOATS)
    if kind == "bfloat16":  # the upper half of a float32
        upper = build.shl(build.zext(held, INTS), ir.Constant(INTS, [16] * LANES))
        return build.bitcast(upper, FLOATS)
    return build.sitofp(build.sext(held, INTS), FLOATS) if kind == "int8" else held


def _splat(build: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = build.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return build.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def _fma(module: ir.Module, build: ir.IRBuilder, *operands: ir.Value) -> ir.Value:
    return build.call(declared(module, f"llvm.fma.v{LANES}f32", FLOATS, [FLOATS] * 3), operands)


def begin(
    module: ir.Module, name: str, takes: list[ir.Type], result: ir.Type = VOID
) -> tuple[ir.Function, ir.IRBuilder]:
    """Returns a function of the module and a builder at its beginning."""
    function = ir.Function(module, ir.FunctionType(result, takes), name)
    return function, ir.IRBuilder(function.append_basic_block())


def declared(module: ir.Module, name: str, result: ir.Type, takes: list[ir.Type]) -> ir.Function:
    """A function from outside the module, declared once."""
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, takes), name)
