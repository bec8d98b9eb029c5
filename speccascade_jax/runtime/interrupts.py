"""Ctrl-C and SIGTERM: an end in one line that says how to go on, with the status that shells expect."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

SAME = "give the same command again: what was finished stays, the rest follows"
ANEW = "give the same command to begin anew"
SAVED = "give the same command again: it goes on where it last saved"


class Terminated(BaseException):
    """SIGTERM came; no handler of errors should take it for one."""


def _terminate(*_: Any) -> None:
    raise Terminated


@contextlib.contextmanager
def told(how: str) -> Iterator[None]:
    """Ctrl-C ends the program with status 130 and SIGTERM with 143, in a line on stderr and without a trace.

    Args:
        how: how to go on.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as signalled:
        sys.exit(status(signalled, how))
    finally:
        signal.signal(signal.SIGTERM, before)


def status(signalled: BaseException, how: str) -> int:
    """Says that the process was stopped; returns what it ends with."""
    print(f"\nstopped: {how}", file=sys.stderr)
    return 128 + (signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT)
