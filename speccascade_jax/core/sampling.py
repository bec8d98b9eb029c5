"""The sampling transform `S` and the drawing of tokens, without a sort over the vocabulary.

Sorting 8,192 entries costs more than a small draft's whole step on a CPU. Thresholds are found by bisection on the bit
patterns of float32 (exact, because non-negative floats order as integers), and only if a row asks for them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Controls, LawPair, LogPair, Sampling
from speccascade_jax.core.types import Laws as Buffers


def argmax(values: Array) -> Array:
    """Returns int32 `[...]`: the lowest index of the maximum over the last axis of `[..., V]`.

    It takes the maximum, then the smallest index that attains it: ten times faster on a CPU than `jnp.argmax`.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    hit = values == values.max(-1, keepdims=True)
    # NaN equals nothing: the index stays inside the vocabulary, and the engine reports the NaN itself
    return jnp.minimum(jnp.where(hit, indices, values.shape[-1]).min(-1), values.shape[-1] - 1)


def one_hot(tokens: Array, size: int) -> Array:
    """Returns float32 `[..., size]`: 1 at `tokens` `[...]`, 0 elsewhere."""
    indices = jax.lax.broadcasted_iota(jnp.int32, (*tokens.shape, size), tokens.ndim)
    return (indices == tokens[..., None]).astype(jnp.float32)


def softmax(logits: Array) -> Array:
    """Returns the raw distribution: softmax in float32 at temperature 1 over `[..., V]`."""
    return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)


def transform(logits: Array, sampling: Sampling) -> Array:
    """Applies `S`: temperature, then top-k, then top-p of the renormalised rest (METHODS section 1).

    Args:
        logits: `[B, ..., V]`, masked entries -inf.
        sampling: values per row `[B]`.

    Returns:
        float32 `[B, ..., V]`. Temperature 0 gives the one-hot of the argmax (ties: lowest index).
    """
    return raw_and_scaled(logits, sampling).scaled


class Laws(NamedTuple):
    """The two distributions that logits define, raw and scaled.

    Attributes:
        raw: `[..., V]`, the softmax.
        scaled: `[..., V]`, `transform` of the logits.
        max_raw: `[...]`, the maximum of `raw`.
    """

    raw: Array
    scaled: Array
    max_raw: Array


def raw_and_scaled(logits: Array, sampling: Sampling) -> Laws:
    """Returns the raw and the scaled distribution of logits `[..., V]`, float32; computes only what the batch needs.

    If every row is greedy, no exponential is computed; if `S` is the identity in every row, both distributions are one
    array. The compiler removes outputs that nothing reads.
    """
    return _laws(logits, sampling)[0]


def laws_and_token(logits: Array, sampling: Sampling, uniform: Array) -> tuple[Laws, Array]:
    """Returns the output of `raw_and_scaled`, and a token drawn from the scaled distribution, int32 `[...]`.

    If every row is greedy, the token is the only one with nonzero probability, and no sums over the vocabulary are
    needed to find it.

    Args:
        logits: `[..., V]`.
        sampling: values per row `[B]`.
        uniform: float32 `[...]` in [0, 1), for `sample`.

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
    # named, like the other branches here, so that a reader of the compiled program can tell which one a setting takes
    with jax.named_scope("is_greedy"):
        token = jax.lax.cond(
            greedy, lambda law, u, only: only, lambda law, u, _: sample(law, u), laws.scaled, uniform, largest
        )
    return laws, token


def _laws(logits: Array, sampling: Sampling) -> tuple[Laws, Array]:
    """Returns the distributions and the likeliest tokens, int32 `[...]`; these are valid if every row is greedy."""
    logits = logits.astype(jnp.float32)
    # Facts about the whole batch, because one branch is chosen for all rows.
    identity, greedy = jnp.all(_is_identity(sampling)), jnp.all(sampling.temperature <= 0.0)
    # All branches of a switch return the same shapes; `without` and `none` fill in for values that a branch does not
    # compute.
    without, none = jnp.zeros(logits.shape[:-1], jnp.float32), jnp.zeros(logits.shape[:-1], jnp.int32)

    def cold(x: Array) -> tuple[Array, Array, Array]:
        token = argmax(x)
        return one_hot(token, x.shape[-1]), without, token

    branches = (
        lambda x: (*_softmax_and_max(x), none),
        cold,
        lambda x: (_scale(x, sampling), without, none),
    )
    # One switch for the whole batch: a branch per row would compute all three under vmap.
    case = jnp.where(greedy, 1, jnp.where(identity, 0, 2))
    with jax.named_scope("identity_greedy_or_scaled"):
        scaled, max_scaled, largest = jax.lax.switch(case, branches, logits)
    # Under the identity the scaled distribution is the raw one, and its softmax is not taken twice.
    with jax.named_scope("is_identity"):
        raw, max_raw = jax.lax.cond(
            identity, lambda x, *scaled: scaled, lambda x, *_: _softmax_and_max(x), logits, scaled, max_scaled
        )
    return Laws(raw, scaled, max_raw), largest


def _softmax_and_max(logits: Array) -> tuple[Array, Array]:
    """Returns `softmax` and its maximum, which is computed as `1 / Σ exp(x − max x)`.

    A search for the maximum would cost half as much as a small output layer.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return weights / total, 1.0 / total[..., 0]


def _is_identity(sampling: Sampling) -> Array:
    return (sampling.temperature == 1.0) & (sampling.top_k <= 0) & (sampling.top_p >= 1.0)


def _scale(logits: Array, sampling: Sampling) -> Array:
    """Applies `S` to rows that may differ in temperature, top-k and top-p."""
    temperature, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    greedy = temperature <= 0.0
    # The maximum is subtracted before the division, so that a small temperature cannot overflow. Greedy rows divide by
    # 1 instead of 0; their result is replaced below.
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)
    laws = jax.nn.softmax(scaled, axis=-1)
    # Greedy rows take a one-hot below, whatever top-k and top-p are: they cause no bisection.
    truncates = jnp.any(~greedy & ((top_k > 0) | (top_p < 1.0)))
    with jax.named_scope("truncates"):
        laws = jax.lax.cond(truncates, _truncate, lambda laws, *_: laws, laws, top_k, top_p)
    return jnp.where(greedy, one_hot(argmax(logits), logits.shape[-1]), laws)


def expand(values: Array, ndim: int) -> Array:
    """Reshapes `values` `[B]` to `[B, 1, …]` with `ndim` axes, so that they broadcast against distributions."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def log_laws(logits: Array, scaled: Array, sampling: Sampling) -> Buffers:
    """Returns the logs of `softmax(logits)` and of `scaled`, which is `transform` of the logits; `[B, ..., V]` each.

    They are computed from the logits, because a float32 distribution is 0 at a logit that is 87 below the largest.
    """
    logits = logits.astype(jnp.float32)
    heat, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    cold = heat <= 0.0
    whole = jax.nn.log_softmax((logits - logits.max(-1, keepdims=True)) / jnp.where(cold, 1.0, heat), axis=-1)
    # entries that were cut off are truly 0, and float32 can hold the logs of the rest
    cut = cold | (top_k > 0) | (top_p < 1.0)
    return Buffers(jax.nn.log_softmax(logits, axis=-1), jnp.where(cut, jnp.log(scaled), whole))


def make_law_pair(
    q: Array, q_tilde: Array, greedy: Array, p_logits: Array, sampling: Sampling, logs: Buffers | None = None
) -> LawPair:
    """Returns the draft's and the target's distributions at every position, as a rule reads them.

    Args:
        q: `[B, ..., V]`, the draft's raw distribution.
        q_tilde: `[B, ..., V]`, the distribution that the draft's tokens were drawn from.
        greedy: bool `[B]`, whether the draft is greedy.
        p_logits: `[B, ..., V]`, the target's logits.
        sampling: the target's transform.
        logs: `log_laws` of the draft's logits; `None`: the logs of `q` and `q_tilde`.
    """
    p, p_tilde, _ = raw_and_scaled(p_logits, sampling)
    draft_logs, target_logs = logs or Buffers(jnp.log(q), jnp.log(q_tilde)), log_laws(p_logits, p_tilde, sampling)
    four_logs = LogPair(q=draft_logs.q, p=target_logs.q, q_tilde=draft_logs.q_tilde, p_tilde=target_logs.q_tilde)
    # `greedy` gets the leading shape of the other fields, because positions are gathered from all of them alike
    greedy = jnp.broadcast_to(expand(greedy, q.ndim), (*q.shape[:-1], 1))
    return LawPair(q=q, p=p, q_tilde=q_tilde, p_tilde=p_tilde, greedy=greedy, logs=four_logs)


def law_pair_of(q_logits: Array, p_logits: Array, controls: Controls) -> LawPair:
    """Returns the distributions that a rule may read, from the logits of draft and target, `[B, V]` each."""
    # The draft's own sampling makes `q̃`, the target's makes `p̃`: a draft may be greedy under a sampled target.
    q, q_tilde = softmax(q_logits), transform(q_logits, controls.draft)
    logs = log_laws(q_logits, q_tilde, controls.draft)
    return make_law_pair(q, q_tilde, controls.draft.temperature <= 0, p_logits, controls.target, logs)


def _truncate(laws: Array, top_k: Array, top_p: Array) -> Array:
    ones = jnp.ones_like(laws)
    # Top-k comes first, and top-p applies to what remains, as in METHODS section 1; `need` is relative to the
    # renormalised sum.
    kept = laws * keep_largest(laws, ones, jnp.where(top_k > 0, top_k, float(laws.shape[-1])))
    laws = jnp.where(top_k > 0, kept / kept.sum(-1, keepdims=True), laws)
    # For top-p the weights are the probabilities themselves; `need` scales with their sum, which rounding moves off 1.
    kept = laws * keep_largest(laws, laws, jnp.minimum(top_p, 1.0) * laws.sum(-1, keepdims=True))
    return jnp.where(top_p < 1.0, kept / kept.sum(-1, keepdims=True), laws)


def keep_largest(values: Array, weights: Array, need: Array) -> Array:
    """Returns a mask of the largest `values`, as few as it takes for their `weights` to sum to `need`.

    Ties go to the lowest index.

    Args:
        values: float32 `[..., V]` in [0, 1].
        weights: float32 `[..., V]`, equal where values are equal (ones for top-k, the values for top-p).
        need: float32 `[..., 1]`.

    Returns:
        bool `[..., V]`, at least one entry kept.
    """
    # Non-negative float32 numbers order as their bit patterns do, so that 31 halvings find the threshold exactly.
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
    # All entries above the threshold are kept, and of those at it only as many as the weight still needs.
    tied = bits == threshold
    tied_weight = jnp.where(tied, weights, 0.0).max(-1, keepdims=True)
    missing = need - weight_from(threshold + 1)
    count = jnp.maximum(jnp.ceil(missing / jnp.where(tied_weight > 0, tied_weight, 1.0)), 1.0)
    return (bits > threshold) | (tied & (_counted(tied) <= count))


def _counted(marked: Array) -> Array:
    """Returns int32 `[..., V]`: the number of `marked` entries up to each entry, inclusive.

    It sums in two levels, as `sample` does: with a vocabulary that is spread over devices, only the blocks' totals
    travel.
    """
    blocks = _in_blocks(marked, _width(marked.shape[-1]))
    inside = jnp.cumsum(blocks, -1, dtype=jnp.int32)
    before = jnp.cumsum(inside[..., -1], -1) - inside[..., -1]
    return (inside + before[..., None]).reshape(*marked.shape[:-1], -1)[..., : marked.shape[-1]]


def sample(laws: Array, uniform: Array) -> Array:
    """Draws a token by inverse CDF in two levels (block sums, then inside one block).

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
    # Two short searches, over block sums and inside one block, replace a cumulative sum over the vocabulary.
    block = _first_with_mass(cumulative > rest[..., None], blocks.sum(-1))
    inside = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
    # `before` comes from the cumulative sum that chose the block: another order of summation would round differently.
    before = jnp.where(
        block > 0, jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[..., None], -1)[..., 0], 0.0
    )
    index = _first_with_mass(jnp.cumsum(inside, -1) > (rest - before)[..., None], inside)
    return (block * width + index).astype(jnp.int32)


def _first_with_mass(beyond: Array, mass: Array) -> Array:
    """Returns the first index that is `beyond` the threshold and has `mass` > 0, or else the last with `mass` > 0.

    A parallel cumulative sum is not monotone to the last bit, so counting the entries below a threshold could end on an
    entry of mass 0.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1)
    # If the caller's `uniform` is close to 1, rounding can leave no entry beyond the threshold. The last entry with
    # nonzero mass is then the right one.
    last = jnp.where(mass > 0, indices, 0).max(-1)
    return jnp.minimum(jnp.where(beyond & (mass > 0), indices, mass.shape[-1]).min(-1), last)


def _width(size: int) -> int:
    """Returns how many entries of a vocabulary of `size` form one block."""
    return size if size <= 128 else 64 if size <= 8192 else 256


def _in_blocks(laws: Array, width: int) -> Array:
    # Padding has mass 0, which `_first_with_mass` never returns.
    missing = -laws.shape[-1] % width
    padded = jnp.pad(laws, [(0, 0)] * (laws.ndim - 1) + [(0, missing)]) if missing else laws
    return padded.reshape(*laws.shape[:-1], -1, width)
