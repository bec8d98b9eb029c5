"""A whole product as a call that XLA makes: the panels dealt out to the threads that are free.

XLA calls `handler_<kind>(frame)` with `x` float32 `[rows, K]`, panels `[n, K, P]`, scales `[n * P]` and a result
float32 `[rows, n * P]`; `frame` is as XLA's foreign function interface says (`xla/ffi/api/c_api.h` beside jaxlib).
The calling thread writes a job, asks XLA's own thread pool for help, and takes panels one by one until none is left; a
helper that comes late finds none. So no thread ever waits for one that has not begun, and nothing can lock up. The
caller takes the first panels and helpers the last ones, so that a core finds in its own cache what it read a step ago.

One helper stays awake for some microseconds, and finds the next product in a letter box (`jobs`).
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import llvmlite.ir as ir

from speccascade_jax.runtime.products.jobs import FIELDS, add, drop_user, look, place, post, read, release, take_back
from speccascade_jax.runtime.products.tiles import (
    ELEMENTS,
    FLOAT,
    I8,
    I32,
    I64,
    POINTER,
    ROWS,
    begin,
    const,
    declared,
    tile,
)

GRAIN = 65_536
"""Bytes of weights for which it is worth to ask one more thread."""
_NULL = ir.Constant(POINTER, None)
# bytes from the start of XLA's structures
_FRAME = {"extension": 8, "api": 16, "context": 24, "arguments": 72, "results": 112}
_BUFFER = {"data": 24, "dims": 40}
_METADATA = {"in extension": 24, "major": 24, "minor": 28, "traits": 32}
_API_FUNCTIONS = 48
_ASKED = len(FIELDS)  # behind them, what is passed to XLA to ask for a thread: size, extension, context, task, data
_POOL = _ASKED + 5  # and to learn how many there are: size, extension, context, place; the number
_WORDS = _POOL + 5


class Interface(NamedTuple):
    """XLA's foreign function interface as the installed jaxlib has it.

    Attributes:
        major, minor: its version, which a handler must repeat.
        schedule, threads: bytes into the table of functions where those for XLA's threads stand.
    """

    major: int
    minor: int
    schedule: int
    threads: int


@cache
def interface() -> Interface:
    """Read from the header that lies beside jaxlib.

    Raises:
        LookupError: there is none, or it is of a kind that this module does not know.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = header.read_text() if header.is_file() else ""
    versions = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", text)
    wanted = ("XLA_FFI_ThreadPool_Schedule", "XLA_FFI_ThreadPool_NumThreads")
    if versions[0] is None or versions[1] is None or versions[0][1] != "0" or not set(wanted) <= set(functions):
        raise LookupError(f"{header} describes no foreign function interface of version 0 with a thread pool")
    places = [_API_FUNCTIONS + 8 * functions.index(name) for name in wanted]
    return Interface(int(versions[0][1]), int(versions[1][1]), *places)


def handler(module: ir.Module, kind: str, width: int) -> str:
    """Add the handler for weights of a kind in panels of `width` columns to a module; returns its name."""
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
    """Answer what XLA asks when a handler is registered: the version that it was made for."""
    metadata, version = _load(build, extension, _METADATA["in extension"]), interface()
    for field, value in (("major", version.major), ("minor", version.minor), ("traits", 0)):
        build.store(ir.Constant(I32, value), build.gep(metadata, [const(_METADATA[field])], source_etype=I8))


def _job(module: ir.Module, build: ir.IRBuilder, frame: ir.Value, work: ir.Function, width: int) -> ir.Value:
    """A job on the heap, since helpers may outlive the call, made of the call's arguments."""
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
    """Ask for a helper per `GRAIN` bytes beyond the first, as many as XLA has threads besides this one.

    Returns:
        Whether the first of them was asked by the letter box.
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
    start, again, end = build.block, build.append_basic_block(), build.append_basic_block()
    build.cbranch(build.icmp_signed(">", wanted, const(0)), again, end)
    build.position_at_end(again)
    asked = build.phi(I64)
    add(build, job, "users")
    refused = _call(build, _load(build, api, interface().schedule), place(build, job, _ASKED))
    with build.if_then(build.icmp_unsigned("!=", refused, _NULL)):  # no pool: nobody else uses the job
        drop_user(build, job)
    following = build.add(asked, const(1))
    asked.add_incoming(const(0), start)
    asked.add_incoming(following, build.block)
    build.cbranch(build.icmp_signed("<", following, wanted), again, end)
    build.position_at_end(end)
    return posted


def _call(build: ir.IRBuilder, address: ir.Value, argument: ir.Value) -> ir.Value:
    """Call a function of XLA's table, which takes a structure and returns an error or null."""
    kind = ir.FunctionType(POINTER, [POINTER])
    return build.call(build.inttoptr(build.ptrtoint(address, I64), kind.as_pointer()), [argument])


def _worker(module: ir.Module, kind: str, width: int) -> ir.Function:
    """`void work(job, helps)`: take one more panel from one's own end, multiply it, until none is left."""
    function, build = begin(module, f"work_{kind}", [POINTER, I64])
    job, helps = function.args
    x, w, scales, y = [read(build, job, name, POINTER) for name in ("x", "w", "scales", "y")]
    inputs, stride, rows, panels = [read(build, job, name) for name in ("inputs", "stride", "rows", "panels")]
    start = build.block
    claim, go, end = (function.append_basic_block(name) for name in ("claim", "go", "end"))
    build.branch(claim)
    build.position_at_end(claim)
    first = build.phi(I64)  # the caller's next
    first.add_incoming(const(0), start)
    taken = add(build, job, "taken")
    build.cbranch(build.icmp_signed("<", taken, panels), go, end)
    build.position_at_end(go)
    # as many are taken as there are, from both ends: none twice
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
    """One panel for all rows, in the fewest tiles, none much smaller than another (8 rows: 4 and 4, not 6 and 2)."""
    x, w, scales, y, inputs, stride = arguments
    start, loop, left, end = build.block, *(build.append_basic_block() for _ in range(3))
    build.branch(loop)
    build.position_at_end(loop)
    row = build.phi(I64)
    rest = build.sub(rows, row)
    tiles = build.sdiv(build.add(rest, const(ROWS - 1)), const(ROWS))
    taken = build.sdiv(build.sub(build.add(rest, tiles), const(1)), tiles)
    x = build.gep(x, [build.mul(row, inputs)], source_etype=FLOAT)
    y = build.gep(y, [build.mul(row, stride)], source_etype=FLOAT)
    choice = build.switch(taken, left)
    for size in range(1, ROWS + 1):
        block = build.append_basic_block()
        choice.add_case(const(size), block)
        inner = ir.IRBuilder(block)
        inner.call(tile(module, kind, size, width), [x, w, scales, y, inputs, stride])
        inner.branch(left)
    build.position_at_end(left)
    following = build.add(row, taken)
    row.add_incoming(const(0), start)
    row.add_incoming(following, left)
    build.cbranch(build.icmp_signed("<", following, rows), loop, end)
    build.position_at_end(end)


def _task(module: ir.Module, kind: str, work: ir.Function) -> ir.Function:
    """`void task(job)`: what a helper does: this job, and those that come to the letter box while it looks."""
    function, build = begin(module, f"task_{kind}", [POINTER])
    build.call(work, [*function.args, const(1)])
    build.call(release(module), function.args)
    look(module, build)
    build.ret_void()
    return function


def _wait(module: ir.Module, build: ir.IRBuilder, job: ir.Value) -> None:
    """Until every panel that a helper took is done: it is being worked on, so this is short."""
    loop, end = build.append_basic_block(), build.append_basic_block()
    build.branch(loop)
    build.position_at_end(loop)
    done = build.load_atomic(place(build, job, "done"), "acquire", 8, typ=I64)
    panels = read(build, job, "panels")
    build.cbranch(build.icmp_signed("<", done, panels), loop, end)
    build.position_at_end(end)
