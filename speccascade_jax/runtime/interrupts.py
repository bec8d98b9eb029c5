"""Handling of Ctrl-C, SIGTERM and a closed terminal: one line says how to continue, with the status shells expect."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from speccascade_jax.runtime import progress
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
def _none_lost() -> Iterator[None]:
    """Sends a signal again if Python drops the exception that it raised, as in JAX's garbage-collector callback."""
    before = sys.unraisablehook

    def again(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt | Terminated):
            threading.Timer(0.1, os.kill, (os.getpid(), _number(dropped.exc_value))).start()
        else:
            before(dropped)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def told(how: str) -> Iterator[None]:
    """Ends the program with status 130 on Ctrl-C and 143 on SIGTERM, and prints one line instead of a traceback.

    SIGHUP, which a closed terminal sends, does what SIGTERM does, unless `nohup` has switched it off.

    Inside the block, every `UserWarning` is printed as one line, too, and the program reports progress (`progress`).

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
        with one_line_warnings(), _none_lost(), progress.shown():
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
    return 128 + _number(signalled)


def _number(signalled: BaseException) -> int:
    return signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT
