"""Handling of Ctrl-C and SIGTERM: one line that says how to continue, and the exit status that shells expect."""

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
    """An exception for SIGTERM; it derives from BaseException, so `except Exception` does not catch it."""


def _terminate(*_: Any) -> None:
    raise Terminated


@contextlib.contextmanager
def told(how: str) -> Iterator[None]:
    """Ends the program with status 130 on Ctrl-C and 143 on SIGTERM, and prints one line instead of a traceback.

    Inside the block, every `UserWarning` is printed as one line, too.

    Args:
        how: the printed advice on how to continue.
    """
    for stream in (sys.stdout, sys.stderr):
        # an ASCII terminal shows ? instead of γ; without this, printing γ would end the run
        if isinstance(stream, io.TextIOWrapper):
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
    """Prints that the process was stopped, and the advice `how`; returns the exit status."""
    print(f"\nstopped: {how}", file=sys.stderr)
    return 128 + (signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT)
