"""Measures of distributions `[..., V]` that rules compare: maximum, entropy and total variation."""

import jax.numpy as jnp

from speccascade_jax.core.types import Array


def max_of(law: Array) -> Array:
    """Returns `max_v law(v)`, `[..., 1]`."""
    return law.max(-1, keepdims=True)


def entropy(law: Array) -> Array:
    """Returns the entropy `H` in nats, `[..., 1]`, with `0 log 0 = 0`."""
    return -jnp.where(law > 0, law * jnp.log(jnp.where(law > 0, law, 1.0)), 0.0).sum(-1, keepdims=True)


def total_variation(first: Array, second: Array) -> Array:
    """Returns the total variation `½ Σ abs(first − second)`, `[..., 1]`; exactly 1 if no token has mass in both."""
    apart = ~(jnp.minimum(first, second) > 0).any(-1, keepdims=True)
    return jnp.where(apart, 1.0, 0.5 * jnp.abs(first - second).sum(-1, keepdims=True))
