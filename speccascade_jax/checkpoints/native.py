"""This package's own checkpoint format: a directory with `config.json` and the folder `params/`, which Orbax can read.

`config.json` holds the model's configuration, and the shape, dtype and digest of every array. The entry "parts" has the
digests of the chunks of arrays that have several; earlier versions neither wrote nor need it.

In a bucket, where nothing can be renamed, the folder is `params-<token>/`, which the entry "params" names. The token is
new in every attempt, and `config.json` is written last: until then, readers find the former checkpoint, or none.
"""

import dataclasses
import glob
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from flax.core import unfreeze
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints.array_plan import (
    Arrays,
    Stored,
    Tensor,
    Tensors,
    describe_not_finite,
    layers_of,
    vocabulary_ids,
)
from speccascade_jax.checkpoints.byte_ranges import Part
from speccascade_jax.checkpoints.infer import check_shapes
from speccascade_jax.checkpoints.native_arrays import NamedArrays, checked
from speccascade_jax.checkpoints.zarr import open_arrays, tree_specs
from speccascade_jax.core.types import Params
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.families import FAMILIES, Config, Model, family_name
from speccascade_jax.models.products import quantised
from speccascade_jax.models.stacks import separate_shapes, unstack_params
from speccascade_jax.storage import checksums, locks
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, incomplete, listing, not_finite
from speccascade_jax.storage.files import expanded, make_folder, naming, remove_folder, write_atomically
from speccascade_jax.storage.readers import json_object

CONFIG = "config.json"
PARAMS = "params"
_PARAMS = re.compile(rf"{PARAMS}(-[0-9a-f]{{8}})?")
"""Pattern of the names of the folder of arrays; a folder in a bucket has a token in its name."""
FORMAT, EIGHT_BITS = 1, 2
"""Format numbers in `config.json`. 8-bit checkpoints have another one, so that older package versions refuse them."""
SAVED_DTYPES = ("float32", "bfloat16", "int8")
# `_sweep` tries at most 40 times, every 0.05 s (2 s in all), to delete an unfinished folder. It ends earlier if the
# folder is absent in 4 checks in a row (0.2 s).
_SWEEPS, _ENOUGH, _BETWEEN_SWEEPS = 40, 4, 0.05
_OLD = "-old"
SCALES = "_scales"
"""End of the names of the scales of 8-bit arrays, float32 `[1, N]` or `[V, 1]`; it follows the array's name."""


def save(
    path: str | os.PathLike[str], model: Model, params: Params, dtype: str = "float32", *, overwrite: bool = False
) -> None:
    """Writes a model's configuration and parameters to a new directory, which appears complete or not at all.

    Args:
        path: the directory to create; missing parents are created too.
        model: the model, whose configuration is written.
        params: nested parameters of `model`, in any float dtype; stacked ones (`models.stacks`) are stored stacked,
            and ids stay whole numbers.
        dtype: "float32"; "bfloat16", with half the size and 8 bits of mantissa; or "int8", with a quarter of the size
            (`narrowed`).
        overwrite: whether to replace an existing checkpoint of this format once the new one is complete.

    Raises:
        FileExistsError: `path` exists and `overwrite` is off, or `path` is not a checkpoint of this format.
        LockedError: another process is writing to `path`.
        CheckpointError: parameters are not finite, or do not belong to `model`.
    """
    if dtype not in SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(SAVED_DTYPES)}")
    with claimed(path, overwrite) as target:
        # Scales of 8-bit matrices are per layer, so their layers are stored separately.
        flat = flatten_dict(unstack_params(unfreeze(params)) if dtype == "int8" else unfreeze(params), sep="/")
        shapes = {name: tuple(value.shape) for name, value in flat.items()}
        check_shapes(target, separate_shapes(shapes), model.config)
        arrays = ((name, _held(np.asarray(flat[name]), dtype)) for name in sorted(flat))
        write(target, model.config, arrays, dtype)


def _held(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns an array to be written as `dtype`; whole numbers are ids, which a smaller float dtype would change."""
    return array.astype("int32" if array.dtype.kind in "iu" else held_as(dtype), copy=False)


def held_as(dtype: str) -> str:
    """Returns the dtype that arrays must have in memory to be written as `dtype`; it is float32 for "int8"."""
    return "float32" if dtype == "int8" else dtype


@contextmanager
def claimed(path: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """Locks a path for one writer, removes leftovers of killed writers, and yields the absolute path.

    Raises:
        FileExistsError, LockedError: as in `save`.
    """
    target = _place(path)
    with locks.held(target.with_name(f".{target.name}.lock"), target):
        for leftover in _put_back(target):
            _remove(leftover)
        check_free(target, overwrite)
        yield target


def put_back(target: Path) -> None:
    """Restores the old checkpoint at `target` if the process that was replacing it was killed.

    The writer first renames the old checkpoint, then renames the new one to `target`. If it was killed in between, the
    old one gets its name back, with a warning.

    Raises:
        LockedError: the writer is still running.
    """
    if not target.exists() and any(leftover.name.endswith(_OLD) for leftover in _leftovers(target)):
        with locks.held(target.with_name(f".{target.name}.lock"), target):
            _put_back(target)
        warnings.warn(
            f"{target} has its previous contents again: the process that was replacing it was killed", stacklevel=3
        )


def _put_back(target: Path) -> list[Path]:
    """Restores the old checkpoint while the caller holds the lock; returns the remaining leftover folders."""
    for leftover in _leftovers(target):
        if leftover.name.endswith(_OLD) and not target.exists():
            leftover.rename(target)
    return _leftovers(target)


def _leftovers(target: Path) -> list[Path]:
    """Returns the temporary folders next to `target` that killed calls of `save` left behind; buckets have none."""
    if isinstance(target, BucketPath):
        return []
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.tmp-*"))


def _remove(folder: Path) -> None:
    """Deletes a folder; renames it first, so that a partly deleted checkpoint is never restored."""
    gone = folder.with_name(folder.name.removesuffix(_OLD) + "-gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sweep(temporary: Path) -> None:
    """Deletes an unfinished directory repeatedly until it stays deleted.

    After a failure, threads of tensorstore may write into the directory, and thereby create it again, for a moment.
    """
    if not temporary.exists():  # The directory was completed and renamed, so no thread writes to it.
        return
    absent = 0
    for _ in range(_SWEEPS):
        shutil.rmtree(temporary, ignore_errors=True)
        time.sleep(_BETWEEN_SWEEPS)
        absent = 0 if temporary.exists() else absent + 1
        if absent == _ENOUGH:
            return


def write(
    target: Path,
    config: Config,
    arrays: Iterable[tuple[str, np.ndarray]],
    dtype: str,
    depths: Mapping[str, int] | None = None,
) -> None:
    """Writes a checkpoint of named arrays to a `claimed` path, and replaces the checkpoint that is there.

    Args:
        target: the path that `claimed` yielded.
        config: the model's configuration.
        arrays: names and arrays of dtype `held_as(dtype)`; each is written before the next is taken from the iterator.
        dtype: dtype of the stored arrays.
        depths: for each parameter whose layers are to be stacked, their number; in `arrays`, its layers come in order.

    Raises:
        CheckpointError: arrays are not finite.
        OSError: the files cannot be written.
    """
    with _replacing(target) as output:
        with _naming(target):
            output.params.mkdir()
        writer, reasons = NamedArrays(output.params, depths or {}), {}
        for name, array in arrays:
            if reason := describe_not_finite(array):
                reasons[name] = reason
            elif not reasons:
                with _naming(target):
                    writer.add_all(narrowed({name: array}) if dtype == "int8" else {name: array})
            del array  # Memory holds no array while the next one is read.
        if reasons:
            raise not_finite(target, reasons)
        with _naming(target):
            writer.close()
            output.commit(_config_text(config, writer.table, writer.parts, dtype, output.params.name))


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Makes errors that occur while files are written name the checkpoint."""
    with naming(target), _as_system_errors(target):
        yield


@contextmanager
def _as_system_errors(target: Path) -> Iterator[None]:
    """Converts tensorstore's ValueErrors about system errors, such as a full disk, to OSErrors with an error number."""
    try:
        yield
    except ValueError as error:
        if isinstance(target, BucketPath):
            raise target.failed(error) from error
        if (code := re.search(r"os_error_code='(\d+)'", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _place(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a checkpoint, or of the folder that a symbolic link points to.

    A write to the returned path therefore replaces this folder and not the link.
    """
    target = expanded(path).absolute()
    if isinstance(target, BucketPath) and not target.key:
        raise ValueError(f"{target} is a whole bucket: give gs://BUCKET/NAME")
    return target.resolve() if target.is_symlink() else target


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Checks that `save` may write to `path`.

    Raises:
        FileExistsError: `path` exists and `overwrite` is off, or `path` holds anything that `save` did not write.
    """
    target = _place(path)
    if not target.exists() or _is_unfinished(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: choose another path, or pass overwrite=True to replace it")
    try:
        # This check is stricter than `is_ours`, because the old directory is deleted afterwards.
        ours = _record(target)["family"] in FAMILIES
    except (CheckpointError, OSError):
        ours = False
    if not ours:
        raise FileExistsError(
            f"{target} exists and is not a checkpoint written by save: choose another path or delete it"
        )
    if extra := {name for entry in target.iterdir() if not _PARAMS.fullmatch(name := entry.name)} - {CONFIG}:
        raise FileExistsError(
            f"{target} holds more than a checkpoint written by save ({listing(extra)}): choose another path or move "
            "it out"
        )


def _is_unfinished(target: Path) -> bool:
    """Returns whether a path in a bucket holds only leftovers of interrupted writes."""
    names = [entry.name for entry in target.iterdir()] if isinstance(target, BucketPath) else []
    return bool(names) and all(_PARAMS.fullmatch(name) for name in names) and not target.is_file()


def is_ours(path: Path) -> bool:
    """Returns whether a directory has this package's format, even if it is incomplete.

    It must hold a `params/` folder, or a `config.json` with the entry "family". A `config.json` alone is not enough,
    because other tools write a file of this name.
    """
    if (path / PARAMS).is_dir():
        return True
    try:
        return "family" in json_object(path / CONFIG, COPY_AGAIN)
    except (OSError, ValueError):
        return False


@dataclasses.dataclass
class _Output:
    """Checkpoint that is being written.

    Attributes:
        folder: the folder of `config.json`.
        params: the folder of the arrays.
        generation: the generation (version number) of the former `config.json` in a bucket.
        former: other folders of arrays in a bucket, listed before `config.json` is replaced.
        may_be_complete: whether `config.json` in the bucket may name `params` already, or may still come to name it
            when a request that was sent arrives.
    """

    folder: Path
    params: Path
    generation: bytes = b""
    former: tuple[Path, ...] = ()
    may_be_complete: bool = False

    def commit(self, text: str) -> None:
        """Writes `config.json`.

        Raises:
            LockedError: another process has written the file since this one began.
        """
        file = self.folder / CONFIG
        if not isinstance(file, BucketPath):
            write_atomically(file, text)
            return
        folders = [entry for entry in self.folder.iterdir() if _PARAMS.fullmatch(entry.name)]
        self.former = tuple(entry for entry in folders if entry != self.params)
        self.may_be_complete = True
        if not file.swap(text.encode(), self.generation):
            self.may_be_complete = False
            remedy = "choose another path, or run the same command again"
            raise locks.LockedError(f"{self.folder} was written by another process meanwhile: {remedy}")


@contextmanager
def _replacing(target: Path) -> Iterator[_Output]:
    """Yields an output that replaces `target` if the `with` block ends without an error.

    If the process is killed at any moment, `target` is still the old directory or already the new one, or `put_back`
    restores the old one.
    """
    if isinstance(target, BucketPath):
        with _replacing_objects(target) as output:
            yield output
        return
    make_folder(target.parent)
    token = uuid.uuid4().hex[:8]
    temporary, old = (target.with_name(f".{target.name}.tmp-{token}{end}") for end in ("", _OLD))
    temporary.mkdir()
    try:
        yield _Output(temporary, temporary / PARAMS)
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


@contextmanager
def _replacing_objects(target: BucketPath) -> Iterator[_Output]:
    """Yields an output in a bucket; afterwards deletes the arrays of former checkpoints, or of a failed one.

    The former arrays were listed before `config.json` was replaced. Their writers had read an earlier generation of it,
    so they can't commit any more. Arrays that appear later may belong to the next writer, and are not deleted. If the
    bucket did not answer the write of `config.json`, the new arrays are not deleted either; the next write deletes what
    is not needed.
    """
    output = _Output(target, target / f"{PARAMS}-{uuid.uuid4().hex[:8]}", (target / CONFIG).read()[1])
    try:
        yield output
    except BaseException:
        if not output.may_be_complete:
            with suppress(OSError):
                remove_folder(output.params)
        raise
    for folder in output.former:
        remove_folder(folder)


def _config_text(
    config: Config, table: Mapping[str, Any], parts: Mapping[str, list[str]], dtype: str, params: str
) -> str:
    """Returns the text of `config.json`, which has one line per array, so that a diff of two versions is short.

    Args:
        config: the model's configuration.
        table: array name -> shape, dtype and digest.
        parts: array name -> digests of its chunks.
        dtype: dtype of the checkpoint.
        params: name of the folder of the arrays.
    """
    head: dict[str, Any] = {
        "format": EIGHT_BITS if dtype == "int8" else FORMAT,
        "family": family_name(config),
        "config": _options(config),
        "dtype": dtype,
        "fingerprint": _fingerprint(table),
    }
    if params != PARAMS:
        head["params"] = params
    head["blake2b"] = _record_digest(head | {"arrays": table, "parts": parts})
    return f"{json.dumps(head, indent=2)[:-2]},\n{_lines('arrays', table)},\n{_lines('parts', parts)}\n}}\n"


def _lines(name: str, rows: Mapping[str, Any]) -> str:
    """Returns the text of one of the entries of `config.json` that has one line per array."""
    text = ",\n".join(f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items()))
    return f'  "{name}": {{\n{text}\n  }}' if rows else f'  "{name}": {{}}'


def _options(config: Config) -> dict[str, Any]:
    """Returns a configuration's fields by name.

    Fields that earlier versions of the package do not know are left out if they have their default values.
    """
    values = dataclasses.asdict(config)
    if isinstance(config, DecoderConfig) and config.encoder is not None:
        values["encoder"] = _options(config.encoder)
    later = {field.name: field.default for field in dataclasses.fields(config) if field.metadata.get("later")}
    later["scan_layers"] = None
    return {name: value for name, value in values.items() if name not in later or value != later[name]}


def _record_digest(record: Mapping[str, Any]) -> str:
    """Returns the digest of all entries of `config.json` except "blake2b"; the text's layout does not matter."""
    return _fingerprint({name: value for name, value in record.items() if name != "blake2b"})


def _fingerprint(table: Mapping[str, Any]) -> str:
    """Returns one digest of a JSON-like table, such as the names, shapes, dtypes and digests of all parameters."""
    return checksums.digest(json.dumps(table, sort_keys=True).encode())


def open_ours(path: Path) -> Stored:
    """Opens a checkpoint that `save` wrote, without reading its arrays.

    Raises:
        CheckpointError: `config.json` or `params/` is missing or damaged, the model family is unknown, or arrays are
            missing.
    """
    record = _record(path)
    config = _config(path, record)
    table = record["arrays"]
    params = path / record.get("params", PARAMS)
    if not params.is_dir():
        raise CheckpointError(f"{path} is incomplete: its {params.name} folder is missing; {COPY_AGAIN}")
    specs = tree_specs(params)
    if missing := table.keys() - specs.keys():
        raise incomplete(path, missing, len(table))
    digests = {name: (row.get("blake2b"), record.get("parts", {}).get(name)) for name, row in table.items()}
    tensors = {
        name: checked(tensor, *digests[name], f"its bytes do not match the checksum in {CONFIG}")
        for name, tensor in open_arrays(path, {name: specs[name] for name in table}).items()
    }
    tensors = widened(path, tensors)
    for name in (name for name in tensors if name.endswith("/ids")):
        tensors[name] = vocabulary_ids(name, tensors[name], config.num_embeddings)
    plan = layers_of(path, tensors)
    # The digest of `config.json` is checked last, so that earlier checks can name the damaged part. Earlier versions of
    # the package stored no such digest.
    if record.get("blake2b", expected := _record_digest(record)) != expected:
        raise CheckpointError(
            f"{path / CONFIG} is damaged (its text has changed); {COPY_AGAIN}, or remove its blake2b entry "
            "if it was edited on purpose"
        )
    form, narrow = f"speccascade_jax, format {record['format']}", record["format"] == EIGHT_BITS
    return Stored(path, form, tensors, config, plan, _fingerprint(table), narrow)


def _record(path: Path) -> dict[str, Any]:
    """Returns the contents of `config.json`; raises an error if entries are missing or the format is unknown."""
    file = path / CONFIG
    try:
        record = json_object(file, COPY_AGAIN, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is incomplete: its {CONFIG} is missing; {COPY_AGAIN}") from None
    if absent := [key for key in ("format", "family", "config", "arrays") if key not in record]:
        raise CheckpointError(f"{file} lacks {', '.join(absent)}: it was not written by save, or was edited")
    if not _PARAMS.fullmatch(str(record.get("params", PARAMS))):
        raise CheckpointError(f"{file} is damaged (params is {record['params']!r:.80}); {COPY_AGAIN}")
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
    """Returns float32 arrays with kernels and embeddings converted to 8-bit integers and scales; others unchanged.

    The result has about a quarter of the size. Kernels `[K, N]` get one scale per output, and embeddings `[V, E]` one
    per token. When a checkpoint is read, `widened` multiplies integers and scales, so readers see float32 arrays.
    """
    out = dict(arrays)
    for name, array in arrays.items():
        kind = name.rsplit("/", 1)[-1]
        if array.ndim >= 2 and kind == "kernel":
            out[name], scales = quantised(array)
            out[name + SCALES] = scales[..., None, :]
        elif array.ndim == 2 and kind == "embedding":
            numbers, scales = quantised(array.T)
            out[name], out[name + SCALES] = np.ascontiguousarray(numbers.T), scales[:, None]
    return out


def widened(path: Path, tensors: Tensors) -> Tensors:
    """Returns tensors, not yet read, that are float32 again where `narrowed` stored 8-bit integers and scales.

    Raises:
        CheckpointError: an 8-bit array has no scales, or scales of a wrong shape.
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
    if len(shape) == 3:
        return scales == (shape[0], 1, shape[2])
    return len(shape) == 2 and scales in ((1, shape[1]), (shape[0], 1))


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    def read() -> np.ndarray:
        return np.asarray(numbers.read() * scales.read())  # NumPy returns float32 for int8 times float32.

    def read_part(part: Part) -> np.ndarray:
        places = tuple(slice(0, 1) if size == 1 else axis for size, axis in zip(scales.shape, part, strict=True))
        # Scales are few, and are read as a whole, so that their digest is checked.
        return np.asarray(numbers.read_part(part) * scales.read()[places]) if numbers.read_part else read()[part]

    return Tensor(numbers.shape, "float32", numbers.file, read, read_part, numbers.chunks)
