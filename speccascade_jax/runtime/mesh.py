"""The devices as a grid: rows of a batch along `data`, heads, units and the vocabulary along `model`.

One device is no mesh: its programs are those of a process that never heard of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from speccascade_jax.core.checks import several, whole
from speccascade_jax.runtime import hosts

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


def checked(shape: Sequence[int]) -> tuple[int, int]:
    """A mesh's shape, (data, model).

    Raises:
        ValueError: not two whole numbers from 1 up.
    """
    given = several("mesh", shape, 1)
    if len(given) != len(AXES):
        raise ValueError(f"mesh={given} has {len(given)} numbers: give two, (data, model)")
    data, model = (whole(f"mesh's {axis} axis", size, 1) for axis, size in zip(AXES, given, strict=True))
    return data, model


def fewest_rows(mesh: Mesh | None) -> int:
    """What batches are multiples of: over how many devices rows are spread."""
    return 1 if mesh is None else int(mesh.shape[DATA])


def make(shape: Sequence[int]) -> Mesh | None:
    """A mesh of `shape` (data, model), over the first so many devices of all processes; `None` for a single one.

    Neighbours along `model` are neighbours in `jax.devices()`: what talks most lies closest.

    Raises:
        ValueError: not two numbers from 1 up, or more than there are devices.
    """
    sizes = checked(shape)
    found = jax.devices()
    count = math.prod(sizes)
    if count > len(found):
        raise ValueError(
            f"mesh={tuple(shape)} takes {count} devices and there are {len(found)} ({found[0].platform}): make it "
            f"smaller"
        )
    if jax.process_count() > 1 and not hosts.many():
        raise ValueError(
            f"this is one of {jax.process_count()} processes, which have not found each other: give --multiprocess"
        )
    if hosts.many() and count != len(found):
        raise ValueError(
            f"mesh={tuple(shape)} takes {count} devices, and the {jax.process_count()} processes have {len(found)}: "
            f"take all of them, or start fewer"
        )
    if count == 1:
        return None
    # sampling mixes what is sharded with what is not, which only axes that XLA sees through allow
    return Mesh(np.array(found[:count]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
