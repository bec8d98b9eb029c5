"""Steps of a launcher: commands to run and files to write, which can also be printed for a shell."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speccascade_jax.runtime import progress

GRACE = 300.0
"""Seconds in which commands may save their state after a signal."""


@dataclass(frozen=True)
class Command:
    """A command to run, with its input and environment.

    Attributes:
        words: the program and its arguments; stdin: text for its standard input, such as a script.
        env: additional environment variables.
    """

    words: tuple[str, ...]
    stdin: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def shown(self, ending: str) -> str:
        """Returns the command as a line for a shell that ends in `ending`, with its input below."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return _with_document(" ".join([*variables, shlex.join(self.words)]), self.stdin, ending)

    def __str__(self) -> str:
        """Returns the command as one line, without its input."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class File:
    """A file to write on this machine, such as a script that a later command sends."""

    path: str
    text: str

    def shown(self, ending: str) -> str:
        """Returns a line for a shell that writes the file and ends in `ending`, with the content below."""
        folder, path = shlex.quote(os.path.dirname(self.path)), shlex.quote(self.path)
        return _with_document(f"mkdir -p {folder} && cat > {path}", self.text, ending)

    def write(self) -> None:
        """Writes the file, and creates its folder if needed."""
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        Path(self.path).write_text(self.text, encoding="utf-8")


Step = Command | File


def _with_document(line: str, document: str | None, ending: str) -> str:
    return f"{line}{ending}\n" if document is None else f"{line} <<'END'{ending}\n{document}END\n"


def shown(steps: Sequence[Step], together: bool) -> str:
    """Returns the steps as lines for a shell: all at the same time, or one after another until one fails."""
    if together and len(steps) > 1:
        return "".join(step.shown(" &") for step in steps) + "wait\n"
    return "".join(step.shown(" &&") for step in steps[:-1]) + steps[-1].shown("")


def check_programs(steps: Sequence[Step]) -> None:
    """Raises ValueError if a program that a step runs is not installed."""
    programs = dict.fromkeys(step.words[0] for step in steps if isinstance(step, Command))
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise ValueError(f"not installed here: {', '.join(missing)}; --dry_run prints what to run elsewhere")


def run(steps: Sequence[Step], together: bool) -> int:
    """Runs the steps: all at the same time, or one after another until one fails.

    Returns:
        The first exit status that is not 0, or 0.
    """
    if together:
        return _run_commands([step for step in steps if isinstance(step, Command)])
    for step in steps:
        if isinstance(step, File):
            step.write()
        elif status := _run_commands([step]):
            return status
    return 0


def _run_commands(commands: Sequence[Command]) -> int:
    progress.end()  # the commands show their progress themselves
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            pipe = None if command.stdin is None else subprocess.PIPE
            running.append(subprocess.Popen(command.words, env=os.environ | dict(command.env), text=True, stdin=pipe))
        for command, process in zip(commands, running, strict=True):
            if command.stdin is not None:
                process.communicate(command.stdin)
        statuses = [process.wait() for process in running]
    except BaseException as signalled:
        # Ctrl-C has reached the commands too, and a second signal would end them before their state is saved
        _end(running, terminate=not isinstance(signalled, KeyboardInterrupt))
        raise
    for command, status in zip(commands, statuses, strict=True):
        if status:
            print(f"error: exit status {status} of {command}", file=sys.stderr)
    return next((status for status in statuses if status), 0)


def _end(running: Sequence[subprocess.Popen[str]], terminate: bool) -> None:
    """Waits for processes that save their state, and kills them after `GRACE` seconds or at another signal.

    Args:
        terminate: whether the processes still need SIGTERM to end.
    """
    deadline = time.monotonic() + GRACE
    try:
        for process in running:
            if terminate:
                process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in running:
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in running:  # has no effect on a process that has ended
            process.kill()
