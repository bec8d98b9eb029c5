"""Parsers of commands without gin files, and the version that every command prints."""

import argparse
from collections.abc import Sequence
from typing import Any

import speccascade_jax

VERSION = "print the version and end"
"""The help of `--version`."""


def parser(description: str | None, **further: Any) -> argparse.ArgumentParser:
    """Returns the parser of a command, with `--version`.

    Args:
        description: the text of `--help`, printed as it is.
        further: other arguments of `argparse.ArgumentParser`.
    """
    form = argparse.RawDescriptionHelpFormatter
    command = argparse.ArgumentParser(description=description, formatter_class=form, **further)
    command.add_argument("--version", action="version", version=_line(), help=VERSION)
    return command


def _line() -> str:
    return f"speccascade_jax {speccascade_jax.__version__}"


def print_version(argv: Sequence[str]) -> None:
    """Prints the version and ends the program if `argv` asks for it; for commands that do not use `parser`."""
    if "--version" in argv:
        parser(None).parse_args(["--version"])
