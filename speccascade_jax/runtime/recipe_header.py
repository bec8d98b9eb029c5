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

_CHANGES = re.compile(r"--?(task|pair|methods|alphas)\b|--?gin\.(\w+[./])*(task|name|target|draft|methods|alphas)=")
"""Beginning of a word of a command line that makes a recipe's title untrue."""
_ASIDE = re.compile(r"--?(output|notes|debug|import|host_logs|gin\.MINE)\b")
"""Beginning of a word that changes neither what is measured nor its time; `MINE` stands for the user's rules."""

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


def announce(count: str = "", file: TextIO | None = None, subject: str = "") -> None:
    """Prints the first line of a command, in the first process; nothing without a recipe.

    Args:
        count: what the command measures, such as "14 points".
        file: the stream; by default stdout.
        subject: as in `first_line`.
    """
    for recipe in _RECIPE if hosts.first() else ():
        if line := first_line(recipe, count, sys.argv[1:], subject):
            print(line, file=file, flush=True)
    _RECIPE.clear()


def announce_places() -> None:
    """Prints where results go, once, in the first process; commands call this after all checks."""
    for place in _PLACES if hosts.first() else ():
        print(f"results go to {place}; --output=PATH names another place", flush=True)
    _PLACES.clear()


def first_line(recipe: str, count: str, typed: Sequence[str], subject: str = "") -> str:
    """Returns the first line of a command.

    Args:
        recipe: the recipe's text. Its times are those of its own command, so another command has none.
        count: as in `announce`.
        typed: the words of the command line.
        subject: the name of what is measured, if flags may change the recipe's task, pair or methods.
    """
    name = shortened(subject) if subject and any(map(_CHANGES.match, typed)) else title(recipe)
    same = any(sorted(_flags(words)) == sorted(_flags(typed)) for words in commands(recipe))
    spent = times(recipe) if same else ""
    return f"{'' if name.endswith('…') else '.'} ".join(filter(None, [name, ", ".join(filter(None, [count, spent]))]))


def _flags(words: Sequence[str]) -> list[str]:
    """Returns the words that determine what is measured and how long it takes."""
    return [word for word in words if word.startswith("-") and not _ASIDE.match(word)]


def shortened(text: str) -> str:
    """Returns a text that fits into a line."""
    return textwrap.shorten(text, _WIDTH, placeholder=" …")


def title(recipe: str) -> str:
    """Returns the first sentence of a recipe's first comment; empty without one."""
    comment = re.match(r"(?:#[^\n]+\n)+", recipe)
    words = " ".join(re.sub(r"(?m)^# ?", " ", comment[0]).split()) if comment else ""
    sentence = re.split(r"(?<!al)\.\s+(?=[A-Z(]|python )", words)[0].rstrip(".:")
    return shortened(sentence)


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
