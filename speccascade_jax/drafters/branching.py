"""A language model that drafts a tree: several tokens behind each, level by level (METHODS section 10)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.protocols import BranchingModel, Outcome, Request, Start
from speccascade_jax.core.sampling import log_laws, raw_and_scaled, sample
from speccascade_jax.core.trees import Tree, without
from speccascade_jax.core.types import Array, Cache, Draft, Laws, Params
from speccascade_jax.models.teacher_forcing import catch_up


@dataclass(frozen=True)
class BranchingDrafter:
    """Drafts `tree` with `model`; parameters are `{"model": …}`.

    A node's children are drawn one after the other without replacement: each from the law behind the node without those
    before it, normalised (`core.trees.without`). A level is one call of the model. The last one is fed only where the
    law behind it is asked for.
    """

    model: BranchingModel
    tree: Tree
    adaptive: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False

    @property
    def block(self) -> int:
        """The tree's tokens."""
        return self.tree.size

    def init(self, params: Params, start: Start) -> Cache:
        return self.model.prefill(params["model"], start.prompt, start.slots, None)

    def propose(self, params: Params, state: Cache, request: Request) -> tuple[Draft, Cache, Cache]:
        """Draw the whole tree; rows without room get none."""
        own, behind = params["model"], jnp.maximum(request.length - 1 - self.model.consumed(state), 0)
        cache = catch_up(self.model, own, state, request.tokens, request.length, request.active)
        before = self.model.consumed(cache)
        rows = request.active & ((request.room > 0) | request.complete)
        draws = request.active & (request.room > 0)
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)
        draft, levels = self._empty(request, draws), self.tree.depth + request.complete
        entries = jnp.concatenate([pending, draft.tokens], axis=1)
        nodes = jnp.broadcast_to(jnp.arange(self.block, dtype=jnp.int32), draft.tokens.shape)
        uniforms = request.keys.uniform(nodes, rngs.DRAFT)
        for depth in range(levels):
            first, end = self.tree.level(depth)
            logits, cache = self._fed(own, cache, entries[:, first:end], first, end)
            draft, laws = self._record(draft, logits, request, first)
            entries = self._drawn(entries, laws, uniforms, first, end)
        cache = self.model.rollback(cache, jnp.where(rows, self.model.consumed(cache), before))
        steps = jnp.where(rows, levels, 0) + jnp.where(request.active, behind, 0)
        return replace(draft, tokens=entries[:, 1:], steps=steps), cache, request.target.cache

    def _empty(self, request: Request, draws: Array) -> Draft:
        rows = request.length.shape[0]
        return Draft(
            tokens=jnp.zeros((rows, self.block), jnp.int32),
            length=jnp.where(draws, self.tree.depth, 0),
            q=request.block.q,
            q_tilde=request.block.q_tilde,
            greedy=request.controls.draft.temperature <= 0,
            steps=jnp.zeros((rows,), jnp.int32),
            bad=jnp.zeros((rows, self.block + 1), bool),
            logs=request.block.logs,
            spent=jnp.where(draws, self.block, 0),
        )

    def _fed(self, params: Params, cache: Cache, tokens: Array, first: int, end: int) -> tuple[Array, Cache]:
        """Logits `[B, T, V]` behind entries of a level."""
        if first == 0:
            out, cache = self.model.extend(params, cache, tokens)
        else:
            out, cache = self.model.extend_branch(params, cache, tokens, self.tree.branch(first, end))
        return out.logits[..., : self.model.vocab_size], cache

    def _record(self, draft: Draft, logits: Array, request: Request, first: int) -> tuple[Draft, Laws]:
        """The draft with the laws behind entries of a level, and those laws."""
        with jax.named_scope("sampling"):
            q, q_tilde, _ = raw_and_scaled(logits, request.controls.draft)
        laws = Laws(q, q_tilde)
        if draft.logs is not None:
            laws = replace(laws, logs=log_laws(logits, q_tilde, request.controls.draft))

        def write(held: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(held, new, first, axis=1)

        written: Laws = jax.tree.map(write, draft.laws, laws)
        bad = write(draft.bad, ~jnp.isfinite(logits.max(-1)))
        return replace(draft, q=written.q, q_tilde=written.q_tilde, logs=written.logs, bad=bad), laws

    def _drawn(self, entries: Array, laws: Laws, uniforms: Array, first: int, end: int) -> Array:
        """The entries with the children of a level's."""
        children, taken = self.tree.children[first:end], jnp.zeros(laws.q.shape, bool)
        for turn in range(children.shape[1]):
            there = np.flatnonzero(children[:, turn])  # of the level's entries, those with so many children
            if not len(there):
                break
            at = children[there, turn]
            with jax.named_scope("sampling"):
                law = without(laws.q_tilde[:, there], laws.q[:, there], taken[:, there])
                tokens = sample(law, uniforms[:, at - 1])
            entries = entries.at[:, at].set(tokens)
            taken = taken.at[:, there].set(taken[:, there] | (jnp.arange(laws.q.shape[-1]) == tokens[..., None]))
        return entries

    def commit(self, params: Params, state: Cache, outcome: Outcome) -> Cache:
        """The cache with the path that was kept, as far as it was fed."""
        assert outcome.path is not None, "a drafter of trees needs the path that was kept"
        before, consumed = outcome.length - outcome.num_new, self.model.consumed(state)
        last, _ = self.tree.level(self.tree.depth)
        deepest = jnp.where(consumed - (before - 1) > last, self.tree.depth, self.tree.depth - 1)
        cache = self.model.keep(state, before - 1, outcome.path[:, : self.tree.depth + 1])
        kept = before + jnp.minimum(outcome.num_kept, deepest)
        return self.model.rollback(cache, jnp.minimum(jnp.where(outcome.active, kept, consumed), outcome.length - 1))

    def stats(self, state: Cache) -> Any:
        return None
