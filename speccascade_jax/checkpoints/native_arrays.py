"""Arrays of this package's own format, written in chunks with a digest each; devices of a mesh hold whole chunks."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.checkpoints.array_plan import Arrays, Tensor
from speccascade_jax.checkpoints.byte_ranges import Part
from speccascade_jax.checkpoints.tree_writing import TreeWriter, cells
from speccascade_jax.models.sharding import spec_of
from speccascade_jax.models.stacks import in_stack, stack_path
from speccascade_jax.runtime.mesh import MODEL
from speccascade_jax.storage.checksums import array_digest
from speccascade_jax.storage.errors import UnreadableError

PARTS = (16, 8, 4, 2)
"""Possible numbers of chunks along the axis that a mesh splits; the largest that fits is used."""
SMALLEST = 1 << 16
"""Smallest size of a chunk, in bytes; a smaller array is one chunk."""


def chunks_of(name: str, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks in which an array is written.

    The axis that the `model` axis of a mesh splits has up to 16 chunks, so that a host reads only the chunks of its
    devices. Each layer of a stack has separate chunks.
    """
    chunks = [1 if axis == 0 and in_stack(name) else size for axis, size in enumerate(shape)]
    try:
        spec = tuple(spec_of(name))
    except ValueError:  # The scales of an 8-bit array are small.
        return tuple(chunks)
    if MODEL in spec:
        axis, size = spec.index(MODEL), math.prod(chunks) * itemsize
        count = next((n for n in PARTS if shape[axis] % n == 0 and size // n >= SMALLEST), 1)
        chunks[axis] = shape[axis] // count
    return tuple(chunks)


class NamedArrays:
    """Arrays that are being written into a folder, and what `config.json` says about them.

    Attributes:
        table: array name -> shape, dtype and digest of all bytes.
        parts: array name -> digests of its chunks in C order, if there are several.
    """

    def __init__(self, folder: Path, depths: Mapping[str, int]):
        """Begins an Orbax tree; `depths` has the number of layers of each parameter that is to be stacked."""
        self.table: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, list[str]] = {}
        self._tree, self._depths = TreeWriter(folder), depths
        self._digests: dict[str, Any] = {}

    def add_all(self, arrays: Arrays) -> None:
        """Writes arrays; one that is a layer of a parameter to be stacked goes into the stack. Layers come in order."""
        for name, array in arrays.items():
            stack = stack_path(name)
            if stack is None or stack[0] not in self._depths:
                self._begin(name, array.shape, array.dtype)
                self._put(name, array, None)
            else:
                if stack[1] == 0:
                    self._begin(stack[0], (self._depths[stack[0]], *array.shape), array.dtype)
                self._put(stack[0], array, stack[1])

    def _begin(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._tree.create(name, shape, dtype, chunks_of(name, shape, dtype.itemsize))
        self.table[name] = {"shape": list(shape), "dtype": dtype.name}
        self.parts[name], self._digests[name] = [], hashlib.blake2b(digest_size=16)

    def _put(self, name: str, array: np.ndarray, layer: int | None) -> None:
        """Writes an array, or a layer of it, and adds its bytes to the digests."""
        self._tree.put(name, array, layer)
        chunks = chunks_of(name, self.table[name]["shape"], array.dtype.itemsize)[0 if layer is None else 1 :]
        self.parts[name] += [array_digest(array[cell]) for cell in cells(array.shape, chunks)]
        self._digests[name].update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Completes the tree and the digests."""
        self._tree.close()
        for name, digest in self._digests.items():
            self.table[name]["blake2b"] = digest.hexdigest()
        self.parts = {name: digests for name, digests in self.parts.items() if len(digests) > 1}


def checked(tensor: Tensor, digest: str | None, digests: Sequence[str] | None, reason: str) -> Tensor:
    """Returns a tensor whose bytes are compared with digests when they are read.

    Args:
        tensor: the stored array.
        digest: digest of all bytes, which a read of the whole array checks.
        digests: digests of the chunks in C order, which a read of whole chunks checks. If it is `None`, parts of an
            array of several chunks are not checked, as in checkpoints of earlier versions.
        reason: the error's message.

    Raises:
        UnreadableError: (when the tensor is read) a digest differs.
    """
    whole = tensor.checked(digest, reason)
    read_part, chunks = tensor.read_part, tensor.chunks
    count = math.prod(-(-size // chunk) for size, chunk in zip(tensor.shape, chunks or (), strict=True))
    digests = [str(digest)] if digests is None and count == 1 else digests
    if read_part is None or digests is None:
        return whole

    def read(part: Part) -> np.ndarray:
        array = read_part(part)
        for number, place in _whole_chunks(part, chunks or (), tensor.shape):
            if len(digests) != count or array_digest(array[place]) != digests[number]:
                raise UnreadableError(reason)
        return array

    return replace(whole, read_part=read)


def _whole_chunks(part: Part, chunks: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, Part]]:
    """Yields the chunks that a part holds as a whole: the number of each in C order, and its place in the part."""
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    axes = [
        [
            (number, slice(number * chunk - axis.start, min((number + 1) * chunk, size) - axis.start))
            for number in range(-(-axis.start // chunk), -(-axis.stop // chunk))
            if min((number + 1) * chunk, size) <= axis.stop
        ]
        for axis, chunk, size in zip(part, chunks, shape, strict=True)
    ]
    for places in itertools.product(*axes):
        number = 0
        for (index, _), count in zip(places, counts, strict=True):
            number = number * count + index
        yield number, tuple(place for _, place in places)
