"""A store in a bucket: one object per record, so that many processes can write it at the same time.

The store `gs://bucket/a.jsonl` is not an object itself. Its records are the objects `gs://bucket/a.jsonl/records/*.json`,
each with the line that a local store would hold. A record is created only if its object is absent: of two writers that
measure the same point, the first one's record counts, and no record is ever lost or doubled. The outputs are written
before the record, under a name that contains the hash of their content.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from speccascade_jax.results.store.bucket_records import FOLDER, name_of, read_new
from speccascade_jax.results.store.lines import NotAStoreError, parse_lines, to_line
from speccascade_jax.results.store.record import Record
from speccascade_jax.results.store.result_store import ResultStore
from speccascade_jax.storage.buckets import ABSENT, BucketPath
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.leases import SECONDS, Lease


class BucketStore(ResultStore):
    """A store whose records are objects in a bucket.

    With `follow`, every call of `done_keys` also finds the records that other processes have written meanwhile.

    Args:
        path: `gs://BUCKET/NAME.jsonl`.
        part: the part of a sweep that this process writes. Two processes with the same part would measure the same
            points, so the second one is refused while the first one lives.
        follow: whether to look for records of other writers. If several processes measure each point together on one
            mesh, they must not follow: they would no longer agree on the points that remain to be measured.

    Raises:
        LockedError: another process writes this part.
        NotAStoreError: there is an object with this very name, such as a copy of a local store.
    """

    lease_seconds: ClassVar[float] = SECONDS
    path: BucketPath

    def __init__(self, path: str | Path, part: str = "whole", follow: bool = True):
        self._part, self._follow = part, follow
        self._lease: Lease | None = None
        self._read: set[str] = set()
        super().__init__(path)

    def _open(self) -> None:
        if self.path.is_file():
            raise NotAStoreError(f"{self.path} is one object, to which no record can be added: name another output")
        leases = self.path / "leases"
        self._lease = Lease(leases / f"{self._part}.json", self.path, self.lease_seconds)
        if self._lease.place.name not in leases.below():
            raise OSError(f"{self.path}: this account cannot list objects; give it the role Storage Object User")
        self._refresh()

    def _refresh(self) -> None:
        """Adds the records that this process has not read yet."""
        records, names = read_new(self.path, self._read)
        self._read |= names
        for record in records:
            if self._lacks(record):
                self._add(record)

    def done_keys(self) -> set[str]:
        """Returns the keys of all records in the store, with `follow` those of other writers included."""
        if self._follow:
            self._refresh()
        return super().done_keys()

    def _is_open(self) -> bool:
        return self._lease is not None

    def _store(self, record: Record) -> None:
        place, line = self.path / FOLDER / name_of(record), to_line(record).encode()
        content, generation = None, ABSENT
        while not place.swap(line, generation):
            content, generation = place.read()
            if content is not None and (known := parse_lines(content)[0]):
                record = known[0]  # another process was faster
                break
        self._read.add(place.name)
        self._add(record)

    def close(self) -> None:
        """Releases the lease, which keeps other processes from writing this part; a second call does nothing."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def open_store(path: str | Path, part: str = "whole", follow: bool = True) -> ResultStore:
    """Opens the store at a path: a file, or a store in a bucket.

    Args:
        path: the store.
        part: the part of a sweep that is written, for stores in buckets, which all parts share.
        follow: as for `BucketStore`; a file has one writer.
    """
    place = expanded(path)
    return BucketStore(place, part, follow) if isinstance(place, BucketPath) else ResultStore(place)
