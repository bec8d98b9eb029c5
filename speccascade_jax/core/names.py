"""Names: of what stands in a table, of what is one's own, and what an error says about one that is not known."""

import difflib
import importlib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

TARGET = "autoregressive"
DRAFT = "autoregressive_draft"

SOURCES = ("draft", "replaced", "bonus", "target")
"""Where a committed token came from: drafted and kept; put by the target in place of a rejected one; after a block kept
whole; where nothing was drafted."""

PER_EXAMPLE = ("committed", "target_calls", "discarded", "draft_steps", "drafted")
"""Counts that records hold example by example, so that rates and predicted times have intervals."""


def hint(name: object, known: Iterable[str]) -> str:
    """Returns `"did you mean a, b? "` with the nearest of the known names, at most three; empty where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4)
    return f"did you mean {', '.join(near)}? " if near else ""


def natural(text: str) -> tuple[tuple[float, str], ...]:
    """Sorts names by the numbers in them: `token_v2` before `token_v10`, "γ = 8" before "γ = 10"."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((float(part), "") if n % 2 else (-math.inf, part) for n, part in enumerate(parts))


def unknown(name: object, known: Iterable[str], where: str = "") -> str:
    """Returns what an error says of an unknown name: the nearest, and all of them, or where they are if many."""
    known = list(known)
    if len(known) > _FEW and where:
        return f"{hint(name, known)}all {len(known)} are in {where}"
    more = ", …" if len(known) > _FEW else ""
    return f"{hint(name, known)}there are {', '.join(known[:_FEW]) or 'none'}{more}"


_FEW = 12
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxtuple, _SHORT.maxlist, _SHORT.maxdict = 4, 8, 8, 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """Returns a value as errors show it: short, and without an address."""
    return without_addresses(_SHORT.repr(value))


def without_addresses(text: str) -> str:
    """Returns a text without the addresses that Python shows of objects."""
    return _ADDRESS.sub("", text)


def look_up(what: str, name: str, table: Mapping[str, Any], kind: Any, where: str = "", also: str = "") -> Any:
    """Returns the entry of that name, or what `module.NAME` names: something of a user's, in a file that Python finds.

    Args:
        what: "rule", "task", for errors; kind: the class, or a tuple of classes, that something of a user's must have;
            where: the table's name, for errors; also: a further remedy.

    Raises:
        ValueError: no such entry (the message names the nearest), no such module or name in it, or another kind.
    """
    if not isinstance(name, str):
        names = where or ", ".join(table)
        raise ValueError(
            f"{what}={shown(name)} is no name: give a text, {f'one of {names}' if names else 'module.NAME'}"
        )
    if name in table:
        return table[name]
    if not all(name.split(".")) or "." not in name:
        near = unknown(name, table, where)
        raise ValueError(f"unknown {what} {shown(name)}: {near}; one of your own is named module.NAME{also}")
    value = _imported(what, name)
    if not isinstance(value, kind):
        wanted = " or a ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{what} {name!r} is {shown(value)}: it must be a {wanted}")
    return value


def _imported(what: str, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a file of one's own may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            where = "its file lies where you start from, or in a folder of PYTHONPATH"
            raise ValueError(f"{what} {name!r}: there is no module {error.name!r}; {where}") from error
        error.add_note(f"{what} {name!r}: module {module!r} cannot be imported")
        raise
    if not hasattr(imported, attribute):
        raise ValueError(f"{what} {name!r}: module {module!r} has no {attribute!r}")
    return getattr(imported, attribute)
