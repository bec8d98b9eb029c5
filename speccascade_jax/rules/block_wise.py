"""Block verification: a block's tokens are accepted jointly (METHODS section 10; docs/methods.md)."""

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
    """Keep as much of a block as the law allows: no verification keeps more in expectation (Sun et al., 2025).

    Written for `p` in their paper; `π` takes its place, for all it needs is the law that each position's token obeys
    given its prefix, and the one that its draft was drawn from. Any rule fits, and blocks of any stopping time.

    With `P_0 = 1`, `P_i = min(1, P_{i−1} π_i(x_i)/q̃_i(x_i))` is the chance to keep at least `i` tokens, given `x_1 …
    x_i`. From the block's end, where `h_G = P_G`, it is asked at each `i` whether all up to `x_i` are kept, with chance
    `h_i = left_i / (left_i + 1 − P_i)`, `left_i = Σ_v max(0, P_i π_{i+1}(v) − q̃_{i+1}(v))`; behind them the next token
    comes from that mass, normalised. `h_i` is at most `P_i`, and 1 where that is 1: only where `u_i < P_i < 1` is a sum
    taken over the vocabulary, and only until one is kept.

    A one-hot `q̃` gains nothing: the chances to keep `i` tokens are token-wise's. At temperature 0 so are the tokens.
    """

    joint: ClassVar[bool] = True

    def _kept(self, pair: LawPair, law: Array, draft: Draft, keys: rngs.RoundKeys, alpha: Array) -> tuple[Array, Array]:
        """The largest `i` with `u_i < h_i`, int32 `[B]`, and `P_i` there, float32 `[B]`."""
        batch, block = draft.tokens.shape
        slots = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32), (batch, block))
        uniforms = jnp.pad(keys.uniform(slots, rngs.ACCEPT), [(0, 0), (1, 0)])  # u_i, drawn in the slot of x_i
        reached = self._reached(pair, law, draft, alpha, uniforms)
        # nor do logits that are not finite let anything behind them be kept
        likely = jnp.cumprod(reached[:, 1:] > 0, -1).sum(-1).astype(jnp.int32)
        # h_i <= P_i, for left_i <= P_i: the i's that need not be asked at are told without a sum
        places = jnp.where(uniforms < reached, jnp.arange(block + 1, dtype=jnp.int32), 0)
        nearest = jax.lax.cummax(places, axis=1)

        def settled(kept: Array) -> Array:
            return (entry_at(reached, kept) >= 1) | (kept == draft.length)

        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            kept, done = carry
            with jax.named_scope("rule"):
                here = at_position(pair, kept)
                own = self._law_at(here, law, kept, alpha)
                chance = self._chance(here, own, entry_at(reached, kept))
            # a chance that is no number ends the block before what it is from, where the engine finds it
            keeps = done | ~(entry_at(uniforms, kept) >= chance)
            kept = jnp.where(keeps, kept, entry_at(nearest, jnp.maximum(kept - 1, 0)))
            return kept, keeps | settled(kept)

        begin = entry_at(nearest, likely)
        kept, _ = jax.lax.while_loop(lambda carry: ~carry[1].all(), body, (begin, settled(begin)))
        return kept, entry_at(reached, kept)

    @property
    def _bounded(self) -> bool:
        """Whether two entries often tell `π` at a token: it is then made only at positions where they do not."""
        return self.rule.kept is not None and self.rule.at_most is not None

    @property
    def _solved(self) -> bool:
        """Whether the law at one token costs as much as all of it: it is then made once, of every position."""
        return self.rule.deferral is None and not self.rule.lossless and not self._bounded

    def _law_at(self, here: LawPair, law: Array, at: Array, alpha: Array) -> Array:
        if self._solved:
            return jnp.take_along_axis(law, at[:, None, None], axis=1)[:, 0]
        return super()._law_at(here, law, at, alpha)

    def _reached(self, pair: LawPair, law: Array, draft: Draft, alpha: Array, uniforms: Array) -> Array:
        """`P_0 … P_G`, float32 `[B, G + 1]`; 0 behind a row's block.

        Where no more than `i − 1` tokens can be kept by `uniforms`, `u_0 … u_G`, it may be less than `P_i`.
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
        """As `_reached`, where `min(q̃, π)` and a bound of `π` are known of a token alone.

        Below `q̃` the former is `π`; where the bound is no more than `q̃` neither is `π`, nor less. Else `π >= q̃` is
        all that is known of the ratio: enough where `P_{i−1} = 1`, and where nothing from `x_i` on may be kept.
        """
        assert self.rule.kept is not None and self.rule.at_most is not None
        if not within.shape[1]:
            return jnp.ones_like(alpha)[:, None]
        chosen, each = laws.at_tokens(pair, tokens), alpha[:, None, None]
        drawn = chosen.q_tilde[..., 0]
        kept, most = (bound(chosen, each)[..., 0] for bound in (self.rule.kept, self.rule.at_most))
        full = kept >= drawn  # masses, not quotients: on some devices a / a falls short of 1
        told = (~full | (most <= drawn))[:, :-1] | ~within  # what is no number is, too
        low, high = jnp.where(full, 1.0, kept / drawn), most / drawn
        low, high = (jnp.where(within, ratio[:, :-1], 0.0) for ratio in (low, high))

        def asked(ratio: Array, told: Array) -> Array:
            """Where `π` must be made, bool `[B, G]`; only each row's first such place is used."""
            may_be_kept = uniforms < _chances_of(jnp.where(told, ratio, high))
            wanted = jax.lax.cummax(may_be_kept[:, 1:].astype(jnp.int32), axis=1, reverse=True) > 0
            return ~told & wanted & (_chances_of(ratio)[:, :-1] < 1)

        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            ratio, told = carry
            open_ = asked(ratio, told)
            first = jnp.argmax(open_, axis=1)
            law = self.law(at_position(pair, first), alpha[:, None])
            exact = laws.at_tokens(law, entry_at(tokens, first))[:, 0] / entry_at(drawn, first)
            here = open_ & (jnp.arange(told.shape[1])[None] == first[:, None])
            return jnp.where(here, exact[:, None], ratio), told | here

        ratio, _ = jax.lax.while_loop(lambda carry: asked(*carry).any(), body, (low, told))
        return _chances_of(ratio)

    def _chance(self, after: LawPair, law: Array, reached: Array) -> Array:
        """`h_i`, float32 `[B]`, of the laws `[B, V]` behind `x_i`."""
        left = self._mass(after, law, reached).sum(-1)
        total = left + (1.0 - reached)
        return jnp.where(total == 0, 1.0, left / jnp.where(total == 0, 1.0, total))

    def _mass(self, after: LawPair, law: Array, reached: Array) -> Array:
        return jnp.maximum(reached[:, None] * law - after.q_tilde, 0.0)

    def _replacement(self, last: LawPair, law: Array, alpha: Array, reached: Array) -> Array:
        """`norm(max(0, P_i π − q̃))`; no mass at all means that nothing was rejected, but for rounding."""
        return laws.normalise(self._mass(last, law, reached), law)


def _chances_of(ratio: Array) -> Array:
    """`P_0 … P_G`, `[B, G + 1]`, of `π_i(x_i)/q̃_i(x_i)` `[B, G]`."""
    reached = [jnp.ones(ratio.shape[:1], ratio.dtype)]
    for i in range(ratio.shape[1]):
        reached.append(jnp.minimum(1.0, reached[-1] * ratio[:, i]))
    return jnp.stack(reached, axis=1)


JOINT: dict[str, Callable[[Rule], Verifier]] = {"block": BlockWise}
"""Name -> what a method's `verify` is called by, beside "token"."""
