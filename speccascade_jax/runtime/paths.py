"""Paths of the repository and of shipped files."""

import shlex
import shutil
import sys
from pathlib import Path


def shipped(*parts: str) -> Path:
    """Returns the path of `parts` among the package's assets: weights, vocabularies, `tiny_translation`."""
    return Path(__file__).resolve().parents[1].joinpath("assets", *parts)


def share_root() -> Path:
    """Returns the folder of gin/, configs/ and experiments/: a clone's root, or `share/` in an installed package."""
    clone = repository_root()
    return clone if (clone / "gin" / "run.gin").is_file() else Path(__file__).resolve().parents[1] / "share"


def command(name: str, python: str = "python") -> str:
    """Returns the shell command of an experiment: `python -m …` in a clone, `speccascade …` in an installed wheel."""
    return f"{python} -m experiments.{name}" if share_root() == repository_root() else f"speccascade {name}"


def interpreter() -> str:
    """Returns the shell command that starts the running Python: `python` if PATH leads to it, otherwise its path.

    The path is relative if it lies below the current folder.
    """
    if not sys.executable or shutil.which("python") == sys.executable:
        return "python"
    running, here = Path(sys.executable), Path.cwd()
    return shlex.quote(f"./{running.relative_to(here)}" if running.is_relative_to(here) else str(running))


def repository_root() -> Path:
    """Returns the folder that holds the package: the clone's root when installed with `pip install -e`."""
    return Path(__file__).resolve().parents[2]
