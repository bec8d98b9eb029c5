"""Lock files for one writer at a time: they name their owner, and the kernel releases them when the owner dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from speccascade_jax.storage.files import make_folder


class LockedError(RuntimeError):
    """Error raised if another process is writing the same output."""


@contextlib.contextmanager
def held(lock: Path, output: str | Path, remedy: str = "wait for it, end it, or name another output") -> Iterator[None]:
    """Holds `lock` while the block runs, and removes the file afterwards.

    Args:
        lock: the lock's file.
        output: the output that the lock protects, for the error.
        remedy: the end of the error's sentence.

    Raises:
        LockedError: another process holds it; names the process.
    """
    handle = acquire(lock, output, remedy)
    try:
        yield
    finally:
        release(handle, lock)


def acquire(lock: Path, output: str | Path, remedy: str = "wait for it, end it, or name another output") -> int:
    """Acquires the lock and returns its file descriptor for `release`.

    Raises:
        LockedError: as `held`.
        ValueError: the file exists and is not a lock; it stays unchanged.
    """
    make_folder(lock.parent)
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        if owner and not owner.isdigit():
            os.close(handle)
            raise ValueError(f"{lock} is not a lock of {output}: move it away, or name another output")
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
    """Releases a lock and removes its file, unless the file belongs to another process by now."""
    if is_held(handle, lock):
        # Removed while still locked: a process that opened it meanwhile detects that the path is another file now.
        lock.unlink(missing_ok=True)
    os.close(handle)


def is_held(handle: int, lock: Path) -> bool:
    """Returns whether the path is still the locked file; after a removal another process may hold a new file."""
    try:
        return os.path.samestat(os.stat(lock), os.fstat(handle))
    except OSError:
        return False
