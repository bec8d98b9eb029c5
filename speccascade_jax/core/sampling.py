"""The sampling transform `S` and the drawing of tokens, without a sort over the vocabulary.

Sorting 8,192 entries costs more than a small draft's whole step on CPU; thresholds are found by bisection on
the bit patterns of float32 (exact: non-negative floats order as integers), and only when a row asks for them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Controls, LawPair, LogPair, Sampling
from speccascade_jax.core.types import Laws as Buffers


def argmax(values: Array) -> Array:
    """int32 `[...]`: the lowest index of the maximum over the last axis of `[..., V]`.

    Maximum, then smallest index that attains it: ten times faster on CPU than `jnp.argmax`.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    hit = values == values.max(-1, keepdims=True)
    # NaN attains nothing: stay inside the vocabulary, the engine reports the NaN itself
    return jnp.minimum(jnp.where(hit, indices, values.shape[-1]).min(-1), values.shape[-1] - 1)


def one_hot(tokens: Array, size: int) -> Array:
    """float32 `[..., size]`: 1 at `tokens` `[...]`, 0 elsewhere."""
    indices = jax.lax.broadcasted_iota(jnp.int32, (*tokens.shape, size), tokens.ndim)
    return (indices == tokens[..., None]).astype(jnp.float32)


def softmax(logits: Array) -> Array:
    """The raw law: softmax in float32 at temperature 1 over `[..., V]`."""
    return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)


def transform(logits: Array, sampling: Sampling) -> Array:
    """`S`: temperature, then top-k, then top-p of the renormalised rest (METHODS section 1).

    Args:
        logits: `[B, ..., V]`, masked entries -inf.
        sampling: values per row `[B]`.

    Returns:
        float32 `[B, ..., V]`. Temperature 0 gives the one-hot of the argmax (ties: lowest index).
    """
    return raw_and_scaled(logits, sampling).scaled


class Laws(NamedTuple):
    """`raw` `[..., V]`, the softmax; `scaled` `[..., V]`, `transform` of the logits; `max_raw` `[...]`, of `raw`."""

    raw: Array
    scaled: Array
    max_raw: Array


def raw_and_scaled(logits: Array, sampling: Sampling) -> Laws:
    """Both laws of logits `[..., V]` in float32, without what the batch does not need.

    Where every row is greedy no exponential is taken; where `S` is the identity in every row, the two are one. What
    nothing reads is left out by the compiler.
    """
    return _laws(logits, sampling)[0]


def laws_and_token(logits: Array, sampling: Sampling, uniform: Array) -> tuple[Laws, Array]:
    """As `raw_and_scaled`, and what `sample` draws from the scaled law with `uniform` `[...]`, int32 `[...]`.

    Where every row is greedy that is the law's one token, and no sums over the vocabulary are taken to find it.
    """
    laws, largest = _laws(logits, sampling)
    greedy = jnp.all(sampling.temperature <= 0.0)
    token = jax.lax.cond(
        greedy, lambda law, u, only: only, lambda law, u, _: sample(law, u), laws.scaled, uniform, largest
    )
    return laws, token


def _laws(logits: Array, sampling: Sampling) -> tuple[Laws, Array]:
    """And the most likely tokens, int32 `[...]`, where every row is greedy."""
    logits = logits.astype(jnp.float32)
    identity, greedy = jnp.all(_is_identity(sampling)), jnp.all(sampling.temperature <= 0.0)
    without, none = jnp.zeros(logits.shape[:-1], jnp.float32), jnp.zeros(logits.shape[:-1], jnp.int32)

    def cold(x: Array) -> tuple[Array, Array, Array]:
        token = argmax(x)
        return one_hot(token, x.shape[-1]), without, token

    branches = (
        lambda x: (*_softmax_and_max(x), none),
        cold,
        lambda x: (_scale(x, sampling), without, none),
    )
    case = jnp.where(greedy, 1, jnp.where(identity, 0, 2))
    scaled, max_scaled, largest = jax.lax.switch(case, branches, logits)
    raw, max_raw = jax.lax.cond(
        identity, lambda x, *found: found, lambda x, *_: _softmax_and_max(x), logits, scaled, max_scaled
    )
    return Laws(raw, scaled, max_raw), largest


def _softmax_and_max(logits: Array) -> tuple[Array, Array]:
    """`softmax` and its maximum, `1 / Σ exp(x − max x)`: to search the vocabulary for it costs half of a small head."""
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return weights / total, 1.0 / total[..., 0]


def _is_identity(sampling: Sampling) -> Array:
    return (sampling.temperature == 1.0) & (sampling.top_k <= 0) & (sampling.top_p >= 1.0)


def _scale(logits: Array, sampling: Sampling) -> Array:
    """`S` for rows that differ."""
    temperature, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    greedy = temperature <= 0.0
    # the maximum is subtracted before the division, so that a small temperature can't overflow
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)
    laws = jax.nn.softmax(scaled, axis=-1)
    truncates = jnp.any(~greedy & ((top_k > 0) | (top_p < 1.0)))
    laws = jax.lax.cond(truncates, _truncate, lambda laws, *_: laws, laws, top_k, top_p)
    return jnp.where(greedy, one_hot(argmax(logits), logits.shape[-1]), laws)


def expand(values: Array, ndim: int) -> Array:
    """`[B]` as `[B, 1, …]` with `ndim` axes, so that it broadcasts against laws."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def log_laws(logits: Array, scaled: Array, sampling: Sampling) -> Buffers:
    """The logs of `softmax(logits)` and of `scaled`, `S` of the logits, which `transform` gives; `[B, ..., V]` each.

    They are taken of the logits, not of the laws: in float32 a law is 0 where its logit lies 87 below the largest.
    """
    logits = logits.astype(jnp.float32)
    heat, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    cold = heat <= 0.0
    whole = jax.nn.log_softmax((logits - logits.max(-1, keepdims=True)) / jnp.where(cold, 1.0, heat), axis=-1)
    # what was cut off is truly 0, and what is left of it float32 can hold
    cut = cold | (top_k > 0) | (top_p < 1.0)
    return Buffers(jax.nn.log_softmax(logits, axis=-1), jnp.where(cut, jnp.log(scaled), whole))


def make_law_pair(
    q: Array, q_tilde: Array, greedy: Array, p_logits: Array, sampling: Sampling, logs: Buffers | None = None
) -> LawPair:
    """What a rule may read at every position.

    Args:
        q, q_tilde: `[B, ..., V]`, the draft's raw law and the one its tokens were drawn from; logs: theirs, `log_laws`
            of its logits, or `None`: of what float32 holds of them.
        greedy: bool `[B]`, whether the draft is greedy.
        p_logits: `[B, ..., V]`, the target's; sampling: its transform.
    """
    p, p_tilde, _ = raw_and_scaled(p_logits, sampling)
    own, theirs = logs or Buffers(jnp.log(q), jnp.log(q_tilde)), log_laws(p_logits, p_tilde, sampling)
    both = LogPair(q=own.q, p=theirs.q, q_tilde=own.q_tilde, p_tilde=theirs.q_tilde)
    # the full leading shape: positions are gathered from every field alike
    greedy = jnp.broadcast_to(expand(greedy, q.ndim), (*q.shape[:-1], 1))
    return LawPair(q=q, p=p, q_tilde=q_tilde, p_tilde=p_tilde, greedy=greedy, logs=both)


def law_pair_of(q_logits: Array, p_logits: Array, controls: Controls) -> LawPair:
    """What a rule may read of the logits of draft and target, `[B, V]` each."""
    q, q_tilde = softmax(q_logits), transform(q_logits, controls.draft)
    logs = log_laws(q_logits, q_tilde, controls.draft)
    return make_law_pair(q, q_tilde, controls.draft.temperature <= 0, p_logits, controls.target, logs)


def _truncate(laws: Array, top_k: Array, top_p: Array) -> Array:
    ones = jnp.ones_like(laws)
    kept = laws * keep_largest(laws, ones, jnp.where(top_k > 0, top_k, float(laws.shape[-1])))
    laws = jnp.where(top_k > 0, kept / kept.sum(-1, keepdims=True), laws)
    kept = laws * keep_largest(laws, laws, jnp.minimum(top_p, 1.0) * laws.sum(-1, keepdims=True))
    return jnp.where(top_p < 1.0, kept / kept.sum(-1, keepdims=True), laws)


def keep_largest(values: Array, weights: Array, need: Array) -> Array:
    """Mask of the smallest set of largest `values` whose `weights` reach `need`; ties go to the lowest index.

    Args:
        values: float32 `[..., V]` in [0, 1].
        weights: float32 `[..., V]`, equal where values are equal (ones for top-k, the values for top-p).
        need: float32 `[..., 1]`.

    Returns:
        bool `[..., V]`, at least one entry kept.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)

    def weight_from(threshold: Array) -> Array:
        return jnp.where(bits >= threshold, weights, 0.0).sum(-1, keepdims=True)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = weight_from(middle) >= need
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(bits[..., :1])
    high = jnp.max(bits, -1, keepdims=True) + 1
    threshold: Array = jax.lax.fori_loop(0, 31, halve, (low, high))[0]
    tied = bits == threshold
    each = jnp.where(tied, weights, 0.0).max(-1, keepdims=True)
    missing = need - weight_from(threshold + 1)
    count = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0, each, 1.0)), 1.0)
    return (bits > threshold) | (tied & (_counted(tied) <= count))


def _counted(marked: Array) -> Array:
    """int32 `[..., V]`: how many of `marked` `[..., V]` there are up to each entry, itself included.

    In two levels, as `sample` does: where the vocabulary is spread over devices, only the blocks' own numbers travel.
    """
    blocks = _in_blocks(marked, _width(marked.shape[-1]))
    inside = jnp.cumsum(blocks, -1, dtype=jnp.int32)
    before = jnp.cumsum(inside[..., -1], -1) - inside[..., -1]
    return (inside + before[..., None]).reshape(*marked.shape[:-1], -1)[..., : marked.shape[-1]]


def sample(laws: Array, uniform: Array) -> Array:
    """Draw a token by inverse CDF in two levels (block sums, then inside one block).

    Args:
        laws: float32 `[..., V]`, non-negative; normalised here by their sum.
        uniform: float32 `[...]` in [0, 1).

    Returns:
        int32 `[...]`; never a token of mass 0.
    """
    width = _width(laws.shape[-1])
    blocks = _in_blocks(laws, width)
    cumulative = jnp.cumsum(blocks.sum(-1), -1)
    rest = uniform * cumulative[..., -1]
    block = _first_with_mass(cumulative > rest[..., None], blocks.sum(-1))
    inside = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
    before = jnp.where(
        block > 0, jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[..., None], -1)[..., 0], 0.0
    )
    index = _first_with_mass(jnp.cumsum(inside, -1) > (rest - before)[..., None], inside)
    return (block * width + index).astype(jnp.int32)


def _first_with_mass(beyond: Array, mass: Array) -> Array:
    """The first index that is `beyond` and has mass; the last with mass where rounding leaves none.

    A parallel cumulative sum is not monotone to the last bit, so that counting the entries below a threshold
    could end on an entry of mass 0.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1)
    last = jnp.where(mass > 0, indices, 0).max(-1)
    return jnp.minimum(jnp.where(beyond & (mass > 0), indices, mass.shape[-1]).min(-1), last)


def _width(size: int) -> int:
    """Entries of a block of a vocabulary."""
    return size if size <= 128 else 64 if size <= 8192 else 256


def _in_blocks(laws: Array, width: int) -> Array:
    missing = -laws.shape[-1] % width
    padded = jnp.pad(laws, [(0, 0)] * (laws.ndim - 1) + [(0, missing)]) if missing else laws
    return padded.reshape(*laws.shape[:-1], -1, width)
