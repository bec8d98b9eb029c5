"""Models along given tokens: whole outputs in one pass, and caches that have fallen behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import Array, BoundModel, Cache, Params, Prompt


def catch_up(model: LanguageModel, params: Params, cache: Cache, tokens: Array, length: Array) -> Cache:
    """Feed committed tokens until every row has consumed `length − 1` of `tokens` `[B, L]`.

    A block that was kept whole leaves the draft's cache one token behind. No iteration runs where nothing is missing.
    """

    def behind(cache: Cache) -> Array:
        return model.consumed(cache) < length - 1

    def feed(cache: Cache) -> Cache:
        at, missing = model.consumed(cache), behind(cache)
        _, fed = model.extend(params, cache, jnp.take_along_axis(tokens, at[:, None], axis=1))
        return model.rollback(fed, jnp.where(missing, at + 1, at))

    return jax.lax.while_loop(lambda cache: jnp.any(behind(cache)), feed, cache)


def features(bound: BoundModel) -> int | None:
    """The width of a model's hidden states; `None` where it gives none. Compiles nothing."""
    one: Any = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    length: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    prompt = Prompt(one, length, one if getattr(bound.model, "is_encoder_decoder", False) else None)

    def hidden(params: Params, prompt: Prompt) -> Array | None:
        cache = bound.model.prefill(params, prompt, 2)
        return bound.model.extend(params, cache, prompt.tokens)[0].hidden

    shape = jax.eval_shape(hidden, bound.params, prompt)
    return None if shape is None else int(shape.shape[-1])


def states(model: Any, params: Params, prompt: Prompt, tokens: Array) -> Array:
    """The hidden state behind each of `tokens` `[B, T]`, float `[B, T, D]`, in one pass: what a stop policy sees.

    The state of token `i` is what `extend` returns for feeding it behind the prompt and the tokens before it.
    """
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + tokens.shape[1])
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    out, _ = model.extend(params, cache, jnp.concatenate([pending, tokens], axis=1))
    return out.hidden[:, 1:]


def along(bound: BoundModel, prompt: Prompt, tokens: Array) -> Array:
    """Logits `[B, L, V]` of a model before each of `tokens` `[B, L]`, in one call behind the prefill."""
    return _along(bound.model, bound.params, prompt, tokens)


@partial(jax.jit, static_argnames="model")
def _along(model, params, prompt: Prompt, tokens: Array) -> Array:  # type: ignore[no-untyped-def]
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + tokens.shape[1])
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    out, _ = model.extend(params, cache, jnp.concatenate([pending, tokens[:, :-1]], axis=1))
    return out.logits[..., : model.vocab_size]
