"""Lines of a store: records as JSON with a checksum, and lines that hold none."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from speccascade_jax.results.store.migration import migrated

Record = dict[str, Any]
CHECKSUM = "checksum"
BEGIN = b'{"key":"'
"""Beginning of every line, by which a torn first line differs from a file of something else."""


class DamagedLine(NamedTuple):
    """A line of a store that holds no record: its number (from 1), what is wrong, and its bytes, its end included."""

    number: int
    reason: str
    content: bytes


def parse_lines(content: bytes) -> tuple[list[Record], list[DamagedLine]]:
    """Returns the records of a store's bytes, migrated, and the lines that hold none.

    Those are torn, not JSON, without a key, with a key seen before, or not what their checksum was taken of. A line
    that supersedes an earlier one takes its place among the records.
    """
    records: list[Record] = []
    damaged: list[DamagedLine] = []
    first = dict[str, tuple[int, int]]()  # key -> line number, place among the records
    for number, line in numbered_lines(content):
        if not line.strip():
            continue
        record, wrong = _parsed(line)
        if wrong:
            damaged.append(DamagedLine(number, wrong, line))
        elif record["key"] not in first:
            first[record["key"]] = number, len(records)
            records.append(record)
        elif _is_later(record, records[first[record["key"]][1]]):
            records[first[record["key"]][1]] = record
        else:
            damaged.append(DamagedLine(number, f"the same key as line {first[record['key']][0]}", line))
    return records, damaged


def _is_later(record: Record, former: Record) -> bool:
    """Tells whether a line takes the place of an earlier line with its key.

    It does whatever it says it supersedes, because the line between the two may be damaged. Two records of format 2
    with different keys have one key today if the code between them changed; the later one was measured by newer code.
    """
    migrated_keys = former.get("former_key"), record.get("former_key")
    return "supersedes" in record or (None not in migrated_keys and migrated_keys[0] != migrated_keys[1])


def supersedes(record: Record, former: Record) -> bool:
    """Tells whether a record says that it takes the place of exactly this one of its key."""
    return "supersedes" in record and record["supersedes"] == former.get("provenance", {}).get("code")


def numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the lines with their numbers, with their ends."""
    return enumerate(io.BytesIO(content), start=1)


def _parsed(line: bytes) -> tuple[Record, str]:
    """Returns a line's record, migrated and without its checksum, and what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON: {error}"
    if not isinstance(record, dict) or not isinstance(record.get("key"), str) or not record["key"]:
        return {}, "not a record with a key"
    if record.pop(CHECKSUM, None) not in (None, _checksum(record)):
        return {}, "its checksum is of something else"
    return migrated(record), ""


def _checksum(record: Record) -> str:
    """Returns 16 hex digits of a record's canonical JSON."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def to_line(record: Record) -> str:
    """Returns a record as a line of a store."""
    whole = {"key": record["key"], **record, CHECKSUM: _checksum(record)}
    return json.dumps(whole, allow_nan=False, separators=(",", ":")) + "\n"
