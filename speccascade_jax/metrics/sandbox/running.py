"""Starting a generated program inside `inside.py`'s protection, reading what it says, naming how it ended."""

import functools
import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speccascade_jax.metrics.sandbox import inside

KINDS = ("passed", "failed", "timeout", "memory", "output", "killed")
"""How a program ends: it ran to its last line and ended with status 0; it ended otherwise (an exception, an exit before
the last line, another status); it was still running at the deadline; it asked for more memory than it may have, or
wrote more than it may; a signal ended it."""
MECHANISM = (
    "Linux namespaces (user, mount, process, network, IPC, host name), a read-only file system with Python only, "
    "user nobody without capabilities, resource limits, a system call filter"
)
SPARE = 5.0  # seconds beyond the program's own deadline after which the caller stops waiting for the verdict
SMALLEST_MEMORY = 64 << 20  # bytes; Python itself takes about a third

# the walls as a program sees them: whatever set them up, only this decides
PROBE = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert set(os.getresuid() + os.getresgid()) == {65534}, "it is not nobody"
assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0, "it has capabilities"
assert int(status["NoNewPrivs"]) == 1 and int(status["Seccomp"]) == 2, "its system calls are not filtered"
assert os.getppid() == 1 and os.getpid() < 10, "it is among other processes"
assert os.statvfs("/").f_flag & os.ST_RDONLY, "it can write to the root folder"
assert os.listdir("/tmp") == [], "its folder is not its own"
assert len(open("/proc/net/route").readlines()) <= 1, "it has a network"
"""


class SandboxUnavailable(RuntimeError):  # noqa: N818 (a state of the system, no fault of the caller)
    """This system cannot protect itself from a generated program; says what is missing and what helps."""


@dataclass(frozen=True)
class Limits:
    """What one program may use; `run` names the units."""

    timeout: float
    memory: int
    output_limit: int
    processes: int
    file_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = SMALLEST_MEMORY if name == "memory" else 0
            if not (value > 0 and value >= least):
                raise ValueError(f"{name} is {value}: it must be {f'at least {least} bytes' if least else 'above 0'}")


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `kind` is one of `KINDS`, `output` the end of what it wrote to both streams,
    `seconds` the wall-clock time, the sandbox's own start included."""

    kind: str
    output: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def run(
    program: str,
    *,
    timeout: float = 10.0,
    memory: int = 1 << 30,
    output_limit: int = 64_000,
    processes: int = 16,
    file_size: int = 16 << 20,
) -> Outcome:
    """Runs `program` with this interpreter's standard library, and nothing else of this machine.

    Its hash seed is 0, its folder `/tmp` empty and gone afterwards, its standard input empty.

    "passed" says that the program's last line was reached, by an exit status drawn for this run. A program that leaves
    earlier, whatever the status, is taken for passed by a chance of 1 in 64 at most; but one that means to pass can
    find the number in its own file, or replace its tests: against such a program passing proves nothing.

    Args:
        timeout: seconds of wall clock.
        memory: bytes of addresses for each process, and of resident memory for all together.
        output_limit: bytes to both streams together; the program is ended when it writes more.
        processes: how many there may be at a time, threads counted.
        file_size: bytes that all of its files may have together.

    Raises:
        SandboxUnavailable: where `available` gives a reason; the program is not run.
        ValueError: for a limit that is not positive, or too little memory for Python itself.
    """
    limits = Limits(timeout, memory, output_limit, processes, file_size)
    if reason := available():
        raise SandboxUnavailable(reason)
    return _run(program, limits)


@functools.cache
def available() -> str | None:
    """None where programs can be run, found by running one that looks at its own walls; else what is missing."""
    if sys.platform != "linux":
        return f"generated programs run on Linux only, whose namespaces hold them; this is {sys.platform}"
    try:
        outcome = _run(PROBE, Limits(timeout=10.0, memory=1 << 30, output_limit=64_000, processes=4, file_size=1 << 20))
    except SandboxUnavailable as error:
        return str(error)
    if not outcome.passed:
        lines = outcome.output.strip().splitlines()[-1:]
        return f"generated programs are not run: the sandbox does not hold here ({', '.join([outcome.kind, *lines])})"
    return None


def describe() -> str:
    """One line: what protects this machine, or why nothing runs."""
    return available() or MECHANISM


def _run(program: str, limits: Limits) -> Outcome:
    began = time.monotonic()
    job = asdict(limits) | {"interpreter": _interpreter(), "readable": _readable()}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode() + b"\n" + program.encode("utf-8", "surrogatepass"))
        file.seek(0)
        command = [_interpreter(), "-I", "-S", "-B", inside.__file__]
        streams: dict[str, Any] = {"stdin": file, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd="/", env={}, start_new_session=True, **streams) as process:
            try:
                output, stopped = _read(process, limits.output_limit, began + limits.timeout + SPARE)
            finally:
                process.terminate()
                status = process.wait()
    kind = stopped or _kind(status, output)
    return Outcome(kind, output[-limits.output_limit :].decode("utf-8", "replace"), time.monotonic() - began)


def _read(process: subprocess.Popen[bytes], limit: int, deadline: float) -> tuple[bytes, str | None]:
    """What the program writes, until it ends; else why it has to be ended."""
    assert process.stdout is not None
    descriptor, output = process.stdout.fileno(), bytearray()
    waiting = select.poll()
    waiting.register(descriptor)
    while (left := deadline - time.monotonic()) > 0:
        if waiting.poll(1000 * left):
            chunk = os.read(descriptor, 1 << 16)
            output += chunk
            if len(output) > limit:
                return bytes(output), "output"
            if not chunk:
                return bytes(output), None
    return bytes(output), "timeout"


def _kind(status: int, output: bytes) -> str:
    kinds = {code: kind for kind, code in inside.CODES.items()}
    kind = kinds.get(status, "killed" if status < 0 else "refused")
    lines = output.decode("utf-8", "replace").strip().splitlines()
    if kind == "refused":
        raise SandboxUnavailable(_reason(lines[-1] if lines else f"its launcher ended with status {status}"))
    # the limit on addresses shows in the program as an exception
    return "memory" if kind == "failed" and lines and lines[-1].startswith("MemoryError") else kind


def _reason(failure: str) -> str:
    if os.geteuid() == 0:
        remedy = "give this container CAP_SYS_ADMIN and a system call filter that allows unshare and mount"
    else:
        settings = "user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1"
        settings += ", kernel.apparmor_restrict_unprivileged_userns=0"
        remedy = f"allow unprivileged user namespaces (sysctl {settings}), or run as root"
    return f"generated programs are not run: no sandbox here ({failure}). It takes Linux 5.14 or newer; {remedy}."


def _interpreter() -> str:
    """The interpreter below a virtual environment: its packages are none of the program's business."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _readable() -> list[str]:
    """What Python needs to run: itself, its library, the system's libraries, time zones."""
    library = [sysconfig.get_path("stdlib"), *(f"{sys.base_prefix}/{name}" for name in ("lib", sys.platlibdir))]
    system = ["/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    # links stay links: /lib is one to /usr/lib on most systems
    wanted = {_interpreter(), "/lib", "/lib64"} | {os.path.realpath(path) for path in library + system}
    return sorted(p for p in wanted if os.path.exists(p) and not any(str(above) in wanted for above in Path(p).parents))
