"""Where the data sets lie: one setting for the whole project."""

import os
from pathlib import Path

from speccascade_jax.runtime.paths import repository_root

VARIABLE = "SPECCASCADE_DATA"


def data_directory() -> Path:
    """The folder of data sets: `$SPECCASCADE_DATA` if set, else `../shared/data` beside the repository.

    The folder need not exist; `require` is what complains.
    """
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else repository_root().parent / "shared" / "data"


def require(*parts: str) -> Path:
    """The path of `parts` inside the data directory.

    Raises:
        FileNotFoundError: if nothing lies there; names the path and how to point elsewhere.
    """
    path = data_directory().joinpath(*parts)
    if not path.exists():
        now = f"now: {os.environ.get(VARIABLE) or 'unset'}"
        remedy = f"Set the environment variable {VARIABLE} to the folder that holds {'/'.join(parts)} ({now}), or use"
        shipped = "the shipped task tiny_translation, which needs no data directory."
        raise FileNotFoundError(f"{path} does not exist. {remedy} {shipped}")
    return path
