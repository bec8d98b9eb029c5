"""Signs of life of a command: whenever it has printed nothing for a few seconds, a line says what it is doing.

Code names its long stages (`stage`), and counts those that have parts (`counted`). A command prints them inside
`shown`. On a terminal, the line replaces itself after every `EVERY` silent seconds. In a log file, each is a line of
its own that stays, so the silence before a line grows from `EVERY` to `LONGEST` seconds.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

Item = TypeVar("Item")

EVERY = 4.0
"""Number of silent seconds after which a line is printed on a terminal, and the first one in a file."""
LONGEST = 60.0
"""Greatest number of silent seconds in a file, where every line doubles the number."""
EARLIER = 0.5
"""Number of seconds by which a stage that is counted prints the line itself earlier, between two of its parts."""


def clock_time(seconds: float) -> str:
    """Returns a duration as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(eq=False)
class Stage:
    """A part of the work that may take long.

    Attributes:
        describe: returns what the stage does; called only if a line is printed.
        total: number of parts; 0: unknown.
        unit: what the parts are.
        done: number of finished parts.
        began: the time at which the stage began; first: the `working_time` at which its first part was finished.
    """

    describe: Callable[[], str]
    total: int = 0
    unit: str = "parts"
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0

    def count(self) -> None:
        """Counts a finished part."""
        self.done += 1
        if self.done == 1:
            self.first = working_time(time.monotonic())

    def text(self, now: float) -> str:
        """Returns what the stage does and, if it has several parts, how many are done and the remaining time."""
        if self.total < 2:
            return self.describe()
        counts = f"{self.done} of {self.total} {self.unit}"
        if self.done > 1:
            # the first part is left out, because it often includes the first run of a program
            remaining = (working_time(now) - self.first) / (self.done - 1) * (self.total - self.done)
            counts += f", about {clock_time(remaining)} left"
        return f"{counts}, {self.describe()}"


_STARTED = time.monotonic()
_STAGES: list[Stage] = []
_COMPILING: list[float] = []
"""Time at which the compilation that runs now began; empty: none runs."""

_PREPARED: list[tuple[float, float]] = []
"""Begin and end of each time in which programs were traced and compiled, in order."""


@contextlib.contextmanager
def stage(named: str | Callable[[], str], total: int = 0, unit: str = "parts") -> Iterator[Stage]:
    """Names what the block does, inside the stages that are open already.

    Args:
        named: what the block does, such as "loading the models", or a function that returns it.
        total: number of parts that the block counts (`Stage.count`); 0: unknown.
        unit: what the parts are.
    """
    entered = Stage(named if callable(named) else lambda: named, total, unit)
    _STAGES.append(entered)
    try:
        yield entered
    finally:
        _STAGES.remove(entered)
        _COMPILING.clear()  # a compilation that failed reports no end


def counted(items: Iterable[Item], named: str | Callable[[], str], unit: str, total: int = 0) -> Iterator[Item]:
    """Yields the items, and counts them as the parts of a stage.

    Between two items, the working thread prints the lines itself, so each item may be timed: the other thread
    prints only during an item that takes seconds.

    Args:
        items: the items.
        named: what the stage does, as in `stage`.
        unit: what the items are.
        total: number of items, if `items` has no length.
    """
    with stage(named, total or (len(items) if isinstance(items, Sized) else 0), unit) as entered:
        for item in items:
            yield item
            entered.count()
            if _SIGNS:
                _SIGNS[0].beat(EARLIER)


def compiling(begins: bool) -> None:
    """Notes that a compilation begins or has ended (`compilation_cache`)."""
    _COMPILING[:] = [time.monotonic()] if begins else []


def prepared(seconds: float, now: float) -> None:
    """Notes that the tracing or compilation of a program has ended `now`, after so many seconds."""
    begin = now - seconds
    while _PREPARED and _PREPARED[-1][0] >= begin:
        _PREPARED.pop()  # an inner function's, which the outer one's time contains
    _PREPARED.append((begin, now))


def working_time(now: float) -> float:
    """Returns `now` on a clock that stands still while programs are traced and compiled.

    Remaining times use this clock, because later parts share the programs of earlier ones.
    """
    return (_COMPILING or [now])[0] - sum(end - begin for begin, end in _PREPARED)


def described(now: float) -> str:
    """Returns how long the current work has taken, and what it is, the innermost stage first.

    A terminal cuts the line's end off, so what changes comes first.
    """
    stages, began = list(_STAGES), [_STARTED, *(entered.began for entered in _STAGES), *_COMPILING][-1]
    texts = ["compiling a program"] * bool(_COMPILING) + [entered.text(now) for entered in reversed(stages)]
    return f"{now - began:.0f} s: {'; '.join(texts) or 'working'}"


class Signs:
    """Lines on stderr that say what the process does, while it prints nothing.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock, self._ended = clock, threading.RLock(), threading.Event()
        self._last, self._shown, self._lines = clock(), False, 0
        self._streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
        self._error, self._write = sys.stderr, getattr(sys.stderr, "write", None)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signs of life")

    def begin(self) -> None:
        """Begins to watch the output."""
        for stream in self._streams:
            # set on the stream itself, because handlers of logs keep the stream that they began with
            vars(stream)["write"] = partial(self._noting, stream.write)
        self._thread.start()

    def end(self) -> None:
        """Ends the lines, and removes the last one from a terminal."""
        self._ended.set()
        self._thread.join()
        for stream in self._streams:
            vars(stream).pop("write", None)
        with self._lock:
            self._clear()

    def beat(self, earlier: float = 0.0) -> None:
        """Prints a line if nothing was printed for long enough, or for `earlier` seconds less than that."""
        with self._lock:
            now = self._clock()
            if now - self._last >= self._silence() - earlier and not self._ended.is_set():
                self._say(f"… {described(now)}")
                self._last = now

    def _watch(self) -> None:
        while not self._ended.wait(max(0.05, self._last + self._silence() - self._clock())):
            self.beat()

    def _silence(self) -> float:
        """Returns the number of silent seconds before the next line."""
        return EVERY if self._is_terminal() else min(EVERY * 2**self._lines, LONGEST)

    def _is_terminal(self) -> bool:
        return self._error is not None and self._error.isatty()

    def _say(self, line: str) -> None:
        terminal = self._is_terminal()
        if terminal:
            # The line is cut to the terminal's width, because the next one could not overwrite a wrapped line. The
            # cursor returns to its start, because XLA prints alarms, such as "Very slow compile?", without Python's
            # streams, and they would otherwise continue the line.
            line = f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}\r"
        self._print(line if terminal else f"{line}\n")
        self._shown = terminal
        self._lines += 1

    def _clear(self) -> None:
        if self._shown:
            self._print("\r\x1b[K")
            self._shown = False

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
            if self._write is not None and self._error is not None:
                self._write(text)
                self._error.flush()

    def _noting(self, write: Callable[[str], int], text: str) -> int:
        """Writes to a stream, and notes the time; a line on the terminal makes room first."""
        with self._lock:
            self._clear()
            self._last = self._clock()
            return write(text)


_SIGNS: list[Signs] = []
"""The signs of this process, if it is a command."""


def begin() -> None:
    """Shows signs of life from now on."""
    if not _SIGNS:
        _SIGNS.append(Signs())
        _SIGNS[0].begin()


def end() -> None:
    """Shows no signs of life from now on."""
    while _SIGNS:
        _SIGNS.pop().end()


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Shows signs of life while the block runs."""
    begin()
    try:
        yield
    finally:
        end()


def is_shown() -> bool:
    """Returns whether signs of life are shown."""
    return bool(_SIGNS)
