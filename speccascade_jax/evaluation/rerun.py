"""Running a record's point again: from its stored configuration, files of one's own included."""

from __future__ import annotations

import itertools
from pathlib import Path

from speccascade_jax.core.names import hint
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import NotAStoreError, Record, read_records
from speccascade_jax.storage.files import expanded

SHORTEST = 4
AGAIN = "again-"
"""What stores of points that were run again begin with: they are not looked through for records."""


def output(record: Record) -> str:
    """A store that is not there yet, for a record that is run again."""
    numbers = itertools.count(1)
    names = (f"results/{AGAIN}{record['key'][:8]}-{number}.jsonl" for number in numbers)
    return next(name for name in names if not Path(name).exists())


def find(key: str, store: str | None = None) -> tuple[Record, Path]:
    """The record whose key begins with `key`, and its store: the one named, or any `results/*.jsonl`.

    Raises:
        ValueError: none, several, or too few digits to tell. FileNotFoundError: no such store.
    """
    if len(key) < SHORTEST:
        raise ValueError(f"from_record={key!r}: give at least {SHORTEST} digits of the record's key")
    found, keys = dict[str, tuple[Record, Path]](), list[str]()
    stores = [path for path in sorted(Path("results").glob("*.jsonl")) if not path.name.startswith(AGAIN)]
    for path in [expanded(store)] if store else stores:
        try:
            records = read_records(path)
        except NotAStoreError:
            if store:
                raise
            continue
        keys += [record["key"] for record in records]
        found |= {r["key"]: (r, path) for r in records if any(known.startswith(key) for known in keys_of(r))}
    where = store or "results/*.jsonl"
    if not found:
        raise ValueError(f"no record of {where} has a key that begins with {key!r}: {hint(key, keys)}give --store")
    if len(found) > 1:
        raise ValueError(f"{len(found)} records of {where} have keys that begin with {key!r}: give more digits")
    record, path = next(iter(found.values()))
    if "configuration" not in record:
        raise ValueError(f"record {record['key']} of {path} is of no point: it has no configuration to run again")
    return record, path


def keys_of(record: Record) -> list[str]:
    """Returns a record's key, and the one that it had in a former format."""
    return [record[name] for name in ("key", "former_key") if name in record]


def compared(old: Record, old_store: Path, new: Record, new_store: str | Path) -> str:
    """What became of a record that was run again, in words."""
    told = ["the same key"] if old["key"] == new["key"] else [f"another key, {new['key']}: {_changed(old, new)}"]
    before, after = outputs.read(old_store, old), outputs.read(new_store, new)
    if before is None or after is None:
        return "; ".join([*told, "outputs were not kept, so they cannot be compared"])
    known = {each.id: each.tokens for each in before}
    same = sum(known.get(each.id) == each.tokens for each in after)
    return "; ".join([*told, f"the same tokens in {same} of {len(after)} outputs"])


def _changed(old: Record, new: Record) -> str:
    differs = _names(old.get("fingerprints", {}), new.get("fingerprints", {}))
    differs += _names(*({"code": record.get("provenance", {}).get("code")} for record in (old, new)))
    differs += _names({"device": old.get("device")}, {"device": new.get("device")})
    differs += _names({"configuration": old["configuration"]}, {"configuration": new["configuration"]})
    return f"other {', '.join(differs)}" if differs else "another version of records"


def _names(old: Record, new: Record) -> list[str]:
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]
