"""Preflight of a launch: the command that compiles a sweep or a training step for a TPU before one is created."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence

from experiments.launch.steps import Command

COMPILED = {"experiments.sweep": (), "experiments.finetune": ("--part=train",)}
"""Commands whose programs `experiments.preflight` can compile, with the flags that it needs for each."""
_SETTINGS = ("--gin_file", "--gin_bindings", "--gin_search_paths", "--import")
"""Flags of a command that are passed on to the preflight, together with those that begin with `--gin.`."""
NO_COMPILER = (
    "the preflight needs the TPUs' compiler, which is not installed: pip install 'speccascade_jax[libtpu]' (0.7 GB), "
    "or give --no_preflight"
)


def check_installed() -> None:
    """Raises ValueError if the TPUs' compiler is not installed, since then nothing has been checked."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(NO_COMPILER)


def step_for(command: Sequence[str], topology: str, python: str = "python") -> Command | None:
    """Returns the preflight of a command on a topology; `None` if the command cannot be compiled beforehand."""
    module = next((word for word in command if word in COMPILED), None)
    settings = _settings(command)
    if module is None or not settings:
        return None
    words = (python, "-m", "experiments.preflight", *settings, *COMPILED[module], f"--topology={topology}")
    return Command(words)


def _settings(command: Sequence[str]) -> list[str]:
    """Returns the words of a command that choose its gin files and bindings."""
    # the word after a flag that is written without = is its value
    pairs = itertools.pairwise(["", *command])
    return [
        word
        for before, word in pairs
        if before in _SETTINGS or word.startswith("--gin.") or word.partition("=")[0] in _SETTINGS
    ]


def note(command: Sequence[str]) -> str:
    """Returns the line that says why a command has no preflight."""
    names = " and ".join(name.removeprefix("experiments.") for name in COMPILED)
    return f"note: no preflight of {' '.join(command[:3])}: only {names} with gin files are compiled beforehand"
