"""From parameter names and shapes to a `T5Config`: what T5X does not store beside its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speccascade_jax.checkpoints.arrays import Arrays, Shapes
from speccascade_jax.checkpoints.errors import COPY_AGAIN, CheckpointError, incomplete, listing
from speccascade_jax.models.t5 import T5Config

EMBEDDING = "token_embedder/embedding"
# T5's vocabulary is padded for sharding: 32,000 pieces and 100 sentinels in 32,128 rows.
PADDED_VOCABULARIES = {32128: 32100}
_STACKS = ("encoder", "decoder")
_SCANNED = ("encoder", "decoder", "layers")
_BIASES = ("relpos_bias", "relative_posemb")


class Source(NamedTuple):
    """Where a parameter comes from: a stored array, or one layer of it (axis 1)."""

    name: str
    layer: int | None = None


def sources(shapes: Shapes) -> dict[str, Source]:
    """T5 parameter names and where each is stored.

    scalable_t5 scans over its layers: one stored array holds all of them, stacked at axis 1, under
    `encoder/encoder/…` (or `encoder/layers/…`); each layer also carries the relative biases.
    """
    found: dict[str, Source] = {}
    for stored, shape in shapes.items():
        parts = stored.split("/")
        if not (len(parts) > 2 and parts[0] in _STACKS and parts[1] in _SCANNED and len(shape) > 1):
            found[stored] = Source(stored)
        elif parts[2] in _BIASES:
            found[f"{parts[0]}/relpos_bias/rel_embedding"] = Source(stored, 0)
        else:
            rest = "/".join(parts[2:])
            found |= {f"{parts[0]}/layers_{i}/{rest}": Source(stored, i) for i in range(shape[1])}
    return found


def unstacked_shapes(shapes: Shapes) -> Shapes:
    """Shapes by T5 parameter name, one layer each."""
    whole = {name: (shapes[source.name], source.layer) for name, source in sources(shapes).items()}
    return {name: shape if layer is None else shape[:1] + shape[2:] for name, (shape, layer) in whole.items()}


def unstacked(path: Path, arrays: Arrays) -> Arrays:
    """Arrays by T5 parameter name, one layer each.

    Raises:
        CheckpointError: scanned layers have relative biases of their own (UMT5), which T5 shares.
    """
    result = {}
    for name, source in sources({n: a.shape for n, a in arrays.items()}).items():
        array = arrays[source.name]
        if name.endswith("rel_embedding") and source.layer is not None and (array != array[:, :1]).any():
            raise CheckpointError(
                f"{path}: unknown architecture: {source.name} holds different relative biases for each layer "
                "(as UMT5 has), and T5 shares one among its layers"
            )
        result[name] = array if source.layer is None else np.ascontiguousarray(array[:, source.layer])
    return result


def infer_config(path: Path, shapes: Shapes) -> T5Config:
    """The configuration that `shapes` (one layer each) imply.

    What shapes can't tell keeps T5's values: GELU gates where `wi_0` is there and ReLU where `wi` is,
    relative distances up to 128, epsilon 1e-6.

    Raises:
        CheckpointError: not a T5, or an array needed to tell its sizes is missing or has an odd shape.
    """
    if EMBEDDING not in shapes or not all(_layers(shapes, stack) for stack in _STACKS):
        raise CheckpointError(
            f"{path}: unknown architecture: a T5 has {EMBEDDING}, encoder/layers_i and decoder/layers_i, here "
            f"are {listing(shapes)}; only T5X's T5 encoder-decoders can be loaded"
        )
    rows, d_model = _sizes(path, shapes, EMBEDDING)
    heads, buckets = _sizes(path, shapes, "encoder/relpos_bias/rel_embedding")
    _, joined = _sizes(path, shapes, "encoder/layers_0/attention/query/kernel")
    d_ff, _ = _sizes(path, shapes, "encoder/layers_0/mlp/wo/kernel")
    if joined % heads:
        raise CheckpointError(
            f"{path}: array encoder/layers_0/attention/query/kernel has {joined} columns, which the {heads} "
            f"heads of encoder/relpos_bias/rel_embedding don't divide: files of two models are mixed; {COPY_AGAIN}"
        )
    return T5Config(
        vocab_size=PADDED_VOCABULARIES.get(rows, rows),
        num_embeddings=rows,
        d_model=d_model,
        num_heads=heads,
        head_dim=joined // heads,
        d_ff=d_ff,
        num_encoder_layers=_layers(shapes, "encoder"),
        num_decoder_layers=_layers(shapes, "decoder"),
        relative_buckets=buckets,
        gated=any("/mlp/wi_0/" in name for name in shapes),
        tied=not any(name.startswith("decoder/logits_dense/") for name in shapes),
    )


def _sizes(path: Path, shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    """The shape of a matrix that must be there."""
    if name not in shapes:
        raise incomplete(path, [name], len(shapes) + 1)
    if len(shapes[name]) != 2:
        raise CheckpointError(f"{path}: array {name} has shape {list(shapes[name])}, but a T5 has a matrix there")
    first, second = shapes[name]
    return first, second


def _layers(shapes: Shapes, stack: str) -> int:
    """One more than the highest layer, so that a hole shows as missing arrays."""
    prefix = f"{stack}/layers_"
    numbers = [name[len(prefix) :].split("/")[0] for name in shapes if name.startswith(prefix)]
    return max((int(n) for n in numbers if n.isdigit()), default=-1) + 1


def expected_shapes(c: T5Config) -> Shapes:
    """Shapes of the parameters of `T5Module(c)` by name.

    Written out, because asking the module takes longer than reading the weights of a small model.
    """
    shapes: Shapes = {EMBEDDING: (c.num_embeddings, c.d_model)}
    for stack, layers in (("encoder", c.num_encoder_layers), ("decoder", c.num_decoder_layers)):
        shapes[f"{stack}/relpos_bias/rel_embedding"] = (c.num_heads, c.relative_buckets)
        shapes[f"{stack}/{stack}_norm/scale"] = (c.d_model,)
        layer = _layer_shapes(c, stack)
        shapes |= {f"{stack}/layers_{i}/{name}": shape for i in range(layers) for name, shape in layer.items()}
    return shapes if c.tied else shapes | {"decoder/logits_dense/kernel": (c.d_model, c.num_embeddings)}


def _layer_shapes(c: T5Config, stack: str) -> Shapes:
    """Shapes of one layer's parameters: its parts, and a norm before each."""
    parts = {"attention": "attention"}
    if stack == "decoder":
        parts = {"self_attention": "self_attention", "encoder_decoder_attention": "cross_attention"}
    width, inner = c.num_heads * c.head_dim, ("wi_0", "wi_1") if c.gated else ("wi",)
    shapes: Shapes = {f"pre_{norm}_layer_norm/scale": (c.d_model,) for norm in (*parts.values(), "mlp")}
    for part in parts:
        shapes |= {f"{part}/{name}/kernel": (c.d_model, width) for name in ("query", "key", "value")}
        shapes[f"{part}/out/kernel"] = (width, c.d_model)
    shapes |= {f"mlp/{name}/kernel": (c.d_model, c.d_ff) for name in inner}
    return shapes | {"mlp/wo/kernel": (c.d_ff, c.d_model)}


def check_shapes(path: Path, shapes: Shapes, config: T5Config) -> None:
    """Every parameter of the configuration is there, with its shape, and none besides.

    Raises:
        CheckpointError: naming missing arrays, arrays of a wrong shape, or arrays a T5 has no place for.
    """
    expected = expected_shapes(config)
    if missing := expected.keys() - shapes.keys():
        raise incomplete(path, missing, len(expected))
    if unknown := shapes.keys() - expected.keys():
        raise CheckpointError(
            f"{path}: unknown architecture: a T5 has no place for the arrays {listing(unknown)}; only T5X's T5 "
            "encoder-decoders can be loaded"
        )
    wrong = [name for name in sorted(expected) if tuple(shapes[name]) != tuple(expected[name])]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} arrays have a wrong shape ({listing(wrong)}): {name} is {list(shapes[name])}, but "
            f"the configuration needs {list(expected[name])}: correct the configuration or {COPY_AGAIN}"
        )
