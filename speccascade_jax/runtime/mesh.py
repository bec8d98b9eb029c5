"""A device mesh with two axes: `data` splits the batch; `model` splits heads, hidden units and the vocabulary.

A single device has no mesh: its programs contain no sharding at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from speccascade_jax.core.checks import whole
from speccascade_jax.core.names import shown
from speccascade_jax.runtime import hosts

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


def checked(shape: Sequence[int]) -> tuple[int, int]:
    """Checks the shape of a mesh and returns it as two integers, (data, model).

    Raises:
        ValueError: the shape is not two integers of at least 1.
    """
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise ValueError(f"mesh={shown(shape)} is one value where two are meant: write (data, model), say (2, 1)")
    sizes = tuple(shape)
    if len(sizes) != len(AXES):
        raise ValueError(f"mesh={sizes} has {len(sizes)} numbers: give two, (data, model)")
    data, model = (whole(f"mesh's {axis} axis", size, 1) for axis, size in zip(AXES, sizes, strict=True))
    return data, model


def fewest_rows(mesh: Mesh | None) -> int:
    """Returns the number of devices along `data`; every batch size must be a multiple of this number."""
    return 1 if mesh is None else int(mesh.shape[DATA])


def make(shape: Sequence[int]) -> Mesh | None:
    """Returns a mesh of `shape` (data, model) over the first devices of all processes, or `None` for a single device.

    Devices that are adjacent along `model` are adjacent in `jax.devices()`, because they communicate most.

    Raises:
        ValueError: the shape is not two integers of at least 1, it needs more devices than there are, several processes
            are not connected, or connected processes have further devices.
    """
    sizes = checked(shape)
    devices, processes, count = jax.devices(), jax.process_count(), math.prod(sizes)
    needs = f"mesh={tuple(shape)} needs {count} devices"
    if count > len(devices):
        raise ValueError(f"{needs}, but there are {len(devices)} ({devices[0].platform}): make it smaller")
    if processes > 1 and not hosts.many():
        raise ValueError(f"this is one of {processes} processes that are not connected: give --multiprocess")
    if hosts.many() and count != len(devices):
        remedy = "use all of them, or start fewer processes"
        raise ValueError(f"{needs}, but the {processes} processes have {len(devices)}: {remedy}")
    if count == 1:
        return None
    # sampling combines sharded with unsharded arrays, which JAX allows only for axes of type Auto
    return Mesh(np.array(devices[:count]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
