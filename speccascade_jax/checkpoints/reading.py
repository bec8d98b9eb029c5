"""`load` and `describe`: what lies at a path is told by what is there, not by its name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from speccascade_jax.checkpoints import native, orbax_tree, t5x
from speccascade_jax.checkpoints.arrays import Stored, check_finite
from speccascade_jax.checkpoints.errors import CheckpointError, listing
from speccascade_jax.checkpoints.infer import check_shapes, infer_config, unstacked, unstacked_shapes
from speccascade_jax.models.t5 import T5, T5Config

LOOKED_FOR = (
    f"{native.CONFIG} and {native.PARAMS}/ (written by save), a msgpack file named {t5x.MSGPACK} (T5X), "
    f"{t5x.STATE}/ (T5X through Orbax), or checkpoint_<step> directories"
)
DTYPES = ("float32", "bfloat16", "float16")
_STEP = re.compile(r"checkpoint_(\d+)")
_TEMPORARY = re.compile(r"\.(tmp|orbax-checkpoint-tmp)-")


def load(
    path: str | os.PathLike[str], *, vocab_size: int | None = None, dtype: str | None = "float32"
) -> tuple[T5, dict[str, Any]]:
    """Load a model and its parameters, whatever the format.

    Args:
        path: a directory written by `save`; a T5X `checkpoint_<step>` directory (native or Orbax) or its
            parent, where the newest complete step is taken; or a T5X checkpoint in one msgpack file.
        vocab_size: real vocabulary entries, when not those of the checkpoint: by default 32,100 of T5's
            32,128 rows, and otherwise all rows.
        dtype: of the parameters returned; `None` keeps the stored one.

    Returns:
        The model, its configuration read or inferred from names and shapes, and nested jax arrays named as
        in T5X. Parameters only: optimiser state is not read.

    Raises:
        FileNotFoundError: nothing lies at `path`.
        CheckpointError: not a checkpoint, still being written, incomplete, damaged, of an unknown
            architecture or with values that are not finite; names the arrays and the remedy.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}, or None to keep the stored one")
    stored = find(path)
    config = _config(stored, vocab_size)
    arrays = stored.read()
    check_finite(stored.path, arrays)
    # cast by NumPy: on the device each shape would be a program of its own to compile
    flat = {n: a.astype(dtype or a.dtype, copy=False) for n, a in unstacked(stored.path, arrays).items()}
    return T5(config), jax.device_put(unflatten_dict(flat, sep="/"))


def describe(path: str | os.PathLike[str]) -> str:
    """Format, configuration and size of a checkpoint, one a line; arrays are not read.

    Raises:
        As `load` does, except for what only reading the arrays shows.
    """
    stored = find(path)
    config = _config(stored, None)
    count = sum(math.prod(shape) for shape in unstacked_shapes(stored.shapes).values())
    lines = [f"format: {stored.format}", f"model: {config}"]
    lines += [f"parameters: {count:,} in {len(stored.shapes)} arrays, {', '.join(sorted(stored.dtypes))}"]
    return "\n".join(lines + ([f"fingerprint: {stored.fingerprint}"] if stored.fingerprint else []))


def _config(stored: Stored, vocab_size: int | None) -> T5Config:
    """The stored or inferred configuration, after checking the shapes against it."""
    shapes = unstacked_shapes(stored.shapes)
    config = stored.config or infer_config(stored.path, shapes)
    check_shapes(stored.path, shapes, config)
    if vocab_size is None:
        return config
    if not 0 < vocab_size <= config.num_embeddings:
        raise ValueError(
            f"vocab_size is {vocab_size}, but {stored.path} has {config.num_embeddings} embedding rows: give "
            "the number of real entries among them"
        )
    return dataclasses.replace(config, vocab_size=vocab_size)


def find(path: str | os.PathLike[str]) -> Stored:
    """Open the checkpoint at `path` without reading its arrays (errors as `load`)."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: give a directory written by save, a T5X checkpoint_<step> directory or its "
            "parent, or a T5X checkpoint in one file"
        )
    if _TEMPORARY.search(path.name):
        raise CheckpointError(
            f"{path} is being written (its name is a temporary one): wait until it is renamed, or choose "
            "another step if its writer died"
        )
    if path.is_file() or (path / t5x.MSGPACK).is_file():
        return t5x.open_native(path)
    if _is_ours(path):
        return native.open_ours(path)
    if (path / t5x.STATE).is_dir() or (path / orbax_tree.METADATA).is_file():
        return t5x.open_orbax(path)
    return _newest(path)


def _is_ours(path: Path) -> bool:
    """`config.json` alone may be another tool's; ours has a family, or `params/` beside it."""
    if (path / native.PARAMS).is_dir():
        return True
    try:
        return "family" in json.loads((path / native.CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


def _newest(path: Path) -> Stored:
    """The newest step that is complete; warns about newer ones that are not."""
    names = [entry.name for entry in path.iterdir()]
    steps = sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True)
    failures: list[CheckpointError] = []
    for step in steps:
        try:
            stored = find(path / f"checkpoint_{step}")
        except CheckpointError as error:
            failures.append(error)
            continue
        for failure in failures:
            warnings.warn(f"{failure}; checkpoint_{step} is loaded instead", stacklevel=4)
        return stored
    if failures:
        raise failures[0]
    writing = [name for name in names if _TEMPORARY.search(name)]
    state = f"only {listing(writing)}, still being written" if writing else (listing(names) or "nothing")
    raise CheckpointError(f"{path} holds no checkpoint: looked for {LOOKED_FOR}; found {state}")
