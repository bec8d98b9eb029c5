"""One writer at a time: a lock file that names its owner, and that the kernel lets go of when the owner dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class LockedError(RuntimeError):
    """Another process is writing the same output."""


@contextlib.contextmanager
def held(lock: Path, output: str | Path, remedy: str = "wait for it, end it, or name another output") -> Iterator[None]:
    """Hold `lock` while the block runs; the file is gone afterwards.

    Args:
        output: what is written under it, for the error.

    Raises:
        LockedError: another process holds it; names the process.
    """
    handle = acquire(lock, output, remedy)
    try:
        yield
    finally:
        release(handle, lock)


def acquire(lock: Path, output: str | Path, remedy: str = "wait for it, end it, or name another output") -> int:
    """A descriptor that holds the lock, to be given to `release`.

    Raises:
        LockedError: as `held`.
        ValueError: there is a file of that name which is no lock; it is left as it is.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        if owner and not owner.isdigit():
            os.close(handle)
            raise ValueError(f"{lock} is no lock of {output}: move it away, or name another output")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            owner = owner or "unknown"
            raise LockedError(f"{output} is being written by process {owner} (lock {lock}): {remedy}") from None
        if is_held(handle, lock):
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            return handle
        os.close(handle)


def release(handle: int, lock: Path) -> None:
    """Let go of a lock and remove its file, unless that is another process's meanwhile."""
    if is_held(handle, lock):
        # Removed while still held: whoever opened it meanwhile sees that it is no longer the file of that name.
        lock.unlink(missing_ok=True)
    os.close(handle)


def is_held(handle: int, lock: Path) -> bool:
    """Whether the file is still the one that was locked: whoever removed it may have let another process in."""
    try:
        return os.path.samestat(os.stat(lock), os.fstat(handle))
    except OSError:
        return False
