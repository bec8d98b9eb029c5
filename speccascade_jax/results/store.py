"""The store of results: one JSON line per measured point, safe against kills, torn lines and two writers.

Nothing here imports JAX. A record is a dictionary with a `key`, the hash of everything that determines it
(`point_key`); a store never holds a key twice, and that is what makes a killed sweep resume.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from speccascade_jax.core.files import _sync_folder, plain, write_atomically

Record = dict[str, Any]
FORMAT = 2
"""Of records of points; those of another one are neither read nor added to."""
Job = TypeVar("Job")


class StoreLockedError(RuntimeError):
    """Another process is writing the same store."""


class DamagedLine(NamedTuple):
    """A line of a store that holds no record: its number (from 1), what is wrong, and its bytes."""

    number: int
    reason: str
    content: bytes


class ResultStore:
    """A JSON-lines file that one process at a time appends records to.

    Opening takes the lock `<path>.lock`, sets damaged lines aside into `<path>.damaged` (reported by number as a
    warning, and kept in `damaged`) and loads the records. Each record is one `write` of one line, then an `fsync`.

    Args:
        path: the file; it and its folders are created when missing.

    Raises:
        StoreLockedError: another process holds the store open.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire(self.path.with_name(self.path.name + ".lock"), self.path)
        self._file = -1
        try:
            self.records, self.damaged = self._recover()
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            _sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise
        self._keys = {record["key"] for record in self.records}

    def _recover(self) -> tuple[list[Record], list[DamagedLine]]:
        """The records on disk; what is no record is moved aside first, and a missing last line end is added."""
        content = self.path.read_bytes() if self.path.exists() else b""
        records, damaged = parse_lines(content)
        if damaged:
            aside = self.path.with_name(self.path.name + ".damaged")
            with open(aside, "ab") as file:
                file.writelines(line.content + b"\n" for line in damaged)
                file.flush()
                os.fsync(file.fileno())
            _report(self.path, damaged, f"set aside in {aside}")
        if damaged or (content and not content.endswith(b"\n")):
            write_atomically(self.path, "".join(_line(record) for record in records))
        return records, damaged

    def append(self, record: Record) -> None:
        """Add one record, durably: after this returns it survives a kill and a power cut.

        Raises:
            ValueError: the record has no `key`, or the store already holds it.
            OSError: the disk took only a part (the part is removed again).
        """
        key = record.get("key")
        if not isinstance(key, str) or not key:
            raise ValueError(f"a record needs a non-empty string 'key', got {key!r}")
        if key in self._keys:
            raise ValueError(f"{self.path} already holds a record with key {key}")
        record = plain(record)
        self._write(_line(record).encode())
        self.records.append(record)
        self._keys.add(key)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(f"{self.path}: only {written} of {len(line)} bytes were written; is the disk full?")
        except OSError:
            os.ftruncate(self._file, size)
            raise
        os.fsync(self._file)

    def take_over(self, keys: Iterable[str], paths: Iterable[str | Path]) -> int:
        """Copy records that other stores hold, so that nothing is measured twice; returns how many.

        Args:
            keys: of the records that are wanted; paths: the other stores; those that do not exist are passed over.
        """
        wanted = set(keys) - self._keys
        found = [record for record in read_records(*filter(os.path.isfile, paths)) if record["key"] in wanted]
        for record in found:
            self.append(record)
        return len(found)

    def done_keys(self) -> set[str]:
        """The keys of all records in the store."""
        return set(self._keys)

    def close(self) -> None:
        """Release the file and the lock; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock >= 0:
            # Removed while still held: whoever opened it meanwhile sees that it is no longer the file of that name.
            self.path.with_name(self.path.name + ".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_format(records: Iterable[Record], where: str | Path) -> None:
    """Refuse records of points that another version wrote: their keys, and what they say of methods, are others.

    Raises:
        ValueError: names the format and the remedy.
    """
    for record in records:
        if "point" in record and record.get("format") != FORMAT:
            raise ValueError(
                f"{where} holds records of format {record.get('format')}, this version reads and writes {FORMAT}: "
                f"name another output and measure again"
            )


def fill(
    store: ResultStore,
    groups: Iterable[Sequence[Job]],
    key: Callable[[Job], str],
    evaluate: Callable[[Sequence[Job]], Iterator[Record]],
    on_record: Callable[[Record], None] = lambda record: None,
) -> int:
    """Measure what the store does not hold yet: the loop of every sweep.

    Args:
        store: where the records go, each as soon as it is there.
        groups: jobs that are cheaper together (the α's of one rule).
        key: the key that a job's record will have.
        evaluate: measures the jobs of one group, yielding one record each; called with the missing ones only.
        on_record: told of each record after it is stored.

    Returns:
        How many records were added.
    """
    added = 0
    for group in groups:
        done = store.done_keys()
        missing = [job for job in group if key(job) not in done]
        for record in evaluate(missing) if missing else ():
            store.append(record)
            on_record(record)
            added += 1
    return added


def read_records(*paths: str | Path) -> list[Record]:
    """The records of one or more stores, without a lock and without changing them; damaged lines are reported.

    A key that several files hold is returned once.

    Raises:
        FileNotFoundError: a path that does not exist, named.
    """
    merged: dict[str, Record] = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"no results at {path}: experiments/sweep.py and experiments/run.py write them")
        records, damaged = parse_lines(path.read_bytes())
        if damaged:
            _report(path, damaged, "left out")
        for record in records:
            merged.setdefault(record["key"], record)
    return list(merged.values())


def parse_lines(content: bytes) -> tuple[list[Record], list[DamagedLine]]:
    """The records of a store's bytes, and the lines that are none (torn, not JSON, no key, a key seen before)."""
    records: list[Record] = []
    damaged: list[DamagedLine] = []
    first: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            damaged.append(DamagedLine(number, f"not JSON: {error}", line))
            continue
        key = record.get("key") if isinstance(record, dict) else None
        if not isinstance(key, str) or not key:
            damaged.append(DamagedLine(number, "not a record with a key", line))
        elif key in first:
            damaged.append(DamagedLine(number, f"the same key as line {first[key]}", line))
        else:
            first[key] = number
            records.append(record)
    return records, damaged


def to_csv(records: Sequence[Record]) -> str:
    """The records, less their single examples, as CSV text: names joined by dots, lists as JSON, undefined empty."""
    rows = [dict(_flatten(record)) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flatten(value: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if name.startswith("per_example"):
            continue  # longer than the cells that CSV readers take
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(item) if isinstance(item, list) else item


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _report(path: Path, damaged: Sequence[DamagedLine], fate: str) -> None:
    listed = "; ".join(f"line {line.number} ({line.reason})" for line in damaged)
    warnings.warn(f"{path}: {len(damaged)} damaged line(s) {fate}: {listed}", stacklevel=3)


def _acquire(lock: Path, store: Path) -> int:
    """A descriptor that holds the lock; the kernel lets go of it when the process dies, however it dies."""
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise StoreLockedError(
                f"{store} is being written by process {owner} (lock {lock}): "
                "wait for it, end it, or name another output"
            ) from None
        if _is_file(handle, lock):
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            return handle
        os.close(handle)


def _is_file(handle: int, path: Path) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False
