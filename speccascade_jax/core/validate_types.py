"""Values held against annotations: what a gin file or a caller gives is what the class or function says it takes."""

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speccascade_jax.core.names import shown


@dataclass(frozen=True)
class Later:
    """A value that is not made yet: `text` says how, `kind` of which class it will be; `None`: of any."""

    text: str
    kind: type | None = None

    def __repr__(self) -> str:
        return self.text


def check(owner: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse values that are not what the annotations of `owner`, a class with fields or a function, say.

    Args:
        values: by name; names without an annotation are passed over. prefix: what errors put before a name.

    Raises:
        ValueError: names the value, where in it, and what is meant.
    """
    hints = _hints(owner)
    for name, value in values.items():
        if wrong := _wrong(prefix + name, value, hints.get(name, Any)):
            raise ValueError(wrong)


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    plain = isinstance(owner, type) and not dataclasses.is_dataclass(owner)
    try:
        return typing.get_type_hints(owner.__init__ if plain else owner)
    except (NameError, TypeError):  # a function of somebody's whose annotations cannot be read
        return {}


def _wrong(name: str, value: Any, hint: Any) -> str:
    """What is wrong with a value, in words; empty if nothing is."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    found = [_inside(name, value, kind) for kind in kinds]
    if "" in found:
        return ""
    if inside := [words for words in found if words]:  # it is of one of the kinds, but for something in it
        return inside[0]
    several = any(_is(kind, Sequence) for kind in kinds)
    if several and (isinstance(value, str) or not isinstance(value, (Sequence, Mapping))):
        return f"{name}={shown(value)} is one value where a tuple is meant; write ({shown(value)},)"
    unquoted = isinstance(value, str) and {bool, int, float}.intersection(kinds)
    remedy = "; write it without quotes" if unquoted else ""
    if int in kinds and isinstance(value, float) and value.is_integer():
        remedy = f"; write {value:.0f}"
    return f"{name}={shown(value)} is not {' or '.join(map(_described, kinds))}{remedy}"


def _inside(name: str, value: Any, kind: Any) -> str | None:
    """Empty if the value is of the kind; what is wrong in it if it is but for that; `None` if it is of another."""
    inner = typing.get_args(kind)
    origin = typing.get_origin(kind) or kind
    if kind is Any or isinstance(value, Later) and (value.kind is None or _is_class(value.kind, origin)):
        return ""
    if kind in _SCALARS:
        return "" if _SCALARS[kind](value) else None
    if origin is typing.Literal:
        return "" if isinstance(value, str) and value in inner else None
    if _is(kind, Mapping):
        return _in_mapping(name, value, inner) if isinstance(value, Mapping) else None
    if _is(kind, Sequence):
        several = isinstance(value, Sequence) and not isinstance(value, str)
        return _in_sequence(name, value, inner) if several else None
    fits = callable(value) if origin is Callable else not isinstance(origin, type) or isinstance(value, origin)
    return "" if fits else None


def _in_mapping(name: str, value: Mapping[Any, Any], inner: tuple[Any, ...]) -> str:
    keys, values = inner or (Any, Any)
    for key, one in value.items():
        if wrong := _wrong(f"a key of {name}", key, keys) or _wrong(f"{name}[{shown(key)}]", one, values):
            return wrong
    return ""


def _in_sequence(name: str, value: Sequence[Any], inner: tuple[Any, ...]) -> str:
    kinds = [inner[0] if inner else Any] * len(value) if len(inner) < 2 or inner[1] is Ellipsis else list(inner)
    if len(kinds) != len(value):
        return f"{name}={shown(value)} has {len(value)} entries where {len(kinds)} are meant"
    each = (_wrong(f"{name}[{number}]", one, kind) for number, (one, kind) in enumerate(zip(value, kinds, strict=True)))
    return next(filter(None, each), "")


def _is(kind: Any, family: type) -> bool:
    return _is_class(typing.get_origin(kind), family)


def _is_class(kind: Any, family: Any) -> bool:
    return isinstance(kind, type) and isinstance(family, type) and issubclass(kind, family)


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False


_SCALARS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, (bool, np.bool_)),
    int: lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
    float: _finite,
    str: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
}
_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text", type(None): "None"}


def _described(kind: Any) -> str:
    if _is(kind, Mapping):
        return "a dictionary"
    if _is(kind, Sequence) or kind in _WORDS:
        return _WORDS.get(kind, "a tuple")
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    name = getattr(kind, "__name__", str(kind))
    return f"an {name}" if name[0] in "AEIO" else f"a {name}"
