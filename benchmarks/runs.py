"""What both commands do with names on their command line and with stored runs."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from speccascade_jax.results.store.record import Row


def picked(what: str, text: str, known: Collection[str]) -> list[str]:
    """The names in `text`, between commas, in the order of `known`; all of them where there is none.

    Raises:
        ValueError: a name that is not known; says what of.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def read(path: Path, kind: int, part: str, command: str) -> Row:
    """What a run stored.

    Args:
        kind: its format; part: the entry that it must have; command: what writes such files.

    Raises:
        ValueError: the file holds something else.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != kind or part not in record:
        raise ValueError(f"{path} holds no run of {command} (format {kind}): measure anew")
    return record
