"""Verification of a tree of drafts, which tries siblings in turn and then the children of the accepted one.

Source: docs/methods.md, section 10.
"""

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
    """The progress of each row's verification through the tree, along one path from the root.

    Attributes:
        entry: int32 `[B]`, the tree entry that the row has reached.
        kept: int32 `[B]`, the number of tokens kept so far.
        path: int32 `[B, N + 1]`, entry 0 and the entries of the kept tokens.
        walking: bool `[B]`, whether the row's path may still grow; False after the last kept token.
        rejected: bool `[B]`, whether all children of the path's last entry were rejected.
        law: float32 `[B, V]`, the distribution of the token after the path; meaningless while the path may grow.
    """

    entry: Array
    kept: Array
    path: Array
    walking: Array
    rejected: Array
    law: Array


@dataclass(frozen=True)
class BranchWise(Speculative):
    """Verification that keeps one path of `tree`; it is exact under any rule whose `π` depends on the path alone.

    An entry has children `x^1, x^2, …`, each drawn from `q̃` without its earlier siblings. `x^1` is kept with
    probability `min(1, π/q̃)`; otherwise `norm(max(0, π − q̃))` replaces `π` and the next child is tried. After the
    last child the token is drawn from the remaining `π`. This is recursive rejection over siblings, each with its exact
    residual (Jeon et al., 2024; Yang et al., 2024).
    """

    tree: Tree

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """Verifies the `N + 1` entries of a tree, as `TokenWise.verify` does a block; the verdict also has the path."""
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
        from_p, final_law = from_target(draft, bonus), end.law
        with jax.named_scope("rule"):
            law = self.law(pair, alpha[:, None, None])
        if from_p is not None:
            from_p &= ~end.rejected
            final_law = jnp.where(from_p[:, None], at_position(pair, end.entry).p_tilde, final_law)
            law = with_targets_law(law, pair, end.entry, from_p)
        final = draw_behind(final_law, keys, end.entry, end.rejected)
        return Verdict(end.kept, end.rejected, final, law, end.path)

    def _level(self, walk: _Walk, pair: LawPair, draft: Draft, uniforms: Array, alpha: Array) -> _Walk:
        """Tries the children of the entry that each row has reached, one after the other; keeps at most one of them."""
        here = at_position(pair, walk.entry)
        with jax.named_scope("rule"):
            target_law = self.law(here, alpha[:, None])
        children = jnp.asarray(self.tree.children)[walk.entry]
        kept_child, taken = jnp.zeros_like(walk.entry), jnp.zeros(target_law.shape, bool)
        drawn = walk.walking & (draft.length > 0)
        for turn in range(children.shape[1]):
            child = children[:, turn]
            tried = drawn & (child > 0) & (kept_child == 0)
            node = jnp.maximum(child - 1, 0)
            token, uniform = entry_at(draft.tokens, node), entry_at(uniforms, node)
            proposed = without(here.q_tilde, here.q, taken)
            kept_at = laws.at_tokens(jnp.minimum(proposed, target_law), token)[:, 0]
            keeps = tried & (uniform * laws.at_tokens(proposed, token)[:, 0] < kept_at)
            kept_child = jnp.where(keeps, child, kept_child)
            residual = laws.normalise(jnp.maximum(target_law - proposed, 0.0), target_law)
            target_law = jnp.where((tried & ~keeps)[:, None], residual, target_law)
            taken |= (jnp.arange(target_law.shape[-1])[None] == token[:, None]) & tried[:, None]
        goes_on = walk.walking & (kept_child > 0)
        ends = walk.walking & (kept_child == 0)
        kept = walk.kept + goes_on
        path_slot = jnp.arange(walk.path.shape[1])[None] == kept[:, None]
        return _Walk(
            entry=jnp.where(goes_on, kept_child, walk.entry),
            kept=kept,
            path=jnp.where(path_slot & goes_on[:, None], kept_child[:, None], walk.path),
            walking=goes_on,
            rejected=walk.rejected | (ends & drawn & (children[:, 0] > 0)),
            law=jnp.where(ends[:, None], target_law, walk.law),
        )
