"""Block verification, which accepts the tokens of a block jointly (docs/methods.md, section 10)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.types import Array, Draft, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.rule import Rule
from speccascade_jax.rules.verification import Verifier, at_position, entry_at


@dataclass(frozen=True)
class BlockWise(Speculative):
    """Joint verification of a block, which keeps the largest possible number of tokens on average (Sun et al., 2025).

    The paper states this for the target distribution `p`. It also holds for `π`, because the proof needs only two
    distributions per position: that of the token given its prefix, and that from which the draft token was drawn. So
    any rule and any stop policy can be used.

    Let `P_0 = 1` and `P_i = min(1, P_{i−1} π_i(x_i)/q̃_i(x_i))`, the probability of keeping at least `i` tokens, given
    `x_1 … x_i`. The algorithm goes from the block's end, where `h_G = P_G`, towards its beginning. At each `i` it
    keeps all tokens up to `x_i`, and stops, with probability `h_i = left_i / (left_i + 1 − P_i)`, where
    `left_i = Σ_v max(0, P_i π_{i+1}(v) − q̃_{i+1}(v))`. The next token is drawn from the terms of this sum, normalised.
    `h_i` is at most `P_i`, and it is 1 if `P_i` is 1. So the sum over the vocabulary is needed only if the uniform
    number `u_i` is below `P_i < 1`, and only until some `i` is accepted.

    With a one-hot `q̃`, the probabilities of keeping `i` tokens are those of token-wise verification, so nothing is
    gained. At temperature 0 the tokens are equal too.
    """

    joint: ClassVar[bool] = True

    def _kept(self, pair: LawPair, law: Array, draft: Draft, keys: rngs.RoundKeys, alpha: Array) -> tuple[Array, Array]:
        """Returns how many tokens are kept: the largest `i` with `u_i < h_i`, int32 `[B]`; and `P_i`, float32 `[B]`."""
        batch, block = draft.tokens.shape
        slots = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32), (batch, block))
        uniforms = jnp.pad(keys.uniform(slots, rngs.ACCEPT), [(0, 0), (1, 0)])  # u_i uses the random bits of x_i's slot
        reached = self._reached(pair, law, draft, alpha, uniforms)
        # `likely` counts the tokens before the first P_i that is 0 or NaN, because no later token can be kept
        likely = jnp.cumprod(reached[:, 1:] > 0, -1).sum(-1).astype(jnp.int32)
        # left_i <= P_i gives h_i <= P_i, so u_i >= P_i excludes an i without a sum over the vocabulary
        places = jnp.where(uniforms < reached, jnp.arange(block + 1, dtype=jnp.int32), 0)
        nearest = jax.lax.cummax(places, axis=1)

        def settled(kept: Array) -> Array:
            return (entry_at(reached, kept) >= 1) | (kept == draft.length)

        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            kept, done = carry
            with jax.named_scope("rule"):
                here = at_position(pair, kept)
                rule_law = self._law_at(here, law, kept, alpha)
                chance = self._chance(here, rule_law, entry_at(reached, kept))
            # if the chance is NaN, the block ends here, so that the engine finds the NaN at the next position
            keeps = done | ~(entry_at(uniforms, kept) >= chance)
            kept = jnp.where(keeps, kept, entry_at(nearest, jnp.maximum(kept - 1, 0)))
            return kept, keeps | settled(kept)

        begin = entry_at(nearest, likely)
        kept, _ = jax.lax.while_loop(lambda carry: ~carry[1].all(), body, (begin, settled(begin)))
        return kept, entry_at(reached, kept)

    @property
    def _bounded(self) -> bool:
        """Whether the rule defines both `kept` and `at_most`, cheap bounds that often determine `π` at a token."""
        return self.rule.kept is not None and self.rule.at_most is not None

    @property
    def _solved(self) -> bool:
        """Whether computing `π` at one token costs as much as at all tokens; `π` is then computed once for all."""
        return self.rule.deferral is None and not self.rule.lossless and not self._bounded

    def _law_at(self, here: LawPair, law: Array, position: Array, alpha: Array) -> Array:
        if self._solved:
            return jnp.take_along_axis(law, position[:, None, None], axis=1)[:, 0]
        return super()._law_at(here, law, position, alpha)

    def _reached(self, pair: LawPair, law: Array, draft: Draft, alpha: Array, uniforms: Array) -> Array:
        """Returns `P_0 … P_G`, float32 `[B, G + 1]`; 0 after the end of a row's block.

        If the uniform numbers `u_0 … u_G` exclude that `i` or more tokens are kept, entry `i` may be less than `P_i`.
        """
        block = draft.tokens.shape[1]
        tokens = jnp.pad(draft.tokens, [(0, 0), (0, 1)])
        within = jnp.arange(block)[None] < draft.length[:, None]
        with jax.named_scope("rule"):
            if self._bounded:
                return self._reached_by_bounds(pair, tokens, within, alpha, uniforms)
            if self._solved:
                law_at = laws.at_tokens(law, tokens)[..., 0]
            else:
                law_at = self.rule.law_at(pair, alpha[:, None, None], tokens)
        drawn_at = laws.at_tokens(pair.q_tilde, tokens)[..., 0]
        return _chances_of(jnp.where(within, law_at[:, :block] / drawn_at[:, :block], 0.0))

    def _reached_by_bounds(self, pair: LawPair, tokens: Array, within: Array, alpha: Array, uniforms: Array) -> Array:
        """Computes `_reached` for rules that give `min(q̃, π)` and an upper bound of `π` at a single token.

        If `min(q̃, π)` is below `q̃`, then it equals `π`. Otherwise `π >= q̃`, and if the upper bound is at most `q̃`,
        then `π = q̃`. If only `π >= q̃` is known, this suffices if `P_{i−1} = 1`, or if no token from `x_i` on can be
        kept. In all other cases `π` is computed.
        """
        assert self.rule.kept is not None and self.rule.at_most is not None
        if not within.shape[1]:
            return jnp.ones_like(alpha)[:, None]
        chosen, row_alpha = laws.at_tokens(pair, tokens), alpha[:, None, None]
        drawn = chosen.q_tilde[..., 0]
        kept, most = (bound(chosen, row_alpha)[..., 0] for bound in (self.rule.kept, self.rule.at_most))
        full = kept >= drawn  # masses are compared, because on some devices a quotient a / a is below 1
        known = (~full | (most <= drawn))[:, :-1] | ~within  # a NaN counts as known
        low, high = jnp.where(full, 1.0, kept / drawn), most / drawn
        low, high = (jnp.where(within, ratio[:, :-1], 0.0) for ratio in (low, high))

        def asked(ratio: Array, known: Array) -> Array:
            """Returns where `π` must be computed, bool `[B, G]`; only the first position of each row is used."""
            may_be_kept = uniforms < _chances_of(jnp.where(known, ratio, high))
            wanted = jax.lax.cummax(may_be_kept[:, 1:].astype(jnp.int32), axis=1, reverse=True) > 0
            return ~known & wanted & (_chances_of(ratio)[:, :-1] < 1)

        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            ratio, known = carry
            open_ = asked(ratio, known)
            first = jnp.argmax(open_, axis=1)
            law = self.law(at_position(pair, first), alpha[:, None])
            exact = laws.at_tokens(law, entry_at(tokens, first))[:, 0] / entry_at(drawn, first)
            here = open_ & (jnp.arange(known.shape[1])[None] == first[:, None])
            return jnp.where(here, exact[:, None], ratio), known | here

        ratio, _ = jax.lax.while_loop(lambda carry: asked(*carry).any(), body, (low, known))
        return _chances_of(ratio)

    def _chance(self, after: LawPair, law: Array, reached: Array) -> Array:
        """Returns `h_i` of the algorithm above, float32 `[B]`, from the distributions `[B, V]` after `x_i`."""
        remaining = self._mass(after, law, reached).sum(-1)
        total = remaining + (1.0 - reached)
        return jnp.where(total == 0, 1.0, remaining / jnp.where(total == 0, 1.0, total))

    def _mass(self, after: LawPair, law: Array, reached: Array) -> Array:
        return jnp.maximum(reached[:, None] * law - after.q_tilde, 0.0)

    def _replacement(self, last: LawPair, law: Array, alpha: Array, reached: Array) -> Array:
        """Returns `norm(max(0, P_i π − q̃))`, or `π` if the mass is 0, which only rounding can cause."""
        return laws.normalise(self._mass(last, law, reached), law)


def _chances_of(ratio: Array) -> Array:
    """Computes `P_0 … P_G`, `[B, G + 1]`, from the ratios `π_i(x_i)/q̃_i(x_i)` `[B, G]`."""
    reached = [jnp.ones(ratio.shape[:1], ratio.dtype)]
    for i in range(ratio.shape[1]):
        reached.append(jnp.minimum(1.0, reached[-1] * ratio[:, i]))
    return jnp.stack(reached, axis=1)


JOINT: dict[str, Callable[[Rule], Verifier]] = {"block": BlockWise}
"""The joint verifiers by name; a method's `verify` takes these names in addition to "token"."""
