"""Ctrl-C and SIGTERM: one line that says how to continue, and the exit status that shells expect."""

import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from typing import Any

from speccascade_jax.runtime.notices import one_line_warnings

SAME = "run the same command again: finished parts are kept, and the rest follows"
ANEW = "run the same command to start from the beginning"
SAVED = "run the same command again: it continues from the last saved state"


class Terminated(BaseException):
    """The arrival of SIGTERM; not an Exception, so that no error handler catches it."""


def _terminate(*_: Any) -> None:
    raise Terminated


@contextlib.contextmanager
def told(how: str) -> Iterator[None]:
    """Ends the program on Ctrl-C with status 130 and on SIGTERM with 143, with a line on stderr and no trace.

    A warning is printed as one line, too.

    Args:
        how: how to continue.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an output in ASCII shows ? for γ; it does not end the run
            stream.reconfigure(errors="replace")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with one_line_warnings():
            yield
    except (KeyboardInterrupt, Terminated) as signalled:
        sys.exit(status(signalled, how))
    finally:
        signal.signal(signal.SIGTERM, before)


def status(signalled: BaseException, how: str) -> int:
    """Prints that the process was stopped; returns its exit status."""
    print(f"\nstopped: {how}", file=sys.stderr)
    return 128 + (signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT)
