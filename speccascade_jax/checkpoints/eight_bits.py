"""Matrices stored as whole numbers of 8 bits with a scale a column: a quarter of float32's size.

What such a checkpoint holds is what its numbers times their scales are, in float32; nothing that reads it knows of the
bits it took. Kernels `[K, N]` have a scale for each of their `N` outputs, embeddings `[V, E]` one for each token.
"""

from pathlib import Path

import numpy as np

from speccascade_jax.checkpoints.arrays import Arrays, Tensor, Tensors
from speccascade_jax.models.products import quantised
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError

SCALES = "_scales"
"""Stored beside an array of 8 bits under its name with this at the end: float32 `[1, N]`, or `[V, 1]`."""


def narrowed(arrays: Arrays) -> Arrays:
    """The arrays as they are stored: kernels and embeddings in 8 bits and their scales, all else in float32."""
    out = dict(arrays)
    for name, array in arrays.items():
        kind = name.rsplit("/", 1)[-1]
        if array.ndim == 2 and kind == "kernel":
            out[name], scales = quantised(array)
            out[name + SCALES] = scales[None, :]
        elif array.ndim == 2 and kind == "embedding":
            numbers, scales = quantised(array.T)
            out[name], out[name + SCALES] = np.ascontiguousarray(numbers.T), scales[:, None]
    return out


def widened(path: Path, tensors: Tensors) -> Tensors:
    """The arrays that were narrowed, each still to be read.

    Raises:
        CheckpointError: 8 bits without scales, or scales that don't fit them.
    """
    narrow = {name for name, tensor in tensors.items() if tensor.dtype == "int8"}
    for name in narrow:
        scales = tensors.get(name + SCALES)
        if scales is None or not _fits(scales.shape, tensors[name].shape):
            found = "no scales" if scales is None else f"scales {list(scales.shape)}"
            raise CheckpointError(
                f"{path}: {name} holds 8 bits {list(tensors[name].shape)}, but there are {found} for them; {COPY_AGAIN}"
            )
    beside = {name + SCALES for name in narrow}
    return {
        name: _scaled(tensor, tensors[name + SCALES]) if name in narrow else tensor
        for name, tensor in tensors.items()
        if name not in beside
    }


def _fits(scales: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and scales in ((1, shape[1]), (shape[0], 1))


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    def read() -> np.ndarray:
        return np.asarray(numbers.read() * scales.read())  # 8 bits times float32 is float32

    return Tensor(numbers.shape, "float32", numbers.file, read)
