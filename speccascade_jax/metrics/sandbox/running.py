"""Functions that start a generated program inside the protection of `inside.py` and classify how it ends."""

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
"""The ways in which a program ends.

- "passed": it reached its last line and ended with status 0.
- "failed": it ended otherwise (an exception, an exit before the last line, another status).
- "timeout": it was still running at the deadline.
- "memory": it asked for more memory than allowed.
- "output": it wrote more than allowed.
- "killed": a signal ended it.
"""
MECHANISM = (
    "Linux namespaces (user, mount, process, network, IPC, host name), a read-only file system with Python only, "
    "user nobody without capabilities, resource limits, a system call filter"
)
SPARE = 5.0  # seconds after the program's deadline at which the caller stops waiting for the launcher
SMALLEST_MEMORY = 64 << 20  # bytes; Python itself takes about a third of it

# A program that tests its own protection. The sandbox counts as available if and only if this program passes.
PROBE = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert set(os.getresuid() + os.getresgid()) == {65534}, "the user is not nobody"
assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0, "it has capabilities"
assert int(status["NoNewPrivs"]) == 1 and int(status["Seccomp"]) == 2, "its system calls are not filtered"
assert os.getppid() == 1 and os.getpid() < 10, "it sees other processes"
assert os.statvfs("/").f_flag & os.ST_RDONLY, "it can write to the root folder"
assert os.listdir("/tmp") == [], "its folder holds files of others"
assert len(open("/proc/net/route").readlines()) <= 1, "it has a network"
"""


class SandboxUnavailable(RuntimeError):  # noqa: N818 (a state of the system, no fault of the caller)
    """Error raised if this system cannot protect itself from a generated program; it names the cause and a remedy."""


@dataclass(frozen=True)
class Limits:
    """The resource limits of one program; the docstring of `run` gives their units."""

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
    """The way in which a program ended, its output, and its run time.

    Attributes:
        kind: one of `KINDS`.
        output: the end of the text that the program wrote to standard output and standard error.
        seconds: wall-clock time, including the start of the sandbox.
    """

    kind: str
    output: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the program reached its last line and ended with status 0."""
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
    """Runs `program` in the sandbox, where it sees Python's standard library and nothing else of this machine.

    Python's hash seed is 0, the standard input is empty, and the folder `/tmp` is empty and deleted afterwards.

    "passed" means that the program reached its last line, which ends it with an exit status drawn for this run. A
    program that ends earlier, with any exit status, counts as passed with a probability of at most 1/64. A program that
    is written to cheat can read the drawn status in its own file, or replace its tests: for such a program "passed"
    proves nothing.

    Args:
        program: Python source.
        timeout: seconds of wall clock.
        memory: bytes of address space for each process, and of resident memory for all processes together.
        output_limit: bytes of standard output and standard error together; a program that writes more is ended.
        processes: the largest number of processes at a time; threads count as processes.
        file_size: bytes of all files of the program together.

    Raises:
        SandboxUnavailable: `available` gives a reason; the program is not run.
        ValueError: a limit is not positive, or the memory is too little for Python itself.
    """
    limits = Limits(timeout, memory, output_limit, processes, file_size)
    if reason := available():
        raise SandboxUnavailable(reason)
    return _run(program, limits)


@functools.cache
def available() -> str | None:
    """Returns `None` if programs can be run, else a text that says what is missing.

    The function runs a program that tests its own protection.
    """
    if sys.platform != "linux":
        return f"generated programs run only on Linux, whose namespaces isolate them; this system is {sys.platform}"
    try:
        outcome = _run(PROBE, Limits(timeout=10.0, memory=1 << 30, output_limit=64_000, processes=4, file_size=1 << 20))
    except SandboxUnavailable as error:
        return str(error)
    if not outcome.passed:
        lines = outcome.output.strip().splitlines()[-1:]
        failure = ", ".join([outcome.kind, *lines])
        return f"generated programs are not run: the sandbox does not isolate them on this system ({failure})"
    return None


def describe() -> str:
    """Returns one line that describes the protection on this machine, or says why no program runs."""
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
    """Reads the program's output; returns it with the name of the limit that was exceeded, or with `None`.

    The limits are "output" (at most `limit` bytes) and "timeout" (the program must end before `deadline`).
    """
    assert process.stdout is not None
    descriptor, output = process.stdout.fileno(), bytearray()
    waiting = select.poll()
    waiting.register(descriptor)
    while (remaining := deadline - time.monotonic()) > 0:
        if waiting.poll(1000 * remaining):
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
    # A program that exceeds the limit on its address space fails with Python's MemoryError.
    return "memory" if kind == "failed" and lines and lines[-1].startswith("MemoryError") else kind


def _reason(failure: str) -> str:
    if os.geteuid() == 0:
        remedy = "give this container CAP_SYS_ADMIN and a system call filter that allows unshare and mount"
    else:
        settings = "user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1"
        settings += ", kernel.apparmor_restrict_unprivileged_userns=0"
        remedy = f"allow unprivileged user namespaces (sysctl {settings}), or run as root"
    needs = f"It needs Linux 5.14 or newer; {remedy}."
    return f"generated programs are not run: this system has no sandbox ({failure}). {needs}"


def _interpreter() -> str:
    """Returns the path of the base interpreter; the program must not see the packages of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _readable() -> list[str]:
    """Returns the paths that Python needs: the interpreter, its library, the system's libraries and time zones."""
    library = [sysconfig.get_path("stdlib"), *(f"{sys.base_prefix}/{name}" for name in ("lib", sys.platlibdir))]
    system = ["/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    # /lib and /lib64 are not resolved: they are links on most systems, and `inside.show` creates links again as links
    wanted = {_interpreter(), "/lib", "/lib64"} | {os.path.realpath(path) for path in library + system}
    return sorted(p for p in wanted if os.path.exists(p) and not any(str(above) in wanted for above in Path(p).parents))
