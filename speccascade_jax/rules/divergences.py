"""★ Divergences between the target's law `p` and the draft's `q`: what fuzzy speculative decoding compares with τ.

Each is a sum over the vocabulary of a function of `p(v)` and `q(v)` alone, times a constant, and is given as these two:
a new one is one function and one row in `DIVERGENCES`. `0 log 0 = 0` and `p log(p/0) = ∞`.
Formulas: METHODS section 5; paper 2, section 3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core.sampling import keep_largest
from speccascade_jax.core.types import Array, LawPair


class Law(NamedTuple):
    """A law, or a part of one, and its log, `[..., V]` each; where the law is 0 in float32 its log may be finite."""

    mass: Array
    log: Array


class Divergence(NamedTuple):
    """`scale · Σ_v terms(p(v), q(v))`; a constant inside the sum makes XLA:CPU take up to four times as long.

    `largest`: the value where no token has mass in both, if finite; `reads_logs`: whether the log of `q` counts.
    """

    terms: Callable[[Law, Law], Array]
    scale: float = 1.0
    largest: float = math.inf
    reads_logs: bool = False


def kl(p: Law, q: Law) -> Array:
    """`p log(p/q)`, the terms of KL(p ‖ q) in nats; infinite where the draft excludes what the target may say."""
    both = jnp.where(q.log > -jnp.inf, p.mass * (p.log - q.log), jnp.inf)
    return jnp.where(p.log > -jnp.inf, both, 0.0)


def js(p: Law, q: Law) -> Array:
    """Jensen-Shannon, half of `KL(p ‖ M) + KL(q ‖ M)`, `M = (p + q)/2`; base 2: in [0, 1]."""
    p, q, middle = (Law(mass, jnp.log(mass)) for mass in (p.mass, q.mass, 0.5 * (p.mass + q.mass)))
    return kl(p, middle) + kl(q, middle)


def js_reference(p: Law, q: Law) -> Array:
    """Half of `KL(M ‖ p) + KL(M ‖ q)`, nats: the authors' code, to which the thresholds of the paper belong."""
    mass = 0.5 * (p.mass + q.mass)
    somewhere = jnp.maximum(p.log, q.log) > -jnp.inf
    middle = Law(mass, jnp.where(somewhere, jnp.log(jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)), -jnp.inf))
    return kl(middle, p) + kl(middle, q)


def tv(p: Law, q: Law) -> Array:
    """Total variation, half of `Σ abs(p − q)`, in [0, 1]."""
    return jnp.abs(p.mass - q.mass)


DIVERGENCES = {
    "js": Divergence(js, 0.5 / math.log(2.0), largest=1.0),
    "js_reference": Divergence(js_reference, 0.5, reads_logs=True),
    "kl": Divergence(kl, reads_logs=True),
    "kl_reversed": Divergence(lambda p, q: kl(q, p)),  # KL(q ‖ p): what the authors' code calls `kl`
    "tv": Divergence(tv, 0.5, largest=1.0),
}


def divergence(
    name: str, p: Array, q: Array, top_k: int = 0, log_p: Array | None = None, log_q: Array | None = None
) -> Array:
    """`Div(p, q)`, float32 `[..., 1]`, never negative.

    Args:
        name: a row of `DIVERGENCES`.
        p, q: laws `[..., V]` of target and draft; log_p, log_q: their logs, where they know more than float32 laws.
        top_k: where positive, over the target's `top_k` likeliest tokens (ties: lowest index) and one bucket for all
            others together; 0 is the whole vocabulary.
    """
    laws = Law(p, jnp.log(p) if log_p is None else log_p), Law(q, jnp.log(q) if log_q is None else log_q)
    if not top_k:
        return _over(DIVERGENCES[name], laws)
    need = jnp.full((*p.shape[:-1], 1), min(top_k, p.shape[-1]), jnp.float32)
    inside = keep_largest(_ranked(laws[0]), jnp.ones_like(p), need)
    # outside, both laws are 0 and their term is 0 too
    top = [Law(jnp.where(inside, law.mass, 0.0), jnp.where(inside, law.log, -jnp.inf)) for law in laws]
    return _over(DIVERGENCES[name], top, [_together(law, ~inside) for law in laws])


def _over(divergence: Divergence, *parts: Sequence[Law]) -> Array:
    """The divergence of laws given in parts, a pair of laws each."""
    terms, scale, largest, _ = divergence
    value = jnp.maximum(scale * sum(terms(*part).sum(-1, keepdims=True) for part in parts), 0.0)
    if math.isinf(largest):
        return value
    # τ may be this very number, and rounding must not leave a hair less
    overlap = sum(jnp.minimum(p.mass, q.mass).sum(-1, keepdims=True) for p, q in parts)
    return jnp.where(overlap > 0, jnp.minimum(value, largest), largest)


def _ranked(law: Law) -> Array:
    """Numbers >= 0 in the order of the law, of its log where float32 has no more than 0."""
    below = jnp.where(law.log > -jnp.inf, 1e-9 / (1.0 + jnp.maximum(-law.log, 0.0)), 0.0)
    return jnp.where(law.mass > 0, law.mass * 2.0**100, below)


def _together(law: Law, chosen: Array) -> Law:
    """The chosen tokens `[..., V]` as one, `[..., 1]`."""
    log = jax.nn.logsumexp(jnp.where(chosen, law.log, -jnp.inf), axis=-1, keepdims=True)
    return Law(jnp.where(chosen, law.mass, 0.0).sum(-1, keepdims=True), log)


@dataclass(frozen=True)
class Threshold:
    """`δ = [Div(p, q) >= τ]` with τ as the rule's α, a `DeferralRule`: a position is kept only below the threshold.

    Attributes:
        name, top_k: as in `divergence`; scaled: compare `p̃` and `q̃` instead of the raw laws.
    """

    name: str
    top_k: int = 0
    scaled: bool = False

    def of(self, pair: LawPair) -> Array:
        """What is compared with τ, `[..., 1]`."""
        p, q = ("p_tilde", "q_tilde") if self.scaled else ("p", "q")
        return divergence(self.name, getattr(pair, p), getattr(pair, q), self.top_k, pair.log(p), pair.log(q))

    def __call__(self, pair: LawPair, alpha: Array) -> Array:
        return self.of(pair) >= alpha
