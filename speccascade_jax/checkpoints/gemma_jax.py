"""Reader of Gemma 2 checkpoints in Google's JAX releases, which are Orbax trees without a configuration.

The model's sizes are inferred from the arrays' shapes, and all other options are Gemma 2's. Source of names and
layouts: https://github.com/google-deepmind/gemma.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.array_plan import Piece, Plan, Stored, check_tensors
from speccascade_jax.checkpoints.infer import check_layers
from speccascade_jax.checkpoints.zarr import METADATA, open_arrays, tree_specs
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.models.decoder_presets import PRESETS
from speccascade_jax.models.families import Shapes
from speccascade_jax.storage.errors import CheckpointError, incomplete

_EMBEDDING = "embedder/input_embedding"
_ROOT = "transformer/"


def is_gemma(path: Path) -> bool:
    """Returns whether a directory is an Orbax tree with a Gemma's arrays."""
    return (path / METADATA).is_file() and not {_EMBEDDING, _ROOT + _EMBEDDING}.isdisjoint(tree_specs(path))


def open_tree(path: Path) -> Stored:
    """Opens a Gemma 2 checkpoint that is an Orbax tree.

    Raises:
        CheckpointError: arrays are missing, of a wrong shape, or not Gemma 2's.
    """
    # In some releases all names begin with "transformer/", and in some the names of kernels end with "/w".
    tensors = {
        name.removeprefix(_ROOT).removesuffix("/w"): tensor
        for name, tensor in open_arrays(path, tree_specs(path)).items()
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = _config(path, shapes)
    check_layers(path, config, len(shapes))
    plan: Plan = {name: (_piece(name, shape, config, shapes),) for name, shape in parameter_shapes(config).items()}
    check_tensors(path, plan, tensors, lambda name: False)
    return Stored(path, "Gemma 2 of Google's JAX releases (Orbax)", tensors, config, plan)


def _config(path: Path, shapes: Shapes) -> DecoderConfig:
    needed = (_EMBEDDING, "layer_0/attn/q_einsum", "layer_0/attn/kv_einsum", "layer_0/mlp/linear")
    if missing := [name for name in needed if name not in shapes]:
        raise incomplete(path, missing, len(shapes) + len(missing))
    if not any(name.endswith("/post_attention_norm/scale") for name in shapes):
        remedy = "in this format only Gemma 2 is read; take the checkpoint in Hugging Face's format"
        raise CheckpointError(f"{path} is a Gemma without norms after its layers, such as Gemma 1: {remedy}")
    (rows, d_model), (heads, _, head_dim), (_, kv_heads, *_), (d_ff, _) = (shapes[name] for name in needed)
    numbers = [name.split("/")[0].removeprefix("layer_") for name in shapes if name.startswith("layer_")]
    layers = 1 + max(int(number) for number in numbers if number.isdigit())
    largest = (d_model, heads) == (4608, 32)  # The 27B model is the only one whose queries have another scale.
    preset = PRESETS["gemma2_27b" if largest else "gemma2_2b"]
    return dataclasses.replace(
        preset, vocab_size=min(rows, preset.vocab_size), num_embeddings=rows, d_model=d_model, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, d_ff=d_ff, embedding_scale=math.sqrt(d_model),
        query_scale=preset.query_scale if largest else head_dim**-0.5,
    )  # fmt: skip


def _piece(name: str, shape: tuple[int, ...], c: DecoderConfig, shapes: Shapes) -> Piece:
    """Returns the location of a parameter in the tree.

    The tree's arrays have a separate axis for heads, one for keys and values, and one for the two gate kernels.
    """
    if not name.startswith("decoder/layers_"):
        return Piece(_EMBEDDING if name.endswith("embedding") else "final_norm/scale", shape, shape)
    _, layer, part = name.split("/", 2)
    layer = layer.replace("layers_", "layer_")
    gates = f"{layer}/mlp/gating_einsum"
    # The larger models store the two gate kernels transposed, as [2, F, E].
    turned = c.d_ff != c.d_model and shapes.get(gates, ())[1:] == (c.d_ff, c.d_model)
    gating = (2, *shape[::-1]) if turned else (2, *shape)
    order = (1, 0) if turned else None
    kv = (2, c.num_kv_heads, c.d_model, c.head_dim)
    products: dict[str, tuple[Any, ...]] = {
        "self_attention/query/kernel": ("attn/q_einsum", (c.num_heads, c.d_model, c.head_dim), (1, 0, 2)),
        "self_attention/key/kernel": ("attn/kv_einsum", kv, (1, 0, 2), (0, 0)),
        "self_attention/value/kernel": ("attn/kv_einsum", kv, (1, 0, 2), (0, 1)),
        "self_attention/out/kernel": ("attn/attn_vec_einsum", (c.num_heads, c.head_dim, c.d_model)),
        "mlp/wi_0/kernel": ("mlp/gating_einsum", gating, order, (0, 0)),
        "mlp/wi_1/kernel": ("mlp/gating_einsum", gating, order, (0, 1)),
        "mlp/wo/kernel": ("mlp/linear", shape),
    }
    source, stored, *layout = products.get(part) or (_NORMS[part], shape)
    return Piece(f"{layer}/{source}", stored, shape, *layout)


_NORMS = {
    "pre_self_attention_layer_norm/scale": "pre_attention_norm/scale",
    "post_self_attention_layer_norm/scale": "post_attention_norm/scale",
    "pre_mlp_layer_norm/scale": "pre_ffw_norm/scale",
    "post_mlp_layer_norm/scale": "post_ffw_norm/scale",
}
