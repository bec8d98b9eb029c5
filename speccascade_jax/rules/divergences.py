"""Divergences between the target's distribution `p` and the draft's `q`, for fuzzy speculative decoding.

Fuzzy decoding keeps a draft token where the divergence is below a threshold τ.

A divergence is a constant times a sum over the vocabulary of a function of `p(v)` and `q(v)` alone. A new divergence is
one function and one row in `DIVERGENCES`. By convention, `0 log 0 = 0` and `p log(p/0) = ∞`. Formulas: docs/methods.md,
section 5; Holsman et al., 2025, section 3.
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
    """A distribution (or a part of one) and its log, `[..., V]` each; the log may be finite where `mass` is 0."""

    mass: Array
    log: Array


class Divergence(NamedTuple):
    """The divergence `scale · Σ_v terms(p(v), q(v))`.

    The constant is applied after the sum, because with a constant in every term XLA takes up to four times as long on a
    CPU.

    Attributes:
        terms: the function of `p` and `q`.
        scale: the constant.
        largest: the value if no token has mass in both distributions; infinite if the divergence is unbounded.
        reads_logs: whether the divergence uses the exact log of `q`.
    """

    terms: Callable[[Law, Law], Array]
    scale: float = 1.0
    largest: float = math.inf
    reads_logs: bool = False


def kl(p: Law, q: Law) -> Array:
    """Returns `p log(p/q)`, the terms of KL(p ‖ q) in nats; infinite where `q` is 0 and `p` is not."""
    terms = jnp.where(q.log > -jnp.inf, p.mass * (p.log - q.log), jnp.inf)
    return jnp.where(p.log > -jnp.inf, terms, 0.0)


def js(p: Law, q: Law) -> Array:
    """Returns the terms of the Jensen-Shannon divergence, half of `KL(p ‖ M) + KL(q ‖ M)` with `M = (p + q)/2`.

    The scale in `DIVERGENCES` converts the sum to base 2, so the divergence is in [0, 1].
    """
    p, q, middle = (Law(mass, jnp.log(mass)) for mass in (p.mass, q.mass, 0.5 * (p.mass + q.mass)))
    return kl(p, middle) + kl(q, middle)


def js_reference(p: Law, q: Law) -> Array:
    """Returns the terms of half of `KL(M ‖ p) + KL(M ‖ q)` in nats, with `M = (p + q)/2`.

    The code of Holsman et al., 2025, computes this divergence, and the thresholds in their paper refer to it.
    """
    mass = 0.5 * (p.mass + q.mass)
    somewhere = jnp.maximum(p.log, q.log) > -jnp.inf
    middle = Law(mass, jnp.where(somewhere, jnp.log(jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)), -jnp.inf))
    return kl(middle, p) + kl(middle, q)


def tv(p: Law, q: Law) -> Array:
    """Returns the terms of total variation, half of `Σ abs(p − q)`, in [0, 1]."""
    return jnp.abs(p.mass - q.mass)


DIVERGENCES = {
    "js": Divergence(js, 0.5 / math.log(2.0), largest=1.0),
    "js_reference": Divergence(js_reference, 0.5, reads_logs=True),
    "kl": Divergence(kl, reads_logs=True),
    "kl_reversed": Divergence(lambda p, q: kl(q, p)),  # KL(q ‖ p), which Holsman et al.'s code calls `kl`
    "tv": Divergence(tv, 0.5, largest=1.0),
}


def divergence(
    name: str, p: Array, q: Array, top_k: int = 0, log_p: Array | None = None, log_q: Array | None = None
) -> Array:
    """Computes `Div(p, q)`, float32 `[..., 1]`, never negative.

    Args:
        name: a key of `DIVERGENCES`.
        p: `[..., V]`, the target's distribution.
        q: `[..., V]`, the draft's distribution.
        top_k: if positive, compare the target's `top_k` most likely tokens (ties: lowest index) and one bucket that
            contains all other tokens; 0 compares the whole vocabulary.
        log_p: `[..., V]`, a log of `p` that is more exact than the log of the float32 numbers; `None`: there is none.
        log_q: `[..., V]`, a log of `q` that is more exact than the log of the float32 numbers; `None`: there is none.
    """
    laws = Law(p, jnp.log(p) if log_p is None else log_p), Law(q, jnp.log(q) if log_q is None else log_q)
    if not top_k:
        return _over(DIVERGENCES[name], laws)
    need = jnp.full((*p.shape[:-1], 1), min(top_k, p.shape[-1]), jnp.float32)
    inside = keep_largest(_ranked(laws[0]), jnp.ones_like(p), need)
    # both distributions are set to 0 outside the top tokens, so those terms of the sum are 0
    top = [Law(jnp.where(inside, law.mass, 0.0), jnp.where(inside, law.log, -jnp.inf)) for law in laws]
    return _over(DIVERGENCES[name], top, [_together(law, ~inside) for law in laws])


def _over(divergence: Divergence, *parts: Sequence[Law]) -> Array:
    """Returns the divergence of two distributions, `[..., 1]`; their entries may be split into several `parts`.

    Each part is a pair `(p, q)` of some of the entries.
    """
    terms, scale, largest, _ = divergence
    value = jnp.maximum(scale * sum(terms(*part).sum(-1, keepdims=True) for part in parts), 0.0)
    if math.isinf(largest):
        return value
    # if no token has mass in both distributions, the divergence is exactly `largest`; τ may be equal to `largest`, so
    # rounding must not reduce the value
    overlap = sum(jnp.minimum(p.mass, q.mass).sum(-1, keepdims=True) for p, q in parts)
    return jnp.where(overlap > 0, jnp.minimum(value, largest), largest)


def _ranked(law: Law) -> Array:
    """Returns numbers >= 0 that sort like the probabilities; where these are 0 in float32, like their logs."""
    below = jnp.where(law.log > -jnp.inf, 1e-9 / (1.0 + jnp.maximum(-law.log, 0.0)), 0.0)
    return jnp.where(law.mass > 0, law.mass * 2.0**100, below)


def _together(law: Law, chosen: Array) -> Law:
    """Returns the `chosen` tokens, bool `[..., V]`, merged into a single token, `[..., 1]`."""
    log = jax.nn.logsumexp(jnp.where(chosen, law.log, -jnp.inf), axis=-1, keepdims=True)
    return Law(jnp.where(chosen, law.mass, 0.0).sum(-1, keepdims=True), log)


@dataclass(frozen=True)
class Threshold:
    """The deferral `δ = [Div(p, q) >= τ]`, where α is τ: a draft is kept only if the divergence is below τ.

    Attributes:
        name, top_k: as in `divergence`.
        scaled: whether `p̃` and `q̃` are compared instead of the raw distributions.
    """

    name: str
    top_k: int = 0
    scaled: bool = False

    def of(self, pair: LawPair) -> Array:
        """Returns the divergence that is compared with τ, `[..., 1]`."""
        p, q = ("p_tilde", "q_tilde") if self.scaled else ("p", "q")
        return divergence(self.name, getattr(pair, p), getattr(pair, q), self.top_k, pair.log(p), pair.log(q))

    def __call__(self, pair: LawPair, alpha: Array) -> Array:
        """Returns whether the divergence is at least `alpha`, bool `[..., 1]`."""
        return self.of(pair) >= alpha
