"""What a rule is: the decision about a draft, and what the tools must know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from speccascade_jax.core.types import Array, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.laws import DeferralRule, TargetLaw


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and what the tools must know of it.

    Attributes:
        name: how gin, records and tables call it.
        deferral: `r(pair, alpha)`, or `None` for a law that is no deferral.
        law: `π(pair, alpha)`; by default made from `deferral`.
        kept: `min(q̃, π)`, where it is a function of `q̃(v)` and `p̃(v)` of the same token alone: then a block is
            accepted or not by looking up its tokens, without a pass over the vocabulary.
        grid: the range of α worth sweeping (`None`: the rule has no α). `"lnV"` stands for `ln V`.
        domain: α must satisfy `domain[0] <= α < domain[1]`; closed: the upper end belongs to the domain too.
        reads_q: whether `π` depends on the draft's law; if not, no draft pass is spent on the bonus position.
        lossless: whether `π = p̃` for every α.
        greedy_only: defined at temperature 0 only.
    """

    name: str
    deferral: DeferralRule | None = None
    law: TargetLaw | None = None
    kept: TargetLaw | None = None
    grid: tuple[float | str, float | str] | None = (0.0, 1.0)
    domain: tuple[float, float] = (-math.inf, math.inf)
    closed: bool = False
    reads_q: bool = True
    lossless: bool = False
    greedy_only: bool = False

    def __post_init__(self) -> None:
        if (self.law is None) == (self.deferral is None):
            raise ValueError(f"rule {self.name!r} needs either a deferral function or a law, not both and not neither")

    def target_law(self, pair: LawPair, alpha: Array) -> Array:
        """`π`, float32 `[..., V]`; `alpha` is `[..., 1]`."""
        if self.law is not None:
            return self.law(pair, alpha)
        assert self.deferral is not None
        return laws.from_deferral(self.deferral)(pair, alpha)

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """`min(q̃, π)` at `tokens` `[...]`, float32: only what its entries need is computed over the vocabulary."""
        chosen = laws.at_tokens(pair, tokens)
        if self.kept is not None:
            return self.kept(chosen, alpha)[..., 0]
        if self.deferral is None:
            return laws.at_tokens(jnp.minimum(pair.q_tilde, self.target_law(pair, alpha)), tokens)[..., 0]
        deferred = self.deferral(pair, alpha)
        left = laws.undeferred(laws.at_tokens(deferred, tokens), chosen)
        law = left + chosen.p_tilde * laws.deferral_mass(deferred, pair)
        return jnp.minimum(chosen.q_tilde, law)[..., 0]
