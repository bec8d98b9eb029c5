"""Lines of a store. A line is a record as JSON with a checksum; every other line is damaged."""

import hashlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from speccascade_jax.results.store.migration import migrated
from speccascade_jax.results.store.record import Record, StoredRecord

CHECKSUM = "checksum"
BEGIN = b'{"key":"'
"""Beginning of every line. It distinguishes a store whose first line is torn from a file that is not a store."""


class NotAStoreError(ValueError):
    """Error raised for a file that is not empty and contains no record."""


class DamagedLine(NamedTuple):
    """A line of a store without a valid record: its number (from 1), the error, and its bytes with the line end."""

    number: int
    reason: str
    content: bytes


def parse_lines(content: bytes) -> tuple[list[Record], list[DamagedLine]]:
    """Returns the migrated records in the bytes of a store, and the damaged lines.

    A line is damaged if it is torn, is not JSON, has no key, has the key of an earlier line, or does not match its
    checksum. A record that supersedes an earlier record replaces it at the same position of the list.
    """
    records, damaged = dict[str, Record](), list[DamagedLine]()
    first = dict[str, int]()  # number of the first line with each key
    for number, line in numbered_lines(content):
        if not line.strip():
            continue
        record, wrong = _parsed(line)
        key = record["key"]
        if not wrong and key in records and not _is_later(record, records[key]):
            wrong = f"the same key as line {first[key]}"
        if wrong:
            damaged.append(DamagedLine(number, wrong, line))
        else:
            first.setdefault(key, number)
            records[key] = record
    return list(records.values()), damaged


def _is_later(record: Record, former: Record) -> bool:
    """Returns whether a line replaces an earlier line with the same key.

    A line with `supersedes` always replaces the earlier line. The digests are not compared, because a line between the
    two may be damaged. Two records with different keys in format 2 may have the same key today, if the code changed
    between them. In this case the later record was measured by newer code, so it replaces the earlier one.
    """
    migrated_keys = former.get("former_key"), record.get("former_key")
    return "supersedes" in record or (None not in migrated_keys and migrated_keys[0] != migrated_keys[1])


def supersedes(record: Record, former: Record) -> bool:
    """Returns whether `record` states that it replaces `former`, a record with the same key."""
    return "supersedes" in record and record["supersedes"] == former.get("provenance", {}).get("code")


def numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number (from 1) of each line, and the line with its line end."""
    return enumerate(io.BytesIO(content), start=1)


def _parsed(line: bytes) -> tuple[Record, str]:
    """Returns the migrated record of a line, without its checksum, and an error message (empty for a valid line)."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"key": ""}, f"not JSON: {error}"
    if not isinstance(record, dict) or not isinstance(record.get("key"), str) or not record["key"]:
        return {"key": ""}, "not a record with a key"
    if record.pop(CHECKSUM, None) not in (None, checksum(record)):
        return {"key": ""}, "its checksum does not match"
    return cast(Record, StoredRecord(migrated(record))), ""


def checksum(record: Mapping[str, Any]) -> str:
    """Returns the hash of a record's canonical JSON, as 16 hexadecimal digits."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def to_line(record: Record) -> str:
    """Returns a record as a line of a store, with its checksum and a line end."""
    whole = {"key": record["key"], **record, CHECKSUM: checksum(record)}
    return json.dumps(whole, allow_nan=False, separators=(",", ":")) + "\n"


def parse_store(path: Path, content: bytes) -> tuple[list[Record], list[DamagedLine]]:
    """Returns the records and damaged lines of a store; raises NotAStoreError for any other file.

    A file that ends within its first record counts as a store.
    """
    records, damaged = parse_lines(content)
    torn = b"\n" not in content and BEGIN.startswith(content[: len(BEGIN)])
    if content.strip() and not records and not torn:
        raise NotAStoreError(
            f"{path} holds no record: it is not a store of results, or all its lines are damaged. Name another file, "
            f"or move this one away"
        )
    return records, damaged


def report_damaged(path: Path, damaged: Sequence[DamagedLine], fate: str) -> None:
    """Warns of damaged lines, and says what became of them (`fate`)."""
    listed = [f"line {line.number} ({line.reason})" for line in damaged[:5]]
    more = [f"and {len(damaged) - 5} more"] * (len(damaged) > 5)
    warnings.warn(f"{path}: {len(damaged)} damaged line(s) {fate}: {'; '.join(listed + more)}", stacklevel=3)
