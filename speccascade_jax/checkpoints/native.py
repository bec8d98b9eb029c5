"""Our own format: `config.json` (what the model is, what its arrays must be) and `params/` (Orbax)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints.arrays import Arrays, Stored, check_finite, open_arrays, read_arrays
from speccascade_jax.checkpoints.arrays import stored as stored_arrays
from speccascade_jax.checkpoints.errors import COPY_AGAIN, CheckpointError, damaged, incomplete
from speccascade_jax.checkpoints.infer import check_shapes
from speccascade_jax.checkpoints.orbax_tree import tree_specs, write_tree
from speccascade_jax.models.base import Params
from speccascade_jax.models.t5 import T5, T5Config

CONFIG = "config.json"
PARAMS = "params"
FORMAT = 1
SAVED_DTYPES = ("float32", "bfloat16")


def save(
    path: str | os.PathLike[str], model: T5, params: Params, dtype: str = "float32", *, overwrite: bool = False
) -> None:
    """Write a model and its parameters in our format; the directory appears whole or not at all.

    Args:
        path: the directory to create; parents are created too.
        params: nested parameters of `model`, in any float dtype.
        dtype: "float32" or "bfloat16" (half the size, 8 bits of mantissa).
        overwrite: replace an existing directory once the new one is complete.

    Raises:
        FileExistsError: something lies at `path` and `overwrite` is off, or it isn't a checkpoint of ours.
        CheckpointError: parameters that are not finite or don't fit `model`.
    """
    target = Path(path).expanduser().absolute()
    if dtype not in SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(SAVED_DTYPES)}")
    _check_free(target, overwrite)
    flat = flatten_dict(unfreeze(params), sep="/")
    check_shapes(target, {name: tuple(value.shape) for name, value in flat.items()}, model.config)
    arrays = {name: np.asarray(value).astype(jnp.dtype(dtype)) for name, value in sorted(flat.items())}
    check_finite(target, arrays)
    with _replacing(target) as temporary:
        (temporary / PARAMS).mkdir()
        write_tree(temporary / PARAMS, arrays)
        (temporary / CONFIG).write_text(_config_text(model, arrays, dtype))


def _check_free(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: choose another path, or pass overwrite=True to replace it")
    if target.exists() and not (target / CONFIG).is_file() and not (target / PARAMS).is_dir():
        raise FileExistsError(f"{target} exists and is no checkpoint written by save: choose another path or delete it")


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new directory beside `target` that takes its place when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:8]
    temporary = target.with_name(f".{target.name}.tmp-{token}")
    old = target.with_name(f".{target.name}.tmp-{token}-old")
    temporary.mkdir()
    try:
        yield temporary
        if target.exists():
            target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _digest(array: np.ndarray) -> str:
    """BLAKE2b of an array's bytes, 128 bits in hexadecimal."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def _config_text(model: T5, arrays: Arrays, dtype: str) -> str:
    """`config.json`: one line an array, so that two versions compare well."""
    table = {
        name: {"shape": list(array.shape), "dtype": array.dtype.name, "blake2b": _digest(array)}
        for name, array in arrays.items()
    }
    head = {
        "format": FORMAT,
        "family": "t5",
        "config": dataclasses.asdict(model.config),
        "dtype": dtype,
        "fingerprint": _fingerprint(table),
    }
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    return f'{json.dumps(head, indent=2)[:-2]},\n  "arrays": {{\n{rows}\n  }}\n}}\n'


def _fingerprint(table: Mapping[str, Any]) -> str:
    """One digest for all parameters: BLAKE2b of their names, shapes, dtypes and digests."""
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16).hexdigest()


def open_ours(path: Path) -> Stored:
    """Open a directory that `save` wrote.

    Raises:
        CheckpointError: `config.json` or `params/` is missing or damaged, the family is unknown, arrays are
            missing or have other shapes than `config.json` says.
    """
    record = _record(path)
    config = _t5_config(path, record)
    table = record["arrays"]
    if not (path / PARAMS).is_dir():
        raise CheckpointError(f"{path} is incomplete: its {PARAMS} folder is missing; {COPY_AGAIN}")
    specs = tree_specs(path / PARAMS)
    if missing := table.keys() - specs.keys():
        raise incomplete(path, missing, len(table))
    opened = open_arrays(path, {name: specs[name] for name in table})

    def read() -> Arrays:
        arrays = read_arrays(path, opened)
        _check_digests(path, arrays, table)
        return arrays

    whole = stored_arrays(path, f"speccascade_jax, format {FORMAT}", opened, config=config)
    return dataclasses.replace(whole, read=read, fingerprint=_fingerprint(table))


def _record(path: Path) -> dict[str, Any]:
    """`config.json`, with the entries this version needs."""
    file = path / CONFIG
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is incomplete: its {CONFIG} is missing; {COPY_AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {COPY_AGAIN}") from error
    absent = [key for key in ("format", "family", "config", "arrays") if key not in record]
    if absent:
        raise CheckpointError(f"{file} lacks {', '.join(absent)}: it was not written by save, or was edited")
    if record["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {record['format']!r}, and this version reads {FORMAT}: update speccascade_jax"
        )
    return record


def _t5_config(path: Path, record: Mapping[str, Any]) -> T5Config:
    if record["family"] not in FAMILIES:
        raise CheckpointError(
            f"{path / CONFIG}: unknown architecture {record['family']!r}; known: {', '.join(FAMILIES)}: update "
            "speccascade_jax or correct family"
        )
    kind = FAMILIES[record["family"]]
    try:
        return kind(**record["config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG}: config is not a {kind.__name__} ({error}): correct it") from error


def _check_digests(path: Path, arrays: Arrays, table: Mapping[str, Any]) -> None:
    reason = "its bytes are not those that were saved (checksum in config.json)"
    if changed := [name for name, array in arrays.items() if _digest(array) != table[name].get("blake2b")]:
        raise damaged(path, dict.fromkeys(changed, reason))


FAMILIES = {"t5": T5Config}
