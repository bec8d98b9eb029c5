"""Paths of the repository and of shipped files."""

import shlex
import shutil
import sys
from pathlib import Path


def shipped(*parts: str) -> Path:
    """Returns the path of a file or folder in the package's `assets`: weights, vocabularies, `tiny_translation`."""
    return Path(__file__).resolve().parents[1].joinpath("assets", *parts)


def share_root() -> Path:
    """Returns the folder of gin/, configs/ and experiments/: a clone's root, or an installed package's `share/`."""
    clone = repository_root()
    return clone if (clone / "gin" / "run.gin").is_file() else Path(__file__).resolve().parents[1] / "share"


def command(name: str, python: str = "python") -> str:
    """Returns the shell command that runs an experiment: `python -m …` in a clone, otherwise `speccascade …`."""
    return f"{python} -m experiments.{name}" if share_root() == repository_root() else f"speccascade {name}"


def interpreter() -> str:
    """Returns the shell command that starts the running Python: `python` if PATH leads to it, otherwise its path.

    A path below the current folder is returned as a relative path.
    """
    if not sys.executable or shutil.which("python") == sys.executable:
        return "python"
    running, here = Path(sys.executable), Path.cwd()
    return shlex.quote(f"./{running.relative_to(here)}" if running.is_relative_to(here) else str(running))


def repository_root() -> Path:
    """Returns the folder that holds the package; with `pip install -e`, this is the root of the clone."""
    return Path(__file__).resolve().parents[2]
