"""The sampling transform `S` (temperature, top-k, top-p) and the drawing of tokens, without sorting the vocabulary.

On a CPU, sorting 8,192 entries costs more than one step of a small draft model. The thresholds of top-k and top-p are
therefore found by bisection on the bit patterns of float32. This is exact, because non-negative floats have the same
order as their bit patterns read as integers. The bisection runs only if a row of the batch uses top-k or top-p.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Controls, LawPair, LogPair, Sampling
from speccascade_jax.core.types import Laws as Buffers


def argmax(values: Array) -> Array:
    """Returns int32 `[...]`: the lowest index of the maximum over the last axis of `[..., V]`.

    It computes the maximum, then the smallest index that attains it. On a CPU this is ten times as fast as
    `jnp.argmax`.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    hit = values == values.max(-1, keepdims=True)
    # NaN equals no number, so a row with NaN has no hit. The outer minimum keeps its index inside the vocabulary; the
    # engine reports the NaN.
    return jnp.minimum(jnp.where(hit, indices, values.shape[-1]).min(-1), values.shape[-1] - 1)


def one_hot(tokens: Array, size: int) -> Array:
    """Returns float32 `[..., size]`: 1 at `tokens` `[...]`, 0 elsewhere."""
    indices = jax.lax.broadcasted_iota(jnp.int32, (*tokens.shape, size), tokens.ndim)
    return (indices == tokens[..., None]).astype(jnp.float32)


def softmax(logits: Array) -> Array:
    """Returns the raw distribution: softmax in float32 at temperature 1 over `[..., V]`."""
    return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)


def transform(logits: Array, sampling: Sampling) -> Array:
    """Applies the transform `S`: temperature, then top-k, then top-p after renormalisation.

    Source: docs/methods.md, section 1.

    Args:
        logits: `[B, ..., V]`, masked entries -inf.
        sampling: temperature, top-k and top-p, one number of each per row `[B]`.

    Returns:
        float32 `[B, ..., V]`. Temperature 0 gives the one-hot of the argmax (ties: lowest index).
    """
    return raw_and_scaled(logits, sampling).scaled


class Laws(NamedTuple):
    """The raw and the scaled distribution of the same logits.

    Attributes:
        raw: `[..., V]`, the softmax of the logits at temperature 1.
        scaled: `[..., V]`, the output of `transform`, from which tokens are drawn.
        max_raw: `[...]`, the maximum of `raw`.
    """

    raw: Array
    scaled: Array
    max_raw: Array


def raw_and_scaled(logits: Array, sampling: Sampling) -> Laws:
    """Returns the raw and the scaled distribution of logits `[..., V]` in float32, without work that no row needs.

    If every row is greedy, the scaled distribution is computed without exponentials. If `S` is the identity in every
    row, the scaled distribution is the same array as the raw one. XLA removes outputs that the caller does not use.
    """
    return _laws(logits, sampling)[0]


def laws_and_token(logits: Array, sampling: Sampling, uniform: Array) -> tuple[Laws, Array]:
    """Returns the output of `raw_and_scaled`, and a token drawn from the scaled distribution, int32 `[...]`.

    If every row is greedy, the token is the argmax of the logits, and drawing it needs no sums over the vocabulary.

    Args:
        logits: `[..., V]`.
        sampling: temperature, top-k and top-p, one number of each per row `[B]`.
        uniform: random numbers in [0, 1) for `sample`, float32 `[...]`.

    Returns:
        `Laws` (`raw` and `scaled` `[..., V]`, `max_raw` `[...]`), and the token.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import Settings, laws_and_token
        >>> controls = sc.METHODS["speculative"].controls(Settings(temperature=1.0, top_k=2), 2)
        >>> logits = np.log([[0.5, 0.3, 0.2]] * 2)
        >>> laws, token = laws_and_token(logits, controls.draft, np.array([0.1, 0.9]))
        >>> print(np.asarray(laws.raw[0]).round(3), np.asarray(laws.scaled[0]).round(3), token)
        [0.5 0.3 0.2] [0.625 0.375 0.   ] [0 1]
    """
    laws, largest = _laws(logits, sampling)
    greedy = jnp.all(sampling.temperature <= 0.0)
    # The branches have names, so that a reader of the compiled program can tell which branch a setting takes.
    with jax.named_scope("is_greedy"):
        token = jax.lax.cond(
            greedy, lambda law, u, only: only, lambda law, u, _: sample(law, u), laws.scaled, uniform, largest
        )
    return laws, token


def _laws(logits: Array, sampling: Sampling) -> tuple[Laws, Array]:
    """Returns the distributions, and int32 `[...]` tokens: the argmax if every row is greedy, otherwise 0."""
    logits = logits.astype(jnp.float32)
    # Both conditions are about the whole batch, because one branch is chosen for all rows.
    identity, greedy = jnp.all(is_identity(sampling)), jnp.all(sampling.temperature <= 0.0)
    # All branches of a switch must return the same shapes, so a branch that does not compute the maximum or the token
    # returns zeros in its place: `without` or `none`.
    without, none = jnp.zeros(logits.shape[:-1], jnp.float32), jnp.zeros(logits.shape[:-1], jnp.int32)

    def cold(x: Array) -> tuple[Array, Array, Array]:
        token = argmax(x)
        return one_hot(token, x.shape[-1]), without, token

    branches = (
        lambda x: (*_softmax_and_max(x), none),
        cold,
        lambda x: (_scale(x, sampling), without, none),
    )
    # The switch covers the whole batch, because with a switch per row, vmap would compute all three branches.
    case = jnp.where(greedy, 1, jnp.where(identity, 0, 2))
    with jax.named_scope("identity_greedy_or_scaled"):
        scaled, max_scaled, largest = jax.lax.switch(case, branches, logits)
    # If `S` is the identity, the scaled distribution is the raw one, so the softmax is not computed a second time.
    with jax.named_scope("is_identity"):
        raw, max_raw = jax.lax.cond(
            identity, lambda x, *scaled: scaled, lambda x, *_: _softmax_and_max(x), logits, scaled, max_scaled
        )
    return Laws(raw, scaled, max_raw), largest


def _softmax_and_max(logits: Array) -> tuple[Array, Array]:
    """Returns the softmax of logits `[..., V]` and its maximum `[...]`, which is `1 / Σ exp(x − max x)`.

    A separate search for the maximum would cost half as much as the output layer of a small model.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return weights / total, 1.0 / total[..., 0]


def is_identity(sampling: Sampling) -> Array:
    """Returns bool `[B]`: whether the transform `S` changes nothing."""
    return (sampling.temperature == 1.0) & (sampling.top_k <= 0) & (sampling.top_p >= 1.0)


def _scale(logits: Array, sampling: Sampling) -> Array:
    """Applies `S` to rows that may differ in temperature, top-k and top-p."""
    temperature, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    greedy = temperature <= 0.0
    # The maximum is subtracted before the division, so that a small temperature cannot overflow. Greedy rows divide by
    # 1 instead of 0; their result is replaced below.
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)
    laws = jax.nn.softmax(scaled, axis=-1)
    # Greedy rows become one-hot below, whatever their top-k and top-p are, so they never need the bisection.
    truncates = jnp.any(~greedy & ((top_k > 0) | (top_p < 1.0)))
    with jax.named_scope("truncates"):
        laws = jax.lax.cond(truncates, _truncate, lambda laws, *_: laws, laws, top_k, top_p)
    return jnp.where(greedy, one_hot(argmax(logits), logits.shape[-1]), laws)


def expand(values: Array, ndim: int) -> Array:
    """Reshapes `values` `[B]` to `[B, 1, …]` with `ndim` axes, so that they broadcast against distributions."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def log_laws(logits: Array, scaled: Array, sampling: Sampling) -> Buffers:
    """Returns the logs of `softmax(logits)` and of `scaled = transform(logits, sampling)`, `[B, ..., V]` each.

    The logs are computed from the logits, because a float32 probability is already 0 where a logit is 87 below the
    largest.
    """
    logits = logits.astype(jnp.float32)
    heat, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    cold = heat <= 0.0
    whole = jax.nn.log_softmax((logits - logits.max(-1, keepdims=True)) / jnp.where(cold, 1.0, heat), axis=-1)
    # Entries that greedy decoding, top-k or top-p removes have probability 0, which only `scaled` shows. Other rows use
    # the more exact logs from the logits.
    cut = cold | (top_k > 0) | (top_p < 1.0)
    return Buffers(jax.nn.log_softmax(logits, axis=-1), jnp.where(cut, jnp.log(scaled), whole))


def make_law_pair(
    q: Array, q_tilde: Array, greedy: Array, p_logits: Array, sampling: Sampling, logs: Buffers | None = None
) -> LawPair:
    """Returns the `LawPair` that a rule reads: the draft's and the target's distributions at every position.

    Args:
        q: `[B, ..., V]`, the draft's raw distribution.
        q_tilde: `[B, ..., V]`, the distribution that the draft's tokens were drawn from.
        greedy: bool `[B]`, whether the draft is greedy.
        p_logits: `[B, ..., V]`, the target's logits.
        sampling: the target's temperature, top-k and top-p.
        logs: `log_laws` of the draft's logits; `None` computes the logs from `q` and `q_tilde`.
    """
    p, p_tilde, _ = raw_and_scaled(p_logits, sampling)
    draft_logs, target_logs = logs or Buffers(jnp.log(q), jnp.log(q_tilde)), log_laws(p_logits, p_tilde, sampling)
    four_logs = LogPair(q=draft_logs.q, p=target_logs.q, q_tilde=draft_logs.q_tilde, p_tilde=target_logs.q_tilde)
    # `greedy` gets the leading shape of the other fields, because one function gathers positions from all fields.
    greedy = jnp.broadcast_to(expand(greedy, q.ndim), (*q.shape[:-1], 1))
    return LawPair(q=q, p=p, q_tilde=q_tilde, p_tilde=p_tilde, greedy=greedy, logs=four_logs)


def law_pair_of(q_logits: Array, p_logits: Array, controls: Controls) -> LawPair:
    """Returns the `LawPair` that a rule reads, computed from the logits of draft and target, `[B, V]` each."""
    # `q̃` uses the draft's sampling settings and `p̃` the target's, because a greedy draft may serve a sampled target.
    q, q_tilde = softmax(q_logits), transform(q_logits, controls.draft)
    logs = log_laws(q_logits, q_tilde, controls.draft)
    return make_law_pair(q, q_tilde, controls.draft.temperature <= 0, p_logits, controls.target, logs)


def _truncate(laws: Array, top_k: Array, top_p: Array) -> Array:
    ones = jnp.ones_like(laws)
    # Top-k comes first. Top-p then applies to the remaining entries after renormalisation (docs/methods.md, section 1).
    kept = laws * keep_largest(laws, ones, jnp.where(top_k > 0, top_k, float(laws.shape[-1])))
    laws = jnp.where(top_k > 0, kept / kept.sum(-1, keepdims=True), laws)
    # For top-p the weights are the probabilities. Rounding can make their sum differ from 1, so top-p is multiplied by
    # the sum.
    kept = laws * keep_largest(laws, laws, jnp.minimum(top_p, 1.0) * laws.sum(-1, keepdims=True))
    return jnp.where(top_p < 1.0, kept / kept.sum(-1, keepdims=True), laws)


def keep_largest(values: Array, weights: Array, need: Array) -> Array:
    """Returns a mask of the largest `values`: the fewest entries whose `weights` sum to at least `need`.

    Ties go to the lowest index.

    Args:
        values: float32 `[..., V]` in [0, 1].
        weights: float32 `[..., V]`, equal where values are equal (ones for top-k, the values for top-p).
        need: float32 `[..., 1]`.

    Returns:
        bool `[..., V]`, True for at least one entry.
    """
    # Non-negative float32 numbers have the order of their bit patterns, so 31 bisection steps find the exact threshold.
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
    # All entries above the threshold are kept. Of the entries equal to it, only as many are kept as `need` requires.
    tied = bits == threshold
    tied_weight = jnp.where(tied, weights, 0.0).max(-1, keepdims=True)
    missing = need - weight_from(threshold + 1)
    count = jnp.maximum(jnp.ceil(missing / jnp.where(tied_weight > 0, tied_weight, 1.0)), 1.0)
    return (bits > threshold) | (tied & (_counted(tied) <= count))


def _counted(marked: Array) -> Array:
    """Returns int32 `[..., V]`: the number of `marked` entries up to each entry, inclusive.

    It sums inside blocks and then over blocks, as `sample` does. If the vocabulary is sharded over devices, only the
    blocks' totals are communicated.
    """
    blocks = _in_blocks(marked, _width(marked.shape[-1]))
    inside = jnp.cumsum(blocks, -1, dtype=jnp.int32)
    before = jnp.cumsum(inside[..., -1], -1) - inside[..., -1]
    return (inside + before[..., None]).reshape(*marked.shape[:-1], -1)[..., : marked.shape[-1]]


def sample(laws: Array, uniform: Array) -> Array:
    """Draws a token by inverting the cumulative distribution, first over block sums, then inside one block.

    Args:
        laws: float32 `[..., V]`, non-negative; normalised here by their sum.
        uniform: float32 `[...]` in [0, 1).

    Returns:
        int32 `[...]`; never a token of probability 0.
    """
    width = _width(laws.shape[-1])
    blocks = _in_blocks(laws, width)
    cumulative = jnp.cumsum(blocks.sum(-1), -1)
    rest = uniform * cumulative[..., -1]
    # Two short searches, over block sums and inside one block, replace a cumulative sum over the vocabulary.
    block = first_with_mass(cumulative > rest[..., None], blocks.sum(-1))
    inside = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
    # `before` is read from the cumulative sum that chose the block, because another order of summation would round
    # differently.
    before = jnp.where(
        block > 0, jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[..., None], -1)[..., 0], 0.0
    )
    index = first_with_mass(jnp.cumsum(inside, -1) > (rest - before)[..., None], inside)
    return (block * width + index).astype(jnp.int32)


def first_with_mass(beyond: Array, mass: Array) -> Array:
    """Returns the first index with `beyond` True and `mass` > 0; if there is none, the last index with `mass` > 0.

    A parallel cumulative sum is not monotone to the last bit, so counting the entries below a threshold could end on an
    entry of mass 0.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1)
    # If the caller's random number is close to 1, rounding can leave no entry beyond the threshold. The last entry with
    # nonzero mass is then the right one.
    last = jnp.where(mass > 0, indices, 0).max(-1)
    return jnp.minimum(jnp.where(beyond & (mass > 0), indices, mass.shape[-1]).min(-1), last)


def _width(size: int) -> int:
    """Returns how many entries of a vocabulary of `size` form one block."""
    return size if size <= 128 else 64 if size <= 8192 else 256


def _in_blocks(laws: Array, width: int) -> Array:
    # Padding has mass 0, which `first_with_mass` never returns.
    missing = -laws.shape[-1] % width
    padded = jnp.pad(laws, [(0, 0)] * (laws.ndim - 1) + [(0, missing)]) if missing else laws
    return padded.reshape(*laws.shape[:-1], -1, width)
