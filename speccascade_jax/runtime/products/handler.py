"""LLVM code of a matrix product on a CPU, which XLA calls, and which idle threads help to compute.

The weights are stored as panels, which are blocks of `P` adjacent columns.

Arithmetic: a tile multiplies a few rows by one panel. For so few rows, reading the weights limits the speed, provided
that each weight, once read, serves all rows. A tile therefore keeps the sums of all its rows in registers, reads the
panel once from front to back, and prefetches some cache lines ahead. The prefetching is explicit, because the
processor's own prefetching reaches less far if there is more arithmetic between two reads. Each sum runs over the `K`
inputs in order, one fused multiply-add after the other, for any number of rows. So a token's products have the same
bits whether it is computed alone, in a block or in a batch.

Job: the threads that compute one product share a state, the job. The job is on the heap, because a helper thread may
outlive the call. Waking a thread takes longer than a small product, so one helper waits for the next job for some
microseconds before it ends. The calling thread puts the job into a shared variable, the letter box, and removes it
again if no helper has taken it.

Call: XLA calls `handler_<kind>(frame)` with `x` float32 `[rows, K]`, panels `[n, K, P]`, scales `[n * P]` and a result
float32 `[rows, n * P]`; XLA's foreign function interface defines `frame` (`xla/ffi/api/c_api.h` next to jaxlib). The
calling thread writes a job, requests helpers from XLA's thread pool, and computes panels one by one until none is left.
A helper that starts late finds no panel. So no thread ever waits for a thread that has not begun, and there is no
deadlock. The calling thread starts with the first panel and helpers with the last one. In this order, the cache of a
core often already holds the panels that the core read in the previous decoding step.
"""

import contextlib
import ctypes
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import llvmlite.binding as llvm
import llvmlite.ir as ir

ROWS = 6
"""Largest number of rows in one pass over a panel: their sums take 24 of AVX-512's 32 registers, or 12 of AVX2's 16."""
LANES = 16
"""Number of floats per vector; the compiler splits vectors if the processor's registers are narrower."""
AHEAD = 4096
"""Number of bytes between the data being read and the data being prefetched.

This value was compared with no prefetching and with 1, 2 and 8 KiB, on matrices of 250 MB (Intel, AVX-512). Products of
one row are fastest with this value. The cost of a block of 4 rows, relative to one row, is higher without prefetching,
and about the same with each of the other values.
"""
LINE = 64


@cache
def ahead() -> int:
    """Returns how many bytes ahead this processor should prefetch; 0, no prefetching, on AMD's Zen processors.

    On Zen, every prefetched line takes one of the few slots for lines on their way to the first-level cache, and lines
    that the second-level cache prefetches by itself are lost. On an EPYC 9004 (two cores), products of 2 to 6 rows read
    eight matrices of 5 MB at 22 to 26 GB/s with prefetching and at 38 to 45 GB/s without. Products of one row read them
    at 37 GB/s with prefetching and at 43 GB/s without.
    """
    return 0 if llvm.get_host_cpu_name().startswith("znver") else AHEAD


VOID, POINTER = ir.VoidType(), ir.PointerType()
I1, I8, I16, I32, I64 = map(ir.IntType, (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
ELEMENTS = {"float32": (FLOAT, 4), "float16": (ir.HalfType(), 2), "bfloat16": (I16, 2), "int8": (I8, 1)}
"""LLVM element type and size in bytes of each weight dtype."""


def const(value: int) -> ir.Constant:
    """Returns a 64-bit integer constant for LLVM code."""
    return ir.Constant(I64, value)


def begin(
    module: ir.Module, name: str, takes: list[ir.Type], result: ir.Type = VOID
) -> tuple[ir.Function, ir.IRBuilder]:
    """Adds an empty function to the module; returns the function, and a builder at the beginning of its body."""
    function = ir.Function(module, ir.FunctionType(result, takes), name)
    return function, ir.IRBuilder(function.append_basic_block())


def declared(module: ir.Module, name: str, result: ir.Type, takes: list[ir.Type]) -> ir.Function:
    """Returns an external function, after declaring it in the module if it is not declared yet."""
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, takes), name)


@dataclass
class Loop:
    """A loop under construction.

    Attributes:
        index: the counter, which starts at 0.
        step: the increment of the counter; the loop's body may replace it.
    """

    index: ir.Value
    step: ir.Value


@contextlib.contextmanager
def counted(build: ir.IRBuilder, bound: ir.Value) -> Iterator[Loop]:
    """Builds a loop around the code built inside the block; it runs at least once, while the index is below `bound`."""
    start, body, end = build.block, build.append_basic_block(), build.append_basic_block()
    build.branch(body)
    build.position_at_end(body)
    loop = Loop(build.phi(I64), const(1))
    loop.index.add_incoming(const(0), start)
    yield loop
    following = build.add(loop.index, loop.step)
    loop.index.add_incoming(following, build.block)
    build.cbranch(build.icmp_signed("<", following, bound), body, end)
    build.position_at_end(end)


def tile(module: ir.Module, kind: str, rows: int, width: int) -> ir.Function:
    """Builds a function that multiplies `rows` rows of `x` by the panel `w` `[K, width]` and writes the result to `y`.

    The function is `void tile(x, w, scales, y, K, N)`.

    Args (of the built function):
        x: float32 `[rows, K]`.
        y: float32 `[rows, N]`, from the panel's first column on.
        scales: float32 `[width]`, read for int8 only.
    """
    function, build = begin(module, f"tile_{kind}_{rows}", [POINTER] * 4 + [I64] * 2)
    function.linkage = "internal"
    x, w, scales, y, inputs, stride = function.args
    entry = build.block
    row_of_x = [build.gep(x, [build.mul(inputs, const(row))], source_etype=FLOAT) for row in range(rows)]
    with counted(build, inputs) as loop:
        sums = [[build.phi(FLOATS) for _ in range(width // LANES)] for _ in range(rows)]
        weights = _read(module, build, kind, w, loop.index, width)
        added = []
        for row in range(rows):
            number = build.load(build.gep(row_of_x[row], [loop.index], source_etype=FLOAT), typ=FLOAT)
            factor = _splat(build, number)
            added.append([_fma(module, build, factor, *pair) for pair in zip(weights, sums[row], strict=True)])
        for phi, value in zip(chain(*sums), chain(*added), strict=True):
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
            phi.add_incoming(value, build.block)
    for row in range(rows):
        to = build.gep(y, [build.mul(stride, const(row))], source_etype=FLOAT)
        for part, value in enumerate(added[row]):
            offset = [const(part * LANES)]
            if kind == "int8":
                value = build.fmul(
                    value, build.load(build.gep(scales, offset, source_etype=FLOAT), typ=FLOATS, align=4)
                )
            build.store(value, build.gep(to, offset, source_etype=FLOAT), align=4)
    build.ret_void()
    return function


def _read(module: ir.Module, build: ir.IRBuilder, kind: str, w: ir.Value, k: ir.Value, width: int) -> list[ir.Value]:
    """Builds code that loads row `k` of a panel as float32 vectors and prefetches data `ahead()` bytes further on."""
    element, size = ELEMENTS[kind]
    row = build.gep(w, [build.mul(k, const(width))], source_etype=element)
    prefetch = declared(module, "llvm.prefetch.p0", VOID, [POINTER, I32, I32, I32])
    for line in range(0, width * size if ahead() else 0, LINE):
        further = build.gep(row, [const(ahead() + line)], source_etype=I8)
        build.call(prefetch, [further, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])
    places = [build.gep(row, [const(first_column)], source_etype=element) for first_column in range(0, width, LANES)]
    vector = ir.VectorType(element, LANES)
    return [_widened(build, kind, build.load(place, typ=vector, align=size)) for place in places]


def _widened(build: ir.IRBuilder, kind: str, weights: ir.Value) -> ir.Value:
    """Builds the exact conversion of a vector of weights to float32; scales of int8 weights are applied later."""
    if kind == "float16":
        return build.fpext(weights, FLOATS)
    if kind == "bfloat16":  # bfloat16 is the upper half of a float32
        upper = build.shl(build.zext(weights, INTS), ir.Constant(INTS, [16] * LANES))
        return build.bitcast(upper, FLOATS)
    return build.sitofp(build.sext(weights, INTS), FLOATS) if kind == "int8" else weights


def _splat(build: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = build.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return build.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def _fma(module: ir.Module, build: ir.IRBuilder, *operands: ir.Value) -> ir.Value:
    return build.call(declared(module, f"llvm.fma.v{LANES}f32", FLOATS, [FLOATS] * 3), operands)


ONE = const(1)
FIELDS = ("x", "w", "scales", "y", "inputs", "stride", "rows", "panels", "taken", "helped", "done", "users", "work")
"""Fields of a job, 8 bytes each; `work` is the function `void work(job, helps)`. After these fields, a job has space
for the arguments of calls to XLA (`_ASKED`, `_POOL`)."""
LOOKS = 1_000
"""Number of times that an idle helper looks for the next job, about 50 ns apart. In total, they take about as long as
the pause between two products of a decoding step."""
_BOX = (ctypes.c_int64 * 16)()
"""The letter box, two cache lines. The first holds the address of a job, or 0 if the box is empty. The second holds 1
while a helper works or waits for a job, otherwise 0."""


def place(build: ir.IRBuilder, job: ir.Value, word: str | int) -> ir.Value:
    """Builds the address of a word in a job: the field of this name, or the `word`-th 8 bytes."""
    number = FIELDS.index(word) if isinstance(word, str) else word
    return build.gep(job, [const(number)], source_etype=I64)


def read(build: ir.IRBuilder, job: ir.Value, word: str | int, kind: ir.Type = I64) -> ir.Value:
    """Builds code that loads the value of a word in a job (see `place`)."""
    return build.load(place(build, job, word), typ=kind)


def add(build: ir.IRBuilder, job: ir.Value, field: str, number: ir.Value = ONE, order: str = "monotonic") -> ir.Value:
    """Builds code that adds a number to a job's field atomically; returns the previous value."""
    return build.atomic_rmw("add", place(build, job, field), number, order)


def drop_user(build: ir.IRBuilder, job: ir.Value, order: str = "monotonic") -> ir.Value:
    """Builds code that subtracts 1 from a job's number of users atomically; returns the previous number."""
    return build.atomic_rmw("sub", place(build, job, "users"), ONE, order)


def release(module: ir.Module) -> ir.Function:
    """Builds the function that each thread calls when it has finished with a job; the last thread frees the memory."""
    if "release" in module.globals:
        return module.globals["release"]
    function, build = begin(module, "release", [POINTER])
    function.linkage = "internal"
    users = drop_user(build, function.args[0], "acq_rel")
    with build.if_then(build.icmp_signed("==", users, ONE)):
        build.call(declared(module, "free", VOID, [POINTER]), function.args)
    build.ret_void()
    return function


def post(build: ir.IRBuilder, job: ir.Value, wanted: ir.Value) -> ir.Value:
    """Builds code that puts a job into the letter box if help is wanted, a helper is waiting and the box is empty.

    Returns:
        Whether the job was put there.
    """
    looking = build.icmp_signed("!=", build.load_atomic(_box(1), "monotonic", 8, typ=I64), const(0))
    asks = build.and_(wanted, looking)
    start = build.block
    with build.if_then(asks):
        add(build, job, "users")
        exchanged = _exchanged(build, _box(0), const(0), build.ptrtoint(job, I64))
        with build.if_then(build.not_(exchanged)):
            drop_user(build, job)
        last = build.block
    posted = build.phi(I1)
    posted.add_incoming(ir.Constant(I1, 0), start)
    posted.add_incoming(exchanged, last)
    return posted


def _box(line: int) -> ir.Constant:
    """Returns the address of the letter box's job (line 0), or of the mark that a helper is waiting (line 1)."""
    return const(ctypes.addressof(_BOX) + 64 * line).inttoptr(I64.as_pointer())


def _exchanged(build: ir.IRBuilder, place: ir.Value, expected: ir.Value, new: ir.Value) -> ir.Value:
    """Builds an atomic exchange: the address `place` gets `new` if it holds `expected`; returns whether it did."""
    return build.extract_value(build.cmpxchg(place, expected, new, "acq_rel", "acquire"), 1)


def take_back(build: ir.IRBuilder, job: ir.Value) -> None:
    """Builds code that removes a job from the letter box if no helper has taken it."""
    with build.if_then(_exchanged(build, _box(0), build.ptrtoint(job, I64), const(0))):
        drop_user(build, job)


def look(module: ir.Module, build: ir.IRBuilder) -> None:
    """Builds a helper's loop: it works on jobs from the letter box until the box was empty `LOOKS` times in a row.

    The loop does nothing if another helper is already waiting for jobs.
    """
    with build.if_then(_exchanged(build, _box(1), const(0), const(1))):
        _help(module, build)
        build.store_atomic(const(0), _box(1), "release", 8)


def _help(module: ir.Module, build: ir.IRBuilder) -> None:
    start, loop, some, taken, none, end = build.block, *(build.append_basic_block() for _ in range(5))
    build.branch(loop)
    build.position_at_end(loop)
    looks = build.phi(I64)
    looks.add_incoming(const(0), start)
    number = build.load_atomic(_box(0), "monotonic", 8, typ=I64)
    build.cbranch(build.icmp_signed("!=", number, const(0)), some, none)
    build.position_at_end(some)
    build.cbranch(_exchanged(build, _box(0), number, const(0)), taken, none)
    build.position_at_end(taken)
    job = build.inttoptr(number, POINTER)
    work = read(build, job, "work", ir.FunctionType(VOID, [POINTER, I64]).as_pointer())
    build.call(work, [job, ONE])
    build.call(release(module), [job])
    looks.add_incoming(const(0), build.block)
    build.branch(loop)
    build.position_at_end(none)
    _pause(module, build)
    following = build.add(looks, ONE)
    looks.add_incoming(following, none)
    build.cbranch(build.icmp_signed("<", following, const(LOOKS)), loop, end)
    build.position_at_end(end)


def _pause(module: ir.Module, build: ir.IRBuilder) -> None:
    """Builds the instruction that tells the processor that a loop is waiting."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        build.call(declared(module, "llvm.x86.sse2.pause", VOID, []), [])
    else:
        build.call(declared(module, "llvm.aarch64.isb", VOID, [I32]), [ir.Constant(I32, 15)])


GRAIN = 65_536
"""Bytes of weights per thread: one more thread makes a product faster only if it can read about this much."""
_NULL = ir.Constant(POINTER, None)
# byte offsets of fields in the C structures of XLA's foreign function interface
_FRAME = {"extension": 8, "api": 16, "context": 24, "arguments": 72, "results": 112}
_BUFFER = {"data": 24, "dims": 40}
_METADATA = {"in extension": 24, "major": 24, "minor": 28, "traits": 32}
_API_FUNCTIONS = 48
_ASKED = len(FIELDS)  # first word of the arguments of XLA's `Schedule`: size, extension, context, task, data
# first word of the arguments of XLA's `NumThreads`: size, extension, context, address; then the number itself
_POOL = _ASKED + 5
_WORDS = _POOL + 5


class Interface(NamedTuple):
    """The version of XLA's foreign function interface in the installed jaxlib, and the place of two of its functions.

    Attributes:
        major, minor: the version, which a handler must report.
        schedule, threads: byte offsets, in XLA's table of functions, of the functions `Schedule` and `NumThreads` of
            its thread pool.
    """

    major: int
    minor: int
    schedule: int
    threads: int


@cache
def interface() -> Interface:
    """Returns the interface that the C header in jaxlib describes.

    Raises:
        LookupError: the header is missing, or its version is unknown to this module.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = header.read_text() if header.is_file() else ""
    versions = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", text)
    wanted = ("XLA_FFI_ThreadPool_Schedule", "XLA_FFI_ThreadPool_NumThreads")
    if versions[0] is None or versions[1] is None or versions[0][1] != "0" or not set(wanted) <= set(functions):
        raise LookupError(
            f"{header} does not describe version 0 of XLA's foreign function interface with its thread pool"
        )
    places = [_API_FUNCTIONS + 8 * functions.index(name) for name in wanted]
    return Interface(int(versions[0][1]), int(versions[1][1]), *places)


def handler(module: ir.Module, kind: str, width: int) -> str:
    """Adds the function that XLA calls, for weights of one dtype in panels of `width` columns; returns its name."""
    work = _worker(module, kind, width)
    task = _task(module, kind, work)
    function, build = begin(module, f"handler_{kind}", [POINTER], POINTER)
    (frame,) = function.args
    extension = _load(build, frame, _FRAME["extension"])
    with build.if_then(build.icmp_unsigned("!=", extension, _NULL)):
        _describe(build, extension)
        build.ret(_NULL)
    job = _job(module, build, frame, work, width)
    posted = _ask(build, frame, job, task, kind, width)
    build.call(work, [job, const(0)])
    with build.if_then(posted):
        take_back(build, job)
    _wait(module, build, job)
    build.call(release(module), [job])
    build.ret(_NULL)
    return str(function.name)


def _load(build: ir.IRBuilder, base: ir.Value, offset: int, kind: ir.Type = POINTER) -> ir.Value:
    return build.load(build.gep(base, [const(offset)], source_etype=I8), typ=kind)


def _describe(build: ir.IRBuilder, extension: ir.Value) -> None:
    """Builds the answer to XLA's query at registration: the interface version that the handler was built for."""
    metadata, version = _load(build, extension, _METADATA["in extension"]), interface()
    for field, value in (("major", version.major), ("minor", version.minor), ("traits", 0)):
        build.store(ir.Constant(I32, value), build.gep(metadata, [const(_METADATA[field])], source_etype=I8))


def _job(module: ir.Module, build: ir.IRBuilder, frame: ir.Value, work: ir.Function, width: int) -> ir.Value:
    """Builds code that allocates a job on the heap, as it may outlive the call, and stores the call's arguments."""
    arguments, results = _load(build, frame, _FRAME["arguments"]), _load(build, frame, _FRAME["results"])
    buffers = [_load(build, arguments, 8 * number) for number in range(3)] + [_load(build, results, 0)]

    def size(buffer: ir.Value, axis: int) -> ir.Value:
        return _load(build, _load(build, buffer, _BUFFER["dims"]), 8 * axis, I64)

    rows, inputs, panels = size(buffers[0], 0), size(buffers[0], 1), size(buffers[1], 0)
    job = build.call(declared(module, "malloc", POINTER, [I64]), [const(8 * _WORDS)])
    data = [_load(build, buffer, _BUFFER["data"]) for buffer in buffers]
    fields = [*data, inputs, build.mul(panels, const(width)), rows, panels, *[const(0)] * 3, const(1), work]
    for name, value in zip(FIELDS, fields, strict=True):
        build.store(value, place(build, job, name))
    return job


def _ask(build: ir.IRBuilder, frame: ir.Value, job: ir.Value, task: ir.Value, kind: str, width: int) -> ir.Value:
    """Builds code that requests helpers: one per `GRAIN` bytes of weights beyond the first `GRAIN` bytes.

    The number of helpers is at most the number of XLA's other threads, and less than the number of panels.

    Returns:
        Whether the first helper was requested through the letter box.
    """
    api, context = _load(build, frame, _FRAME["api"]), _load(build, frame, _FRAME["context"])
    for word, value in enumerate((const(40), _NULL, context, task, job)):
        build.store(value, place(build, job, _ASKED + word))
    for word, value in enumerate((const(32), _NULL, context, place(build, job, _POOL + 4), const(1))):
        build.store(value, place(build, job, _POOL + word))
    _call(build, _load(build, api, interface().threads), place(build, job, _POOL))
    threads, panels, inputs = (read(build, job, word) for word in (_POOL + 4, "panels", "inputs"))
    bytes_held = build.mul(build.mul(panels, inputs), const(width * ELEMENTS[kind][1]))
    wanted = build.sdiv(build.sub(bytes_held, const(1)), const(GRAIN))
    for limit in (build.sub(threads, const(1)), build.sub(panels, const(1))):
        wanted = build.select(build.icmp_signed("<", wanted, limit), wanted, limit)
    posted = post(build, job, build.icmp_signed(">", wanted, const(0)))
    wanted = build.sub(wanted, build.zext(posted, I64))
    with build.if_then(build.icmp_signed(">", wanted, const(0))), counted(build, wanted):
        add(build, job, "users")
        refused = _call(build, _load(build, api, interface().schedule), place(build, job, _ASKED))
        # XLA has no thread pool, so no helper will use the job
        with build.if_then(build.icmp_unsigned("!=", refused, _NULL)):
            drop_user(build, job)
    return posted


def _call(build: ir.IRBuilder, address: ir.Value, argument: ir.Value) -> ir.Value:
    """Builds a call of a function in XLA's table, which takes a structure and returns an error or null."""
    kind = ir.FunctionType(POINTER, [POINTER])
    return build.call(build.inttoptr(build.ptrtoint(address, I64), kind.as_pointer()), [argument])


def _worker(module: ir.Module, kind: str, width: int) -> ir.Function:
    """Builds `void work(job, helps)`, which multiplies panels: the caller from the first one, helpers from the last."""
    function, build = begin(module, f"work_{kind}", [POINTER, I64])
    job, helps = function.args
    x, w, scales, y = [read(build, job, name, POINTER) for name in ("x", "w", "scales", "y")]
    inputs, stride, rows, panels = [read(build, job, name) for name in ("inputs", "stride", "rows", "panels")]
    start = build.block
    claim, go, end = (function.append_basic_block(name) for name in ("claim", "go", "end"))
    build.branch(claim)
    build.position_at_end(claim)
    first = build.phi(I64)  # the caller's next panel
    first.add_incoming(const(0), start)
    taken = add(build, job, "taken")
    build.cbranch(build.icmp_signed("<", taken, panels), go, end)
    build.position_at_end(go)
    # `taken` counts the panels claimed at both ends, so no panel is computed twice
    helped = add(build, job, "helped", helps)
    last = build.sub(build.sub(panels, const(1)), helped)
    panel = build.select(build.icmp_signed("==", helps, const(0)), first, last)
    column = build.mul(panel, const(width))
    w = build.gep(w, [build.mul(column, inputs)], source_etype=ELEMENTS[kind][0])
    scales, y = (build.gep(base, [column], source_etype=FLOAT) for base in (scales, y))
    _all_rows(module, build, kind, width, (x, w, scales, y, inputs, stride), rows)
    add(build, job, "done", order="release")
    first.add_incoming(build.add(first, const(1)), build.block)
    build.branch(claim)
    build.position_at_end(end)
    build.ret_void()
    return function


def _all_rows(
    module: ir.Module, build: ir.IRBuilder, kind: str, width: int, arguments: tuple[ir.Value, ...], rows: ir.Value
) -> None:
    """Builds the product of all rows with a panel, in the fewest tiles of similar size (8 rows: 4 + 4, not 6 + 2)."""
    x, w, scales, y, inputs, stride = arguments
    with counted(build, rows) as loop:
        rest = build.sub(rows, loop.index)
        tiles = build.sdiv(build.add(rest, const(ROWS - 1)), const(ROWS))
        loop.step = build.sdiv(build.sub(build.add(rest, tiles), const(1)), tiles)
        x = build.gep(x, [build.mul(loop.index, inputs)], source_etype=FLOAT)
        y = build.gep(y, [build.mul(loop.index, stride)], source_etype=FLOAT)
        rest_block = build.append_basic_block()
        choice = build.switch(loop.step, rest_block)
        for size in range(1, ROWS + 1):
            build.position_at_end(build.append_basic_block())
            choice.add_case(const(size), build.block)
            build.call(tile(module, kind, size, width), [x, w, scales, y, inputs, stride])
            build.branch(rest_block)
        build.position_at_end(rest_block)


def _task(module: ir.Module, kind: str, work: ir.Function) -> ir.Function:
    """Builds `void task(job)`, which a helper runs: it works on this job, and then on jobs from the letter box."""
    function, build = begin(module, f"task_{kind}", [POINTER])
    build.call(work, [*function.args, const(1)])
    build.call(release(module), function.args)
    look(module, build)
    build.ret_void()
    return function


def _wait(module: ir.Module, build: ir.IRBuilder, job: ir.Value) -> None:
    """Builds a loop that waits until all panels are done; the wait is short, as helpers already work on the rest."""
    loop, end = build.append_basic_block(), build.append_basic_block()
    build.branch(loop)
    build.position_at_end(loop)
    done = build.load_atomic(place(build, job, "done"), "acquire", 8, typ=I64)
    panels = read(build, job, "panels")
    build.cbranch(build.icmp_signed("<", done, panels), loop, end)
    build.position_at_end(end)
