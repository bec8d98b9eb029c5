"""From any format that is read to ours, and what a conversion would do."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from speccascade_jax.checkpoints import huggingface, native
from speccascade_jax.checkpoints.array_plan import Piece, Stored, shape_of, stream
from speccascade_jax.storage.checksums import CHECKSUMS
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

Advance = Callable[[int, int], None]
"""Called with the bytes of each array once it is read, and those of all."""


class Row(NamedTuple):
    """A parameter, and what it is made of: tensors with what is done to them, and their file."""

    name: str
    shape: tuple[int, ...]
    sources: str
    file: str


def rows(stored: Stored) -> Iterator[Row]:
    """What maps to what, in the order of our parameters."""
    for name, pieces in stored.plan.items():
        files = {stored.tensors[piece.source].file.name for piece in pieces}
        yield Row(name, shape_of(pieces), ", ".join(map(_text, pieces)), ", ".join(sorted(files)))


def _text(piece: Piece) -> str:
    text = piece.source
    if piece.take is not None:
        axis, index = piece.take
        text += f"[{':, ' * axis}{index}]"
    if piece.order is not None:
        text += " transposed" if piece.order == (1, 0) else f" axes {', '.join(map(str, piece.order))}"
    return text


def size(stored: Stored, dtype: str) -> int:
    """Bytes of all parameters in `dtype`."""
    return sum(math.prod(shape_of(pieces)) for pieces in stored.plan.values()) * jnp.dtype(dtype).itemsize


def default_dtype(stored: Stored) -> str:
    """The stored dtype where all arrays share one that we save, otherwise float32."""
    return min(stored.dtypes) if len(stored.dtypes) == 1 and stored.dtypes <= {*native.SAVED_DTYPES} else "float32"


def convert(
    stored: Stored,
    destination: str | os.PathLike[str],
    dtype: str,
    *,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> None:
    """Read a checkpoint and write it in our format; the configuration stays as it is.

    Memory holds the model once while reading; writing adds Orbax's buffers.

    Args:
        stored: what `reading.find` gives.
        dtype: of the parameters written, as `save`'s.
        overwrite: replace a checkpoint of ours at `destination`.

    Raises:
        FileExistsError, LockedError: as `save`, before anything is read.
        CheckpointError: as `load`.
    """
    if dtype not in native.SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(native.SAVED_DTYPES)}")
    with native.claimed(destination, overwrite) as target:
        arrays = {}
        for name, array in stream(stored, stored.plan, native.held_as(dtype)):
            arrays[name] = array
            if advance:
                advance(array.nbytes, size(stored, native.held_as(dtype)))
        native.write(target, stored.config, arrays, dtype)


def write_checksums(path: str | os.PathLike[str], advance: Advance | None = None) -> Path:
    """Write `checksums.json` into a folder, for formats without digests of their own; returns the file.

    Later loads compare tensors, configurations and vocabularies with it and name those that changed. Write it where the
    files are known to be good.

    Args:
        path: a Hugging Face directory, or a pair's folder with a vocabulary in it.

    Raises:
        CheckpointError: another format, or tensors that can't be read.
    """
    path = expanded(path)
    if huggingface.model_type(path) is None and huggingface.companions(path) and not native.is_ours(path):
        return huggingface.write_checksums(path, {}, advance)
    if native.is_ours(path) or huggingface.model_type(path) is None:
        raise CheckpointError(
            f"{path} is no Hugging Face directory: {CHECKSUMS} is for those alone (our format has digests "
            "already; convert other formats to it)"
        )
    return huggingface.write_checksums(path, huggingface.open_tensors(path), advance)
