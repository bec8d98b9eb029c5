"""Jitted loops for timing: calls of a model without an engine around them, and a matrix-vector product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import BoundModel, Cache, Params, Prompt
from speccascade_jax.models.products import multiply, panels
from speccascade_jax.runtime import products


@partial(jax.jit, static_argnames=("model", "slots"))
def prefill(model: LanguageModel, params: Params, prompt: Prompt, slots: int) -> Cache:
    """Returns a cache of `slots` slots that holds `prompt`."""
    return model.prefill(params, prompt, slots)


def extend_loop(
    bound: BoundModel, prompt: Prompt, width: int, slots: int, filled: int | None = None
) -> Callable[[int], Any]:
    """Returns a function of `count` that feeds `width` tokens to the model and rolls the cache back, `count` times.

    Weights and caches are arguments of the jitted function, as in the engine, because XLA would precompute operations
    on constants. `filled` is the number of cache slots in use; by default the cache is half full.
    """
    cache = prefill(bound.model, bound.params, prompt, slots)
    used = (slots - width) // 2 if filled is None else filled
    lengths = jnp.full((prompt.tokens.shape[0],), used, jnp.int32)

    def run(count: int) -> Any:
        return _extend(bound.model, bound.params, cache, lengths, jnp.asarray(count, jnp.int32), width)

    return run


@partial(jax.jit, static_argnames=("model", "width"))
def _extend(model: LanguageModel, params: Params, cache: Cache, filled: Any, count: Any, width: int) -> Any:
    tokens = jnp.zeros((filled.shape[0], width), jnp.int32)

    def body(_: Any, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        cache, tokens = carry
        out, cache = model.extend(params, model.rollback(cache, filled), tokens)
        # The next tokens depend on every logit, so that XLA cannot omit a part of the output layer; costs one maximum.
        bits = jax.lax.bitcast_convert_type(out.logits.max(-1).astype(jnp.float32), jnp.int32)
        return cache, jnp.abs(bits >> 8) % model.vocab_size

    return jax.lax.fori_loop(0, count, body, (model.rollback(cache, filled), tokens))[1]


ORDERS = ("W x", "x W", "packed") if products.available() else ("W x", "x W")
"""The implementations of a matrix-vector product; `packed` is the one that models use on a CPU."""


def stream_loop(size: int, order: str) -> Callable[[int], Any]:
    """Returns a function of `count` that multiplies a float32 matrix of `size` bytes by a vector `count` times."""
    width = max(8, round((size / 4) ** 0.5))
    values = np.full((width, width), 1.0 / width, np.float32)
    matrix = panels(values, "float32", products.width()) if order == "packed" else jnp.asarray(values)

    def run(count: int) -> Any:
        return _stream(matrix, jnp.ones((width,), jnp.float32), jnp.asarray(count, jnp.int32), order)

    return run


@partial(jax.jit, static_argnames="order")
def _stream(matrix: Any, vector: Any, count: Any, order: str) -> Any:
    def body(_: Any, x: Any) -> Any:
        if order == "packed":
            return multiply(x[None], matrix, "float32")[0]
        return matrix @ x if order == "W x" else x @ matrix

    return jax.lax.fori_loop(0, count, body, vector)
