"""What a model needs, from shapes alone: parameters, cache, the laws of a block. Nothing is allocated or read.

Everything comes from `jax.eval_shape` of the code that runs, so that a 70-billion model is described on a laptop.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from speccascade_jax.core.types import Prompt
from speccascade_jax.models import sharding
from speccascade_jax.models.cache import KVCache
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.t5 import T5

# Parameters that `extend` never touches: what they make of the prompt lies in the cache.
_PROMPT_ALONE = re.compile(r"^encoder/|/relpos_bias/|/encoder_decoder_attention/(key|value)/")


# leaves of caches that have rows and no heads
_BY_ROWS = re.compile(r"length|cross_bias|summary")


class Needs(NamedTuple):
    """Of one model, batch and block.

    Attributes:
        parameters: how many; parameter_bytes: in the model's dtype. Bytes are those on one device of the mesh.
        cache_bytes: of all rows, rings and, for an encoder-decoder, the encoder's keys and values included.
        laws_bytes: the block's laws q̃ and p̃ (`2 · B · (G + 1) · V` float32), which any exact verification reads.
        call_bytes: what one call of `extend` reads at least: the cache and the parameters, once each, without an
            encoder and what else serves the prompt alone, and without the embedding where it does not make the
            logits (rows of it are gathered).
    """

    parameters: int
    parameter_bytes: int
    cache_bytes: int
    laws_bytes: int
    call_bytes: int


def needs(model: DecoderLM | T5, *, batch: int, length: int, block_size: int, mesh: tuple[int, int] = (1, 1)) -> Needs:
    """What decoding with `model` needs as a target, on each device.

    Args:
        batch: rows; length: positions in the cache, prompt and output (of an encoder-decoder: each of both).
        block_size: γ.
        mesh: (data, model), over how many devices rows are spread, and heads, units and the vocabulary
            (`models.sharding`).

    Raises:
        ValueError: rows, heads, units or the vocabulary do not divide by the mesh.
    """
    sharding.check(model.config, mesh, "the model")
    if batch % mesh[0]:
        raise ValueError(
            f"a batch of {batch} does not divide by the {mesh[0]} parts that mesh={mesh} spreads rows over"
        )
    params = abstract(model)
    cache = jax.eval_shape(lambda p: model.prefill(p, _prompt(model, batch, length), length, block_size + 1), params)
    block = jax.ShapeDtypeStruct((batch, block_size + 1), jnp.int32)
    logits = jax.eval_shape(model.extend, params, cache, block)[0].logits
    cache = _without_summary(cache)
    # cache bytes that a call reads: T5's slice of relative biases is negligible
    read = cache.replace(static=cache.static.replace(bias=None)) if isinstance(model, T5) else cache
    return Needs(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        parameter_bytes=_held(flatten_dict(params, sep="/"), mesh),
        cache_bytes=_cached(cache, mesh),
        laws_bytes=2 * math.prod(logits.shape[:-1]) * model.vocab_size * 4 // math.prod(mesh),
        call_bytes=_held(_read(model, params), mesh) + _cached(read, mesh),
    )


def _held(leaves: Mapping[str, Any], mesh: tuple[int, int]) -> int:
    """Bytes of parameters on each device."""
    return sum(_bytes(leaf) // sharding.parts(path, mesh) for path, leaf in leaves.items())


def _without_summary(cache: Any) -> Any:
    """A cache without what is there for drafters alone: a program whose drafter does not read it has none."""
    if isinstance(cache, KVCache):
        return replace(cache, static=replace(cache.static, summary=None))
    return replace(cache, summary=None)


def _cached(cache: Any, mesh: tuple[int, int]) -> int:
    """Bytes of a cache on each device: what has no heads lies along the rows alone."""

    def parts(path: Any) -> int:
        return mesh[0] if _BY_ROWS.search(jax.tree_util.keystr(path)) else math.prod(mesh)

    return sum(_bytes(leaf) // parts(path) for path, leaf in jax.tree_util.tree_leaves_with_path(cache))


def _read(model: DecoderLM | T5, params: Any) -> dict[str, Any]:
    """The parameters that a call reads whole."""
    leaves = {name: leaf for name, leaf in flatten_dict(params, sep="/").items() if not _PROMPT_ALONE.search(name)}
    if not model.config.tied:
        del leaves["token_embedder/embedding"]
    return leaves


def abstract(model: DecoderLM | T5) -> Any:
    """The parameters' shapes, in the dtype that the model computes in; nothing is allocated."""
    inputs = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * (2 if model.is_encoder_decoder else 1)
    params = jax.eval_shape(model.module.init, jax.random.key(0), *inputs)["params"]
    dtype = jnp.dtype(model.config.dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def longest(model: DecoderLM | T5) -> float:
    """The positions that a model was made for; a T5 has no limit."""
    return model.config.max_length if isinstance(model, DecoderLM) else math.inf


def _prompt(model: DecoderLM | T5, batch: int, length: int) -> Prompt:
    ones = jnp.ones((batch, 1), jnp.int32)
    encoder = jnp.ones((batch, length), jnp.int32) if model.is_encoder_decoder else None
    return Prompt(ones, ones[:, 0], encoder)


def _bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)
