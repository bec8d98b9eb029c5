"""Reading the records of a store in a bucket, without JAX."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from speccascade_jax.results.store.lines import parse_lines
from speccascade_jax.results.store.record import Record
from speccascade_jax.storage.buckets import BucketPath

FOLDER = "records"
"""Name of the place below a store that holds its records."""


def name_of(record: Record) -> str:
    """Returns the name of a record's object; a record that supersedes another does not replace its object."""
    code = f"-{record['provenance']['code']}" if "supersedes" in record else ""
    return f"{record['key']}{code}.json"


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
    # a record that supersedes another was measured after it
    records.sort(key=lambda record: (record.get("started") or "", "supersedes" in record, record["key"]))
    return records, set(names)
