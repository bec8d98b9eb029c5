"""Reading the records of a store in a bucket, without JAX."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

from speccascade_jax.results.store.lines import checksum, parse_lines, supersedes
from speccascade_jax.results.store.record import Record
from speccascade_jax.storage.buckets import BucketPath

FOLDER = "records"
"""Name of the place below a store that holds its records."""


def name_of(record: Record) -> str:
    """Returns the name of a record's object.

    A record that supersedes another (replaces one that other code measured) has a name with its checksum. So it never
    overwrites the other record, even if code that has measured the point before measures it again.
    """
    suffix = f"-{checksum(record)}" if "supersedes" in record else ""
    return f"{record['key']}{suffix}.json"


def read_new(store: BucketPath, known: Collection[str] = ()) -> tuple[list[Record], set[str]]:
    """Returns the records whose objects are not `known`, in the order in which they were measured, and the new names.

    A warning lists damaged objects. Their points are measured again, and replace them.
    """
    folder = store / FOLDER
    names = [name for name in folder.below() if name.endswith(".json") and name not in known]
    records, damaged = list[Record](), dict[str, str]()
    for name, content in zip(names, folder.read_below(names), strict=True):
        parsed, wrong = parse_lines(content or b"")
        records += parsed
        if not parsed and content is not None:
            damaged[name] = wrong[0].reason if wrong else "it is empty"
    if damaged:
        listed = "; ".join(f"{name} ({reason})" for name, reason in list(damaged.items())[:5])
        warnings.warn(f"{folder}: {len(damaged)} damaged record(s) left out: {listed}", stacklevel=3)
    return _in_order(records), set(names)


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Sorts records by the time of their measurement, but each after the record that it supersedes.

    The clocks of the machines that measured them may differ.
    """
    by_time = sorted(records, key=lambda record: (record.get("started") or "", record["key"]))
    rest = [record for record in by_time if "supersedes" in record]
    ordered = [record for record in by_time if "supersedes" not in record]
    newest = {record["key"]: record for record in ordered}
    while rest:
        # If no remaining record follows a known one, the superseded record of the oldest one is lost: take it anyway.
        following = (r for r in rest if r["key"] in newest and supersedes(r, newest[r["key"]]))
        record = next(following, rest[0])
        rest.remove(record)
        ordered.append(record)
        newest[record["key"]] = record
    return ordered
