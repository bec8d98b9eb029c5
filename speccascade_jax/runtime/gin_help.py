"""What `--help` says of an experiment's settings: every argument that gin gives, with its default."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

from speccascade_jax.core import validate_types
from speccascade_jax.core.names import shown


def settings(function: Callable[..., Any]) -> str:
    """The function's arguments, and the fields of the dataclasses that it takes, as lines of a help text."""
    hints, lines, inside = validate_types.hints(function), list[str](), dict[str, type]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or name == "self":
            continue
        if found := [kind for kind in _kinds(hints.get(name)) if dataclasses.is_dataclass(kind)]:
            inside |= {kind.__name__: kind for kind in found}
        if not dataclasses.is_dataclass(hints.get(name)):
            lines.append(_line(f"{function.__name__}.{name}", parameter.default))
    for title, kind in inside.items():
        lines += [_line(f"{title}.{one.name}", _default(one)) for one in dataclasses.fields(kind) if one.init]
    return "\n\nSettings, each as --gin.NAME=VALUE (texts in quotes), with their defaults:\n\n" + "\n".join(lines)


def _kinds(hint: Any) -> Iterator[type]:
    """The classes in an annotation."""
    if isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from _kinds(inner)


def _default(one: dataclasses.Field[Any]) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default


def _line(name: str, default: Any) -> str:
    needed = default is inspect.Parameter.empty
    return f"  {name:<36} {'(no default; most gin files give one)' if needed else shown(default)}"
