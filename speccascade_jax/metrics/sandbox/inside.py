"""The protection around a generated program: a script started by `running.py` that needs the standard library only.

There are three processes. The first one, the launcher, leaves the caller's namespaces. The second one, a child of the
launcher, is process 1 of the new namespaces. It builds a file system that holds Python and none of the caller's files,
then watches time and memory. When process 1 ends, the kernel kills every process that the program has started. The
third process, a child of process 1, gives up the user, the resources and the system calls that it does not need, and
becomes the program. A step that fails ends all three processes, so nothing runs with half of the protection.

Standard input holds the job: a line of JSON, then the program. The result is the launcher's exit status, one of
`CODES`.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

CODES = {"passed": 40, "failed": 41, "timeout": 42, "memory": 43, "killed": 44, "refused": 45}
# These lines are added to the program. Their exit status `end` shows that the program reached its last line, so a
# program that leaves earlier with status 0 does not pass. The status is drawn for every run, so another status is equal
# to it only with a probability of 1/64. A program that is written to cheat can read the status in its own file, just as
# it can replace its tests. `__debug__` is false if Python was started again without assert statements (-O).
LAST_LINE = '\nif __name__ == "__main__" and __debug__:\n    raise SystemExit({end})\n'
ENDS = range(192, 256)
NOBODY = 65534
POLL = 0.05  # seconds between two checks of the memory
DEVICES = ("null", "zero", "full", "random", "urandom")

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER, AF_UNIX, X32 = 2, 1, 0x40000000

# Numbers of system calls, from the kernel's unistd.h. The filter refuses these calls, except those in `OURS` and
# `ALLOWED`: sockets other than AF_UNIX (virtual machines have socket families that no network namespace hides), memory
# that no limit counts (System V, memfd), the caller's keys, and kernel interfaces that no exercise needs.
EVERYWHERE = {"io_uring_setup": 425, "mount_setattr": 442, "memfd_secret": 447}
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {"audit": 0xC000003E, "pivot_root": 155, "socket": 41, "shmget": 29, "semget": 64, "msgget": 68}
    | {"add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298, "memfd_create": 319}
    | {"bpf": 321, "userfaultfd": 323, "prlimit64": 302},
    "aarch64": {"audit": 0xC00000B7, "pivot_root": 41, "socket": 198, "shmget": 194, "semget": 190, "msgget": 186}
    | {"add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "memfd_create": 279}
    | {"bpf": 280, "userfaultfd": 282, "prlimit64": 261},
}
OURS = ("audit", "pivot_root")
# These calls are allowed with this first argument only. With argument 0, `prlimit64` changes the limits of the calling
# process. It must not change those of process 1, which may run as the same user as the program.
ALLOWED = {"socket": AF_UNIX, "prlimit64": 0}


def call(name: str, *arguments: object) -> None:
    """Calls a function of the C library that reports failure by returning -1 and setting errno.

    Raises:
        OSError: the call failed; the message names the function.
    """
    # Integers are passed as long, because a variadic function reads the whole register.
    widened = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*widened) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def numbers() -> dict[str, int]:
    """Returns the numbers of this machine's system calls.

    Raises:
        OSError: the numbers are not known for this machine.
    """
    if platform.machine() not in NUMBERS:
        raise OSError(
            f"the numbers of system calls are unknown for {platform.machine()} and known only for {', '.join(NUMBERS)}"
        )
    return NUMBERS[platform.machine()] | EVERYWHERE


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mounts a file system at `target` by the system call of this name."""
    call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, options.encode())


def close(path: str, flags: int) -> None:
    """Remounts `path` read-only, without set-user-id programs and devices; with AT_RECURSIVE also mounts below it."""
    attributes = struct.pack("=4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    call("syscall", numbers()["mount_setattr"], AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def map_user(outer_user: int, outer_group: int) -> None:
    """Maps the user nobody of the new user namespace to the given user and group outside the namespace."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {outer_user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {outer_group} 1")


# --- the launcher ------------------------------------------------------------------------------------------------


def leave_namespaces() -> None:
    """Moves this process and its future children out of the caller's Linux namespaces, into new ones.

    Root keeps its user namespace, because only root can mount an interpreter below a home folder that others cannot
    read.
    """
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    call("unshare", flags if user == 0 else flags | CLONE_NEWUSER)
    if user != 0:
        map_user(user, group)


def launch(job: dict[str, Any], program: bytes) -> NoReturn:
    """Leaves the caller's namespaces, starts the process that supervises the program, and ends with its exit status."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM)
    leave_namespaces()
    child = os.fork()
    if child == 0:
        ending_all(2, supervise, job, program)
    # On SIGTERM the launcher kills its child and still waits for its end, so that nothing runs after the launcher.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else CODES["killed"])


def ending_all(report: int, step: Callable[..., NoReturn], *arguments: object) -> NoReturn:
    """Runs `step`, which never returns; if it fails, writes the error to descriptor `report` and ends the process."""
    try:
        step(*arguments)
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(CODES["refused"])


# --- process 1 ---------------------------------------------------------------------------------------------------


def supervise(job: dict[str, Any], program: bytes) -> NoReturn:
    """Runs as process 1 of the new namespaces: builds the root folder, starts the program and waits for its end."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    # The program may run as the same user: it must not trace this process, read its descriptors, or trigger a handler.
    call("prctl", PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    call("sethostname", b"sandbox", 7)
    end = ENDS[os.urandom(1)[0] % len(ENDS)]
    build_root(job, program + LAST_LINE.format(end=end).encode())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        ending_all(writer, become_program, job)
    os.close(writer)
    # A started program leaves nothing to read, because execve closes the pipe.
    if failure := os.read(reader, 4096):
        os.write(2, failure)
        os._exit(CODES["refused"])
    os._exit(CODES[watch(child, end, job["timeout"], job["memory"])])


def build_root(job: dict[str, Any], program: bytes) -> None:
    """Replaces the root folder by a small file system that holds Python and the program."""
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={len(program) + (1 << 20)}")
    os.chdir("/tmp")
    os.mkdir("old")
    call("syscall", numbers()["pivot_root"], b".", b"old")
    os.chdir("/")
    for path in job["readable"]:
        show(path)
        if not os.path.islink(path):
            close(path, AT_RECURSIVE)
    for name in DEVICES:
        show(f"/dev/{name}")
    Path("/program.py").write_bytes(program)
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir("/tmp")
    options = f"mode=700,uid={NOBODY},gid={NOBODY},nr_inodes=4096,size={job['file_size']}"
    mount("folder", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.symlink("/tmp", "/dev/shm")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    close("/", 0)


def show(path: str) -> None:
    """Mounts the caller's file or folder `path` at the same path in the new root; a link is created again as a link."""
    old = "/old" + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        Path(path).touch()
    mount(old, path, None, MS_BIND | MS_REC)


def watch(child: int, end: int, timeout: float, memory: int) -> str:
    """Waits for the end of `child`, or for a limit to be exceeded; returns how the program ended, a key of `CODES`.

    Other processes that end meanwhile are reaped, because process 1 is the parent of all orphans.
    """
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return "killed" if code < 0 else "passed" if code == end else "failed"
        if resident() > memory:
            return "memory"
        signal.sigtimedwait({signal.SIGCHLD}, min(remaining, POLL))
    return "timeout"


def resident() -> int:
    """Returns the resident memory of all processes except this one, in bytes; a shared page counts once per process."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError):  # raised if the process has ended meanwhile
                pages += int(Path("/proc", name, "statm").read_text().split()[1])
    return pages * resource.getpagesize()


# --- the program -------------------------------------------------------------------------------------------------


def become_program(job: dict[str, Any]) -> NoReturn:
    """Gives up all rights, sets the limits, and becomes the interpreter that runs the program."""
    os.setsid()  # a process group of its own: the launcher's group would contain the launcher too
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", PR_SET_DUMPABLE, 1)  # otherwise this process may not write its own user and group maps
    # The program gets a user namespace of its own: the kernel counts the user's processes per namespace, and the
    # program can create no further user namespace.
    call("unshare", CLONE_NEWUSER)
    map_user(NOBODY, NOBODY)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    set_limits(job)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.chdir("/tmp")
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_calls()
    environment = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    # After execve the program has no capabilities, because its user is not root.
    os.execve(job["interpreter"], [job["interpreter"], "-s", "-P", "-S", "-B", "/program.py"], environment)


def set_limits(job: dict[str, Any]) -> None:
    """Sets the resource limits of the job, but never above the limits that the process has already."""
    # Processor time has no limit, because it adds up over threads. The limit on the wall clock ends the program.
    limits = dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK), 0)
    limits |= {resource.RLIMIT_AS: job["memory"], resource.RLIMIT_NPROC: job["processes"]}
    limits |= {resource.RLIMIT_FSIZE: job["file_size"], resource.RLIMIT_NOFILE: 64}
    for kind, value in limits.items():
        most = resource.getrlimit(kind)[1]
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (least, least))


def filter_calls() -> None:
    """Installs the filter of system calls.

    The filter is a BPF program. Its instructions have 8 bytes: the operation, the number of instructions to skip if a
    comparison is true, the number to skip if it is false, and the operand.
    """
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    refuse, allow = (answer, 0, 0, 0x00050000 | errno.EPERM), (answer, 0, 0, 0x7FFF0000)
    known = numbers()
    lines = [(load, 0, 0, 4), (equal, 1, 0, known["audit"]), refuse, (load, 0, 0, 0), (at_least, 0, 1, X32), refuse]
    for name, number in known.items():
        if name in ALLOWED:
            lines += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 0, 1, ALLOWED[name]), allow, refuse]
        elif name not in OURS:
            lines += [(equal, 0, 1, number), refuse]
    lines.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


if __name__ == "__main__":
    header = json.loads(sys.stdin.buffer.readline())
    ending_all(2, launch, header, sys.stdin.buffer.read())
