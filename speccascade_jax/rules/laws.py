"""Target distributions `π`: the one made from a deferral rule, and those that are no deferral.

Each is a function `(pair, alpha) -> float32 [..., V]`, where `alpha` has shape `[..., 1]`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, LawPair

TargetLaw = Callable[[LawPair, Array], Array]
DeferralRule = Callable[[LawPair, Array], Array]
Values = TypeVar("Values", bound=Any)


def after_deferral(deferred: Array, pair: LawPair) -> Array:
    """`π = (1 − r) q̃ + p̃ Σ r q̃`: drafted tokens that `r` defers are handed to the target (METHODS section 3)."""
    return undeferred(deferred, pair) + pair.p_tilde * deferral_mass(deferred, pair)


def undeferred(deferred: Array, pair: LawPair) -> Array:
    """`(1 − r) q̃`, float32 `[..., V]`, for `r` bool or real, `[..., V]` or `[..., 1]`."""
    if deferred.dtype == bool:  # a select costs less than a conversion and a product
        return jnp.where(deferred, 0.0, pair.q_tilde)
    return (1.0 - deferred) * pair.q_tilde


def deferral_mass(deferred: Array, pair: LawPair) -> Array:
    """`η = Σ_v r(v) q̃(v)`, float32 `[..., 1]`: the probability that a drafted token is deferred.

    A rule that decides for the whole position needs no sum: `Σ q̃ = 1`.
    """
    if deferred.shape[-1] == 1:
        return deferred.astype(jnp.float32)
    drafted = jnp.where(deferred, pair.q_tilde, 0.0) if deferred.dtype == bool else deferred * pair.q_tilde
    return drafted.sum(-1, keepdims=True)


def at_tokens(values: Values, tokens: Array) -> Values:
    """Every array `[..., V]` (or `[..., 1]`) of `values` at `tokens` `[...]`, as `[..., 1]`.

    XLA does not look up an entry of an expression without computing all of it: look up first, compute after.
    """

    def entry(array: Array) -> Array:
        return array if array.shape[-1] == 1 else jnp.take_along_axis(array, tokens[..., None], axis=-1)

    entries: Values = jax.tree.map(entry, values)
    return entries


def normalise(mass: Array, fallback: Array) -> Array:
    """`mass / Σ mass` over the last axis; `fallback` where there is no mass at all."""
    total = mass.sum(-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), fallback)


def spec_decode(pair: LawPair, alpha: Array) -> Array:
    """`π = p̃`: lossless speculative decoding."""
    return pair.p_tilde


def kept_lossless(pair: LawPair, alpha: Array) -> Array:
    """`min(q̃, p̃)`."""
    return jnp.minimum(pair.q_tilde, pair.p_tilde)


def sd_reference(pair: LawPair, alpha: Array) -> Array:
    """The law of paper 2's published baseline, which is not lossless (METHODS section 5).

    It keeps a token drawn from `q̃` with probability `min(1, p̃/q)`, dividing by the raw `q` although the token may have
    been chosen greedily, and replaces from `norm(max(0, p̃ − q))`.
    """
    kept = kept_by_soft_ratio(pair)
    rejected = jnp.maximum(pair.q_tilde - kept, 0.0).sum(-1, keepdims=True)
    return kept + rejected * soft_residual(pair)


def kept_by_soft_ratio(pair: LawPair) -> Array:
    """`q̃ min(1, p̃/q)`; a token with `q = 0` that was drawn all the same is kept."""
    ratio = pair.p_tilde / jnp.where(pair.q > 0, pair.q, 1.0)
    return pair.q_tilde * jnp.where(pair.q > 0, jnp.minimum(ratio, 1.0), 1.0)


def soft_residual(pair: LawPair) -> Array:
    """`norm(max(0, p̃ − q))`, or `p̃` where that is empty."""
    return normalise(jnp.maximum(pair.p_tilde - pair.q, 0.0), pair.p_tilde)


@functools.cache  # one function per β: a new one each time would be a new program each time
def lossy_with(beta: float) -> TargetLaw:
    """Lossy speculative decoding's law for a fixed `β`.

    It keeps with probability `min(1, p̃ / ((1 − α) q̃))` and replaces from `norm(max(0, p̃/β − q̃))`, or from `p̃`
    where that is empty; `π` is the law this gives (METHODS section 3; paper 1, Table 1).
    """

    def law(pair: LawPair, alpha: Array) -> Array:
        kept = kept_below_ceiling(pair, alpha)
        residual = normalise(jnp.maximum(pair.p_tilde / beta - pair.q_tilde, 0.0), pair.p_tilde)
        # 1 − Σ kept loses all digits where the draft is nearly kept; the same mass, summed directly, doesn't
        rejected = jnp.maximum(pair.q_tilde - pair.p_tilde / (1.0 - alpha), 0.0).sum(-1, keepdims=True)
        return kept + rejected * residual

    return law


def kept_below_ceiling(pair: LawPair, alpha: Array) -> Array:
    """`min(q̃, π) = min(q̃, p̃/(1−α))`, what both lossy laws keep of a draft: no sum over the vocabulary.

    Where the ceiling is below `q̃` neither law refills: `p̃/β` and `b p̃` are at most the ceiling.
    """
    return jnp.minimum(pair.q_tilde, pair.p_tilde / (1.0 - alpha))


@functools.cache
def lossy_at_most(beta: float = 1.0) -> TargetLaw:
    """`max(min(q̃, p̃/(1−α)), p̃/β)`, which neither lossy law exceeds for `1 − α <= β <= 1`; `b` counts as `1/β = 1`.

    What is refilled is no more than `p̃/β − q̃` where that is positive: the mass for it, `Σ max(0, q̃ − p̃/(1−α))`, is at
    most `Σ max(0, q̃ − p̃/β) <= Σ max(0, p̃/β − q̃)`.
    """
    return lambda pair, alpha: jnp.maximum(kept_below_ceiling(pair, alpha), pair.p_tilde / beta)


def lossy_tuned(pair: LawPair, alpha: Array) -> Array:
    """`Lossy*`: `max(min(q̃, p̃/(1−α)), b p̃)` with `b = 1/β` solved for at every position (METHODS section 3).

    `b` is the root of `Σ max(0, q̃ − p̃/(1−α)) = Σ max(0, b p̃ − q̃)` in `[0, 1/(1−α)]`; 0 where the left side is 0. It is
    no more than 1: there the right side is `TV(p̃, q̃)`, and the left side is no more than that.
    """
    q, p = pair.q_tilde, pair.p_tilde
    ceiling = p / (1.0 - alpha)
    excess = jnp.maximum(q - ceiling, 0.0).sum(-1, keepdims=True)

    def root_of_piece(b: Array) -> Array:
        """Where the line on which the refill lies at `b` reaches the excess."""
        piece = b * p > q
        slope = jnp.where(piece, p, 0.0).sum(-1, keepdims=True)
        drawn = jnp.where(piece, q, 0.0).sum(-1, keepdims=True)
        return jnp.where(slope > 0, (excess + drawn) / jnp.where(slope > 0, slope, 1.0), b)

    # The refill is convex and piecewise linear in b: Newton's steps from above never pass the root, and end on its
    # piece after a few (of random laws over 256,000 entries the worst took 17; the bound is for safety).
    def moves(carry: tuple[Array, Array, Array]) -> Array:
        return jnp.any(carry[1] < carry[0]) & (carry[2] < 50)

    def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return carry[1], jnp.minimum(root_of_piece(carry[1]), carry[1]), carry[2] + 1

    above = jnp.ones_like(excess)
    first = jnp.minimum(root_of_piece(above), above)
    _, b, _ = jax.lax.while_loop(moves, newton, (above, first, jnp.zeros((), jnp.int32)))
    b = jnp.where(excess > 0, b, 0.0)
    return jnp.maximum(jnp.minimum(q, ceiling), b * p)
