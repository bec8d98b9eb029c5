"""Functions that feed known tokens to a model, for outputs at all positions or to bring its cache up to date."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import Array, BoundModel, Cache, LMOutput, Params, Prompt, is_packed
from speccascade_jax.runtime.mesh import fewest_rows


def catch_up(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    tokens: Array,
    length: Array,
    active: Array,
    block: int = 1,
    spared: int = 0,
) -> Cache:
    """Feeds committed tokens to a model until every active row of its cache has consumed `length − 1` tokens.

    If all tokens of a block were accepted, the draft model's cache lacks the block's last token. If a draft model did
    not take part in some rounds, its cache lacks all tokens that were committed in them. If no token is missing,
    nothing is fed.

    Args:
        model: the model that is fed.
        params: the model's parameters.
        cache: the model's cache, which has consumed at most `length − 1` tokens of each active row.
        tokens: int32 `[B, L]`, all committed tokens.
        length: int32 `[B]`, the number of committed tokens of each row.
        active: bool `[B]`; inactive rows keep their caches.
        block: number of tokens that are fed at once if more than one is missing. It must not exceed the engine's
            longest block, because caches have room for no more. Use 1 if at most one token can be missing.
        spared: number of missing tokens that are not fed, because the caller feeds them later.

    Returns:
        The cache after the missing tokens.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import Prompt, catch_up
        >>> bound = sc.TableLM(np.eye(4))
        >>> tokens, length = np.array([[0, 1, 2, 3], [3, 2, 0, 0]]), np.array([4, 2])
        >>> cache = bound.model.prefill(bound.params, Prompt(tokens[:, :1], np.array([1, 1])), max_len=4)
        >>> cache = catch_up(bound.model, bound.params, cache, tokens, length, active=np.array([True, True]))
        >>> bound.model.consumed(cache).tolist()  # all but the pending token
        [3, 1]
    """

    def behind(cache: Cache) -> Array:
        return jnp.where(active, length - 1 - model.consumed(cache), 0)

    def feed(size: int, cache: Cache) -> Cache:
        consumed = model.consumed(cache)
        # All rows are fed equally many tokens. A row that lacks fewer is also fed meaningless tokens from beyond
        # `length − 1`, which the rollback drops.
        places = jnp.minimum(consumed[:, None] + jnp.arange(size)[None], tokens.shape[1] - 1)
        _, fed = model.extend(params, cache, jnp.take_along_axis(tokens, places, axis=1))
        return model.rollback(fed, jnp.where(behind(cache) > 0, jnp.minimum(consumed + size, length - 1), consumed))

    def until(still_missing: int, size: int, cache: Cache) -> Cache:
        return jax.lax.while_loop(lambda state: jnp.any(behind(state) > still_missing), partial(feed, size), cache)

    # Blocks are fed only while more than one token is missing. Usually one is missing, and feeding one token costs less
    # than feeding a block.
    if block > 1:
        cache = until(1, block, cache)
    return until(spared, 1, cache)


def continued(
    model: Any, params: Params, prompt: Prompt, tokens: Array, spare: int = 0, layers: tuple[int, ...] = ()
) -> LMOutput:
    """Prefills a model, then feeds it the prompt's last token and `tokens` `[B, T]`; returns the `T + 1` outputs.

    The cache gets `spare` more slots than it needs, because the number of slots affects how sums are rounded. If
    `layers` are named, the result has `LMOutput.layer_states` too (`core.protocols.LayeredModel`).
    """
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + tokens.shape[1] + spare)
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    fed = jnp.concatenate([pending, tokens], axis=1)
    out: LMOutput = (model.extend_layers(params, cache, fed, layers) if layers else model.extend(params, cache, fed))[0]
    return out


@jax.jit
def along(bound: BoundModel, prompt: Prompt, tokens: Array) -> Array:
    """Returns the logits `[B, L, V]` that predict each of `tokens` `[B, L]`; feeds all tokens in one call."""
    # The last token is not fed, because no logits after it are needed. The cache still has a slot for it, so that sums
    # are rounded as if it were fed.
    logits = continued(bound.model, bound.params, prompt, tokens[:, :-1], spare=1).logits
    return logits[..., : bound.model.vocab_size]


@jax.jit
def failing(logits: Array, lengths: Array) -> Array:
    """Returns bool `[B]`: whether a row of `logits` `[B, L, V]` has invalid logits at its first `lengths` positions.

    Logits are invalid if one of them is NaN or +inf, or if all of them are -inf.
    """
    # -inf is normal for padding of the vocabulary, so the maximum is tested: it is finite unless logits are invalid.
    counted = jnp.arange(logits.shape[1])[None] < lengths[:, None]
    return (~jnp.isfinite(logits.max(-1)) & counted).any(-1)


def states(model: Any, params: Params, prompt: Prompt, tokens: Array) -> Array:
    """Returns a model's hidden states after each of `tokens` `[B, T]`, float `[B, T, D]`, in one pass.

    They are the states that `extend` returns when it feeds the tokens one by one after the prompt.
    """
    # The first output belongs to the prompt's last token, which is not one of `tokens`, so it is dropped.
    hidden = continued(model, params, prompt, tokens).hidden
    assert hidden is not None, f"{type(model).__name__} gives no hidden states"
    return hidden[:, 1:]


@partial(jax.jit, static_argnames="layers")
def layer_states(bound: BoundModel, prompt: Prompt, tokens: Array, layers: tuple[int, ...]) -> Array:
    """Returns the target's hidden states after chosen layers, in one pass, to train a head that drafts from them.

    Args:
        bound: the target, a `core.protocols.LayeredModel` with its parameters.
        prompt: `[B, P]`.
        tokens: int32 `[B, T]`, the tokens after the prompt.
        layers: indices of `L` layers, as in `LayeredModel` (static).

    Returns:
        float `[B, T + 1, L, D]`. Entry 0 is the state after the prompt's last token, and entry `j` the state after
        `tokens[:, j - 1]`. `Outcome.hidden` has the same order if a whole block is committed.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import layer_states, make_prompt
        >>> pair = sc.Pair(target=sc.TableLM(np.eye(8)), draft=sc.TableLM(np.zeros((8, 8))))
        >>> states = layer_states(pair.target, make_prompt(pair, [[1, 2], [3]]), np.array([[4, 5, 6]] * 2), (0, 1))
        >>> states.shape, np.argmax(states[0, :, 0], axis=-1).tolist()  # the pending token 2, then the three tokens
        ((2, 4, 2, 8), [2, 4, 5, 6])
    """
    states = continued(bound.model, bound.params, prompt, tokens, layers=layers).layer_states
    assert states is not None
    return states


def plain_params(params: Params) -> Params:
    """Returns a loaded model's parameters with every packed matrix converted to a plain array.

    Training needs plain arrays, because JAX cannot differentiate the CPU code for packed matrices.

    Args:
        params: a pytree whose leaves are arrays or `core.types.Packed`.

    Returns:
        The same pytree, with arrays as its only leaves. Matrices of 8 bits are multiplied by their scales.

    Examples:
        >>> import jax
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import plain_params
        >>> params = plain_params(sc.load_pair("tatoeba_en_de").draft.params)
        >>> attention = params["decoder"]["layers_0"]["encoder_decoder_attention"]
        >>> isinstance(attention["query"]["kernel"], jax.Array)  # it may have been packed, on a CPU
        True
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf)) if is_packed(leaf) else leaf, params, is_leaf=is_packed
    )


def features(bound: BoundModel) -> int | None:
    """Returns the width of a model's hidden states, or `None` if it has none; compiles nothing."""
    # The batch has as few rows as the mesh accepts, because tracing fails with fewer rows.
    rows = fewest_rows(getattr(bound.model, "mesh", None))
    tokens: Any = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    length: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompt = Prompt(tokens, length, tokens if getattr(bound.model, "is_encoder_decoder", False) else None)
    shape = jax.eval_shape(partial(continued, bound.model), bound.params, prompt, tokens).hidden
    return None if shape is None else int(shape.shape[-1])
