"""A job: what threads that work on one product share, and the letter box in which the next one may wait.

The job is on the heap, since a helper may outlive the call. To wake a thread takes longer than a small product. One
helper therefore looks for the next job for some microseconds before it goes: the caller leaves it in the letter box,
and takes it back when nobody came.
"""

import ctypes
import platform

import llvmlite.ir as ir

from speccascade_jax.runtime.products.tiles import I1, I32, I64, POINTER, VOID, begin, const, declared

ONE = const(1)
FIELDS = ("x", "w", "scales", "y", "inputs", "stride", "rows", "panels", "taken", "helped", "done", "users", "work")
"""Of 8 bytes each; `work` is the function `void work(job, helps)`. What follows them is the caller's."""
LOOKS = 1_000
"""How often an idle helper looks for the next job, some 50 ns apart: the time between two products of a step."""
_BOX = (ctypes.c_int64 * 16)()
"""The letter box, of two lines of memory: the job in it or 0, and whether a helper is looking."""


def place(build: ir.IRBuilder, job: ir.Value, word: str | int) -> ir.Value:
    """Where a job's field, or its `word`-th 8 bytes, lie."""
    number = FIELDS.index(word) if isinstance(word, str) else word
    return build.gep(job, [const(number)], source_etype=I64)


def read(build: ir.IRBuilder, job: ir.Value, word: str | int, kind: ir.Type = I64) -> ir.Value:
    """Returns what a field holds."""
    return build.load(place(build, job, word), typ=kind)


def add(build: ir.IRBuilder, job: ir.Value, field: str, number: ir.Value = ONE, order: str = "monotonic") -> ir.Value:
    """Adds to a field, of which other threads see the whole change; returns what it held before."""
    return build.atomic_rmw("add", place(build, job, field), number, order)


def drop_user(build: ir.IRBuilder, job: ir.Value, order: str = "monotonic") -> ir.Value:
    """Takes one from the users; returns how many they were."""
    return build.atomic_rmw("sub", place(build, job, "users"), ONE, order)


def release(module: ir.Module) -> ir.Function:
    """`void release(job)`: the last of its users gives the job's memory back."""
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
    """Leave the job in the letter box where help is wanted, a helper is looking and the box is empty; whether it is."""
    looking = build.icmp_signed("!=", build.load_atomic(_box(1), "monotonic", 8, typ=I64), const(0))
    asks = build.and_(wanted, looking)
    start = build.block
    with build.if_then(asks):
        add(build, job, "users")
        left = _exchanged(build, _box(0), const(0), build.ptrtoint(job, I64))
        with build.if_then(build.not_(left)):
            drop_user(build, job)
        last = build.block
    posted = build.phi(I1)
    posted.add_incoming(ir.Constant(I1, 0), start)
    posted.add_incoming(left, last)
    return posted


def _box(line: int) -> ir.Constant:
    """Where the letter box's job (0) or its mark (1) lies."""
    return const(ctypes.addressof(_BOX) + 64 * line).inttoptr(I64.as_pointer())


def _exchanged(build: ir.IRBuilder, place: ir.Value, expected: ir.Value, new: ir.Value) -> ir.Value:
    """Put `new` where `expected` stands; whether it stood there."""
    return build.extract_value(build.cmpxchg(place, expected, new, "acq_rel", "acquire"), 1)


def take_back(build: ir.IRBuilder, job: ir.Value) -> None:
    """Take a job that was left there out of the letter box again, if nobody came for it."""
    with build.if_then(_exchanged(build, _box(0), build.ptrtoint(job, I64), const(0))):
        drop_user(build, job)


def look(module: ir.Module, build: ir.IRBuilder) -> None:
    """Where no other helper does: help with jobs in the letter box until none came for `LOOKS` looks."""
    with build.if_then(_exchanged(build, _box(1), const(0), const(1))):
        _help(module, build)
        build.store_atomic(const(0), _box(1), "release", 8)


def _help(module: ir.Module, build: ir.IRBuilder) -> None:
    start, loop, some, found, none, end = build.block, *(build.append_basic_block() for _ in range(5))
    build.branch(loop)
    build.position_at_end(loop)
    looks = build.phi(I64)
    looks.add_incoming(const(0), start)
    number = build.load_atomic(_box(0), "monotonic", 8, typ=I64)
    build.cbranch(build.icmp_signed("!=", number, const(0)), some, none)
    build.position_at_end(some)
    build.cbranch(_exchanged(build, _box(0), number, const(0)), found, none)
    build.position_at_end(found)
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
    """What a processor is told in a loop that waits."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        build.call(declared(module, "llvm.x86.sse2.pause", VOID, []), [])
    else:
        build.call(declared(module, "llvm.aarch64.isb", VOID, [I32]), [ir.Constant(I32, 15)])
