"""Files of compiled programs, which a machine with the devices can run without compiling them again.

A program runs only with the versions of jax and of the compiler (libtpu) that made it, on devices of the same kind and
number. A file is a pickle, so load only your own files. Loading is tested on a CPU and has not been tried on a TPU.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from speccascade_jax.preflight.compiling import versions
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import check_replaceable, expanded, write_atomically

_BEGIN = b"speccascade_jax program\n"


def save(path: str | Path, compiled: jax.stages.Compiled) -> Path:
    """Writes a compiled program to a file, atomically.

    Args:
        path: the file; an existing file is replaced only if it contains a compiled program.
        compiled: the program, as `preflight.compiled` returns it.

    Raises:
        ValueError: the file contains something else, or programs of this compiler cannot be written.
    """
    file = expanded(path)
    check_replaceable(file, start=_BEGIN.decode())
    try:
        payload, inputs, outputs = serialize_executable.serialize(compiled)
    except Exception as error:  # Each platform raises another exception for programs that it cannot write.
        raise ValueError(f"{file}: this program cannot be written: {str(error).splitlines()[0]}") from error
    content = {"versions": versions(), "payload": payload, "inputs": inputs, "outputs": outputs}
    write_atomically(file, _BEGIN + pickle.dumps(content))
    return file


def load(path: str | Path) -> Any:
    """Loads a compiled program onto this machine's devices; call it with arguments like those that it was compiled for.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file was not written by `save`.
        ValueError: the program was made by another version of jax or of the compiler.
    """
    file = expanded(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: write it with preflight.save or --save")
    content = file.read_bytes()
    if not content.startswith(_BEGIN):
        raise CheckpointError(f"{file} is not a program that preflight.save wrote: write it again")
    parts = pickle.loads(content[len(_BEGIN) :])
    if parts["versions"] != versions():
        raise ValueError(
            f"{file} was compiled by {_listed(parts['versions'])}, but this machine has {_listed(versions())}: compile "
            f"it again"
        )
    return serialize_executable.deserialize_and_load(parts["payload"], parts["inputs"], parts["outputs"])


def _listed(table: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in table.items())
