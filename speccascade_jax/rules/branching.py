"""Verifying a tree of drafts: sibling after sibling, then their children (METHODS section 10)."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.trees import Tree, without
from speccascade_jax.core.types import Array, Draft, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.verification import (
    Verdict,
    at_position,
    draw_behind,
    entry_at,
    from_target,
    with_targets_law,
)


class _Walk(NamedTuple):
    """Where each row stands: `entry` int32 `[B]`; `kept` `[B]`, tokens so far; `path` `[B, N + 1]`, their entries.

    `walking` bool `[B]`; `rejected` bool `[B]`; `law` float32 `[B, V]`, of the token behind the path, where it ended.
    """

    entry: Array
    kept: Array
    path: Array
    walking: Array
    rejected: Array
    law: Array


@dataclass(frozen=True)
class BranchWise(Speculative):
    """Keep a path of `tree`, exactly under any rule whose `π` is a function of the path alone.

    At an entry with children `x^1, x^2, …`, each drawn from `q̃` without those before it: keep `x^1` with probability
    `min(1, π/q̃)`, else put `norm(max(0, π − q̃))` in `π`'s place and try the next; after the last, draw from what `π`
    has become. Recursive rejection over siblings, each with its exact residual (Jeon et al., 2024; Yang et al., 2024).
    """

    tree: Tree

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """As of `TokenWise.verify`, with the path; laws over the tree's entries `[B, N + 1, V]`."""
        (rows, size), vocab_size = draft.tokens.shape, pair.p.shape[-1]
        slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
        uniforms, none = keys.uniform(slots, rngs.ACCEPT), jnp.zeros((rows,), jnp.int32)
        begin = _Walk(
            entry=none,
            kept=none,
            path=jnp.zeros((rows, size + 1), jnp.int32),
            walking=none == 0,
            rejected=none > 0,
            law=jnp.zeros((rows, vocab_size), jnp.float32),
        )

        def further(walk: _Walk) -> _Walk:
            return self._level(walk, pair, draft, uniforms, alpha)

        end = jax.lax.while_loop(lambda walk: walk.walking.any(), further, begin)
        theirs, final_law = from_target(draft, bonus), end.law
        with jax.named_scope("rule"):
            law = self.law(pair, alpha[:, None, None])
        if theirs is not None:
            theirs &= ~end.rejected
            final_law = jnp.where(theirs[:, None], at_position(pair, end.entry).p_tilde, final_law)
            law = with_targets_law(law, pair, end.entry, theirs)
        final = draw_behind(final_law, keys, end.entry, end.rejected)
        return Verdict(end.kept, end.rejected, final, law, end.path)

    def _level(self, walk: _Walk, pair: LawPair, draft: Draft, uniforms: Array, alpha: Array) -> _Walk:
        """Every walking row's children, one after the other."""
        here = at_position(pair, walk.entry)
        with jax.named_scope("rule"):
            left = self.law(here, alpha[:, None])
        children = jnp.asarray(self.tree.children)[walk.entry]
        found, taken = jnp.zeros_like(walk.entry), jnp.zeros(left.shape, bool)
        drawn = walk.walking & (draft.length > 0)
        for turn in range(children.shape[1]):
            child = children[:, turn]
            tried = drawn & (child > 0) & (found == 0)
            node = jnp.maximum(child - 1, 0)
            token, uniform = entry_at(draft.tokens, node), entry_at(uniforms, node)
            proposed = without(here.q_tilde, here.q, taken)
            kept_at = laws.at_tokens(jnp.minimum(proposed, left), token)[:, 0]
            keeps = tried & (uniform * laws.at_tokens(proposed, token)[:, 0] < kept_at)
            found = jnp.where(keeps, child, found)
            residual = laws.normalise(jnp.maximum(left - proposed, 0.0), left)
            left = jnp.where((tried & ~keeps)[:, None], residual, left)
            taken |= (jnp.arange(left.shape[-1])[None] == token[:, None]) & tried[:, None]
        goes_on = walk.walking & (found > 0)
        ends = walk.walking & (found == 0)
        kept = walk.kept + goes_on
        at = jnp.arange(walk.path.shape[1])[None] == kept[:, None]
        return _Walk(
            entry=jnp.where(goes_on, found, walk.entry),
            kept=kept,
            path=jnp.where(at & goes_on[:, None], found[:, None], walk.path),
            walking=goes_on,
            rejected=walk.rejected | (ends & drawn & (children[:, 0] > 0)),
            law=jnp.where(ends[:, None], left, walk.law),
        )
