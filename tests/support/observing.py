"""Observer of a sandboxed program from the host: finds its processes by a name that they set themselves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Self

from speccascade_jax.metrics import sandbox


def marked(mark: str, program: str) -> str:
    """Returns `program` with a first line that names its process and its children after `mark` and this test run."""
    return f'open("/proc/self/comm", "w").write("{_name(mark)}")\n{program}'


def _name(mark: str) -> str:
    """Returns a name of at most 15 characters, the kernel's limit."""
    name = f"{mark}-{os.getpid()}"
    assert len(name) <= 15
    return name


def found(mark: str) -> list[Path]:
    """Returns the host's `/proc` folders of all processes of that name."""
    folders = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == _name(mark):
                folders.append(path.parent)
        except OSError:  # the process ended while it was read
            continue
    return folders


def processes(mark: str) -> int:
    return len(found(mark))


class Watched(threading.Thread):
    """A thread that runs the marked program; counts the most processes that it had at a time, and those at the end."""

    def __init__(self, mark: str, program: str, **limits: float) -> None:
        super().__init__()
        self.mark, self.program, self.limits = mark, marked(mark, program), limits
        self.most, self.left = 0, 0

    def run(self) -> None:
        self.outcome = sandbox.run(self.program, **self.limits)
        self.left = processes(self.mark)

    def watch(self) -> Self:
        self.start()
        while self.is_alive():
            self.most = max(self.most, processes(self.mark))
            time.sleep(0.02)
        return self
