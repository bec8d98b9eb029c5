"""Estimates of the memory that decoding needs for parameters, cache and distributions, computed from shapes alone.

The shapes come from `jax.eval_shape` of the decoding code. No array is allocated or read, so a laptop can estimate the
memory of a model with 70 billion parameters.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.protocols import AttachedModel, TargetHead
from speccascade_jax.core.types import Prompt
from speccascade_jax.models import sharding
from speccascade_jax.models.cache import KVCache
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.experts import EXPERTS
from speccascade_jax.models.families import family_of
from speccascade_jax.models.t5 import T5

# Names of the parameters that `extend` never reads: prefill applies them to the prompt and caches the results.
_PROMPT_ALONE = re.compile(r"^encoder/|/relpos_bias/|/encoder_decoder_attention/(key|value)/")


# Names of cache arrays without an axis of heads, which the mesh's `model` axis therefore does not split.
_BY_ROWS = re.compile(r"length|cross_bias|summary|states|real")


class Needs(NamedTuple):
    """Memory that decoding with one target needs, in bytes on each device of a mesh.

    Attributes:
        parameters: number of parameters of the whole model.
        active: number of parameters that a token uses: of experts, only those that it chooses.
        parameter_bytes: bytes of the parameters in the model's dtype.
        cache_bytes: bytes of the cache of all rows; for an encoder-decoder it includes the cross-attention's keys and
            values.
        laws_bytes: bytes of a block's draft and target distributions q̃ and p̃ (`2 · B · (G + 1) · V` float32), which
            every exact verification reads.
        call_bytes: lower bound of the bytes that one call of `extend` reads: the cache and the parameters, each once.
            Parameters that only prefill reads (such as an encoder) do not count. Embeddings that are not output
            matrices do not count either, because a call reads few of their rows. Of experts, those count that the
            call's tokens choose if they choose evenly and independently; tokens that agree choose fewer.
    """

    parameters: int
    active: int
    parameter_bytes: int
    cache_bytes: int
    laws_bytes: int
    call_bytes: int


def needs(model: DecoderLM | T5, *, batch: int, length: int, block_size: int, mesh: tuple[int, int] = (1, 1)) -> Needs:
    """Returns the memory that decoding with `model` as the target needs on each device.

    Args:
        model: the target.
        batch: number of rows.
        length: number of positions in the cache, for prompt and output together. For an encoder-decoder it is the
            length of the encoder's input, and also of the decoder's sequence.
        block_size: γ, the number of tokens that are drafted in a round.
        mesh: (data, model): the numbers of devices that split the rows, and that split heads, units and the
            vocabulary (`models.sharding`).

    Raises:
        ValueError: the mesh does not divide the rows, heads, units or vocabulary.
    """
    sharding.check(model.config, mesh, "the model")
    if batch % mesh[0]:
        raise ValueError(
            f"a batch of {batch} is not divisible by the {mesh[0]} parts that mesh={mesh} spreads rows over: "
            f"give a multiple of {mesh[0]}"
        )
    params = abstract(model)
    # A rollback may undo a whole block and its extra token, so ring buffers need `block_size + 1` spare slots.
    cache = jax.eval_shape(lambda p: _cache(model, p, _prompt(model, batch, length), length, block_size + 1), params)
    cache = _without_summary(cache)
    # A call reads the whole cache, except that it reads only a negligible slice of T5's relative biases.
    read = cache.replace(static=cache.static.replace(bias=None)) if isinstance(model, T5) else cache
    leaves, tokens = flatten_dict(params, sep="/"), batch // mesh[0] * (block_size + 1)
    return Needs(
        parameters=sum(leaf.size for leaf in leaves.values()),
        active=round(sum(leaf.size * _share(model, name, 1) for name, leaf in leaves.items())),
        parameter_bytes=_held(leaves, mesh),
        cache_bytes=_cached(cache, mesh),
        # Verification drops the padding of the vocabulary, so `vocab_size` counts here and not the width of the logits.
        laws_bytes=2 * batch * (block_size + 1) * model.vocab_size * 4 // math.prod(mesh),
        call_bytes=_held(_read(model, params), mesh, lambda name: _share(model, name, tokens)) + _cached(read, mesh),
    )


def _cache(model: Any, params: Any, prompt: Prompt, length: int, most: int) -> Any:
    """Returns a cache of `length` positions that can be rolled back by `most` tokens."""
    if isinstance(model, TargetHead):  # it needs no states of its target for a prompt of one token
        return model.begin(params, prompt, jnp.zeros(()), length)
    if isinstance(model, AttachedModel):  # it reads its target's cache
        return ()
    return model.prefill(params, prompt, length, most)


def _share(model: DecoderLM | T5, name: str, tokens: int) -> float:
    """Returns the share of a parameter that `tokens` tokens use; it is 1 except for experts (`experts_used`)."""
    c = model.config
    if f"/{EXPERTS}/" not in name or not isinstance(c, DecoderConfig):
        return 1.0
    return experts_used(c, tokens) / c.num_experts


def experts_used(c: DecoderConfig, tokens: int) -> float:
    """Returns the mean number of a layer's experts that tokens use together, if choices are even and independent."""
    missed: float = (1 - c.experts_per_token / c.num_experts) ** tokens
    return c.num_experts * (1 - missed)


def _held(leaves: Mapping[str, Any], mesh: tuple[int, int], share: Callable[[str], float] = lambda _: 1.0) -> int:
    """Returns the bytes of parameters on one device; `share` gives the part of each parameter, by name, that counts."""
    return round(sum(_bytes(leaf) // sharding.parts(path, mesh) * share(path) for path, leaf in leaves.items()))


def _without_summary(cache: Any) -> Any:
    """Returns a cache without the prompt's summary, which compiled programs omit unless the drafter reads it."""
    if isinstance(cache, KVCache):
        return replace(cache, static=replace(cache.static, summary=None))
    return replace(cache, summary=None) if hasattr(cache, "summary") else cache


def _cached(cache: Any, mesh: tuple[int, int]) -> int:
    """Returns the bytes that a cache needs on each device; arrays without heads are split by rows only."""

    def parts(path: Any) -> int:
        return mesh[0] if _BY_ROWS.search(jax.tree_util.keystr(path)) else math.prod(mesh)

    return sum(_bytes(leaf) // parts(path) for path, leaf in jax.tree_util.tree_leaves_with_path(cache))


def _read(model: DecoderLM | T5, params: Any) -> dict[str, Any]:
    """Returns the parameters that every call of `extend` reads in full.

    The result has no parameters that only prefill reads, and no embeddings that are only used for lookups.
    """
    leaves = {name: leaf for name, leaf in flatten_dict(params, sep="/").items() if not _PROMPT_ALONE.search(name)}
    # A tied embedding is also the output matrix, which every call reads as a whole.
    if not model.config.tied:
        leaves.pop("token_embedder/embedding", None)  # a head may use its target's
    leaves.pop("layer_inputs/embedder/embedding", None)
    if getattr(model.config, "num_centroids", None):  # few rows of the output matrix
        del leaves["token_embedder/embedding"], leaves["decoder/clusters/ids"]
    return leaves


def abstract(model: DecoderLM | T5) -> Any:
    """Returns the shapes of a model's parameters, with the model's dtype of computation; allocates no array."""
    if isinstance(model, AttachedModel):
        shapes, kind = family_of(model.config).shapes(model.config), jnp.dtype(model.config.dtype)
        return unflatten_dict({name: jax.ShapeDtypeStruct(shape, kind) for name, shape in shapes.items()}, sep="/")
    # Parameters do not depend on the inputs' length, so one token per input suffices.
    inputs = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * (2 if model.is_encoder_decoder else 1)
    params = jax.eval_shape(model.module.init, jax.random.key(0), *inputs)["params"]
    dtype = jnp.dtype(model.config.dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def longest(model: DecoderLM | T5) -> float:
    """Returns the longest sequence that a model was trained for; infinity for a T5 and for a head of a target."""
    return model.config.max_length if isinstance(model, DecoderLM) else math.inf


def _prompt(model: DecoderLM | T5, batch: int, length: int) -> Prompt:
    # The decoder's context is one token, which stays pending, so prefill feeds no token to the decoder. The size of the
    # cache follows from `length` alone.
    ones = jnp.ones((batch, 1), jnp.int32)
    encoder = jnp.ones((batch, length), jnp.int32) if model.is_encoder_decoder else None
    return Prompt(ones, ones[:, 0], encoder)


def _bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)
