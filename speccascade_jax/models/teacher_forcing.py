"""Models along given tokens: whole outputs in one pass, and caches that have fallen behind."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import Array, BoundModel, Cache, LMOutput, Params, Prompt, is_packed
from speccascade_jax.runtime.mesh import fewest_rows


def catch_up(
    model: LanguageModel, params: Params, cache: Cache, tokens: Array, length: Array, active: Array, block: int = 1
) -> Cache:
    """Feed committed tokens until every active row has consumed `length − 1` of `tokens` `[B, L]`.

    A block that was kept whole leaves a draft's cache one token behind; a drafter that sat out rounds is behind by all
    that others wrote meanwhile. No iteration runs where nothing is missing.

    Args:
        active: bool `[B]`; the other rows keep their caches as they are.
        block: tokens fed at once where more than one is missing; at most the engine's longest block, for which caches
            have room. 1 is best where no more is ever missing.
    """

    def behind(cache: Cache) -> Array:
        return jnp.where(active, length - 1 - model.consumed(cache), 0)

    def feed(size: int, cache: Cache) -> Cache:
        at = model.consumed(cache)
        # what lies behind `length − 1` is junk: it is fed, and taken back at once
        places = jnp.minimum(at[:, None] + jnp.arange(size)[None], tokens.shape[1] - 1)
        _, fed = model.extend(params, cache, jnp.take_along_axis(tokens, places, axis=1))
        return model.rollback(fed, jnp.where(behind(cache) > 0, jnp.minimum(at + size, length - 1), at))

    def until(left: int, size: int, cache: Cache) -> Cache:
        return jax.lax.while_loop(lambda held: jnp.any(behind(held) > left), partial(feed, size), cache)

    if block > 1:  # often only the last one is missing, and a block is more than that needs
        cache = until(1, block, cache)
    return until(0, 1, cache)


def continued(
    model: Any, params: Params, prompt: Prompt, tokens: Array, spare: int = 0, layers: tuple[int, ...] = ()
) -> LMOutput:
    """What a model says when it is fed the pending token of `prompt` and `tokens` `[B, T]` behind it: `T + 1` outputs.

    `spare` slots of its cache are never used; the number of slots decides how sums are rounded. With `layers`
    `LMOutput.layer_states` is there too (`core.protocols.LayeredModel`).
    """
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + tokens.shape[1] + spare)
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    fed = jnp.concatenate([pending, tokens], axis=1)
    out: LMOutput = (model.extend_layers(params, cache, fed, layers) if layers else model.extend(params, cache, fed))[0]
    return out


@jax.jit
def along(bound: BoundModel, prompt: Prompt, tokens: Array) -> Array:
    """Returns a model's logits `[B, L, V]` before each of `tokens` `[B, L]`, in one call behind the prefill."""
    logits = continued(bound.model, bound.params, prompt, tokens[:, :-1], spare=1).logits
    return logits[..., : bound.model.vocab_size]


@jax.jit
def failing(logits: Array, lengths: Array) -> Array:
    """bool `[B]`: rows with NaN or infinite logits before one of their first `lengths` `[B]` tokens; `[B, L, V]`."""
    counted = jnp.arange(logits.shape[1])[None] < lengths[:, None]
    return (~jnp.isfinite(logits.max(-1)) & counted).any(-1)


def states(model: Any, params: Params, prompt: Prompt, tokens: Array) -> Array:
    """The hidden state behind each of `tokens` `[B, T]`, float `[B, T, D]`, in one pass: what a stop policy sees.

    The state of token `i` is what `extend` returns for feeding it behind the prompt and the tokens before it.
    """
    hidden = continued(model, params, prompt, tokens).hidden
    assert hidden is not None, f"{type(model).__name__} gives no hidden states"
    return hidden[:, 1:]


@partial(jax.jit, static_argnames="layers")
def layer_states(bound: BoundModel, prompt: Prompt, tokens: Array, layers: tuple[int, ...]) -> Array:
    """Returns the states that a drafter head is trained on: `[B, T + 1, L, D]`, in one pass.

    Entry 0 belongs to the pending token of `prompt`, entry `j` to `tokens[:, j - 1]` behind it: as in `Outcome.hidden`
    of a block that is committed whole.

    Args:
        tokens: int32 `[B, T]`; layers: numbered as `core.protocols.LayeredModel` numbers them.
    """
    states = continued(bound.model, bound.params, prompt, tokens, layers=layers).layer_states
    assert states is not None
    return states


def plain_params(params: Params) -> Params:
    """Returns a loaded model's parameters with every packed matrix as a plain array.

    A loss can be differentiated through plain arrays alone: a packed matrix is multiplied by code that JAX calls.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf)) if is_packed(leaf) else leaf, params, is_leaf=is_packed
    )


def features(bound: BoundModel) -> int | None:
    """The width of a model's hidden states; `None` where it gives none. Compiles nothing."""
    rows = fewest_rows(getattr(bound.model, "mesh", None))
    one: Any = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    length: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompt = Prompt(one, length, one if getattr(bound.model, "is_encoder_decoder", False) else None)
    shape = jax.eval_shape(partial(continued, bound.model), bound.params, prompt, one).hidden
    return None if shape is None else int(shape.shape[-1])
