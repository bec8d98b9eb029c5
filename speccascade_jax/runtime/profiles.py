"""Traces of XLA's profiler (xprof), written to a local folder or to a bucket."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import jax

from speccascade_jax.runtime import hosts
from speccascade_jax.storage.files import expanded, write_atomically

_PROBE = ".writable-{}"
"""Name of the file that `check_place` writes; its random part differs in processes that check one folder together."""


def host_folder(place: str | Path) -> Path:
    """Returns the folder of this process's traces in a place, such as `traces/host-0`."""
    index = jax.process_index() if hosts.many() else 0
    return expanded(place) / f"host-{index}"


def check_place(flag: str, place: str | Path | None) -> None:
    """Writes a small file to this process's folder and deletes it, so that a refusal comes before anything is compiled.

    Args:
        flag: name of the setting that names the place, for the error's message.
        place: a folder or an address in a bucket; `None` is not checked.

    Raises:
        ValueError: nothing can be written there.
    """
    if place is None:
        return
    try:
        probe = host_folder(place) / _PROBE.format(uuid.uuid4().hex)
        write_atomically(probe, b"1")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{flag}={place}: nothing can be written there ({error}): name another place") from error


@contextlib.contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Traces the block with XLA's profiler, and then copies the trace's files into a folder, local or in a bucket."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python's calls would only slow the block down
    with tempfile.TemporaryDirectory(prefix="trace-") as scratch:
        with jax.profiler.trace(scratch, profiler_options=options):
            yield
        for file in sorted(Path(scratch).rglob("*")):
            if file.is_file():
                write_atomically(folder / file.relative_to(scratch).as_posix(), file.read_bytes())
