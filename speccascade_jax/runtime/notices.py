"""Messages about slow operations, for a user at a terminal or in a notebook and for the log."""

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from speccascade_jax.runtime import progress

LONG = 0.5
"""Number of seconds after which a running operation prints a message."""

_log = logging.getLogger("speccascade_jax")


@contextlib.contextmanager
def said_if_long(describe: Callable[[], str], after: float = LONG) -> Iterator[None]:
    """Prints what the block does and how long it took, in one line on stderr, if it takes longer than `after` seconds.

    The line is printed only if stderr is a terminal or Python is interactive (a notebook). In every case, the logger
    "speccascade_jax" receives the whole line at level INFO when the block ends.

    Args:
        describe: returns a description of the operation; called only if the block takes longer than `after` seconds.
        after: number of seconds before the description is printed.
    """
    # commands already report progress themselves, also in log files
    begin, waits, words = time.perf_counter(), _somebody_waits() and not progress.is_shown(), list[str]()

    def say(text: str) -> None:
        if waits:
            print(text, end="", file=sys.stderr, flush=True)

    def begin_line() -> None:
        words.append(f"speccascade_jax: {describe()} … ")
        say(words[0])

    timer = threading.Timer(after, begin_line)
    timer.daemon = True
    timer.start()
    try:
        with progress.stage(describe):
            yield
    finally:
        timer.cancel()
        timer.join()  # otherwise the duration could be printed before the description
        if words:
            took = f"{time.perf_counter() - begin:.1f} s"
            say(f"{took}\n")
            _log.info("%s%s", words[0], took)


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Prints every UserWarning inside the block as one line, without the file name and the source line."""
    whole = warnings.formatwarning

    def line(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> str:
        if category is UserWarning:
            return f"warning: {message}\n"
        return whole(message, category, filename, *place)

    warnings.formatwarning = line  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = whole


def _somebody_waits() -> bool:
    stream = sys.stderr
    return stream is not None and (stream.isatty() or hasattr(sys, "ps1"))
