"""Functions that load and describe checkpoints of every format, which they recognize by a path's contents."""

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from speccascade_jax.checkpoints import (
    eagle3,
    gemma4_assistant,
    gemma_jax,
    huggingface,
    llama2c,
    maxtext,
    native,
    t5x,
    zarr,
)
from speccascade_jax.checkpoints.array_plan import Plan, Stored, fused, shape_of, stream
from speccascade_jax.checkpoints.byte_ranges import Part
from speccascade_jax.checkpoints.infer import check_shapes
from speccascade_jax.checkpoints.slices import Blocks, bounds, stream_parts
from speccascade_jax.core.names import hint
from speccascade_jax.core.protocols import AttachedModel
from speccascade_jax.core.types import DTYPES, STORED
from speccascade_jax.models import sharding
from speccascade_jax.models.families import PRESETS, Config, Model, model_from
from speccascade_jax.models.products import held
from speccascade_jax.models.stacks import put_layer, stack_path, stacked_shapes
from speccascade_jax.runtime import products
from speccascade_jax.runtime.mesh import MODEL
from speccascade_jax.storage import hub
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, listing
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.hub import located

LOOKED_FOR = (
    f"{native.CONFIG} and {native.PARAMS}/ (written by save), {huggingface.CONFIG} with a model_type (Hugging Face), "
    f"one *.bin file of llama2.c, a msgpack file named {t5x.MSGPACK} (T5X), {t5x.STATE}/ (T5X through Orbax), an Orbax "
    "tree (Gemma, MaxText), or checkpoint_<step> directories"
)
_OTHER_FORMATS = {
    "*.gguf": "is in llama.cpp's format, which is not read: give the model's safetensors",
    "adapter_config.json": "is an adapter: merge it into its base model (peft's merge_and_unload) and save that",
    "model.safetensors*": f"has no {huggingface.CONFIG} with a model_type beside it: copy {huggingface.CONFIG} again",
}
"""Pattern of a file that cannot be loaded alone -> the end of an error message that names the reason and the remedy."""
_STEP = re.compile(r"checkpoint_(\d+)")
_TEMPORARY = re.compile(r"\.(tmp|orbax-checkpoint-tmp)-")


def load(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    dtype: str | None = "float32",
    prepared: bool = False,
    mesh: Mesh | None = None,
    whole: bool = False,
    scan_layers: bool | None = None,
) -> tuple[Model, dict[str, Any]]:
    """Loads a model and its parameters from a checkpoint of any supported format.

    Parameters are read one at a time, and each is copied to the device before the next is read. Besides the parameters,
    memory therefore holds only about two arrays of the checkpoint.

    Args:
        path: the checkpoint, in one of these formats, or a model's name on the hub (`storage.hub`):
            a directory written by `save`;
            a Hugging Face directory with `config.json` and safetensors files (`huggingface_config.MODELS`);
            a directory of an EAGLE-3 head with `config.json` and safetensors files (`checkpoints.eagle3`);
            a Hugging Face directory of a Gemma 4 assistant (`checkpoints.gemma4_assistant`);
            a `*.bin` file of llama2.c, or the directory that holds it;
            a directory of Gemma 2 in Google's JAX releases;
            a step of MaxText (Gemma 2, Llama), or its folder `items`;
            a T5X `checkpoint_<step>` directory (native or Orbax), or its parent, of which the newest complete step is
            loaded; or a T5X checkpoint in one msgpack file.
        vocab_size: number of real vocabulary entries. By default it is the checkpoint's own number if the format stores
            one, 32,100 for a T5 with 32,128 rows, and otherwise the number of rows.
        dtype: dtype of the returned parameters, from which the dtype of computation follows: bfloat16 for "bfloat16",
            and float32 for "float32" and "float16" ("float16" only halves the memory). `None` keeps both dtypes as
            stored; computation is in float32 if the format stores no dtype. "int8" needs `prepared`: matrices then have
            8 bits and a scale per column (`models.products.quantised`), and all other parameters have the dtype of
            computation. "stored" means "int8" if the checkpoint is stored in 8 bits and this CPU multiplies them
            directly, and otherwise "float32".
        prepared: whether to return the parameters in the form of `model.prepare`, for decoding; memory never holds both
            forms. On a CPU, computation is then always in float32, because CPUs multiply bfloat16 no faster, and most
            of them much more slowly.
        mesh: the devices that the parameters, which must be `prepared`, are split over. Each host then reads only the
            parts of its own devices (`checkpoints.slices`), and checks that these are finite. Digests of whole arrays
            are not checked then, but the digests of chunks, which this package's format stores, are.
        whole: whether every device of the mesh holds all parameters instead of a part.
        scan_layers: whether the layers run in a scan over stacked parameters (`models.stacks`), whatever the
            checkpoint's layout. `None`: as the checkpoint's configuration says or, if it says nothing, only in deep
            models. Layers whose matrices are packed for a CPU or have 8 bits never run in a scan.

    Returns:
        The model, whose configuration is read or else inferred from the arrays' names and shapes; and the parameters,
        nested dicts of jax arrays with T5X's names. Optimizer state is not read.

    Raises:
        FileNotFoundError: `path` does not exist.
        OSError: a model of the hub cannot be fetched (`hub.fetched`).
        CheckpointError: `path` is not a checkpoint, is still being written, is incomplete or damaged, has an unknown
            architecture or has values that are not finite; names the arrays and the remedy.
    """
    if dtype not in (None, STORED, *DTYPES):
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}, or None to keep the stored one")
    if dtype == "int8" and not prepared:
        raise ValueError("dtype is 'int8', which is for decoding only: load it with prepared=True, as load_pair does")
    if mesh is not None and (dtype == "int8" or not prepared):
        raise ValueError(
            f"mesh={tuple(mesh.shape.values())} needs prepared parameters in 16 or 32 bits: use int8 on one device only"
        )
    stored = find(path)
    dtype = _stored_dtype(stored, prepared and mesh is None) if dtype == STORED else dtype
    config = _config(stored, vocab_size)
    config = dataclasses.replace(config, dtype=computed_in(config, dtype, prepared))
    config = _with_layout(config, scan_layers, prepared and mesh is None, dtype)
    # Matrices are quantized to 8 bits after they are read, so all parameters are read in the dtype of computation.
    read_as = config.dtype if dtype == "int8" else dtype
    model: Any = model_from(config)
    if mesh is not None:
        _check_mesh(stored, config, read_as or config.dtype, mesh, whole)
        model = model if whole else dataclasses.replace(model, mesh=mesh)

    plan = fused(stored.plan) if prepared else stored.plan
    depths = stacked_shapes({name: () for name in plan})
    flat: dict[str, Any] = {}
    if mesh is not None:
        leaves = _on_mesh(stored, plan, read_as, mesh, whole)
    else:
        narrow = "int8" if dtype == "int8" else None
        form = partial(held, config=config, weights=narrow) if prepared else _unchanged
        leaves = _on_one_device(stored, plan, read_as, form)
    for name, leaf in leaves:
        place = stack_path(name) if config.scanned else None
        if place is not None:
            name, layer = place
            leaf = put_layer(flat.get(name), leaf, layer, depths[name][0])
        flat[name] = jax.block_until_ready(leaf)
        del leaf  # A layer that is in its stack is freed before the next array is read.
    return model, unflatten_dict(flat, sep="/")


def _on_one_device(
    stored: Stored, plan: Plan, dtype: str | None, form: Callable[[str, np.ndarray], Any]
) -> Iterator[tuple[str, Any]]:
    """Yields each parameter in its `form` on the default device."""
    for name, array in stream(stored, plan, dtype):
        # NumPy has already cast the array, because a cast on the device would compile a program for every shape.
        leaf = jax.device_put(form(name, array))
        del array  # This frees the host's copy before the next array is read.
        yield name, leaf
        del leaf


def _on_mesh(stored: Stored, plan: Plan, dtype: str | None, mesh: Mesh, whole: bool) -> Iterator[tuple[str, Any]]:
    """Yields each parameter on a mesh; every device gets its part, or all of it if `whole` is true."""

    def layout(name: str, shape: tuple[int, ...]) -> tuple[list[Part], int]:
        parts = sharding.layout_of(name, mesh, whole).addressable_devices_indices_map(shape).values()
        return [part for part in parts if part is not None], 1 if whole else mesh.shape[MODEL]

    for name, blocks in stream_parts(stored, plan, dtype, layout):
        shape = shape_of(plan[name])
        get = partial(_block, blocks, shape)
        leaf = jax.make_array_from_callback(shape, sharding.layout_of(name, mesh, whole), get)
        del blocks, get  # This frees the host's copy before the next array is read.
        yield name, leaf
        del leaf


def _unchanged(name: str, array: np.ndarray) -> np.ndarray:
    return array


def _block(blocks: Blocks, shape: tuple[int, ...], part: Part) -> np.ndarray:
    return blocks[bounds(part, shape)]


def _with_layout(config: Config, scan_layers: bool | None, packs: bool, dtype: str | None) -> Config:
    """Returns the configuration with layers separate or in a scan, as the arguments of `load` ask.

    `packs` is whether the parameters are prepared for one device.

    Raises:
        ValueError: `scan_layers` is true, but the layers' matrices are packed.
    """
    packed = packs and (dtype == "int8" or jax.default_backend() == "cpu")
    if packed and scan_layers:
        raise ValueError(
            "scan_layers=True, but matrices that are packed for a CPU or have 8 bits need separate layers: leave "
            "scan_layers out"
        )
    scanned = False if packed else config.scanned if scan_layers is None else scan_layers
    return config if scanned == config.scanned else dataclasses.replace(config, scan_layers=scanned)


def _stored_dtype(stored: Stored, packs: bool) -> str:
    """Returns "int8" if the weights are stored in 8 bits and the CPU code can multiply 8-bit weights, else "float32".

    Both dtypes give the same values, because quantizing the stored values again gives the stored integers and scales.
    Without the CPU code, 8 bits would be converted at every call, or the computation would be in bfloat16.

    Args:
        stored: the checkpoint.
        packs: whether the parameters will be packed for one device.
    """
    return "int8" if stored.eight_bits and packs and products.available() else "float32"


def _check_mesh(stored: Stored, config: Config, dtype: str, mesh: Mesh, whole: bool) -> None:
    """Raises `ValueError` if the mesh cannot split the model's sizes, or if the parameters exceed a device's memory."""
    shape = tuple(mesh.shape.values())
    if not whole:
        sharding.check(config, shape, str(stored.path))
    memory = mesh.local_devices[0].memory_stats() or {}
    _check_room(stored, dtype, (1, 1) if whole else shape, memory.get("bytes_limit"))


def _check_room(stored: Stored, dtype: str, shape: Sequence[int], room: int | None) -> None:
    """Raises `ValueError` if a device's part of the parameters needs more than `room` bytes; `None`: unknown.

    The check comes before anything is read.
    """
    counts = [math.prod(shape_of(pieces)) // sharding.parts(name, shape) for name, pieces in stored.plan.items()]
    size = sum(counts) * np.dtype(dtype).itemsize
    if room is not None and size > room:
        raise ValueError(
            f"{stored.path} needs {size / 1e9:.1f} GB on each device of mesh={tuple(shape)}, but a device "
            f"has only {room / 1e9:.1f} GB: use more devices, or load it in fewer bits (see experiments.describe)"
        )


def computed_in(config: Config, dtype: str | None, prepared: bool) -> str:
    """Returns the dtype of computation that follows from the arguments of `load` and the checkpoint's configuration."""
    if prepared and jax.default_backend() == "cpu":
        return "float32"
    if dtype == "int8":
        return "bfloat16"
    return config.dtype if dtype is None else "bfloat16" if dtype == "bfloat16" else "float32"


def model_of(path: str | os.PathLike[str]) -> Model:
    """Returns the model that a checkpoint describes, without reading its arrays.

    The configuration is checked against the names and shapes of the stored arrays. For a model on the hub, only the
    configuration is fetched, unless the model belongs to a target (`belongs_to_target`). Raises the same errors as
    `load`.
    """
    if hub.name_of(path) is not None and not belongs_to_target(path):
        return model_from(huggingface.config_of(located(path, hub.CONFIGURATION)))
    return model_from(_config(find(path), None))


def belongs_to_target(path: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoint is a draft model that needs its target: an EAGLE-3 head, or a Gemma 4 assistant.

    Only a configuration is read, or fetched from the hub. Raises the same errors as `load` for a name on the hub.
    """
    folder = located(path, hub.CONFIGURATION)
    if native.is_ours(folder):
        return isinstance(model_of(folder), AttachedModel)
    return eagle3.is_head(folder) or gemma4_assistant.is_assistant(folder)


def named(name: str | os.PathLike[str]) -> Model:
    """Returns the model of a preset (`models.families.PRESETS`) or of a checkpoint (`model_of`); reads no arrays.

    Raises:
        ValueError: the name is neither a preset nor a path; the message names similar presets.
        CheckpointError, OSError: as in `load`.
    """
    if str(name) in PRESETS:
        return model_from(PRESETS[str(name)])
    if hub.name_of(name) is None and not expanded(name).exists():
        near = f"{hub.hint(name)}{hint(str(name), PRESETS)}"
        raise ValueError(f"{str(name)!r} is neither a preset nor a checkpoint: {near}presets are {', '.join(PRESETS)}")
    return model_of(name)


def describe(path: str | os.PathLike[str]) -> str:
    """Returns a text with the format, configuration and size of a checkpoint, one per line; does not read its arrays.

    Raises the same errors as `load`, except those that only reading the arrays can detect.
    """
    stored = find(path)
    count = sum(math.prod(shape_of(pieces)) for pieces in stored.plan.values())
    lines = [f"format: {stored.format}", f"model: {_config(stored, None)}"]
    lines += [f"parameters: {count:,} in {len(stored.tensors)} arrays, {', '.join(sorted(stored.dtypes))}"]
    return "\n".join(lines + ([f"fingerprint: {stored.fingerprint}"] if stored.fingerprint else []))


def _config(stored: Stored, vocab_size: int | None) -> Config:
    """Returns a checkpoint's configuration, after checking the shapes of its arrays against it."""
    config = stored.config
    check_shapes(stored.path, {name: shape_of(pieces) for name, pieces in stored.plan.items()}, config)
    if vocab_size is None:
        return config
    if not 0 < vocab_size <= config.num_embeddings:
        raise ValueError(
            f"vocab_size={vocab_size} must be between 1 and {config.num_embeddings}, the number of embedding rows in "
            f"{stored.path}: give the number of rows that are real vocabulary entries"
        )
    return dataclasses.replace(config, vocab_size=vocab_size)


def find(path: str | os.PathLike[str]) -> Stored:
    """Opens the checkpoint at `path` without reading its arrays; raises the same errors as `load`."""
    path = located(path)
    native.put_back(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: {hub.hint(path)}give a directory written by save, a Hugging Face directory, a "
            "T5X checkpoint_<step> directory or its parent, or a checkpoint in one file (T5X, llama2.c)"
        )
    if _TEMPORARY.search(path.name):
        raise CheckpointError(
            f"{path} is being written (its name is a temporary one): wait until it is renamed, or choose "
            "another step if its writer died"
        )
    try:
        return _find(path)
    except (CheckpointError, OSError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        # The readers do not validate all metadata, so damaged metadata can raise any of these errors.
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); {COPY_AGAIN}") from error


def _find(path: Path) -> Stored:
    if not path.is_file():
        return _find_in_directory(path)
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} {_OTHER_FORMATS['*.gguf']}")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} holds no configuration: give its directory, which holds {huggingface.CONFIG}")
    return llama2c.open_file(path) if path.suffix == ".bin" else t5x.open_native(path)


def _find_in_directory(path: Path) -> Stored:
    if (path / t5x.MSGPACK).is_file():
        return t5x.open_native(path)
    if native.is_ours(path):
        return native.open_ours(path)
    if eagle3.is_head(path):
        return eagle3.open_directory(path)
    if gemma4_assistant.is_assistant(path):
        return gemma4_assistant.open_directory(path)
    if huggingface.model_type(path) is not None:
        return huggingface.open_directory(path)
    if (path / t5x.STATE).is_dir() or (path / zarr.METADATA).is_file():
        if maxtext.is_maxtext(path):
            return maxtext.open_tree(path)
        return gemma_jax.open_tree(path) if gemma_jax.is_gemma(path) else t5x.open_orbax(path)
    if (path / maxtext.ITEMS).is_dir() and maxtext.is_maxtext(path):
        return maxtext.open_tree(path)
    models = [file for file in path.glob("*.bin") if llama2c.is_model(file)]
    return llama2c.open_file(models[0]) if len(models) == 1 else _newest(path)


def _newest(path: Path) -> Stored:
    """Opens the newest complete `checkpoint_<step>` in a directory; warns about newer ones that are incomplete.

    Raises:
        CheckpointError: there is no complete checkpoint; names the reason.
    """
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
    root = path.parent if path.name == "snapshots" else path
    if snapshots := sorted(file.parent for file in root.glob("snapshots/*/config.json")):
        folders = " or ".join(map(str, snapshots))
        raise CheckpointError(f"{path} is Hugging Face's cache of a model, not a checkpoint: give {folders}")
    for pattern, remedy in _OTHER_FORMATS.items():
        if file := next(path.glob(pattern), None):
            raise CheckpointError(f"{file} {remedy}")
    state = f"only {listing(writing)}, still being written" if writing else (listing(names) or "nothing")
    raise CheckpointError(f"{path} holds no checkpoint: looked for {LOOKED_FOR}; found {state}")
