"""Recipes: commands of the project that run one after the other, each in its own process.

Interrupted commands resume by themselves, so a recipe stores no state. It skips every step whose result exists, and
starts the others. A step without a result is always started; it suits commands that end at once if there is nothing to
do, such as a sweep. A recipe is less than a workflow engine: it has no graph and no time stamps, and steps depend only
on the order. Settings of a finished step are not compared, so use another folder for other settings.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccascade_jax.runtime import paths, progress, recipe_header
from speccascade_jax.storage import locks
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import expanded


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of a recipe. In all texts, `{name}` is replaced by the recipe's value of that name.

    Attributes:
        name: what the step does, for progress.
        command: the module in `experiments`, such as "finetune".
        files: its gin files, in order; empty names are left out.
        settings: its gin settings, passed as `--gin.NAME=VALUE`; strings are written in quotes, as in gin.
        arguments: its other arguments; empty ones are left out.
        result: path of a file or folder that exists once the command is complete; empty: the command always runs.
    """

    name: str
    command: str
    files: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    arguments: tuple[str, ...] = ()
    result: str = ""

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """Returns the arguments of the step's command, in which `{name}` is replaced by values.

        Raises:
            ValueError: a text names a value that the recipe does not have.
        """
        files = [f"--gin_file={file}" for file in self._filled(self.files, values) if file]
        texts = {name: value if isinstance(value, str) else repr(value) for name, value in self.settings.items()}
        filled = self._filled(list(texts.values()), values)
        settings = [f"--gin.{name}={value}" for name, value in zip(texts, filled, strict=True)]
        return [*files, *settings, *filter(None, self._filled(self.arguments, values))]

    def place(self, values: Mapping[str, Any]) -> Path | None:
        """Returns the path of the result; `None`: the step has none."""
        return expanded(self._filled([self.result], values)[0]) if self.result else None

    def _filled(self, texts: Sequence[str], values: Mapping[str, Any]) -> list[str]:
        try:
            return [text.format_map(values) for text in texts]
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(values)
            raise ValueError(f"step {self.name!r} cannot be filled in ({error}): the recipe has {known}") from error


def run(
    *,
    folder: str,
    steps: Sequence[Step],
    before: Sequence[Step] = (),
    values: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> int:
    """Runs the steps of a recipe one after the other; returns the first exit status that is not 0, or 0.

    Args:
        folder: folder of the recipe's runs, `{folder}` in the steps.
        steps: the steps.
        before: steps that run before `steps`; a gin file can add them without changing `steps`.
        values: texts that replace `{name}` in the steps, by name; they may themselves contain names of other texts.
        dry_run: whether the commands are only printed.

    Raises:
        ValueError: a step names a value that the recipe does not have, or the folder or a result is in a bucket. Raised
            before any step runs.
        LockedError: another recipe runs in the folder.
    """
    texts = {**(values or {}), "folder": folder}
    filled = {name: text.format_map(texts) for name, text in texts.items()}
    planned = [(step, step.words(filled), step.place(filled)) for step in (*before, *steps)]
    if dry_run:
        for step, words, result in planned:
            print(f"# {step.name}{' (complete)' * is_complete(result)}\n{_shell(step, words)}")
        return 0
    recipe_header.announce(f"{len(planned)} steps")
    _check_local(expanded(folder), *(result for *_, result in planned))
    with locks.held(expanded(folder) / "recipe.lock", folder, "wait for it, end it, or name another folder"):
        for number, (step, words, result) in enumerate(planned, 1):
            title = f"step {number} of {len(planned)}, {step.name}"
            if is_complete(result):
                _say(f"{title}: complete ({result})")
                continue
            _say(f"{title}: {_shell(step, words)}")
            if status := _started(step.command, words):
                _say(f"error: {title}, ended with status {status}; the same command continues from this step")
                return status
            if result and not is_complete(result):
                _say(f"error: {title}, did not write {result}: correct the step's result")
                return 1
    return 0


def _check_local(*places: Path | None) -> None:
    """Raises ValueError for a path in a bucket, where a folder's existence does not show that it is complete."""
    for place in places:
        if isinstance(place, BucketPath):
            remedy = "give a local one, or start the steps yourself (--gin.recipe.run.dry_run=True prints them)"
            raise ValueError(f"{place}: a recipe works in local folders only; {remedy}")


def is_complete(result: Path | None) -> bool:
    """Returns whether a step's result exists."""
    return result is not None and result.exists()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shell(step: Step, words: Sequence[str]) -> str:
    return f"{paths.command(step.command)} {shlex.join(words)}"


def _started(command: str, words: Sequence[str]) -> int:
    """Runs a command and returns its exit status; if this process is stopped, the command ends before it."""
    progress.end()  # the command shows its progress itself
    program = [sys.executable, "-c", "from speccascade_jax.runtime.cli import main; main()", command]
    process = subprocess.Popen([*program, *words])
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
