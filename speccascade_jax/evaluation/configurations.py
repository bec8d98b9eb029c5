"""A point's configuration as the text of a gin file, which `experiments/run.py` runs again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.task import Task

BESIDE = {"beside": True}
"""Metadata of a field that is no part of what a point is: in no configuration, and in no record's key."""

_MODULES: Mapping[type, str] = {FileTask: "data.tasks import file_task", SeqioTask: "data.tasks import seqio_task"}
_POINTS = "evaluation import points"


def configuration(parts: Mapping[str, Any], seed: int) -> str:
    """A complete gin file of one run.

    Args:
        parts: argument of `experiment.run` -> a dataclass, in order.
    """
    used = {module for part in parts.values() for module in _used(part)}
    imports = [f"from speccascade_jax.{each}" for each in sorted({*used, _POINTS, "evaluation import experiment"})]
    head = ["from __gin__ import dynamic_registration", "", *imports, ""]
    blocks = [line for part in parts.values() for line in gin_blocks(part)]
    run = [f"  {name} = @{_selector(part)}()" for name, part in parts.items()]
    return "\n".join([*head, *blocks, "experiment.run:", *run, f"  seed = {seed}"]) + "\n"


def _used(part: Any) -> Iterator[str]:
    yield _MODULES.get(type(part), _POINTS)
    yield from (_MODULES[type(value)] for value in fields_of(part).values() if type(value) in _MODULES)


def fields_of(part: Any) -> dict[str, Any]:
    """Name -> value of what a dataclass is made of."""
    own = (one for one in dataclasses.fields(part) if one.init and "beside" not in one.metadata)
    return {one.name: getattr(part, one.name) for one in own}


def gin_blocks(part: Any, scope: str = "") -> Iterator[str]:
    """The lines of a dataclass's gin block and, behind it, of those that it holds, each in a scope of its own."""
    inside = list[tuple[Any, str]]()

    def text(value: Any, name: str) -> str:
        if isinstance(value, tuple):
            return "(" + "".join(text(each, f"{name}{number}") + ", " for number, each in enumerate(value)) + ")"
        if isinstance(value, Task) and type(value) not in _MODULES:
            return _made_in_python(value)
        if not dataclasses.is_dataclass(value):
            return repr(value)
        inside.append((value, f"{scope}{name}_"))
        return f"@{scope}{name}_/{_selector(value)}()"

    lines = [f"  {name} = {text(value, name)}" for name, value in fields_of(part).items()]
    yield f"{scope}/{_selector(part)}:" if scope else f"{_selector(part)}:"
    yield from lines
    for value, within in inside:
        yield from gin_blocks(value, within)


def _selector(part: Any) -> str:
    return f"{_MODULES.get(type(part), _POINTS).rpartition(' ')[2]}.{type(part).__name__}"


def _made_in_python(task: Task) -> str:
    """A hole where a task that no file can name stood, and, for the record's key, what is known of it."""
    known = {name: value for name, value in fields_of(task).items() if isinstance(value, str | int | tuple | None)}
    return f"%gin.REQUIRED  # a Task made in Python, give it as 'module.NAME'; it had {known}"
