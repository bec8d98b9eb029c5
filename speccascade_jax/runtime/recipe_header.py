"""The first line of a command: what its recipe does, how many points, about how long, from the recipe's header.

A recipe is a gin file whose first comment says what it does. Its line `# Time:` says how long the command in its header
takes; `benchmarks.recipe_times` measures it.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from speccascade_jax.runtime import hosts

_WIDTH = 120
_CLOCK = r"(\d+ (?:min|s)(?: \d+ s)?(?: per seed| each)?)"
_KINDS = {
    "cold (nothing compiled)": rf"{_CLOCK} cold|empty compilation cache: (?:about )?{_CLOCK}",
    "warm": rf"{_CLOCK} warm|all programs in the compilation cache: (?:about )?{_CLOCK}",
}
_MACHINE = r"on (?:\d+ cores?|one core)[^(;]*\([^)]*\)|on \d+ cores of an? [\w ]+"

_RECIPE: list[str] = []
_PLACES: list[str] = []


def forget() -> None:
    """Forgets recipe and places of an earlier command."""
    _RECIPE.clear()
    _PLACES.clear()


def remember(recipe: str) -> None:
    """Keeps the text of a recipe until the command has checked its settings (`announce`)."""
    _RECIPE[:] = [recipe]


def remember_place(place: str) -> None:
    """Keeps a place of results that the command has chosen, until all is checked (`announce_places`)."""
    _PLACES.append(place)


def announce(count: str = "", file: TextIO | None = None) -> None:
    """Prints the first line of a command, in the first process; nothing without a recipe.

    Args:
        count: what the command measures, such as "14 points".
        file: the stream; by default stdout.
    """
    for recipe in _RECIPE if hosts.first() else ():
        if line := first_line(recipe, count, sys.argv[1:]):
            print(line, file=file, flush=True)
    _RECIPE.clear()


def announce_places() -> None:
    """Prints where results go, once, in the first process; commands call this after all checks."""
    for place in _PLACES if hosts.first() else ():
        print(f"results go to {place}; --output=PATH names another place", flush=True)
    _PLACES.clear()


def first_line(recipe: str, count: str, typed: Sequence[str]) -> str:
    """Returns the first line of a command, from the recipe's text, the count and the words of the command line."""
    spent = times(recipe)
    if spent and not any(sorted(words) == sorted(typed) for words in commands(recipe)):
        spent = f"the command in the recipe takes {spent}"
    name = title(recipe)
    return f"{'' if name.endswith('…') else '.'} ".join(filter(None, [name, ", ".join(filter(None, [count, spent]))]))


def title(recipe: str) -> str:
    """Returns the first sentence of a recipe's first comment; empty without one."""
    comment = re.match(r"(?:#[^\n]+\n)+", recipe)
    words = " ".join(re.sub(r"(?m)^# ?", " ", comment[0]).split()) if comment else ""
    sentence = re.split(r"(?<!al)\.\s+(?=[A-Z(]|python )", words)[0].rstrip(".:")
    return textwrap.shorten(sentence, _WIDTH, placeholder=" …")


def commands(recipe: str) -> list[list[str]]:
    """Returns the arguments of each command in a recipe's header."""
    block = re.search(r"^# Command: .*\n(?:#  .*\n)*", recipe, re.MULTILINE)
    return [shlex.split(line) for line in re.findall(r"\bpython -m experiments\.\w+(.*)", block[0] if block else "")]


def times(recipe: str) -> str:
    """Returns how long a recipe takes cold and warm, as its header says; empty if it says nothing."""
    block = re.search(r"^# Time: .*\n(?:#  .*\n)*", recipe, re.MULTILINE)
    text = " ".join(re.sub(r"(?m)^#", " ", block[0]).split()) if block else ""
    durations = {kind: re.search(pattern, text) for kind, pattern in _KINDS.items()}
    parts = [f"{match[1] or match[2]} {kind}" for kind, match in durations.items() if match]
    machine = re.search(_MACHINE, text)
    return f"about {', '.join(parts)}{f' {machine[0]}' if machine else ''}" if parts else ""
