"""Store of results: one JSON line per measured point, safe against kills, torn lines and concurrent writers.

This module does not import JAX. A line is a record as JSON, with a `checksum` of all other entries; lines of older
versions may lack a checksum. A record is a dictionary with a `key` (`record_key`). A store never holds two records with
the same key, so a killed sweep resumes where it stopped. A record that was measured by older code is stale: its point
is measured again, and the new line replaces the old line whenever the store is read. Records of format 2 are migrated
when they are read.
"""

import contextlib
import csv
import errno
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from speccascade_jax.results.store import bucket_records, outputs, shards
from speccascade_jax.results.store.lines import (
    DamagedLine,
    NotAStoreError,
    numbered_lines,
    parse_store,
    report_damaged,
    supersedes,
    to_line,
)
from speccascade_jax.results.store.record import FORMAT, Record, StoredRecord
from speccascade_jax.storage import locks
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import _sync_folder, expanded, naming, plain, write_atomically

StoreLockedError = locks.LockedError
"""Error raised because another process is writing the same store."""
Job = TypeVar("Job")


def check_name(output: str | Path) -> None:
    """Raises ValueError if an output's name does not end in .jsonl, because plots and reports share its stem."""
    place = expanded(output)
    if isinstance(place, BucketPath) and not place.key:
        raise ValueError(f"output={str(output)!r} names a bucket: give gs://BUCKET/NAME.jsonl")
    if Path(output).suffix != ".jsonl":
        raise ValueError(
            f"output={str(output)!r} must end in .jsonl: the plot, the report and the outputs beside it have the same "
            f"name with other endings"
        )


class ResultStore:
    """A JSON-lines file to which one process at a time appends records.

    Opening a store takes the lock `<path>.lock`, moves damaged lines to `<path>.damaged` (a warning lists their
    numbers, and the attribute `damaged` holds them) and loads the records. Each record is written as one line with one
    `write`, followed by an `fsync`. A symbolic link is followed, and the lock is beside the file that the link points
    to.

    At each append, the store checks whether another process has removed, moved or changed the file. If so, the store
    writes all `records` that the file lacks to the path again, with a warning.

    Args:
        path: the file; the file and its folders are created if they are missing.

    Raises:
        StoreLockedError: another process holds the store open.
        NotAStoreError: the file is not empty and contains no record; the file is not changed.
    """

    def __init__(self, path: str | Path):
        self.path = expanded(path)
        self.records: list[Record] = []
        self.damaged: list[DamagedLine] = []
        self._places: dict[str, int] = {}
        self._file = self._lock = -1
        self._created, self._new_folders = False, list[Path]()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Takes the lock, moves damaged lines away, adds a missing last line end, and loads the records."""
        self._place = Path(os.path.realpath(self.path))
        self._lock_path = self._place.with_name(self._place.name + ".lock")
        self._created = not self._place.exists()
        self._new_folders = [folder for folder in self._place.parents if not folder.exists()]
        self._lock = locks.acquire(self._lock_path, self.path)
        if self._place.exists() and not self._place.is_file():
            raise NotAStoreError(f"{self._place} is not a file that results can be written to: name another output")
        content = self._place.read_bytes() if self._place.exists() else b""
        records, damaged = parse_store(self.path, content)
        if damaged:
            aside = self._place.with_name(self._place.name + ".damaged")
            _set_aside(aside, damaged)
            report_damaged(self.path, damaged, f"set aside in {aside}")
        if damaged or (content and not content.endswith(b"\n")):
            bad = {line.number for line in damaged}
            kept = b"".join(line for number, line in numbered_lines(content) if number not in bad)
            write_atomically(self._place, kept + b"\n" * (not kept.endswith(b"\n") and bool(kept)))
        self._file = os.open(self._place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _sync_folder(self._place.parent)
        self._size = os.fstat(self._file).st_size
        for record in records:
            self._add(record)
        self.damaged += damaged

    def _add(self, record: Record) -> None:
        """Adds a record to `records`; it replaces the record with the same key if there is one."""
        place = self._places.setdefault(record["key"], len(self.records))
        self.records[place : place + 1] = [cast(Record, StoredRecord(record))]

    def _lacks(self, record: Record) -> bool:
        """Returns whether the store holds no record with this key, or only one that `record` supersedes."""
        place = self._places.get(record["key"])
        return place is None or supersedes(record, self.records[place])

    def append(self, record: Record) -> None:
        """Adds one record and its outputs; when the call returns, they survive a kill and a power failure.

        A record with an entry `supersedes` (the code digest of the stored record with the same key) replaces that
        record.

        Raises:
            ValueError: the record has no `key`, the store already holds this key, or the store is closed.
            OSError: the disk wrote only a part of the line (the part is removed again), the file is gone and cannot be
                created again, or another process writes it (the message says where all records are).
        """
        key = record.get("key")
        if not isinstance(key, str) or not key:
            raise ValueError(f"a record needs a non-empty string 'key', got {key!r}")
        if not self._lacks(record):
            raise ValueError(f"{self.path} already holds a record with key {key}: a store holds one record per key")
        if not self._is_open():
            raise ValueError(f"{self.path} is closed: open it again to add a record")
        # outputs are written before the record, because a sweep skips a point as soon as its record exists
        if kept := record.get(outputs.ENTRY):
            record = outputs.named(self.path, record)
            outputs.write(self.path, record, kept)
        self._store(plain({name: value for name, value in record.items() if name != outputs.ENTRY}))

    def _store(self, record: Record) -> None:
        """Writes one record and adds it to `records`, unless the file holds it by now."""
        if self._changed():
            self._restore(record)
        if self._lacks(record):  # the file that replaced this one may contain the record already
            self._write(to_line(record).encode())
            self._add(record)

    def _is_open(self) -> bool:
        return self._file >= 0

    def _write(self, lines: bytes) -> None:
        with naming(self.path):
            try:
                # on a full disk, `write` may write only some of the bytes
                if os.write(self._file, lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(lines)

    def _changed(self) -> bool:
        """Returns whether the path leads to another file now, the file has changed, or the lock is lost."""
        try:
            current, opened = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return True
        same = os.path.samestat(current, opened) and current.st_size == self._size
        return not (same and locks.is_held(self._lock, self._lock_path))

    def _restore(self, record: Record) -> None:
        """Opens the file to which the path leads now, and writes the records that this file lacks.

        Args:
            record: the next record to append; on failure, this record and all earlier ones are saved to another file.

        Raises:
            OSError: the file cannot be opened or written; the message names that other file.
        """
        mine = self.records
        self.close()
        self.records, self._places = [], {}
        try:
            self._open()
            lacking = [record for record in mine if self._lacks(record)]
            self._write("".join(map(to_line, lacking)).encode())
        except (OSError, ValueError, StoreLockedError) as error:
            self.close()
            self.records = [*mine, record]
            aside = _rescue(self._place, self.records)
            raise OSError(f"{error}; all {len(self.records)} records of this run are in {aside}") from error
        for known in lacking:
            self._add(known)
        warnings.warn(
            f"{self.path} was removed, replaced or changed while it was written; it was opened again, and the "
            f"{len(lacking)} of {len(mine)} records that it lacked were written to it",
            stacklevel=3,
        )

    def take_over(self, keys: Iterable[str], paths: Iterable[str | Path]) -> int:
        """Copies records that other stores hold, so that nothing is measured twice; returns how many were copied.

        Args:
            keys: keys of the wanted records.
            paths: the other stores; paths that do not exist are skipped.
        """
        wanted = set(keys)
        stores = [path for path in _with_parts(paths) if _exists(path)]
        records = [record for record in read_records(*stores) if record["key"] in wanted and self._lacks(record)]
        for record in records:
            outputs.adopt(self.path, record, stores)
            self.append(record)
        return len(records)

    def done_keys(self) -> set[str]:
        """Returns the keys of all records in the store."""
        return set(self._places)

    def judged(self, key: str) -> Record | None:
        """Returns the newest record with this key of quality and counts (`judged_key`), or `None`.

        The record may have been measured on other hardware, on which quality and counts do not depend.
        """
        return next((record for record in reversed(self.records) if record.get("judged_key") == key), None)

    def close(self) -> None:
        """Closes the file and releases the lock; a second call does nothing.

        A file that this object created and wrote nothing to is removed, so that a refused command leaves nothing.
        """
        if self._file >= 0:
            if self._created and self._size == 0 and not self._changed():
                self._place.unlink()
            os.close(self._file)
            self._file = -1
        if self._lock >= 0:
            locks.release(self._lock, self._lock_path)
            self._lock = -1
            with contextlib.suppress(OSError):  # raised for a folder that is not empty, which must stay
                for folder in self._new_folders:
                    folder.rmdir()

    def __enter__(self) -> "ResultStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_format(records: Iterable[Record], source: str | Path) -> None:
    """Raises ValueError if the record of a point has a format that this version can neither read nor migrate.

    Raises:
        ValueError: the message names the format and the remedy.
    """
    for record in records:
        if "point" in record and record.get("format") != FORMAT:
            raise ValueError(
                f"{source} holds records of format {record.get('format')}; this version reads and writes {FORMAT}: "
                f"name another output and measure again"
            )


def fill(
    store: ResultStore,
    groups: Iterable[Sequence[Job]],
    key: Callable[[Job], str],
    evaluate: Callable[[Sequence[Job]], Iterator[Record]],
    on_record: Callable[[Record], None] = lambda record: None,
    stale: Collection[str] = (),
) -> int:
    """Measures the points that the store lacks, and those whose records are stale; every sweep uses this loop.

    Args:
        store: receives each record as soon as it is measured.
        groups: groups of jobs that are cheaper to measure together, such as the α's of one rule.
        key: returns the key that a job's record will have.
        evaluate: measures the missing jobs of one group, and yields one record for each.
        on_record: called with each record after it is stored.
        stale: keys of records that are measured again and superseded (`record_key.is_stale`).

    Returns:
        The number of added records.
    """
    added, outdated = 0, set(stale)
    for group in groups:
        done = store.done_keys() - outdated
        missing = [job for job in group if key(job) not in done]
        for record in evaluate(missing) if missing else ():
            store.append(superseding(record, store.records) if record["key"] in outdated else record)
            outdated.discard(record["key"])
            on_record(record)
            added += 1
    return added


def superseding(record: Record, records: Iterable[Record]) -> Record:
    """Returns `record`, with an entry `supersedes` if `records` contain a record with the same key."""
    codes = [former.get("provenance", {}).get("code") for former in records if former["key"] == record["key"]]
    return record | {"supersedes": codes[0]} if codes else record


def read_records(*paths: str | Path) -> list[Record]:
    """Returns the records of one or more stores, without locking or changing them; a warning lists damaged lines.

    If several files contain the same key, the record of the first file is returned, unless the record of another file
    supersedes it. The stores of a sweep's parts beside a path (`shards`) are read too.

    Raises:
        FileNotFoundError: a path does not exist; the message names it.
        NotAStoreError: a file contains no record.
    """
    merged: dict[str, Record] = {}
    for path in _with_parts(paths):
        for record in _read_one(path):
            if record["key"] not in merged or supersedes(record, merged[record["key"]]):
                merged[record["key"]] = record
    return list(merged.values())


def _exists(path: Path) -> bool:
    return path.is_file() or (isinstance(path, BucketPath) and path.is_dir())


def _read_one(path: Path) -> list[Record]:
    """Returns the records of a store: a file (or its copy in a bucket), or a store of objects in a bucket."""
    if path.is_file():
        records, damaged = parse_store(path, path.read_bytes())
        if damaged:
            report_damaged(path, damaged, "left out")
        return records
    if isinstance(path, BucketPath) and _exists(path):
        return bucket_records.read_new(path)[0]
    raise FileNotFoundError(f"no results at {path}: experiments/sweep.py and experiments/run.py write them")


def _with_parts(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(expanded, paths):
        parts = shards.parts_of(path)
        if path.is_file() or not parts:
            yield path
        yield from parts


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns records as CSV, without `per_example` entries; nested names are joined by dots, and lists are JSON."""
    rows = [dict(_flatten(record)) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if name.startswith("per_example"):
            continue  # these lists are longer than CSV readers accept in one cell
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(item) if isinstance(item, list) else item


def _set_aside(path: Path, damaged: Sequence[DamagedLine]) -> None:
    """Appends damaged lines unchanged to the file `path`."""
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.write(b"\n" * (file.read() != b"\n"))  # the file's last line may lack its line end
        file.writelines(line.content for line in damaged)
        file.flush()
        os.fsync(file.fileno())


def _rescue(place: Path, records: Sequence[Record]) -> Path:
    """Writes records to a file beside a store or, if that fails, to the system's temporary folder; returns its path."""
    content, name = "".join(map(to_line, records)), f"{place.name}.rescued-{os.getpid()}"
    for folder in (place.parent, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            write_atomically(folder / name, content)
            return folder / name
    raise OSError(f"neither {place} nor another file can be written: {len(records)} records are lost")
