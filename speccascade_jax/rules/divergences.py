"""★ Divergences between the target's law `p` and the draft's `q`: what fuzzy speculative decoding compares with τ.

Each is a sum over the vocabulary of a function of `p(v)` and `q(v)` alone, times a constant, and is given as these two:
a new one is one function and one row in `DIVERGENCES`. `0 log 0 = 0` and `p log(p/0) = ∞`.
Formulas: METHODS section 5; paper 2, section 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from speccascade_jax.core.sampling import keep_largest
from speccascade_jax.core.types import Array, LawPair


class Divergence(NamedTuple):
    """`scale · Σ_v terms(p(v), q(v))`; a constant inside the sum makes XLA:CPU take up to four times as long."""

    terms: Callable[[Array, Array], Array]
    scale: float = 1.0


def relative(a: Array, b: Array) -> Array:
    """`a log(a/b)`, the terms of KL(a ‖ b) in nats."""
    return jnp.where(a > 0, a * (jnp.log(jnp.where(a > 0, a, 1.0)) - jnp.log(b)), 0.0)


def kl(p: Array, q: Array) -> Array:
    """KL(p ‖ q), nats; infinite where the draft excludes what the target may say."""
    return relative(p, q)


def kl_reversed(p: Array, q: Array) -> Array:
    """KL(q ‖ p), nats: what the authors' code calls `kl`."""
    return relative(q, p)


def js(p: Array, q: Array) -> Array:
    """Jensen-Shannon, half of `KL(p ‖ M) + KL(q ‖ M)`, `M = (p + q)/2`; base 2: in [0, 1]."""
    middle = 0.5 * (p + q)
    return relative(p, middle) + relative(q, middle)


def js_reference(p: Array, q: Array) -> Array:
    """Half of `KL(M ‖ p) + KL(M ‖ q)`, nats: the authors' code, to which the thresholds of the paper belong."""
    middle = 0.5 * (p + q)
    return relative(middle, p) + relative(middle, q)


def tv(p: Array, q: Array) -> Array:
    """Total variation, half of `Σ abs(p − q)`, in [0, 1]."""
    return jnp.abs(p - q)


DIVERGENCES = {
    "js": Divergence(js, 0.5 / math.log(2.0)),
    "js_reference": Divergence(js_reference, 0.5),
    "kl": Divergence(kl),
    "kl_reversed": Divergence(kl_reversed),
    "tv": Divergence(tv, 0.5),
}


def divergence(name: str, p: Array, q: Array, top_k: int = 0) -> Array:
    """`Div(p, q)`, float32 `[..., 1]`, never negative.

    Args:
        name: a row of `DIVERGENCES`.
        p, q: laws `[..., V]` of target and draft.
        top_k: where positive, over the target's `top_k` likeliest tokens (ties: lowest index) and one bucket for all
            others together; 0 is the whole vocabulary.
    """
    terms, scale = DIVERGENCES[name]
    if not top_k:
        return jnp.maximum(scale * terms(p, q).sum(-1, keepdims=True), 0.0)
    inside = keep_largest(p, jnp.ones_like(p), jnp.full((*p.shape[:-1], 1), min(top_k, p.shape[-1]), jnp.float32))
    rest_p, rest_q = (jnp.where(inside, 0.0, law).sum(-1, keepdims=True) for law in (p, q))
    # outside, both laws are 0 and their term is 0 too
    top = terms(jnp.where(inside, p, 0.0), jnp.where(inside, q, 0.0)).sum(-1, keepdims=True)
    return jnp.maximum(scale * (top + terms(rest_p, rest_q)), 0.0)


@dataclass(frozen=True)
class Threshold:
    """`δ = [Div(p, q) >= τ]` with τ as the rule's α, a `DeferralRule`: a position is kept only below the threshold.

    Attributes:
        name, top_k: as in `divergence`; scaled: compare `p̃` and `q̃` instead of the raw laws.
    """

    name: str
    top_k: int = 0
    scaled: bool = False

    def __call__(self, pair: LawPair, alpha: Array) -> Array:
        p, q = (pair.p_tilde, pair.q_tilde) if self.scaled else (pair.p, pair.q)
        return divergence(self.name, p, q, self.top_k) >= alpha
