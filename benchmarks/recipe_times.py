"""CPU time of recipes (gin files of configs/), cold (nothing compiled) and warm, for the `Time:` lines in the files.

    python -m benchmarks.recipe_times configs/paper4_table3.gin configs/paper5_table1.gin --write

This program runs the commands in each recipe's header twice, in new folders that share an initially empty compilation
cache. It counts the CPU seconds of the processes, which depend less on other programs than elapsed time does.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from speccascade_jax.evaluation.environment import device
from speccascade_jax.runtime import arguments
from speccascade_jax.runtime.paths import repository_root

_COMMANDS = re.compile(r"^# Command: .*\n(?:#  .*\n)*", re.MULTILINE)
_TIME = re.compile(r"^# Time: .*\n(?:#  .*\n)*", re.MULTILINE)


def commands(recipe: Path) -> list[list[str]]:
    """Returns the commands in a recipe's header as lists of words, without the command for published sizes."""
    block = _COMMANDS.search(recipe.read_text(encoding="utf-8"))
    lines = re.findall(r"\bpython -m experiments\..*", block[0]) if block else []
    if not lines:
        raise ValueError(f"{recipe}: its header has no line '# Command: python -m experiments.…'; add one")
    return [[sys.executable, *shlex.split(line)[1:]] for line in lines]


def cpu_seconds(recipe: Path, cache: Path) -> float:
    """Runs a recipe's commands in a new folder; returns the CPU seconds of their processes."""
    # The repository comes first in PYTHONPATH, because the commands run in a folder outside it.
    python_path = os.pathsep.join(filter(None, (str(repository_root()), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"SPECCASCADE_COMPILATION_CACHE": str(cache), "PYTHONPATH": python_path}
    before = _of_children()
    with tempfile.TemporaryDirectory() as folder:
        for words in commands(recipe):
            subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return _of_children() - before


def _of_children() -> float:
    """Returns the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(recipe: Path) -> tuple[float, float]:
    """Returns a recipe's CPU seconds, cold and warm."""
    with tempfile.TemporaryDirectory() as cache:
        return cpu_seconds(recipe, Path(cache)), cpu_seconds(recipe, Path(cache))


def time_line(old: str, cold: float, warm: float, processor: str) -> str:
    """Returns the `Time:` line of a header; the number of points is that of the line that it replaces."""
    points = re.search(r" for \d+ points", old)
    spent = f"CPU time {clock(cold)} cold (nothing compiled), {clock(warm)} warm"
    return f"# Time:      {spent}{points[0] if points else ''}, on 2 cores ({processor})\n"


def clock(seconds: float) -> str:
    """Returns a duration in the form that headers use, such as `3 min 16 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the recipes that the command line names; returns the exit status."""
    parser = arguments.parser(__doc__)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the Time: line of each recipe")
    options = parser.parse_args(argv)
    for recipe in options.recipes:
        text = recipe.read_text(encoding="utf-8")
        cold, warm = measure(recipe)
        old = _TIME.search(text)
        line = time_line(old[0] if old else "", cold, warm, device()["processor"])
        print(f"{recipe}\n{line}", end="", flush=True)
        if options.write and old:
            recipe.write_text(text.replace(old[0], line), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
