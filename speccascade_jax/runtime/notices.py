"""What takes long is said while it happens: to somebody who waits at a terminal or in a notebook, and in the log."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

LONG = 0.5
"""Seconds after which somebody who waits wonders."""

_log = logging.getLogger("speccascade_jax")


@contextlib.contextmanager
def said_if_long(what: Callable[[], str], after: float = LONG) -> Iterator[None]:
    """Say what is being done once it takes `after` seconds, and how long it took in the end: one line on stderr.

    The line is for somebody who waits: it is written where stderr is a terminal or Python is interactive (a notebook).
    Elsewhere, and where the work is done in time, nothing is. The log (`logging`, "speccascade_jax", INFO) gets the
    whole line at the end, wherever that goes.

    Args:
        what: gives the words, and is not asked where nothing is said.
    """
    begin, waits, words = time.perf_counter(), _somebody_waits(), list[str]()

    def say(text: str) -> None:
        if waits:
            print(text, end="", file=sys.stderr, flush=True)

    def begin_line() -> None:
        words.append(f"speccascade_jax: {what()} … ")
        say(words[0])

    timer = threading.Timer(after, begin_line)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # or the end could come before the beginning
        if words:
            took = f"{time.perf_counter() - begin:.1f} s"
            say(f"{took}\n")
            _log.info("%s%s", words[0], took)


def _somebody_waits() -> bool:
    stream = sys.stderr
    return stream is not None and (stream.isatty() or hasattr(sys, "ps1"))
