"""Checks of the values that a gin file or a caller passes to a class or function, against its type annotations."""

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speccascade_jax.core.names import hint as near_names
from speccascade_jax.core.names import shown


@dataclass(frozen=True)
class Later:
    """A placeholder for a value that does not exist yet.

    Attributes:
        text: a description of how the value will be made.
        kind: the value's class; `None` if it may have any class.
    """

    text: str
    kind: type | None = None

    def __repr__(self) -> str:
        return self.text

    def fits(self, kind: Any) -> bool:
        """Returns whether the value, once it exists, can be an instance of class `kind`."""
        return self.kind is None or isinstance(kind, type) and issubclass(self.kind, kind)


def check(owner: Any, values: Mapping[str, object], prefix: str = "") -> None:
    """Raises a ValueError if a value contradicts the type annotations of `owner`, a class with fields or a function.

    Args:
        owner: the class or function.
        values: a map from names to values; names without an annotation are skipped.
        prefix: a text that error messages put before a name.

    Raises:
        ValueError: the message names the value, its wrong part, and the expected type.
    """
    annotations = hints(owner)
    for name, value in values.items():
        if problem := _problem(prefix + name, value, annotations.get(name, Any)):
            raise ValueError(problem)


@functools.cache
def hints(owner: Any) -> dict[str, Any]:
    """Returns the annotations of a dataclass's fields, or of the arguments of a function or class."""
    called = isinstance(owner, type) and not dataclasses.is_dataclass(owner)
    try:
        return typing.get_type_hints(owner.__init__ if called else owner)
    except (NameError, TypeError):  # a user's function with unreadable annotations
        return {}


def _problem(name: str, value: object, hint: Any) -> str:
    """Returns a text that says why a value does not fit an annotation; the text is empty if it fits."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if union else (hint,)
    # A value may match any member of the union, so all members are tried before a problem is reported.
    problems = [_problem_inside(name, value, kind) for kind in kinds]
    if "" in problems:
        return ""
    if inside := next(filter(None, problems), None):  # the container has the right type, but an entry does not
        return inside
    # In Python a string is a sequence, but here it counts as a single value.
    single = isinstance(value, str) or not isinstance(value, (Sequence, Mapping))
    if single and (tuples := [kind for kind in kinds if _is_a(kind, Sequence)]):
        entries = typing.get_args(tuples[0])
        form = f"{shown(value)}, …" if len(entries) > 1 and entries[1] is not Ellipsis else f"{shown(value)},"
        return f"{name}={shown(value)} is one value where a tuple is meant; write ({form})"
    remedy = ""
    words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    if isinstance(value, str) and (near := near_names(value.lower(), words)):
        remedy = f"; {near.strip()}"
    elif isinstance(value, str) and {bool, int, float}.intersection(kinds):
        remedy = "; write it without quotes"
    elif int in kinds and isinstance(value, float) and value.is_integer():
        remedy = f"; write {value:.0f}"
    return f"{name}={shown(value)} is not {' or '.join(map(_described, kinds))}{remedy}"


def _problem_inside(name: str, value: Any, kind: Any) -> str | None:
    """Returns "" if a value fits `kind`, a description if only an entry does not fit, `None` if the value does not."""
    inner, origin = typing.get_args(kind), typing.get_origin(kind) or kind
    if kind is Any or isinstance(value, Later) and value.fits(origin):
        return ""
    # Scalars are not checked by `isinstance`, because in Python True is an int and NumPy's integers are not.
    if kind in _SCALARS:
        fits = _SCALARS[kind][1](value)
    elif origin is typing.Literal:
        fits = isinstance(value, str) and value in inner
    elif _is_a(kind, Mapping):
        return _first_problem(_mapping_parts(name, value, *inner)) if isinstance(value, Mapping) else None
    elif _is_a(kind, Sequence):
        return _in_sequence(name, value, inner) if isinstance(value, Sequence) and not isinstance(value, str) else None
    elif origin is Callable:
        fits = callable(value)
    else:
        fits = not isinstance(origin, type) or isinstance(value, origin)
    return "" if fits else None


_Part = tuple[str, object, Any]
"""A tuple of a name for error messages, a value, and the value's annotation."""


def _first_problem(parts: Iterable[_Part]) -> str:
    return next((problem for part in parts if (problem := _problem(*part))), "")


def _mapping_parts(name: str, value: Mapping[Any, Any], keys: Any = Any, values: Any = Any) -> Iterable[_Part]:
    for key, entry in value.items():
        yield f"a key of {name}", key, keys
        yield f"{name}[{shown(key)}]", entry, values


def _in_sequence(name: str, value: Sequence[Any], inner: tuple[Any, ...]) -> str:
    # `tuple[int, ...]` repeats one annotation; `tuple[int, str]` has one per entry.
    kinds = [inner[0] if inner else Any] * len(value) if len(inner) < 2 or inner[1] is Ellipsis else inner
    if len(kinds) != len(value):
        return f"{name}={shown(value)} has {len(value)} entries, but {len(kinds)} are expected"
    return _first_problem((f"{name}[{n}]", *part) for n, part in enumerate(zip(value, kinds, strict=True)))


def _is_a(kind: Any, family: type) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, family)


def _finite(value: object) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


_SCALARS: dict[object, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, (bool, np.bool_))),
    int: ("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    float: ("a finite number", _finite),
    str: ("a text", lambda value: isinstance(value, str)),
    type(None): ("None", lambda value: value is None),
}


def _described(kind: Any) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind][0]
    if _is_a(kind, Mapping) or _is_a(kind, Sequence):
        return "a dictionary" if _is_a(kind, Mapping) else "a tuple"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    name = getattr(kind, "__name__", str(kind))
    return f"an {name}" if name[0] in "AEIO" else f"a {name}"
