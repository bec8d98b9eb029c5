"""The handling of names on the command line and of stored runs, for both commands."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from speccascade_jax.results.store.record import Row


def picked(what: str, text: str, known: Collection[str]) -> list[str]:
    """Returns the names in `text`, separated by commas, in the order of `known`; all of `known` if there is none.

    Raises:
        ValueError: an unknown name; the message calls it a `what`.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def read(path: Path, kind: int, part: str, command: str) -> Row:
    """Reads a stored run.

    Args:
        kind: its format; part: the entry that it must have; command: the command that writes such files.

    Raises:
        ValueError: the file holds something else.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != kind or part not in record:
        raise ValueError(f"{path} does not hold a run of {command} (format {kind}): measure again")
    return record
