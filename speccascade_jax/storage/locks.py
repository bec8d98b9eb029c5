"""Lock files that let one process at a time write an output.

A lock file holds the id of the process that owns the lock. The kernel releases the lock when this process ends. In a
bucket, `leases` take the place of lock files.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import LockedError as LockedError
from speccascade_jax.storage.files import make_folder
from speccascade_jax.storage.leases import Lease


@contextlib.contextmanager
def held(lock: Path, output: str | Path, remedy: str = "wait for it, end it, or name another output") -> Iterator[None]:
    """Holds a lock while the `with` block runs, and removes the lock's file afterwards.

    In a bucket, the lock is a lease, which stays in force for half a minute after its process is killed.

    Args:
        lock: the lock's file.
        output: the output that the lock protects, for the error.
        remedy: the end of the error's sentence.

    Raises:
        LockedError: another process holds the lock; names the process.
        ValueError: the file exists and is not a lock.
    """
    if isinstance(lock, BucketPath):
        with Lease(lock, output, remedy=remedy, doubled="that process may do the same work again"):
            yield
        return
    handle = acquire(lock, output, remedy)
    try:
        yield
    finally:
        release(handle, lock)


def acquire(lock: Path, output: str | Path, remedy: str = "wait for it, end it, or name another output") -> int:
    """Acquires a lock, and returns the file descriptor that `release` needs; the arguments are those of `held`.

    Raises:
        LockedError: another process holds the lock; names the process.
        ValueError: the file exists and is not a lock; the file stays unchanged.
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
    """Releases a lock and removes its file, unless another process's lock file is at this path by now."""
    if is_held(handle, lock):
        # The file is removed while it is still locked. A process that has opened it meanwhile and then gets the lock
        # sees with `is_held` that the file is no longer at the path.
        lock.unlink(missing_ok=True)
    os.close(handle)


def is_held(handle: int, lock: Path) -> bool:
    """Returns whether the path `lock` still leads to the open file `handle`, and not to nothing or another file."""
    try:
        return os.path.samestat(os.stat(lock), os.fstat(handle))
    except OSError:
        return False
