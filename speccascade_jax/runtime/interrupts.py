"""Handling of Ctrl-C, SIGTERM and a closed terminal: one line that says how to continue, and the exit status that shells expect."""

import contextlib
import io
import os
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


def _hang_up(*_: Any) -> None:
    """Turns SIGHUP into SIGTERM, on which several processes end together (`hosts.stop_here`)."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def told(how: str) -> Iterator[None]:
    """Ends the program with status 130 on Ctrl-C and 143 on SIGTERM, and prints one line instead of a traceback.

    SIGHUP, which a closed terminal sends, does what SIGTERM does, unless `nohup` has switched it off.

    Inside the block, every `UserWarning` is printed as one line, too.

    Args:
        how: the printed advice on how to continue.
    """
    for stream in (sys.stdout, sys.stderr):
        # an ASCII terminal shows ? instead of γ; without this, printing γ would end the run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate)}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _hang_up)
    try:
        with one_line_warnings():
            yield
    except (KeyboardInterrupt, Terminated) as signalled:
        sys.exit(status(signalled, how))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status(signalled: BaseException, how: str) -> int:
    """Prints that the process was stopped, and the advice `how`; returns the exit status."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"\nstopped: {how}", file=sys.stderr)
    return 128 + (signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT)
