"""Conversion of checkpoints of any readable format to this package's format, and previews of a conversion."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from speccascade_jax.checkpoints import huggingface, native
from speccascade_jax.checkpoints.array_plan import Piece, Stored, in_stored_order, shape_of, stream
from speccascade_jax.models.stacks import in_stack, stack_path, stacked_shapes
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.checksums import CHECKSUMS
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

Advance = Callable[[int, int], None]
"""Function that is called after each array is read, with the array's bytes and the bytes of all arrays."""


class Row(NamedTuple):
    """A row of a conversion's preview: a parameter, and the stored tensors and files that it is read from."""

    name: str
    shape: tuple[int, ...]
    sources: str
    file: str


def rows(stored: Stored) -> Iterator[Row]:
    """Yields a `Row` for each of the model's parameters."""
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
    """Returns the number of bytes of all parameters in `dtype`."""
    return sum(math.prod(shape_of(pieces)) for pieces in stored.plan.values()) * jnp.dtype(dtype).itemsize


def default_dtype(stored: Stored) -> str:
    """Returns the dtype of all stored arrays except ids if it is a single one that `save` supports, else float32."""
    dtypes = stored.dtypes - {"int32"}
    return min(dtypes) if len(dtypes) == 1 and dtypes <= {*native.SAVED_DTYPES} else "float32"


def convert(
    stored: Stored,
    destination: str | os.PathLike[str],
    dtype: str,
    *,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> None:
    """Reads a checkpoint of any format, and writes it in this package's format with the same configuration.

    Each parameter is written before the next is read, so memory holds about two stored arrays and 256 MB of buffers.
    Layers are stacked if the configuration says so (`scan_layers`).

    Args:
        stored: a checkpoint that `reading.find` returns.
        destination: the directory to create, as in `save`.
        dtype: dtype of the written parameters, as in `save`.
        overwrite: whether to replace a checkpoint of this package's format at `destination`.
        advance: function that is called after each parameter is read, with the parameter's bytes and the bytes of all
            parameters.

    Raises:
        ValueError: `destination` is inside the source.
        FileExistsError, LockedError: as in `save`, before anything is read.
        CheckpointError: as in `load`.
    """
    if dtype not in native.SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(native.SAVED_DTYPES)}")
    check_outside(stored.path, destination)
    kind = native.held_as(dtype)
    depths = _depths(stored) if stored.config.scan_layers and dtype != "int8" else {}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in stream(stored, stored.plan, kind, _by_stack(stored) if depths else None):
            if advance:
                advance(array.nbytes, size(stored, kind))
            yield name, array
            del array

    with native.claimed(destination, overwrite) as target:
        native.write(target, stored.config, arrays(), dtype, depths)


def check_outside(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Raises a `ValueError` if a conversion would write into its source, which must stay as it is."""
    paths = (expanded(path) for path in (source, destination))
    folder, place = (path if isinstance(path, BucketPath) else path.resolve() for path in paths)
    if folder in place.parents:
        raise ValueError(f"{destination} is inside the source {source}: choose a destination outside it")


def _depths(stored: Stored) -> dict[str, int]:
    """Returns, for each stacked parameter that the layers of a checkpoint form, its number of layers."""
    shapes = {name: shape_of(pieces) for name, pieces in stored.plan.items()}
    return {name: shape[0] for name, shape in stacked_shapes(shapes).items() if in_stack(name)}


def _by_stack(stored: Stored) -> list[str]:
    """Returns the parameters' names in the order of the stored arrays, except that layers of a stack are neighbours."""
    order = in_stored_order(stored, stored.plan)
    first: dict[str, int] = {}
    for place, name in enumerate(order):
        first.setdefault((stack_path(name) or (name, 0))[0], place)

    def key(name: str) -> tuple[int, int]:
        stack, layer = stack_path(name) or (name, 0)
        return first[stack], layer

    return sorted(order, key=key)


def write_checksums(path: str | os.PathLike[str], advance: Advance | None = None) -> Path:
    """Writes the digests of a folder's tensors, configurations and vocabularies to `checksums.json`; returns its path.

    The file is for formats that store no digests. Later loads compare the folder's contents with the digests, and their
    errors name what has changed. Write the file while the folder's contents are known to be intact.

    Args:
        path: a Hugging Face directory, or a pair's folder that holds a vocabulary.
        advance: function that is called after each tensor is read, with the tensor's bytes and the bytes of all
            tensors.

    Raises:
        CheckpointError: the folder has another format, or tensors cannot be read.
    """
    path = expanded(path)
    if huggingface.model_type(path) is None and huggingface.companions(path) and not native.is_ours(path):
        return huggingface.write_checksums(path, {}, advance)
    if native.is_ours(path) or huggingface.model_type(path) is None:
        raise CheckpointError(
            f"{path} is not a Hugging Face directory: {CHECKSUMS} is only for these; convert other formats to this "
            "package's format, which has digests already"
        )
    return huggingface.write_checksums(path, huggingface.open_tensors(path), advance)
