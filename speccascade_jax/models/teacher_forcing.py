"""Models fed with known tokens: outputs of all positions in one pass, and caches that catch up."""

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
    """Feeds committed tokens until every active row has consumed `length − 1` of `tokens` `[B, L]`.

    After a block that was accepted as a whole, the draft's cache is one token behind. A drafter that skipped rounds is
    behind by all tokens that were committed meanwhile. If no token is missing, no iteration runs.

    Args:
        model: the model that is fed.
        params: its parameters.
        cache: the model's cache, which has consumed at most `length − 1` tokens of each active row.
        tokens: int32 `[B, L]`, all committed tokens.
        length: int32 `[B]`, how many tokens are committed.
        active: bool `[B]`; inactive rows keep their caches.
        block: number of tokens fed at once if more than one is missing; at most the engine's longest block, for which
            caches have room. Use 1 if no more than one is ever missing.

    Returns:
        The cache.

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
        # Rows share one block size, so a row that misses fewer tokens is fed junk from beyond `length − 1`; the
        # rollback drops it at once.
        places = jnp.minimum(consumed[:, None] + jnp.arange(size)[None], tokens.shape[1] - 1)
        _, fed = model.extend(params, cache, jnp.take_along_axis(tokens, places, axis=1))
        return model.rollback(fed, jnp.where(behind(cache) > 0, jnp.minimum(consumed + size, length - 1), consumed))

    def until(still_missing: int, size: int, cache: Cache) -> Cache:
        return jax.lax.while_loop(lambda state: jnp.any(behind(state) > still_missing), partial(feed, size), cache)

    # Blocks stop when at most one token is missing: that is the common case, and one token costs less than a block.
    if block > 1:
        cache = until(1, block, cache)
    return until(0, 1, cache)


def continued(
    model: Any, params: Params, prompt: Prompt, tokens: Array, spare: int = 0, layers: tuple[int, ...] = ()
) -> LMOutput:
    """Prefills a model, then feeds the last token of `prompt` and `tokens` `[B, T]`; returns the `T + 1` outputs.

    `spare` slots of the cache stay unused: the number of slots decides how sums are rounded. With `layers` the result
    has `LMOutput.layer_states` too (`core.protocols.LayeredModel`).
    """
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + tokens.shape[1] + spare)
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    fed = jnp.concatenate([pending, tokens], axis=1)
    out: LMOutput = (model.extend_layers(params, cache, fed, layers) if layers else model.extend(params, cache, fed))[0]
    return out


@jax.jit
def along(bound: BoundModel, prompt: Prompt, tokens: Array) -> Array:
    """Returns the logits `[B, L, V]` that predict each of `tokens` `[B, L]`, in one call after the prefill."""
    # The last token is not fed, because nothing follows it; its slot is spare, so that sums round as if it were.
    logits = continued(bound.model, bound.params, prompt, tokens[:, :-1], spare=1).logits
    return logits[..., : bound.model.vocab_size]


@jax.jit
def failing(logits: Array, lengths: Array) -> Array:
    """Returns bool `[B]`: whether any of a row's first `lengths` entries of `logits` `[B, L, V]` is not finite."""
    # The maximum over the vocabulary: -inf is normal for padded entries, while NaN and +inf survive the maximum.
    counted = jnp.arange(logits.shape[1])[None] < lengths[:, None]
    return (~jnp.isfinite(logits.max(-1)) & counted).any(-1)


def states(model: Any, params: Params, prompt: Prompt, tokens: Array) -> Array:
    """Returns the hidden states after each of `tokens` `[B, T]`, float `[B, T, D]`, in one pass, for a stop policy.

    The state of token `i` is the one that `extend` returns if it feeds the token after the prompt and earlier tokens.
    """
    # The first output belongs to the prompt's last token, which is not one of `tokens`.
    hidden = continued(model, params, prompt, tokens).hidden
    assert hidden is not None, f"{type(model).__name__} gives no hidden states"
    return hidden[:, 1:]


@partial(jax.jit, static_argnames="layers")
def layer_states(bound: BoundModel, prompt: Prompt, tokens: Array, layers: tuple[int, ...]) -> Array:
    """Returns the states that a drafter head is trained on, in one pass.

    Args:
        bound: the target, a `core.protocols.LayeredModel` with its parameters.
        prompt: `[B, P]`.
        tokens: int32 `[B, T]`, the tokens after the prompt.
        layers: `L` layers (static), numbered as `LayeredModel` numbers them.

    Returns:
        float `[B, T + 1, L, D]`. Entry 0 belongs to the pending token of `prompt` and entry `j` to `tokens[:, j - 1]`,
        as in `Outcome.hidden` of a block that is committed as a whole.

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
    """Returns a loaded model's parameters with every packed matrix as a plain array.

    A loss can be differentiated through plain arrays only: JAX cannot differentiate the CPU code for packed matrices.

    Args:
        params: a pytree whose leaves are arrays or `core.types.Packed`.

    Returns:
        The same pytree with arrays alone; matrices of 8 bits are multiplied by their scales.

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
    """Returns the width of a model's hidden states, or `None` if it has none. Compiles nothing."""
    # The fewest rows that a mesh accepts; with fewer, tracing would fail.
    rows = fewest_rows(getattr(bound.model, "mesh", None))
    tokens: Any = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    length: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompt = Prompt(tokens, length, tokens if getattr(bound.model, "is_encoder_decoder", False) else None)
    shape = jax.eval_shape(partial(continued, bound.model), bound.params, prompt, tokens).hidden
    return None if shape is None else int(shape.shape[-1])
