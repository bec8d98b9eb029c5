"""Reading named zarr arrays with tensorstore, wherever they lie, and saying which one is missing or damaged.

Orbax reads the same arrays, but it stops at the first failure, can't leave the optimiser's metadata unread
and does not tell which arrays are lost; so reading goes to tensorstore directly, and writing to Orbax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from speccascade_jax.checkpoints.errors import CheckpointError, damaged, incomplete
from speccascade_jax.models.t5 import T5Config

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]
Spec = dict[str, Any]

# Nodes of the OCDBT tree are kept between arrays; the arrays' own data passes through.
_CACHE_BYTES = 100_000_000


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose arrays are known but not yet read.

    Attributes:
        path: the file or directory that was opened.
        format: what it is, for people.
        shapes: of every parameter, by its stored name (slashes between levels).
        dtypes: the stored dtypes.
        read: reads every array; raises `CheckpointError` naming those that are missing or damaged.
        config: the model's configuration where the format stores one.
        fingerprint: of all parameters, where the format stores one.
    """

    path: Path
    format: str
    shapes: Shapes
    dtypes: frozenset[str]
    read: Callable[[], Arrays]
    config: T5Config | None = None
    fingerprint: str | None = None


def _reason(error: Exception) -> str:
    """tensorstore's message without the specification it appends."""
    return str(error).split(" [tensorstore_spec", 1)[0].splitlines()[0]


def _collect(path: Path, futures: Mapping[str, ts.Future], total: int) -> dict[str, Any]:
    """Results of all futures; one error for all that failed, missing ones first."""
    results, missing, reasons = {}, [], {}
    for name, future in futures.items():
        try:
            results[name] = future.result()
        except (ValueError, OSError, NotImplementedError) as error:
            reasons[name] = _reason(error)
            if reasons[name].startswith("NOT_FOUND"):
                missing.append(name)
    if missing:
        raise incomplete(path, missing, total)
    if reasons:
        raise damaged(path, reasons)
    return results


def open_arrays(path: Path, specs: Mapping[str, Spec]) -> dict[str, ts.TensorStore]:
    """Open every array of a checkpoint without reading its data.

    Args:
        path: the checkpoint, for messages.
        specs: tensorstore specifications by array name.

    Raises:
        CheckpointError: arrays without metadata (incomplete) or with unreadable metadata (damaged).
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    futures = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}
    return _collect(path, futures, len(specs))


def read_arrays(path: Path, opened: Mapping[str, ts.TensorStore]) -> Arrays:
    """Read opened arrays whole.

    Raises:
        CheckpointError: chunks that are missing (incomplete) or can't be decoded (damaged).
    """
    futures = {name: array.read() for name, array in opened.items()}
    return {name: as_bfloat16(value) for name, value in _collect(path, futures, len(opened)).items()}


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """uint16 read as the bfloat16 it holds (T5X's version 2); any other dtype as it is."""
    return array.view(jnp.bfloat16) if array.dtype == np.uint16 else array


def stored(path: Path, kind: str, opened: Mapping[str, ts.TensorStore], **known: Any) -> Stored:
    """`Stored` for arrays that tensorstore has opened; `known`: `config` and `fingerprint`."""
    shapes = {name: tuple(array.shape) for name, array in opened.items()}
    dtypes = frozenset("bfloat16" if a.dtype.name == "uint16" else a.dtype.name for a in opened.values())
    return Stored(path, kind, shapes, dtypes, lambda: read_arrays(path, opened), **known)


def check_finite(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse NaN and infinity.

    Raises:
        CheckpointError: naming the arrays and how many of their values are not finite.
    """
    bad = {}
    for name, array in arrays.items():
        finite = np.isfinite(array)
        if not finite.all():
            bad[name] = f"{array.size - int(finite.sum()):,} of {array.size:,} values are NaN or infinite"
    if bad:
        text = "; ".join(f"{name}: {reason}" for name, reason in sorted(bad.items())[:3])
        raise CheckpointError(
            f"{path}: {len(bad)} arrays hold values that are not finite ({text}): the file is damaged or "
            "training diverged; choose an earlier checkpoint"
        )
