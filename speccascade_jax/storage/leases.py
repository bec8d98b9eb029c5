"""Leases: objects in a bucket that play the part of locks, which a bucket does not have.

A writer creates the lease's object and then rewrites it regularly. If another writer sees the object unchanged for
`seconds`, by its own clock, it assumes that the first has died and takes the lease over. Clocks of different hosts are
never compared. A lease only avoids that two processes do the same work. A writer that was suspended and lost its lease
may still write, so the output must be correct without the lease, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import LockedError

_GRACE = 5.0
"""Seconds that a process waits for the server's answers when it ends."""
SECONDS = 30.0
"""Seconds after which a lease that was not renewed counts as abandoned."""


class Lease:
    """The right to write an output, held until `release` or until this process dies.

    Args:
        place: the lease's object.
        output: the output that it protects, for messages.
        seconds: time without a renewal after which another writer may take the lease over; `None`: `SECONDS`.
        remedy: the end of the error's sentence.
        doubled: the consequence if another writer takes the lease over while this one is alive; ends the warning.

    Raises:
        LockedError: another writer holds the lease and is alive; names the writer.
    """

    def __init__(
        self,
        place: BucketPath,
        output: str | Path,
        seconds: float | None = None,
        remedy: str = "wait for it, end it, or name another output",
        doubled: str = "some settings may be measured twice",
    ):
        self.place, self.output, self.seconds = place, output, SECONDS if seconds is None else seconds
        self._remedy, self._doubled = remedy, doubled
        self._writer: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex}
        self._renewals = 0
        self._ended = threading.Event()
        self._take()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _content(self) -> bytes:
        return json.dumps(self._writer | {"renewals": self._renewals}).encode()

    def _take(self) -> None:
        """Takes the lease as soon as it is free, or once it has stayed unchanged for `seconds`."""
        (content, generation), since = self.place.read(), time.monotonic()
        if content is not None:
            writer = f"{self.output} was being written by {_named(content)}"
            warnings.warn(f"{writer}: waiting {self.seconds:.0f} s to see if it is still alive", stacklevel=4)
        while content is not None and time.monotonic() - since < self.seconds:
            time.sleep(min(1.0, self.seconds / 20))
            content, latest = self.place.read()
            if content is not None and latest != generation:
                raise LockedError(
                    f"{self.output} is being written by {_named(content)} (lease {self.place}): {self._remedy}"
                )
            generation = latest
        if not self.place.swap(self._content(), generation):
            self._take()

    def _renew(self) -> None:
        while not self._ended.wait(self.seconds / 3):
            try:
                content, generation = self.place.read()
                if not self._is_mine(content):
                    holder = "nobody" if content is None else _named(content)
                    words = f"the lease {self.place} belongs to {holder} now: {self._doubled}"
                    warnings.warn(words, stacklevel=1)
                    return
                self._renewals += 1
                self.place.swap(self._content(), generation)
            except OSError:
                continue  # the next renewal tries again; if the bucket stays out of reach, writing the output fails

    def release(self) -> None:
        """Gives the lease back, unless another writer has it; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(_GRACE)
        deleting = threading.Thread(target=self._delete, daemon=True)
        deleting.start()
        deleting.join(_GRACE)  # not longer: a preempted process has 30 s in all, and an undeleted lease expires anyway

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            content, generation = self.place.read()
            if self._is_mine(content):
                self.place.swap(None, generation)

    def _is_mine(self, content: bytes | None) -> bool:
        """Returns whether this process wrote a lease's content, when it took the lease or renewed it."""
        return content is not None and self._writer["id"].encode() in content

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class SoleObject:
    """Object that one process writes: its next write fails once another process has begun to write the object.

    The object `<name>.writer` holds the id of the process that began last. It is needed if the server refuses a write
    and the object already has the new content: then either this process wrote it and the server's answer was lost, or
    another process wrote the same content.

    Args:
        place: the object, which the constructor reads.
    """

    def __init__(self, place: BucketPath):
        self._place, self._writer, self._id = place, place.with_name(f"{place.name}.writer"), uuid.uuid4().bytes
        self._content, self._generation = place.read()
        self._writer.write(self._id)  # before the first write of the object itself

    def begin(self) -> None:
        """Writes the content that the constructor read, if any, again, so that later writes of other processes fail."""
        if self._content is not None:
            self.write(self._content)
        self._content = None

    def write(self, content: bytes) -> None:
        """Writes the object.

        Raises:
            LockedError: another process has written it.
        """
        generation = self._place.exchange(content, self._generation, lambda: self._writer.read()[0] == self._id)
        if generation is None:
            remedy = "another process continues this run; end one of the two"
            raise LockedError(f"{self._place} has changed while this process wrote it: {remedy}")
        self._generation = generation


def _named(content: bytes) -> str:
    try:
        writer = json.loads(content)
        return f"process {writer['process']} on {writer['host']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"
