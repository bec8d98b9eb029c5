"""Our own format: `config.json` (what the model is, what its arrays must be) and `params/` (Orbax)."""

import dataclasses
import glob
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints.array_plan import Arrays, Stored, Tensor, Tensors, describe_not_finite, whole
from speccascade_jax.checkpoints.infer import check_shapes
from speccascade_jax.checkpoints.zarr import open_arrays, tree_specs, write_tree
from speccascade_jax.core.types import Params
from speccascade_jax.models.families import FAMILIES, Config, Model, family_name
from speccascade_jax.models.products import quantised
from speccascade_jax.storage import checksums, locks
from speccascade_jax.storage.checksums import array_digest
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, incomplete, listing, not_finite
from speccascade_jax.storage.files import expanded, naming, write_atomically
from speccascade_jax.storage.readers import json_object

CONFIG = "config.json"
PARAMS = "params"
FORMAT, EIGHT_BITS = 1, 2
"""Of `config.json`; versions that know no 8 bits say so."""
SAVED_DTYPES = ("float32", "bfloat16", "int8")
_SWEEPS, _BETWEEN_SWEEPS = 40, 0.05  # two seconds
_OLD = "-old"
SCALES = "_scales"
"""Stored beside an array of 8 bits under its name with this at the end: float32 `[1, N]`, or `[V, 1]`."""


def save(
    path: str | os.PathLike[str], model: Model, params: Params, dtype: str = "float32", *, overwrite: bool = False
) -> None:
    """Write a model and its parameters in our format; the directory appears whole or not at all.

    Args:
        path: the directory to create; parents are created too.
        params: nested parameters of `model`, in any float dtype.
        dtype: "float32", "bfloat16" (half the size, 8 bits of mantissa), or "int8" (a quarter of it: `narrowed`).
        overwrite: replace an existing directory once the new one is complete.

    Raises:
        FileExistsError: something lies at `path` and `overwrite` is off, or it isn't a checkpoint of ours and
            nothing else.
        LockedError: another process is writing it.
        CheckpointError: parameters that are not finite or don't fit `model`.
    """
    if dtype not in SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(SAVED_DTYPES)}")
    with claimed(path, overwrite) as target:
        flat = flatten_dict(unfreeze(params), sep="/")
        check_shapes(target, {name: tuple(value.shape) for name, value in flat.items()}, model.config)
        held = jnp.dtype(held_as(dtype))
        arrays = {name: np.asarray(value).astype(held, copy=False) for name, value in flat.items()}
        write(target, model.config, arrays, dtype)


def held_as(dtype: str) -> str:
    """What arrays are in that are to be written as `dtype`: 8 bits are made of float32."""
    return "float32" if dtype == "int8" else dtype


@contextmanager
def claimed(path: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """The absolute path, kept from other writers and rid of what killed ones left; errors as `save`."""
    target = expanded(path).absolute()
    with locks.held(target.with_name(f".{target.name}.lock"), target):
        for left in _put_back(target):
            _remove(left)
        check_free(target, overwrite)
        yield target


def put_back(target: Path) -> None:
    """Restore a checkpoint whose writer was killed between moving it away and moving the new one to its place.

    Raises:
        LockedError: its writer is at work.
    """
    if not target.exists() and any(left.name.endswith(_OLD) for left in _leftovers(target)):
        with locks.held(target.with_name(f".{target.name}.lock"), target):
            _put_back(target)
        warnings.warn(f"{target} is the old one again: whoever was replacing it was killed", stacklevel=3)


def _put_back(target: Path) -> list[Path]:
    """`put_back` under the lock; returns what is left over then."""
    for left in _leftovers(target):
        if left.name.endswith(_OLD) and not target.exists():
            left.rename(target)
    return _leftovers(target)


def _leftovers(target: Path) -> list[Path]:
    """What a killed `save` left beside `target`."""
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.tmp-*"))


def _remove(folder: Path) -> None:
    """Under another name first: what is half deleted is never put back."""
    gone = folder.with_name(folder.name.removesuffix(_OLD) + "-gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sweep(temporary: Path) -> None:
    """Delete what was being written: where that failed, Orbax's threads may write a moment longer."""
    for _ in range(_SWEEPS):
        shutil.rmtree(temporary, ignore_errors=True)
        if not temporary.exists():
            return
        time.sleep(_BETWEEN_SWEEPS)


def write(target: Path, config: Config, arrays: Arrays, dtype: str) -> None:
    """`save` of arrays by name, all `held_as(dtype)`, in place of what lies at a `claimed` path; errors as there."""
    arrays = dict(sorted(arrays.items()))
    if reasons := {name: reason for name, array in arrays.items() if (reason := describe_not_finite(array))}:
        raise not_finite(target, reasons)
    if dtype == "int8":
        arrays = narrowed(arrays)
    with naming(target), _as_system_errors(), _replacing(target) as temporary:
        (temporary / PARAMS).mkdir()
        write_tree(temporary / PARAMS, arrays)
        write_atomically(temporary / CONFIG, _config_text(config, arrays, dtype))


@contextmanager
def _as_system_errors() -> Iterator[None]:
    """tensorstore tells of a full disk by a ValueError that holds the system's number."""
    try:
        yield
    except ValueError as error:
        if (found := re.search(r"os_error_code='(\d+)'", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse a path that is taken, and to replace what `save` didn't write: `FileExistsError`, as `save`."""
    target = expanded(path).absolute()
    if not target.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: choose another path, or pass overwrite=True to replace it")
    try:
        ours = _record(target)["family"] in FAMILIES  # stricter than `is_ours`, since what is replaced is deleted
    except (CheckpointError, OSError):
        ours = False
    if not ours:
        raise FileExistsError(f"{target} exists and is no checkpoint written by save: choose another path or delete it")
    if others := {entry.name for entry in target.iterdir()} - {CONFIG, PARAMS}:
        raise FileExistsError(
            f"{target} holds more than a checkpoint written by save ({listing(others)}): choose another path or move "
            "it out"
        )


def is_ours(path: Path) -> bool:
    """Whether to read `path` as ours, complete or not: there is `params/`, or a `config.json` with a family.

    `config.json` alone may be another tool's.
    """
    if (path / PARAMS).is_dir():
        return True
    try:
        return "family" in json_object(path / CONFIG, COPY_AGAIN)
    except (OSError, ValueError):
        return False


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new directory beside `target` that takes its place when the block ends without an error.

    Killed at any moment, either the old one or the new one lies at `target`, or `put_back` finds the old one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:8]
    temporary, old = (target.with_name(f".{target.name}.tmp-{token}{end}") for end in ("", _OLD))
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
        _sweep(temporary)
        if target.exists() and old.exists():
            _remove(old)


def _config_text(config: Config, arrays: Arrays, dtype: str) -> str:
    """`config.json`: one line an array, so that two versions compare well."""
    table = {
        name: {"shape": list(array.shape), "dtype": array.dtype.name, "blake2b": array_digest(array)}
        for name, array in arrays.items()
    }
    head = {
        "format": EIGHT_BITS if dtype == "int8" else FORMAT,
        "family": family_name(config),
        "config": dataclasses.asdict(config),
        "dtype": dtype,
        "fingerprint": _fingerprint(table),
    }
    head["blake2b"] = _record_digest(head | {"arrays": table})
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    return f'{json.dumps(head, indent=2)[:-2]},\n  "arrays": {{\n{rows}\n  }}\n}}\n'


def _record_digest(record: Mapping[str, Any]) -> str:
    """Of everything in `config.json` but this digest itself, however it is laid out."""
    return _fingerprint({name: value for name, value in record.items() if name != "blake2b"})


def _fingerprint(table: Mapping[str, Any]) -> str:
    """Returns one digest for all parameters, of their names, shapes, dtypes and digests."""
    return checksums.digest(json.dumps(table, sort_keys=True).encode())


def open_ours(path: Path) -> Stored:
    """Open a directory that `save` wrote.

    Raises:
        CheckpointError: `config.json` or `params/` is missing or damaged, the family is unknown, arrays are
            missing or have other shapes than `config.json` says.
    """
    record = _record(path)
    config = _config(path, record)
    table = record["arrays"]
    if not (path / PARAMS).is_dir():
        raise CheckpointError(f"{path} is incomplete: its {PARAMS} folder is missing; {COPY_AGAIN}")
    specs = tree_specs(path / PARAMS)
    if missing := table.keys() - specs.keys():
        raise incomplete(path, missing, len(table))
    reason = f"its bytes are not those that were saved (checksum in {CONFIG})"
    tensors = {
        name: tensor.checked(table[name].get("blake2b"), reason)
        for name, tensor in open_arrays(path, {name: specs[name] for name in table}).items()
    }
    tensors = widened(path, tensors)
    plan = {name: whole(name, tensor.shape) for name, tensor in tensors.items()}
    # at the end, so that what is wrong is named where it can be; earlier versions wrote none
    if record.get("blake2b", expected := _record_digest(record)) != expected:
        raise CheckpointError(
            f"{path / CONFIG} is damaged (its text is not that written); {COPY_AGAIN}, or remove its blake2b entry "
            "if it was edited on purpose"
        )
    return Stored(path, f"speccascade_jax, format {record['format']}", tensors, config, plan, _fingerprint(table))


def _record(path: Path) -> dict[str, Any]:
    """`config.json`, with the entries this version needs."""
    file = path / CONFIG
    try:
        record = json_object(file, COPY_AGAIN, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is incomplete: its {CONFIG} is missing; {COPY_AGAIN}") from None
    if absent := [key for key in ("format", "family", "config", "arrays") if key not in record]:
        raise CheckpointError(f"{file} lacks {', '.join(absent)}: it was not written by save, or was edited")
    if record["format"] not in (FORMAT, EIGHT_BITS):
        raise CheckpointError(
            f"{file} has format {record['format']!r}, and this version reads {FORMAT} and {EIGHT_BITS}: update "
            "speccascade_jax"
        )
    return record


def _config(path: Path, record: Mapping[str, Any]) -> Config:
    if record["family"] not in FAMILIES:
        raise CheckpointError(
            f"{path / CONFIG}: unknown architecture {record['family']!r}; known: {', '.join(FAMILIES)}: update "
            "speccascade_jax or correct family"
        )
    kind = FAMILIES[record["family"]].config
    try:
        for field in dataclasses.fields(kind):
            value = record["config"].get(field.name)
            if field.type in (int, bool, str) and field.name in record["config"] and type(value) is not field.type:
                raise TypeError(f"{field.name} is {value!r}")
        return kind(**record["config"])
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / CONFIG}: config is not a {kind.__name__} ({error}): correct it") from error


def narrowed(arrays: Arrays) -> Arrays:
    """Returns the arrays as they are stored: kernels and embeddings in 8 bits and their scales, all else in float32.

    A quarter of float32's size. What such a checkpoint holds is what its numbers times their scales are; nothing that
    reads it knows of the bits. Kernels `[K, N]` have a scale for each output, embeddings `[V, E]` one for each token.
    """
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
