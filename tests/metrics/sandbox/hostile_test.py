"""Tests of hostile programs in the sandbox: each is stopped or limited, and the host is unchanged."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import speccascade_jax
from speccascade_jax.metrics import sandbox
from tests.support.observing import Watched, found, marked, processes

pytestmark = [
    pytest.mark.laws,
    pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available())),
]


DEAF = "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)"
FORKS = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
HIDES = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        time.sleep(60)
    os._exit(0)
time.sleep(0.5)
"""
FLOOD = "import sys\nwhile True: print('a line', file=sys.stderr); print('x' * 1000)"
TAKES = "import mmap, os, time\nfor _ in range(3): os.fork()\nkept = {}\ntime.sleep(5)"
SHARED = "mmap.mmap(-1, 96 << 20).write(b'x' * (96 << 20))"


@pytest.mark.parametrize(("mark", "program", "limits", "kind", "seconds", "processes"), [
    ("loop", "while True: pass", {"timeout": 1.0}, "timeout", (1.0, 2.0), (1, 1)),
    ("deaf", DEAF, {"timeout": 1.0}, "timeout", (1.0, 2.0), (1, 1)),
    ("bomb", FORKS, {"timeout": 1.0, "processes": 8}, "timeout", (1.0, 2.5), (8, 8)),
    ("daemon", HIDES, {"timeout": 5.0}, "passed", (0.5, 2.0), (2, 16)),
    ("flood", FLOOD, {"timeout": 10.0, "output_limit": 10_000}, "output", (0.0, 3.0), (0, 1)),
    ("memory", TAKES.format("b'x' * (96 << 20)"), {"timeout": 5.0, "memory": 300 << 20}, "memory", (0.0, 3.0), (0, 8)),
    ("shared", TAKES.format(SHARED), {"timeout": 5.0, "memory": 300 << 20}, "memory", (0.0, 3.0), (0, 8)),
])  # fmt: skip
def test_a_program_that_exceeds_its_limits_ends_in_time_and_leaves_nothing(
    mark, program, limits, kind, seconds, processes
):
    """Includes memory, which is limited for all processes together."""
    watched = Watched(mark, program, **limits).watch()
    assert watched.outcome.kind == kind and watched.outcome.passed == (kind == "passed")
    assert seconds[0] <= watched.outcome.seconds < seconds[1]
    assert processes[0] <= watched.most <= processes[1] and watched.left == 0
    assert kind != "output" or len(watched.outcome.output) == limits["output_limit"]


def test_ten_gigabytes_cannot_be_allocated():
    outcome = sandbox.run("kept = bytearray(10 << 30)\nprint('had them')", timeout=5.0)
    assert outcome.kind == "memory" and outcome.output.endswith("\nMemoryError\n")
    # the largest memory of any process of this test run: kilobytes
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 8 << 20


def test_memory_allocated_in_small_pieces_is_limited():
    program = "kept = []\nwhile True: kept.append(b'x' * (8 << 20))"
    assert sandbox.run(program, timeout=5.0, memory=256 << 20).kind == "memory"


WRITES = """
import os
for path in {paths}:
    for attempt in (lambda: open(path, "w"), lambda: open(path, "a"), lambda: os.mkdir(path + ".d")):
        try:
            attempt()
        except OSError:
            continue
        raise AssertionError(path)
for path in ("/usr/lib", os.__file__, "/program.py", "/proc/1/mem"):
    for attempt in (os.remove, os.rmdir, lambda p: os.chmod(p, 0o777), lambda p: os.rename(p, "/tmp/x")):
        try:
            attempt(path)
        except OSError:
            continue
        raise AssertionError(path)
open({own!r}, "w").write("mine")
"""


def test_writes_outside_the_folder_fail_and_writes_inside_are_not_visible_outside(tmp_path):
    package = Path(speccascade_jax.__file__).parent
    folders = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/proc", "/var/tmp", str(Path.home()), str(Path.cwd())]
    folders += [str(package), os.path.dirname(os.__file__), str(tmp_path), sys.prefix, sys.base_prefix]
    paths = [f"{folder}/sbx-written" for folder in folders]
    path_inside = "/tmp/sbx-written"
    outcome = sandbox.run(WRITES.format(paths=paths, own=path_inside), timeout=5.0)
    assert outcome.kind == "passed", outcome.output
    assert not [path for path in [*paths, path_inside] if os.path.exists(path)]


@pytest.mark.parametrize("program", [
    "open('/tmp/a', 'wb').write(bytes(2 << 20))",
    "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(1 << 18))",
    "for i in range(9): open(f'/dev/shm/{i}', 'wb').write(bytes(1 << 18))",
    "for i in range(9000): open(f'/tmp/{i}', 'w')",
])  # fmt: skip
def test_file_sizes_are_limited(program):
    outcome = sandbox.run(program, timeout=5.0, file_size=1 << 20)
    assert outcome.kind == "failed" and "OSError: [Errno" in outcome.output


SOCKETS = """
import os, socket
def fails(attempt, error):
    try:
        attempt()
    except error:
        return
    raise AssertionError(attempt)
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        fails(lambda: socket.socket(family, kind), PermissionError)
fails(lambda: socket.create_connection(("127.0.0.1", {port}), 1), OSError)
fails(lambda: socket.getaddrinfo("localhost.", 80), OSError)
fails(lambda: socket.socket(socket.AF_UNIX).connect({abstract!r}), ConnectionRefusedError)
fails(lambda: socket.socket(socket.AF_UNIX).connect({file!r}), FileNotFoundError)
interfaces = [line.split(":") for line in open("/proc/net/dev").readlines()[2:]]
assert all(int(rest.split()[0]) == 0 for _, rest in interfaces), interfaces
assert len(open("/proc/net/route").readlines()) <= 1
"""


def test_sockets_reach_no_process_outside(tmp_path):
    abstract, file = f"\0sbx-{os.getpid()}", str(tmp_path / "socket")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind(abstract)
        hidden.listen()
        with socket.socket(socket.AF_UNIX) as named:
            named.bind(file)
            named.listen()
            port = server.getsockname()[1]
            outcome = sandbox.run(SOCKETS.format(port=port, abstract=abstract, file=file), timeout=5.0)
            assert select.select([server, hidden, named], [], [], 0)[0] == []
    assert outcome.kind == "passed", outcome.output


KILLS = """
import os, resource, signal
for number in ({us}, {victim}, os.getppid(), -1):
    for what in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(number, what)
        except OSError:
            pass
assert os.getppid() == 1
try:
    resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))
except PermissionError:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (32, 32)
for name in ("mem", "environ", "fd/1", "fd/0", "root", "cwd"):
    try:
        open("/proc/1/" + name, "rb").read(1)
    except PermissionError:
        continue
    raise AssertionError(name)
"""


def test_the_parent_survives_and_reveals_nothing():
    with subprocess.Popen(["sleep", "60"]) as victim:
        try:
            outcome = sandbox.run(KILLS.format(us=os.getpid(), victim=victim.pid), timeout=5.0)
            assert outcome.kind == "passed", outcome.output
            assert victim.poll() is None
        finally:
            victim.kill()


WALLS = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
def refused(name, *arguments):
    assert getattr(library, name)(*arguments) == -1, name
refused("unshare", 0x10000000)
refused("unshare", 0x20000)
refused("mount", b"none", b"/tmp", b"tmpfs", 0, b"")
refused("mount", None, b"/", None, 32 | 4096, None)
refused("umount2", b"/proc", 2)
refused("sethostname", b"x", 1)
refused("shmget", 0, 4096, 0o1600)
refused("memfd_create", b"x", 0)
refused("ptrace", 16, 1, 0, 0)
for number in (425, 442):
    refused("syscall", number, 1, 0, 0, 0, 0)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger"):
    assert not os.access(path, os.W_OK), path
for line in open("/proc/self/mountinfo"):
    place, options = line.split()[4:6]
    assert options.startswith("ro,nosuid,nodev") or place in ("/proc", "/tmp") or place.startswith("/dev/"), line
assert set(os.listdir("/dev")) == {"null", "zero", "full", "random", "urandom", "shm"}
"""


def test_system_calls_and_files_of_the_kernel_are_blocked():
    outcome = sandbox.run(WALLS, timeout=5.0)
    assert outcome.kind == "passed", outcome.output


CALLER = """
import sys, types
package = types.ModuleType("speccascade_jax")
package.__path__ = [sys.argv[1]]
sys.modules["speccascade_jax"] = package
from speccascade_jax.metrics import sandbox
sandbox.run(sys.argv[2], timeout=60.0)
"""


def calling(mark: str, **how) -> subprocess.Popen[bytes]:
    program = marked(mark, "import time\ntime.sleep(15)")
    return subprocess.Popen([sys.executable, "-c", CALLER, str(Path(speccascade_jax.__file__).parent), program], **how)


@pytest.mark.parametrize("killed", ["caller", "launcher"])
def test_a_program_ends_with_the_process_that_started_it(killed):
    with calling(killed) as caller:
        wait_for(lambda: processes(killed) == 1)
        (launcher,) = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
        os.kill(caller.pid if killed == "caller" else int(launcher), signal.SIGKILL)
        wait_for(lambda: processes(killed) == 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody: otherwise the program runs as the caller")
def test_the_program_runs_as_nobody_on_the_host():
    with calling("nobody", extra_groups=[1]) as caller:
        wait_for(lambda: processes("nobody") == 1)
        status = dict(line.split(":", 1) for line in (found("nobody")[0] / "status").read_text().splitlines())
        caller.kill()
    assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4 and status["Groups"].split() == []


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
