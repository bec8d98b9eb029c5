"""Our own format: `config.json` (what the model is, what its arrays must be) and `params/` (Orbax)."""

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

from speccascade_jax.checkpoints.arrays import Arrays, describe_not_finite, open_arrays
from speccascade_jax.checkpoints.checksums import checked, digest
from speccascade_jax.checkpoints.errors import COPY_AGAIN, CheckpointError, incomplete, listing, not_finite
from speccascade_jax.checkpoints.infer import FAMILIES, Model, check_shapes, family
from speccascade_jax.checkpoints.orbax_tree import tree_specs, write_tree
from speccascade_jax.checkpoints.plan import Config, Stored, as_it_is
from speccascade_jax.core.types import Params

CONFIG = "config.json"
PARAMS = "params"
FORMAT = 1
SAVED_DTYPES = ("float32", "bfloat16")


def save(
    path: str | os.PathLike[str], model: Model, params: Params, dtype: str = "float32", *, overwrite: bool = False
) -> None:
    """Write a model and its parameters in our format; the directory appears whole or not at all.

    Args:
        path: the directory to create; parents are created too.
        params: nested parameters of `model`, in any float dtype.
        dtype: "float32" or "bfloat16" (half the size, 8 bits of mantissa).
        overwrite: replace an existing directory once the new one is complete.

    Raises:
        FileExistsError: something lies at `path` and `overwrite` is off, or it isn't a checkpoint of ours and
            nothing else.
        CheckpointError: parameters that are not finite or don't fit `model`.
    """
    if dtype not in SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(SAVED_DTYPES)}")
    check_free(path, overwrite)
    flat = flatten_dict(unfreeze(params), sep="/")
    check_shapes(Path(path), {name: tuple(value.shape) for name, value in flat.items()}, model.config)
    write(path, model.config, {n: np.asarray(v).astype(jnp.dtype(dtype), copy=False) for n, v in flat.items()}, dtype)


def write(path: str | os.PathLike[str], config: Config, arrays: Arrays, dtype: str) -> None:
    """`save` of arrays by name, all of `dtype`, in place of what lies at `path`; `CheckpointError` as there."""
    target = Path(path).expanduser().absolute()
    arrays = dict(sorted(arrays.items()))
    if reasons := {name: reason for name, array in arrays.items() if (reason := describe_not_finite(array))}:
        raise not_finite(target, reasons)
    with _replacing(target) as temporary:
        (temporary / PARAMS).mkdir()
        write_tree(temporary / PARAMS, arrays)
        (temporary / CONFIG).write_text(_config_text(config, arrays, dtype))


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse a path that is taken, and to replace what `save` didn't write: `FileExistsError`, as `save`."""
    target = Path(path).expanduser().absolute()
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
        return "family" in json.loads((path / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


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


def _config_text(config: Config, arrays: Arrays, dtype: str) -> str:
    """`config.json`: one line an array, so that two versions compare well."""
    table = {
        name: {"shape": list(array.shape), "dtype": array.dtype.name, "blake2b": digest(array)}
        for name, array in arrays.items()
    }
    head = {
        "format": FORMAT,
        "family": family(config),
        "config": dataclasses.asdict(config),
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
    config = _config(path, record)
    table = record["arrays"]
    if not (path / PARAMS).is_dir():
        raise CheckpointError(f"{path} is incomplete: its {PARAMS} folder is missing; {COPY_AGAIN}")
    specs = tree_specs(path / PARAMS)
    if missing := table.keys() - specs.keys():
        raise incomplete(path, missing, len(table))
    reason = f"its bytes are not those that were saved (checksum in {CONFIG})"
    tensors = {
        name: checked(tensor, table[name].get("blake2b"), reason)
        for name, tensor in open_arrays(path, {name: specs[name] for name in table}).items()
    }
    plan = {name: as_it_is(name, tensor.shape) for name, tensor in tensors.items()}
    return Stored(path, f"speccascade_jax, format {FORMAT}", tensors, config, plan, _fingerprint(table))


def _record(path: Path) -> dict[str, Any]:
    """`config.json`, with the entries this version needs."""
    file = path / CONFIG
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is incomplete: its {CONFIG} is missing; {COPY_AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {COPY_AGAIN}") from error
    keys = ("format", "family", "config", "arrays")
    absent = [key for key in keys if not isinstance(record, dict) or key not in record]
    if absent:
        raise CheckpointError(f"{file} lacks {', '.join(absent)}: it was not written by save, or was edited")
    if record["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {record['format']!r}, and this version reads {FORMAT}: update speccascade_jax"
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
        return kind(**record["config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG}: config is not a {kind.__name__} ({error}): correct it") from error
