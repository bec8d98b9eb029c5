"""Memory that a model needs for its parameters, its cache and the distributions of a block, from shapes alone.

All numbers come from `jax.eval_shape` of the code that decodes. Nothing is allocated or read, so a laptop can describe
a model of 70 billion parameters.
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

# Parameters that `extend` never reads: prefill applies them to the prompt and stores the result in the cache.
_PROMPT_ALONE = re.compile(r"^encoder/|/relpos_bias/|/encoder_decoder_attention/(key|value)/")


# Cache leaves with rows but no heads: the mesh's `model` axis does not split them.
_BY_ROWS = re.compile(r"length|cross_bias|summary")


class Needs(NamedTuple):
    """Memory of one model, batch and block, in bytes on one device of the mesh.

    Attributes:
        parameters: number of parameters; parameter_bytes: their bytes in the model's dtype.
        cache_bytes: cache of all rows, rings included; for an encoder-decoder also the encoder's keys and values.
        laws_bytes: the block's distributions q̃ and p̃ (`2 · B · (G + 1) · V` float32), which any exact verification
            reads.
        call_bytes: lower bound of the bytes that one call of `extend` reads: the cache and the parameters, once each.
            Parameters that only the prompt needs (such as an encoder) do not count, and neither does an untied
            embedding, because a call gathers few of its rows.
    """

    parameters: int
    parameter_bytes: int
    cache_bytes: int
    laws_bytes: int
    call_bytes: int


def needs(model: DecoderLM | T5, *, batch: int, length: int, block_size: int, mesh: tuple[int, int] = (1, 1)) -> Needs:
    """Returns the memory that decoding with `model` as the target needs on each device.

    Args:
        model: the target.
        batch: number of rows.
        length: positions in the cache, prompt and output together (an encoder-decoder has this many in its encoder and
            in its decoder).
        block_size: γ.
        mesh: (data, model): the numbers of devices that split the rows, and that split heads, units and the
            vocabulary (`models.sharding`).

    Raises:
        ValueError: the mesh does not divide the rows, heads, units or vocabulary.
    """
    sharding.check(model.config, mesh, "the model")
    if batch % mesh[0]:
        raise ValueError(
            f"a batch of {batch} is not divisible by the {mesh[0]} parts that mesh={mesh} spreads rows over"
        )
    params = abstract(model)
    # A rollback may take back a whole block and its extra token, for which rings need `block_size + 1` spare slots.
    cache = jax.eval_shape(lambda p: model.prefill(p, _prompt(model, batch, length), length, block_size + 1), params)
    block = jax.ShapeDtypeStruct((batch, block_size + 1), jnp.int32)
    logits = jax.eval_shape(model.extend, params, cache, block)[0].logits
    cache = _without_summary(cache)
    # A call reads the whole cache except T5's relative biases, of which it reads a negligible slice.
    read = cache.replace(static=cache.static.replace(bias=None)) if isinstance(model, T5) else cache
    return Needs(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        parameter_bytes=_held(flatten_dict(params, sep="/"), mesh),
        cache_bytes=_cached(cache, mesh),
        # Padding of the vocabulary is cut off before verification, hence `vocab_size` and not the width of the logits.
        laws_bytes=2 * math.prod(logits.shape[:-1]) * model.vocab_size * 4 // math.prod(mesh),
        call_bytes=_held(_read(model, params), mesh) + _cached(read, mesh),
    )


def _held(leaves: Mapping[str, Any], mesh: tuple[int, int]) -> int:
    """Returns the bytes of parameters on each device."""
    return sum(_bytes(leaf) // sharding.parts(path, mesh) for path, leaf in leaves.items())


def _without_summary(cache: Any) -> Any:
    """Returns a cache without its summary; a compiled program whose drafter does not read the summary omits it."""
    if isinstance(cache, KVCache):
        return replace(cache, static=replace(cache.static, summary=None))
    return replace(cache, summary=None)


def _cached(cache: Any, mesh: tuple[int, int]) -> int:
    """Returns the bytes of a cache on each device; leaves without heads are split by rows only."""

    def parts(path: Any) -> int:
        return mesh[0] if _BY_ROWS.search(jax.tree_util.keystr(path)) else math.prod(mesh)

    return sum(_bytes(leaf) // parts(path) for path, leaf in jax.tree_util.tree_leaves_with_path(cache))


def _read(model: DecoderLM | T5, params: Any) -> dict[str, Any]:
    """Returns the parameters that every call of `extend` reads in full.

    It omits parameters that only the prompt needs, and an untied embedding.
    """
    leaves = {name: leaf for name, leaf in flatten_dict(params, sep="/").items() if not _PROMPT_ALONE.search(name)}
    # A tied embedding is also the output matrix, which every call reads as a whole.
    if not model.config.tied:
        del leaves["token_embedder/embedding"]
    return leaves


def abstract(model: DecoderLM | T5) -> Any:
    """Returns the parameters' shapes with the dtype that the model computes in; allocates nothing."""
    # Parameters do not depend on the length, so one token per input suffices.
    inputs = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * (2 if model.is_encoder_decoder else 1)
    params = jax.eval_shape(model.module.init, jax.random.key(0), *inputs)["params"]
    dtype = jnp.dtype(model.config.dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def longest(model: DecoderLM | T5) -> float:
    """Returns the number of positions that a model was trained for; a T5 has no limit."""
    return model.config.max_length if isinstance(model, DecoderLM) else math.inf


def _prompt(model: DecoderLM | T5, batch: int, length: int) -> Prompt:
    # The context is one token, so prefill feeds nothing: the cache's size follows from `length` only.
    ones = jnp.ones((batch, 1), jnp.int32)
    encoder = jnp.ones((batch, length), jnp.int32) if model.is_encoder_decoder else None
    return Prompt(ones, ones[:, 0], encoder)


def _bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)
