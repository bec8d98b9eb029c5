"""What T5X does not store beside its arrays, a `T5Config`, from names and shapes; families and their shapes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.checkpoints.array_plan import Config, Piece, Plan, Stored, as_it_is, shape_of
from speccascade_jax.checkpoints.arrays import Shapes, Tensor, Tensors
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, counted, incomplete, listing

Model = T5 | DecoderLM
EMBEDDING = "token_embedder/embedding"
# T5's vocabulary is padded for sharding: 32,000 pieces and 100 sentinels in 32,128 rows.
PADDED_VOCABULARIES = {32128: 32100}
_STACKS = ("encoder", "decoder")
_SCANNED = ("encoder", "decoder", "layers")
MOST_LAYERS = 10_000
_BIASES = ("relpos_bias", "relative_posemb")


def stored_t5(path: Path, kind: str, tensors: Tensors) -> Stored:
    """What T5X wrote: configuration and plan are inferred from names and shapes.

    scalable_t5 scans over its layers: one stored array holds all of them, stacked at axis 1, under
    `encoder/encoder/…` (or `encoder/layers/…`); each layer also carries the relative biases. Errors as `infer_config`.
    """
    plan: Plan = {}
    readers = dict(tensors)
    for source, tensor in tensors.items():
        parts = source.split("/")
        if not (len(parts) > 2 and parts[0] in _STACKS and parts[1] in _SCANNED and len(tensor.shape) > 1):
            plan[source] = as_it_is(source, tensor.shape)
        elif parts[2] in _BIASES:
            plan[f"{parts[0]}/relpos_bias/rel_embedding"] = _layer(source, tensor, 0)
            readers[source] = dataclasses.replace(tensor, read=functools.partial(_shared_bias, path, source, tensor))
        else:
            _check_count(path, tensor.shape[1], MOST_LAYERS)
            name = "/".join(parts[2:])
            plan |= {f"{parts[0]}/layers_{i}/{name}": _layer(source, tensor, i) for i in range(tensor.shape[1])}
    config = infer_config(path, {name: shape_of(pieces) for name, pieces in plan.items()})
    return Stored(path, kind, readers, config, plan)


def check_layers(path: Path, config: Config, arrays: int) -> None:
    """Refuse a configuration of more layers than there are arrays, before anything is as long as it says.

    Raises:
        CheckpointError: as above.
    """
    both = (config.num_encoder_layers, config.num_decoder_layers) if isinstance(config, T5Config) else ()
    _check_count(path, sum(both) or getattr(config, "num_layers", 0), arrays)


def _check_count(path: Path, layers: int, most: int) -> None:
    if layers > most:
        raise CheckpointError(
            f"{path}: {layers:,} layers are more than the {most:,} there can be: it is damaged; {COPY_AGAIN}"
        )


def _layer(source: str, tensor: Tensor, number: int) -> tuple[Piece]:
    return (Piece(source, tensor.shape, tensor.shape[:1] + tensor.shape[2:], take=(1, number)),)


def _shared_bias(path: Path, source: str, tensor: Tensor) -> np.ndarray:
    array = tensor.read()
    if (array != array[:, :1]).any():
        raise CheckpointError(
            f"{path}: unknown architecture: {source} holds different relative biases for each layer "
            "(as UMT5 has), and T5 shares one among its layers"
        )
    return array


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


def expected_shapes(config: Config) -> Shapes:
    """Shapes of a model's parameters by name, for any family's configuration."""
    return FAMILIES[family(config)].shapes(config)


def _t5_shapes(c: T5Config) -> Shapes:
    """Shapes of the parameters of `T5Module(c)`.

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


def check_shapes(path: Path, shapes: Shapes, config: Config) -> None:
    """Every parameter of the configuration is there, with its shape, and none besides.

    Raises:
        CheckpointError: naming missing arrays, arrays of a wrong shape, or arrays without a place.
    """
    check_layers(path, config, len(shapes))
    expected = expected_shapes(config)
    if missing := expected.keys() - shapes.keys():
        raise incomplete(path, missing, len(expected))
    if unknown := shapes.keys() - expected.keys():
        raise CheckpointError(
            f"{path}: unknown architecture: a {type(config).__name__.removesuffix('Config')} has no place for the "
            f"arrays {listing(unknown)}; correct the configuration or choose another checkpoint"
        )
    wrong = [name for name in sorted(expected) if tuple(shapes[name]) != tuple(expected[name])]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {counted(wrong)} of a wrong shape ({listing(wrong)}): {name} is {list(shapes[name])}, but "
            f"the configuration needs {list(expected[name])}: correct the configuration or {COPY_AGAIN}"
        )


class Family(NamedTuple):
    """The class of a family's configuration; what makes a model of one, and its parameters' shapes."""

    config: type[T5Config] | type[DecoderConfig]
    model: Callable[[Any], Model]
    shapes: Callable[[Any], Shapes]


def family(config: Config) -> str:
    """The name of a configuration's family."""
    return next(name for name, entry in FAMILIES.items() if isinstance(config, entry.config))


FAMILIES = {"t5": Family(T5Config, T5, _t5_shapes), "decoder": Family(DecoderConfig, DecoderLM, parameter_shapes)}
"""By what `config.json` calls them."""
