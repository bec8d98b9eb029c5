"""Helpers of `benchmarks` and `benchmarks.peers`: names on the command line, and stored runs."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from speccascade_jax.results.store.record import Row


def picked(what: str, text: str, known: Collection[str]) -> list[str]:
    """Splits `text` at commas into names; returns these in the order of `known`, or all of `known` if there are none.

    Raises:
        ValueError: a name is not in `known`; `what` says in the message what kind of name it is.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def read(path: Path, kind: int, part: str, command: str) -> Row:
    """Reads a stored run.

    Args:
        kind: the expected number of the format; part: an entry that the run must have; command: the command that
            writes such files, for the message.

    Raises:
        ValueError: the file holds no run of this format.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != kind or part not in record:
        raise ValueError(f"{path} does not hold a run of {command} (format {kind}): measure again")
    return record
