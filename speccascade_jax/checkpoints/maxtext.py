"""Reader of MaxText's checkpoints of Gemma 2 and Llama, with layers stacked (`scan_layers`) or separate.

They are Orbax trees without a configuration. Layers are stacked along axis 1 (MaxText's `param_scan_axis`); Gemma 2's
local layers are in one stack, and its global layers in another. MaxText multiplies the query kernels by the query scale
and Gemma's embedding by √E, and adds 1 to Gemma's norm scales. Source of names and layouts:
https://github.com/AI-Hypercomputer/maxtext (checkpoint conversion).
"""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.checkpoints.array_plan import Piece, Plan, Stored, check_tensors
from speccascade_jax.checkpoints.infer import MOST_LAYERS, check_count
from speccascade_jax.checkpoints.zarr import METADATA, open_arrays, tree_specs
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.models.decoder_presets import PRESETS
from speccascade_jax.models.families import Shapes
from speccascade_jax.storage.errors import CheckpointError, incomplete

ITEMS = "items"
"""Name of the folder that holds the tree in a step of a MaxText checkpoint."""
_EMBEDDING, _LAST_NORM = "token_embedder/embedding", "decoder/decoder_norm/scale"
_ROOTS = ("params/params/", "params/")
_KINDS = ("local", "global")
_NORMS = {
    "pre_self_attention_layer_norm": "pre_self_attention_norm",
    "post_self_attention_layer_norm": "post_self_attention_norm",
    "pre_mlp_layer_norm": "pre_ffw_norm",
    "post_mlp_layer_norm": "post_ffw_norm",
}
"""This package's names of Gemma 2's norms -> MaxText's names without `_local` or `_global` at the end."""
_LLAMA_NORMS = {"pre_mlp_layer_norm": "post_self_attention_layer_norm"}


def is_maxtext(path: Path) -> bool:
    """Returns whether a directory is an Orbax tree of MaxText, or holds one."""
    path = path / ITEMS if (path / ITEMS / METADATA).is_file() else path
    return (path / METADATA).is_file() and _root(tree_specs(path)) is not None


def _root(names: Collection[str]) -> str | None:
    """Returns the prefix of all parameters' names; `None` if the tree is not MaxText's."""
    return next((root for root in _ROOTS if root + _EMBEDDING in names and root + _LAST_NORM in names), None)


def open_tree(path: Path) -> Stored:
    """Opens a MaxText checkpoint, without the optimizer's state.

    Raises:
        CheckpointError: arrays are missing or of a wrong shape, or the model is neither a Gemma 2 nor a Llama preset.
    """
    tree = path / ITEMS if (path / ITEMS / METADATA).is_file() else path
    specs = tree_specs(tree)
    root = _root(specs) or ""
    tensors = open_arrays(
        path, {name.removeprefix(root): spec for name, spec in specs.items() if name.startswith(root)}
    )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = _config(path, shapes)
    plan: Plan = {name: (_piece(name, shape, config, shapes),) for name, shape in parameter_shapes(config).items()}
    check_tensors(path, plan, tensors, lambda name: False)
    if _is_gemma(shapes):
        embedding, scale = tensors[_EMBEDDING], np.float32(config.embedding_scale)
        tensors[_EMBEDDING] = embedding.mapped(
            lambda array: (array.astype(np.float32) / scale).astype(array.dtype), embedding.dtype
        )
    return Stored(path, "MaxText (Orbax)", tensors, config, plan)


def _is_gemma(shapes: Shapes) -> bool:
    return any("/self_attention_local/" in name for name in shapes)


def _config(path: Path, shapes: Shapes) -> DecoderConfig:
    """Returns the configuration that the arrays' names and shapes imply, with MaxText's scales."""
    kind = "_local" if _is_gemma(shapes) else ""
    stacked = f"decoder/layers/self_attention{kind}/query/kernel" in shapes
    layer = "decoder/layers" if stacked else "decoder/layers_0"
    names = [f"{layer}/self_attention{kind}/{part}/kernel" for part in ("query", "key")]
    names.append(f"{layer}/mlp{kind}/wi_0/kernel")
    if missing := [name for name in names if name not in shapes]:
        raise incomplete(path, missing, len(shapes) + len(missing))
    groups = shapes[names[0]][1] if stacked else _numbered(shapes)
    check_count(path, groups, MOST_LAYERS)
    # The axis of layers is the second, if there is one.
    query, key, gate = (shapes[name][:1] + shapes[name][1 + stacked :] for name in names)
    if (len(query), len(key), len(gate)) != (3, 3, 2):
        raise CheckpointError(
            f"{path}: {names[0]} has shape {list(shapes[names[0]])}, which MaxText's layers do not have: choose "
            "another checkpoint"
        )
    sizes: dict[str, Any] = {"num_layers": groups * (2 if kind else 1), "d_model": query[0], "num_heads": query[1]}
    sizes |= {"num_kv_heads": key[1], "head_dim": query[2], "d_ff": gate[1]}
    preset = _gemma(sizes) if kind else _llama(path, sizes)
    rows = shapes[_EMBEDDING][0]
    # MaxText's query kernels contain the query scale.
    return dataclasses.replace(preset, num_embeddings=rows, vocab_size=min(rows, preset.vocab_size), query_scale=1.0)


def _numbered(shapes: Shapes) -> int:
    """Returns the number of groups of separate layers: one more than the highest number in the names."""
    numbers = [name.split("/")[1].removeprefix("layers_") for name in shapes if name.startswith("decoder/layers_")]
    return 1 + max(int(number) for number in numbers if number.isdigit())


def _gemma(sizes: dict[str, Any]) -> DecoderConfig:
    config = dataclasses.replace(PRESETS["gemma2_2b"], norm_offset=0.0, **sizes)
    return dataclasses.replace(config, embedding_scale=math.sqrt(config.d_model))


def _llama(path: Path, sizes: dict[str, int]) -> DecoderConfig:
    """Returns the Llama preset of these sizes; no array shows its rotary base and scaling."""
    for name, preset in PRESETS.items():
        if name.startswith("llama") and all(getattr(preset, size) == value for size, value in sizes.items()):
            # MaxText rotates neighbouring coordinates in Llama 3, and halves of a head in Llama 2.
            return dataclasses.replace(preset, rope_pairs="adjacent" if name.startswith("llama3") else "halves")
    raise CheckpointError(
        f"{path}: {sizes} are the sizes of no Llama preset, and MaxText stores no options: convert it to "
        "Hugging Face's format with MaxText's to_huggingface"
    )


def _piece(name: str, shape: tuple[int, ...], c: DecoderConfig, shapes: Shapes) -> Piece:
    """Returns the location of a parameter in the tree, whose attention kernels have a separate axis for heads."""
    if not name.startswith("decoder/layers_"):
        return Piece(name, shape, shape)
    _, numbered, part = name.split("/", 2)
    number, gemma = int(numbered.removeprefix("layers_")), _is_gemma(shapes)
    group, kind = (number // 2, f"_{_KINDS[number % 2]}") if gemma else (number, "")
    module, rest = part.split("/", 1)
    module = (_NORMS if gemma else _LLAMA_NORMS).get(module, module) + kind
    heads = {"query": c.num_heads, "key": c.num_kv_heads, "value": c.num_kv_heads}
    stored = shape
    if rest == "out/kernel":
        stored = (c.num_heads, c.head_dim, c.d_model)
    elif rest.split("/")[0] in heads:
        stored = (c.d_model, heads[rest.split("/")[0]], c.head_dim)
    source = f"decoder/layers/{module}/{rest}"
    if source not in shapes:
        return Piece(f"decoder/layers_{group}/{module}/{rest}", stored, shape)
    layers = c.num_layers // 2 if gemma else c.num_layers
    return Piece(source, (stored[0], layers, *stored[1:]), shape, take=(1, group))
