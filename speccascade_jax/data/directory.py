"""The folder of data sets: one setting for the whole project."""

import os
from pathlib import Path

from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.files import expanded

VARIABLE = "SPECCASCADE_DATA"


def data_directory() -> Path:
    """Returns the folder of data sets: `$SPECCASCADE_DATA` if set, else `../shared/data` next to the repository.

    The folder need not exist; `require` raises if it does not.
    """
    named = os.environ.get(VARIABLE)
    return expanded(named) if named else repository_root().parent / "shared" / "data"


def require(*parts: str) -> Path:
    """Returns the path of `parts` inside the data directory.

    Raises:
        FileNotFoundError: there is no such file; names the path and how to set another folder.
    """
    path = data_directory().joinpath(*parts)
    if not path.exists():
        now = f"now: {os.environ.get(VARIABLE) or 'unset'}"
        remedy = f"Set the environment variable {VARIABLE} to the folder that holds {'/'.join(parts)} ({now}), or use"
        shipped = "the shipped task tiny_translation, which needs no data directory."
        raise FileNotFoundError(f"{path} does not exist. {remedy} {shipped}")
    return path
