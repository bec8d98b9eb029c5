"""Functions that compute target distributions `π`, for deferral rules and for rules without a deferral.

A target distribution is a function `(pair, alpha) -> float32 [..., V]`; `alpha` has shape `[..., 1]`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from speccascade_jax.core.logit_laws import LogitPair
from speccascade_jax.core.types import Array, LawPair

TargetLaw = Callable[[LawPair, Array], Array]
DeferralRule = Callable[[LawPair, Array], Array]
Values = TypeVar("Values", bound=Any)


def after_deferral(deferred: Array, pair: LawPair) -> Array:
    """Returns `π = (1 − r) q̃ + p̃ Σ r q̃`: the target replaces the drafted tokens that `r` defers.

    Source: docs/methods.md, section 3.
    """
    return undeferred(deferred, pair) + pair.p_tilde * deferral_mass(deferred, pair)


def undeferred(deferred: Array, pair: LawPair) -> Array:
    """Returns `(1 − r) q̃`, float32 `[..., V]`, for `r` bool or real, `[..., V]` or `[..., 1]`."""
    if deferred.dtype == bool:  # a select costs less than a conversion and a product
        return jnp.where(deferred, 0.0, pair.q_tilde)
    return (1.0 - deferred) * pair.q_tilde


def deferral_mass(deferred: Array, pair: LawPair) -> Array:
    """Returns `η = Σ_v r(v) q̃(v)`, float32 `[..., 1]`: the probability that a drafted token is deferred.

    A rule that decides for the whole position needs no sum, because `Σ q̃ = 1`.
    """
    if deferred.shape[-1] == 1:
        return deferred.astype(jnp.float32)
    drafted = jnp.where(deferred, pair.q_tilde, 0.0) if deferred.dtype == bool else deferred * pair.q_tilde
    return drafted.sum(-1, keepdims=True)


def at_tokens(values: Values, tokens: Array) -> Values:
    """Looks up `tokens` `[...]` in every array `[..., V]` or `[..., 1]` of `values`; returns arrays `[..., 1]`.

    Call this before computing with the arrays. If one entry of a computed array is looked up, XLA computes that array
    for the whole vocabulary.
    """
    if isinstance(values, LogitPair):
        chosen: Values = values.at_tokens(tokens)  # type: ignore[assignment]
        return chosen

    def entry(array: Array) -> Array:
        return array if array.shape[-1] == 1 else jnp.take_along_axis(array, tokens[..., None], axis=-1)

    entries: Values = jax.tree.map(entry, values)
    return entries


def drawn_at(pair: LawPair, tokens: Array) -> Array:
    """Returns `q̃` at `tokens` `[...]`, float32 `[..., 1]`."""
    if isinstance(pair, LogitPair):
        return pair.at_tokens(tokens).q_tilde
    return at_tokens(pair.q_tilde, tokens)


def normalise(mass: Array, fallback: Array) -> Array:
    """Returns `mass / Σ mass` over the last axis, or `fallback` where the sum is 0."""
    total = mass.sum(-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), fallback)


def spec_decode(pair: LawPair, alpha: Array) -> Array:
    """Returns `π = p̃`: lossless speculative decoding."""
    return pair.p_tilde


def kept_lossless(pair: LawPair, alpha: Array) -> Array:
    """Returns `min(q̃, p̃)`, the mass that lossless speculative decoding keeps."""
    return jnp.minimum(pair.q_tilde, pair.p_tilde)


def sd_reference(pair: LawPair, alpha: Array) -> Array:
    """Returns the distribution of the baseline of Holsman et al., 2025, which is not lossless.

    Source: docs/methods.md, section 5. The baseline keeps a token drawn from `q̃` with probability `min(1, p̃/q)`. It
    divides by the raw `q`, although the token may have been chosen greedily. Replacements are drawn from `norm(max(0,
    p̃ − q))`.
    """
    kept = kept_by_soft_ratio(pair)
    rejected = jnp.maximum(pair.q_tilde - kept, 0.0).sum(-1, keepdims=True)
    return kept + rejected * soft_residual(pair)


def kept_by_soft_ratio(pair: LawPair) -> Array:
    """Returns `q̃ min(1, p̃/q)`, and `q̃` where `q = 0`: a drafted token with `q = 0` is always kept."""
    ratio = pair.p_tilde / jnp.where(pair.q > 0, pair.q, 1.0)
    return pair.q_tilde * jnp.where(pair.q > 0, jnp.minimum(ratio, 1.0), 1.0)


def soft_residual(pair: LawPair) -> Array:
    """Returns `norm(max(0, p̃ − q))`, or `p̃` if the mass is 0 everywhere."""
    return normalise(jnp.maximum(pair.p_tilde - pair.q, 0.0), pair.p_tilde)


@functools.cache  # jit treats functions as static, so a new one per call would compile a new program per call
def lossy_with(beta: float) -> TargetLaw:
    """Returns the target distribution of lossy speculative decoding for a fixed `β`.

    A token is kept with probability `min(1, p̃ / ((1 − α) q̃))`. A replacement is drawn from `norm(max(0, p̃/β − q̃))`,
    or from `p̃` if that mass is 0 everywhere (docs/methods.md, section 3; Narasimhan et al., 2024, Table 1).
    """

    def law(pair: LawPair, alpha: Array) -> Array:
        """Keeps a token with probability `min(1, p̃ / ((1 − α) q̃))` (Narasimhan et al., 2024, Table 1)."""
        kept = kept_below_ceiling(pair, alpha)
        residual = normalise(jnp.maximum(pair.p_tilde / beta - pair.q_tilde, 0.0), pair.p_tilde)
        # the rejected mass is summed directly, because 1 − Σ kept loses all digits if nearly all mass is kept
        rejected = jnp.maximum(pair.q_tilde - pair.p_tilde / (1.0 - alpha), 0.0).sum(-1, keepdims=True)
        return kept + rejected * residual

    return law


def kept_below_ceiling(pair: LawPair, alpha: Array) -> Array:
    """Returns `min(q̃, π) = min(q̃, p̃/(1−α))`, the mass that the rules `lossy` and `lossy_tuned` keep.

    It needs no sum over the vocabulary. The equation holds because a token with `p̃/(1−α) < q̃` gets no mass from
    replacements. These come from `max(0, p̃/β − q̃)` in `lossy` and from `max(0, b p̃ − q̃)` in `lossy_tuned`, and both
    `p̃/β` and `b p̃` are at most `p̃/(1−α)`.
    """
    return jnp.minimum(pair.q_tilde, pair.p_tilde / (1.0 - alpha))


@functools.cache
def lossy_at_most(beta: float = 1.0) -> TargetLaw:
    """Returns a function for an upper bound of `π`: `max(min(q̃, p̃/(1−α)), p̃/β)`, if `1 − α <= β <= 1`.

    The bound holds for `lossy` with this `β`, and with `β = 1` for `lossy_tuned`. Replacements add to a token at most
    `p̃/β − q̃`, and only where this is positive. This is so because the rejected mass, `Σ max(0, q̃ − p̃/(1−α))`, is at
    most `Σ max(0, q̃ − p̃/β) <= Σ max(0, p̃/β − q̃)`.
    """
    return lambda pair, alpha: jnp.maximum(kept_below_ceiling(pair, alpha), pair.p_tilde / beta)


def lossy_tuned(pair: LawPair, alpha: Array) -> Array:
    """Returns `π = max(min(q̃, p̃/(1−α)), b p̃)` of the rule `Lossy*`, which computes `b = 1/β` at every position.

    `b` is the root of `Σ max(0, q̃ − p̃/(1−α)) = Σ max(0, b p̃ − q̃)` in `[0, 1/(1−α)]`, or 0 if the left side is 0
    (docs/methods.md, section 3). It is at most 1, because at 1 the right side is `TV(p̃, q̃)`, which the left side does
    not exceed.
    """
    q, p = pair.q_tilde, pair.p_tilde
    ceiling = p / (1.0 - alpha)
    excess = jnp.maximum(q - ceiling, 0.0).sum(-1, keepdims=True)

    def root_of_piece(b: Array) -> Array:
        """Returns the root that the equation would have if its right side were linear with its slope at `b`."""
        piece = b * p > q
        slope = jnp.where(piece, p, 0.0).sum(-1, keepdims=True)
        drawn = jnp.where(piece, q, 0.0).sum(-1, keepdims=True)
        return jnp.where(slope > 0, (excess + drawn) / jnp.where(slope > 0, slope, 1.0), b)

    # The right side of the equation is convex and piecewise linear in b. So Newton's method from above never passes the
    # root, and it reaches the root's linear piece after a few steps (at most 17 for random distributions over 256,000
    # entries; the bound of 50 is for safety).
    def moves(carry: tuple[Array, Array, Array]) -> Array:
        return jnp.any(carry[1] < carry[0]) & (carry[2] < 50)

    def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return carry[1], jnp.minimum(root_of_piece(carry[1]), carry[1]), carry[2] + 1

    above = jnp.ones_like(excess)
    first = jnp.minimum(root_of_piece(above), above)
    _, b, _ = jax.lax.while_loop(moves, newton, (above, first, jnp.zeros((), jnp.int32)))
    b = jnp.where(excess > 0, b, 0.0)
    return jnp.maximum(jnp.minimum(q, ceiling), b * p)
