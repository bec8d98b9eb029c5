"""T5X's way of writing a gin setting on the command line, `--gin.NAME=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence

PREFIX = "--gin."


def rewrite_arguments(argv: Sequence[str]) -> list[str]:
    """`--gin.NAME=VALUE` as `--gin_bindings=NAME = VALUE`; everything else as it is.

    Raises:
        ValueError: a setting without a value.
    """
    return [argv[0], *(_rewrite(argument) for argument in argv[1:])] if argv else []


def _rewrite(argument: str) -> str:
    if not argument.startswith(PREFIX):
        return argument
    name, equals, value = argument.removeprefix(PREFIX).partition("=")
    if not equals:
        raise ValueError(f"{argument} has no value; write {PREFIX}{name}=VALUE (strings in quotes: '\"text\"')")
    return f"--gin_bindings={name} = {value}"
