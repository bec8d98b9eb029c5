"""Acceptance of drafted tokens: the probability mass that is kept, and the distribution that replacements come from.

Every class here satisfies the identity `kept + (1 − Σ kept) · replacement = π`, where `π` is the distribution that the
output has under the rule (docs/methods.md, section 2).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from speccascade_jax.core.logit_laws import as_law_pair
from speccascade_jax.core.types import Array, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.rule import Rule
from speccascade_jax.rules.verification import Acceptance, TokenWise, Verifier


@dataclass(frozen=True)
class Speculative(TokenWise):
    """Acceptance that keeps the mass `min(q̃, π)` and draws replacements from `norm(max(0, π − q̃))`.

    No token-wise acceptance with the same `π` keeps more. The code computes the kept mass instead of the ratio `π/q̃`,
    which is 0/0 at temperature 0. Source: Narasimhan et al., 2024, Algorithm 4.
    """

    def __call__(self, pair: LawPair, alpha: Array) -> Acceptance:
        """Returns `min(q̃, π)` and the normalised residual; the residual is `π` if no mass remains."""
        law = self.law(pair, alpha)
        # Without residual mass, π equals q̃ up to rounding. If rounding still causes a rejection, π is used.
        replacement = laws.normalise(jnp.maximum(law - pair.q_tilde, 0.0), law)
        return Acceptance(kept=jnp.minimum(pair.q_tilde, law), replacement=replacement)

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """Returns the rule's `min(q̃, π)` at `tokens` `[...]`."""
        return self.rule.kept_at(pair, alpha, tokens)


@dataclass(frozen=True)
class Deferral(TokenWise):
    """Acceptance that keeps token `v` with probability `1 − r(v)` and draws replacements from `p̃`.

    It gives the same distribution as `Speculative` and keeps fewer tokens. Fuzzy decoding, Big-Little and the oracle
    cascade use it. The rule must have a deferral function `r`.
    """

    def __post_init__(self) -> None:
        if self.rule.deferral is None:
            raise ValueError(f"rule {self.rule.name!r} is not a deferral rule: verify it with Speculative(rule)")

    def __call__(self, pair: LawPair, alpha: Array) -> Acceptance:
        """Returns the mass of `q̃` that the rule does not defer, and `p̃`."""
        assert self.rule.deferral is not None
        kept = laws.undeferred(self.rule.deferral(pair, alpha), pair)
        return Acceptance(kept=kept, replacement=pair.p_tilde)

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """Returns the mass of `q̃` that the rule does not defer, at `tokens` `[...]`."""
        assert self.rule.deferral is not None
        deferred = laws.at_tokens(self.rule.deferral(as_law_pair(pair), alpha), tokens)
        return laws.undeferred(deferred, laws.at_tokens(pair, tokens))[..., 0]


@dataclass(frozen=True)
class SoftRatio(TokenWise):
    """Acceptance with probability `min(1, p̃/q)`, even if the token was not drawn from `q`.

    This is the baseline of Holsman et al., 2025. It is wrong on purpose: unless `q̃` equals `q`, the output does not
    have the target's distribution (docs/methods.md, section 5).
    """

    def __post_init__(self) -> None:
        if self.rule.name != "sd_reference":
            raise ValueError(
                f"acceptance 'soft_ratio' works only with rule 'sd_reference', got {self.rule.name!r}: choose "
                "accept='speculative' for this rule"
            )

    def __call__(self, pair: LawPair, alpha: Array) -> Acceptance:
        """Returns the kept mass and the residual of the ratio `p̃/q`; neither depends on `alpha`."""
        return Acceptance(kept=laws.kept_by_soft_ratio(pair), replacement=laws.soft_residual(pair))

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """Returns, for each of `tokens` `[...]`, the probability `q̃ min(1, p̃/q)` that it is drafted and kept."""
        return laws.kept_by_soft_ratio(laws.at_tokens(pair, tokens))[..., 0]


VERIFIERS: dict[str, Callable[[Rule], Verifier]] = {
    "speculative": Speculative,
    "deferral": Deferral,
    "soft_ratio": SoftRatio,
}
"""The token-wise verifiers by name; a method's `accept` takes these names."""
