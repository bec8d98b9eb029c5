"""Parsers of commands without gin files, and the version that every command prints."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import speccascade_jax


def parser(description: str | None, **further: Any) -> argparse.ArgumentParser:
    """Returns the parser of a command, with `--version`.

    Args:
        description: the text of `--help`, printed as it is.
        further: other arguments of `argparse.ArgumentParser`.
    """
    form = argparse.RawDescriptionHelpFormatter
    command = argparse.ArgumentParser(description=description, formatter_class=form, **further)
    command.add_argument("--version", action="version", version=version(), help="print the version and end")
    return command


def version() -> str:
    """Returns the line that `--version` prints."""
    return f"speccascade_jax {speccascade_jax.__version__}"


def print_version(argv: Sequence[str]) -> None:
    """Ends the program after printing the version if the command line asks for it."""
    if "--version" in argv:
        print(version())
        sys.exit(0)
