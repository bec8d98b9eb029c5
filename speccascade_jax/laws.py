"""Target distributions `π`: the one made from a deferral rule, and those that are no deferral.

Each is a function `(pair, alpha) -> float32 [..., V]`, where `alpha` has shape `[..., 1]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from speccascade_jax.types import Array, LawPair

TargetLaw = Callable[[LawPair, Array], Array]
DeferralRule = Callable[[LawPair, Array], Array]


def from_deferral(rule: DeferralRule) -> TargetLaw:
    """`π = (1 − r) q̃ + p̃ Σ r q̃`: drafted tokens that `r` defers are handed to the target (METHODS section 3)."""

    def law(pair: LawPair, alpha: Array) -> Array:
        deferred = rule(pair, alpha).astype(jnp.float32)
        return (1.0 - deferred) * pair.q_tilde + pair.p_tilde * deferral_mass(deferred, pair)

    return law


def deferral_mass(deferred: Array, pair: LawPair) -> Array:
    """`η = Σ_v r(v) q̃(v)`, float32 `[..., 1]`: the probability that a drafted token is deferred."""
    return (deferred * pair.q_tilde).sum(-1, keepdims=True)


def normalise(mass: Array, fallback: Array) -> Array:
    """`mass / Σ mass` over the last axis; `fallback` where there is no mass at all."""
    total = mass.sum(-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), fallback)


def spec_decode(pair: LawPair, alpha: Array) -> Array:
    """`π = p̃`: lossless speculative decoding."""
    del alpha
    return pair.p_tilde


@functools.cache  # one function per β: a new one each time would be a new program each time
def lossy_with(beta: float) -> TargetLaw:
    """Lossy speculative decoding's law for a fixed `β`.

    It keeps with probability `min(1, p̃ / ((1 − α) q̃))` and replaces from `norm(max(0, p̃/β − q̃))`, or from `p̃`
    where that is empty; `π` is the law this gives (METHODS section 3; paper 1, Table 1).
    """

    def law(pair: LawPair, alpha: Array) -> Array:
        kept = jnp.minimum(pair.q_tilde, pair.p_tilde / (1.0 - alpha))
        residual = normalise(jnp.maximum(pair.p_tilde / beta - pair.q_tilde, 0.0), pair.p_tilde)
        # 1 − Σ kept loses all digits where the draft is nearly kept; the same mass, summed directly, doesn't
        rejected = jnp.maximum(pair.q_tilde - pair.p_tilde / (1.0 - alpha), 0.0).sum(-1, keepdims=True)
        return kept + rejected * residual

    return law


def lossy_tuned(pair: LawPair, alpha: Array) -> Array:
    """`Lossy*`: `max(min(q̃, p̃/(1−α)), b p̃)` with `b = 1/β` solved for at every position (METHODS section 3).

    `b` is the root of `Σ max(0, q̃ − p̃/(1−α)) = Σ max(0, b p̃ − q̃)` in `[0, 1/(1−α)]`; 0 where the left side is 0.
    """
    q, p = pair.q_tilde, pair.p_tilde
    ceiling = p / (1.0 - alpha)
    excess = jnp.maximum(q - ceiling, 0.0).sum(-1, keepdims=True)

    def refill(b: Array) -> Array:
        return jnp.maximum(b * p - q, 0.0).sum(-1, keepdims=True)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        short = refill(middle) < excess
        return jnp.where(short, middle, low), jnp.where(short, high, middle)

    low, high = jax.lax.fori_loop(0, 30, halve, (jnp.zeros_like(excess), 1.0 / (1.0 - alpha) + jnp.zeros_like(excess)))
    # the refill is piecewise linear: on the piece that bisection found, the root is exact
    piece = high * p > q
    slope = jnp.where(piece, p, 0.0).sum(-1, keepdims=True)
    root = (excess + jnp.where(piece, q, 0.0).sum(-1, keepdims=True)) / jnp.where(slope > 0, slope, 1.0)
    b = jnp.where(excess > 0, jnp.clip(root, low, high), 0.0)
    return jnp.maximum(jnp.minimum(q, ceiling), b * p)
