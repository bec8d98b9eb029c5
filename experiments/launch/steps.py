"""What a launcher does, as data: commands that can be shown instead of being run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        words: of the command; stdin: what it reads, a script for instance.
        env: variables of its own.
    """

    words: tuple[str, ...]
    stdin: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As one would type it."""
        own = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = " ".join([*own, shlex.join(self.words)])
        return line if self.stdin is None else f"{line} <<'END'\n{self.stdin}END"


def shown(steps: Sequence[Step]) -> str:
    """All commands, to be pasted into a shell; those that run at the same time end with `&`."""
    return "".join(f"{step}{' &' * (len(steps) > 1)}\n" for step in steps) + "wait\n" * (len(steps) > 1)


def run(steps: Sequence[Step]) -> int:
    """All commands at the same time; the first status that is not 0."""
    running = [
        subprocess.Popen(
            step.words, env=os.environ | dict(step.env), text=True,
            stdin=None if step.stdin is None else subprocess.PIPE,
        )
        for step in steps
    ]  # fmt: skip
    try:
        for step, process in zip(steps, running, strict=True):
            if step.stdin is not None:
                process.communicate(step.stdin)
        statuses = [process.wait() for process in running]
    finally:
        for process in running:  # none stays behind one that was told to end
            process.terminate()
    for step, status in zip(steps, statuses, strict=True):
        if status:
            print(f"error: status {status} of {step}", file=sys.stderr)
    return next((status for status in statuses if status), 0)
