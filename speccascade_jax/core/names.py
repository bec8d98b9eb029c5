"""Names: of what stands in a table, of what is one's own, and what an error says about one that is not known."""

import difflib
import importlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

TARGET = "autoregressive"
DRAFT = "autoregressive_draft"

PER_EXAMPLE = ("committed", "target_calls", "discarded", "draft_steps", "drafted")
"""Counts that records hold example by example, so that rates and predicted times have intervals."""


def hint(name: object, known: Iterable[str]) -> str:
    """`"did you mean a, b? "` with the nearest of the known names, at most three; empty where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4)
    return f"did you mean {', '.join(near)}? " if near else ""


def natural(text: str) -> tuple[tuple[float, str], ...]:
    """Sorts names by the numbers in them: `token_v2` before `token_v10`, "γ = 8" before "γ = 10"."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((float(part), "") if n % 2 else (-math.inf, part) for n, part in enumerate(parts))


def look_up(what: str, name: str, table: Mapping[str, Any], kind: Any, also: str = "") -> Any:
    """The entry of that name, or what `module.NAME` names: something of one's own, in a file that Python can import.

    Args:
        what: "rule", "task", for errors; kind: the class, or a tuple of classes, that something of one's own must have;
            also: a further remedy.

    Raises:
        ValueError: no such entry (the message names the nearest), no such module or name in it, or another kind.
    """
    if not isinstance(name, str):
        raise ValueError(f"{what} {name!r} is no name: the {what}s are {', '.join(table)}")
    if name in table:
        return table[name]
    if not all(name.split(".")) or "." not in name:
        raise ValueError(
            f"unknown {what} {name!r}: {hint(name, table)}the {what}s are {', '.join(table)}; "
            f"one of your own is named module.NAME{also}"
        )
    return _imported(what, name, kind)


_MISSING = object()


def _imported(what: str, name: str, kind: Any) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute, _MISSING)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise ValueError(
            f"{what} {name!r}: there is no module {error.name!r}; its file lies where you start from, or in a "
            f"folder of PYTHONPATH"
        ) from error
    if found is _MISSING:
        raise ValueError(f"{what} {name!r}: module {module!r} has no {attribute!r}")
    if not isinstance(found, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or a ".join(each.__name__ for each in kinds)
        raise ValueError(f"{what} {name!r} is {found!r:.80}: it must be a {wanted}")
    return found
