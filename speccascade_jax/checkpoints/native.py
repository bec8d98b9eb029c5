"""Our own format: `config.json` (the model's configuration, its arrays' shapes and digests) and `params/` (Orbax)."""

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
from speccascade_jax.storage.files import expanded, make_folder, naming, write_atomically
from speccascade_jax.storage.readers import json_object

CONFIG = "config.json"
PARAMS = "params"
FORMAT, EIGHT_BITS = 1, 2
"""Formats of `config.json`: a version of the package that cannot read 8 bits refuses the second."""
SAVED_DTYPES = ("float32", "bfloat16", "int8")
_SWEEPS, _ENOUGH, _BETWEEN_SWEEPS = 40, 4, 0.05  # Two seconds in all, a fifth of one without a new file.
_OLD = "-old"
SCALES = "_scales"
"""Suffix of the name of an 8-bit array's scales, float32 `[1, N]` or `[V, 1]`."""


def save(
    path: str | os.PathLike[str], model: Model, params: Params, dtype: str = "float32", *, overwrite: bool = False
) -> None:
    """Writes a model and its parameters in our format; the directory appears complete or not at all.

    Args:
        path: the directory to create; parents are created too.
        model: the model; its configuration is written too.
        params: nested parameters of `model`, in any float dtype.
        dtype: "float32", "bfloat16" (half the size, 8 bits of mantissa), or "int8" (a quarter of it: `narrowed`).
        overwrite: replace an existing directory once the new one is complete.

    Raises:
        FileExistsError: `path` exists and `overwrite` is off, or it holds anything but a checkpoint of our format.
        LockedError: another process is writing it.
        CheckpointError: parameters are not finite or do not fit `model`.
    """
    if dtype not in SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(SAVED_DTYPES)}")
    with claimed(path, overwrite) as target:
        flat = flatten_dict(unfreeze(params), sep="/")
        check_shapes(target, {name: tuple(value.shape) for name, value in flat.items()}, model.config)
        memory_dtype = jnp.dtype(held_as(dtype))
        arrays = {name: np.asarray(value).astype(memory_dtype, copy=False) for name, value in flat.items()}
        write(target, model.config, arrays, dtype)


def held_as(dtype: str) -> str:
    """Returns the dtype of arrays in memory that will be written as `dtype`: 8 bits are made from float32."""
    return "float32" if dtype == "int8" else dtype


@contextmanager
def claimed(path: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """Locks a path for one writer, removes leftovers of killed writers, and yields the absolute path.

    Raises the same errors as `save`.
    """
    target = _place(path)
    with locks.held(target.with_name(f".{target.name}.lock"), target):
        for leftover in _put_back(target):
            _remove(leftover)
        check_free(target, overwrite)
        yield target


def put_back(target: Path) -> None:
    """Restores a checkpoint whose writer was killed after moving it away and before putting the new one in its place.

    Raises:
        LockedError: its writer is still running.
    """
    if not target.exists() and any(leftover.name.endswith(_OLD) for leftover in _leftovers(target)):
        with locks.held(target.with_name(f".{target.name}.lock"), target):
            _put_back(target)
        warnings.warn(
            f"{target} has its previous contents again: the process that was replacing it was killed", stacklevel=3
        )


def _put_back(target: Path) -> list[Path]:
    """Restores the old checkpoint under the lock; returns the remaining leftovers."""
    for leftover in _leftovers(target):
        if leftover.name.endswith(_OLD) and not target.exists():
            leftover.rename(target)
    return _leftovers(target)


def _leftovers(target: Path) -> list[Path]:
    """Returns the folders next to `target` that a killed `save` did not remove."""
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.tmp-*"))


def _remove(folder: Path) -> None:
    """Deletes a folder after renaming it, so that a partly deleted folder is never restored."""
    gone = folder.with_name(folder.name.removesuffix(_OLD) + "-gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sweep(temporary: Path) -> None:
    """Deletes an unfinished directory until it stays deleted: after a failure, Orbax's threads go on for a moment."""
    if not temporary.exists():  # it was renamed: nothing writes to it
        return
    absent = 0
    for _ in range(_SWEEPS):
        shutil.rmtree(temporary, ignore_errors=True)
        time.sleep(_BETWEEN_SWEEPS)
        absent = 0 if temporary.exists() else absent + 1
        if absent == _ENOUGH:
            return


def write(target: Path, config: Config, arrays: Arrays, dtype: str) -> None:
    """Writes named arrays, all of dtype `held_as(dtype)`, to a `claimed` path and replaces its contents.

    Raises the same errors as `save`.
    """
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
    """Raises tensorstore's ValueError about a full disk as an OSError with the system's error number."""
    try:
        yield
    except ValueError as error:
        if (code := re.search(r"os_error_code='(\d+)'", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _place(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a checkpoint; a symbolic link is followed, because its checkpoint is replaced."""
    target = expanded(path).absolute()
    return target.resolve() if target.is_symlink() else target


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raises the FileExistsError of `save`: for a path that exists, or that holds more than `save` wrote."""
    target = _place(path)
    if not target.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: choose another path, or pass overwrite=True to replace it")
    try:
        # Stricter than `is_ours`, because a replaced directory is deleted.
        ours = _record(target)["family"] in FAMILIES
    except (CheckpointError, OSError):
        ours = False
    if not ours:
        raise FileExistsError(
            f"{target} exists and is not a checkpoint written by save: choose another path or delete it"
        )
    if extra := {entry.name for entry in target.iterdir()} - {CONFIG, PARAMS}:
        raise FileExistsError(
            f"{target} holds more than a checkpoint written by save ({listing(extra)}): choose another path or move "
            "it out"
        )


def is_ours(path: Path) -> bool:
    """Returns whether to read `path` as our format, complete or not.

    It needs a `params/` folder or a `config.json` with a family, because other tools write a `config.json` too.
    """
    if (path / PARAMS).is_dir():
        return True
    try:
        return "family" in json_object(path / CONFIG, COPY_AGAIN)
    except (OSError, ValueError):
        return False


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yields a new directory next to `target`, which replaces `target` if the block ends without an error.

    If the process is killed at any moment, `target` is the old or the new one, or `put_back` restores the old one.
    """
    make_folder(target.parent)
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
    """Returns the text of `config.json`, with one line per array, so that a diff of two versions is short."""
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
    """Returns the digest of all entries of `config.json` except the digest itself, whatever their layout."""
    return _fingerprint({name: value for name, value in record.items() if name != "blake2b"})


def _fingerprint(table: Mapping[str, Any]) -> str:
    """Returns one digest of the names, shapes, dtypes and digests of all parameters."""
    return checksums.digest(json.dumps(table, sort_keys=True).encode())


def open_ours(path: Path) -> Stored:
    """Opens a directory that `save` wrote.

    Raises:
        CheckpointError: `config.json` or `params/` is missing or damaged, the family is unknown, or arrays are
            missing or have other shapes than in `config.json`.
    """
    record = _record(path)
    config = _config(path, record)
    table = record["arrays"]
    if not (path / PARAMS).is_dir():
        raise CheckpointError(f"{path} is incomplete: its {PARAMS} folder is missing; {COPY_AGAIN}")
    specs = tree_specs(path / PARAMS)
    if missing := table.keys() - specs.keys():
        raise incomplete(path, missing, len(table))
    reason = f"its bytes do not match the checksum in {CONFIG}"
    tensors = {
        name: tensor.checked(table[name].get("blake2b"), reason)
        for name, tensor in open_arrays(path, {name: specs[name] for name in table}).items()
    }
    tensors = widened(path, tensors)
    plan = {name: whole(name, tensor.shape) for name, tensor in tensors.items()}
    # Checked last, so that the checks above can name the damaged part. Earlier versions wrote no digest.
    if record.get("blake2b", expected := _record_digest(record)) != expected:
        raise CheckpointError(
            f"{path / CONFIG} is damaged (its text has changed); {COPY_AGAIN}, or remove its blake2b entry "
            "if it was edited on purpose"
        )
    form, narrow = f"speccascade_jax, format {record['format']}", record["format"] == EIGHT_BITS
    return Stored(path, form, tensors, config, plan, _fingerprint(table), narrow)


def _record(path: Path) -> dict[str, Any]:
    """Returns the contents of `config.json`, after checking the entries that this version needs."""
    file = path / CONFIG
    try:
        record = json_object(file, COPY_AGAIN, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is incomplete: its {CONFIG} is missing; {COPY_AGAIN}") from None
    if absent := [key for key in ("format", "family", "config", "arrays") if key not in record]:
        raise CheckpointError(f"{file} lacks {', '.join(absent)}: it was not written by save, or was edited")
    if record["format"] not in (FORMAT, EIGHT_BITS):
        raise CheckpointError(
            f"{file} has format {record['format']!r}, but this version reads {FORMAT} and {EIGHT_BITS}: update "
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
    """Returns the arrays in their stored form: kernels and embeddings in 8 bits with scales, all others in float32.

    The result has a quarter of float32's size. A reader sees the products of numbers and scales, as float32, and no
    8 bits. Kernels `[K, N]` have one scale per output, embeddings `[V, E]` one per token.
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
    """Returns the arrays that `narrowed` made smaller, as float32 and not yet read.

    Raises:
        CheckpointError: an 8-bit array has no scales, or scales that do not fit it.
    """
    narrow = {name for name, tensor in tensors.items() if tensor.dtype == "int8"}
    for name in narrow:
        scales = tensors.get(name + SCALES)
        if scales is None or not _fits(scales.shape, tensors[name].shape):
            text = "no scales" if scales is None else f"scales of shape {list(scales.shape)}"
            raise CheckpointError(
                f"{path}: {name} is an 8-bit array of shape {list(tensors[name].shape)}, but has {text}; {COPY_AGAIN}"
            )
    scale_names = {name + SCALES for name in narrow}
    return {
        name: _scaled(tensor, tensors[name + SCALES]) if name in narrow else tensor
        for name, tensor in tensors.items()
        if name not in scale_names
    }


def _fits(scales: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and scales in ((1, shape[1]), (shape[0], 1))


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    def read() -> np.ndarray:
        return np.asarray(numbers.read() * scales.read())  # int8 times float32 is float32.

    return Tensor(numbers.shape, "float32", numbers.file, read)
