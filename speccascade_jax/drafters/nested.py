"""An engine that drafts for another engine: hierarchies of any depth (paper 4, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.checks import whole
from speccascade_jax.core.protocols import DraftRequest
from speccascade_jax.core.types import Array, Cache, Controls, Draft, Params, Prompt, Round
from speccascade_jax.engine.loop import DecodeState, Engine, run_rounds
from speccascade_jax.models.along import catch_up


@dataclass(frozen=True)
class NestedDrafter:
    """Runs `engine` until it holds at least `budget` tokens and hands **all** of them up with their laws.

    Every token, replaced or bonus too, counts as drawn from the inner engine's law, which is what the level above
    divides by. A lossless inner engine hands up its target's raw law as `q`; another one its own law `π`.
    The inner engine reads `controls.inner` and stops where the outer one does.
    """

    engine: Engine
    budget: int

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1)
        if not self.engine.verify_final:
            raise ValueError("an engine that leaves final blocks unverified cannot draft: set its verify_final=True")

    @property
    def block(self) -> int:
        """Overshoot included: the last inner round may add a whole block and its bonus."""
        return self.budget + self.engine.block

    def init(
        self,
        params: Params,
        prompt: Prompt,
        max_len: int,
        max_rollback: int,
        rng: Array,
        example_ids: Array,
        level: int,
    ) -> DecodeState:
        """The inner engine's state, one level down."""
        # its own block may stand behind the outer one's, in its buffers
        room = max_len - prompt.tokens.shape[1] + self.block
        return self.engine.init(params, prompt, rng, example_ids, room, level + 1, taken_back=max_rollback)

    def propose(
        self,
        params: Params,
        state: DecodeState,
        request: DraftRequest,
        target_cache: Cache,
        controls: Controls,
        *,
        complete: bool,
        stop_ids: tuple[int, ...],
    ) -> tuple[Draft, DecodeState, Cache]:
        """Run inner rounds until every row holds its budget, a stop id or its room is reached."""
        assert controls.inner is not None, "a nested drafter needs Controls.inner"
        inner, engine = controls.inner, replace(self.engine, stop_ids=stop_ids)
        behind = jnp.maximum(request.length - 1 - engine.target.consumed(state.target_cache), 0)
        state = self._at(params, state, request)
        begin, goal = state.length, jnp.minimum(self.budget, request.room)
        rows, vocab = begin.shape[0], engine.target.vocab_size
        calls = state.counters.target_calls - behind
        # room for a whole inner block behind the last law: a row that waits writes there, harmlessly
        laws = jnp.zeros((rows, self.block + self.engine.block + 2, vocab), jnp.float32)

        def collect(carry: tuple[Array, Array], turn: Round) -> tuple[Array, Array]:
            raw = turn.pair.p if self.engine.accept.rule.lossless else turn.law
            at = turn.start - begin
            return write_slots(carry[0], raw, at, axis=1), write_slots(carry[1], turn.law, at, axis=1)

        def unfinished(s: DecodeState) -> Array:
            return ~s.done & (s.length - begin < goal)

        state, laws_pair = run_rounds(engine, params, state, inner, unfinished, (laws, laws), collect)
        length, bad = state.length - begin, self._bad(state, begin)
        if complete:
            calls -= ~state.done
            state, laws_pair, unseen = self._peek(params, state, inner, laws_pair, length)
            bad |= unseen[:, None] & (jnp.arange(self.block + 1)[None] == length[:, None])
        draft = Draft(
            tokens=_window(state.tokens, begin, self.block),
            length=length,
            q=laws_pair[0][:, : self.block + 1],
            q_tilde=laws_pair[1][:, : self.block + 1],
            greedy=self._greedy(inner),
            steps=state.counters.target_calls - calls,
            bad=bad,
        )
        return draft, state, target_cache

    def _at(self, params: Params, state: DecodeState, request: DraftRequest) -> DecodeState:
        """The inner state at the outer one's tokens, its caches caught up."""
        width = min(request.tokens.shape[1], state.tokens.shape[1])
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, request.tokens[:, :width], 0, axis=1)
        cache = catch_up(self.engine.target, params["target"], state.target_cache, tokens, request.length)
        return replace(
            state,
            tokens=tokens,
            length=request.length,
            limit=request.length + request.room,
            done=~request.active,
            target_cache=cache,
            failed_at=jnp.full_like(state.failed_at, -1),
        )

    def _peek(
        self, params: Params, state: DecodeState, inner: Controls, collected: tuple[Array, Array], length: Array
    ) -> tuple[DecodeState, tuple[Array, Array], Array]:
        """The inner law at the bonus position (and whether it is unusable): a round whose token nobody draws."""
        no_room = jnp.zeros_like(length)
        reads_q = self.engine.accept.rule.reads_q
        drafted = self.engine.draft(params, state, inner, no_room, complete=reads_q)
        pair, bad, cache = self.engine.score(params, state, drafted, inner, 1, drafted.target_cache)
        law = self.engine.accept.law(pair, inner.alpha[:, None, None])
        raw = pair.p if self.engine.accept.rule.lossless else law
        collected = (write_slots(collected[0], raw, length, axis=1), write_slots(collected[1], law, length, axis=1))
        cache = self.engine.target.rollback(cache, state.length)
        unusable = (bad[:, 0] | (drafted.draft.bad[:, 0] & reads_q)) & ~state.done
        return replace(state, drafter=drafted.drafter, target_cache=cache), collected, unusable

    def _greedy(self, inner: Controls) -> Array:
        """Whether what is handed up is a one-hot everywhere: under a lossy rule a sampled draft shows through."""
        greedy = inner.target.temperature <= 0
        return greedy if self.engine.accept.rule.lossless else greedy & (inner.draft.temperature <= 0)

    def _bad(self, state: DecodeState, begin: Array) -> Array:
        """Non-finite logits inside, at the position they stood."""
        at = state.failed_at.max(-1) - begin
        return (jnp.arange(self.block + 1)[None] == at[:, None]) & (at >= 0)[:, None]

    def commit(self, state: DecodeState, draft: Draft, num_kept: Array, length: Array) -> DecodeState:
        """Roll every inner cache back to what the outer engine kept."""
        target = self.engine.target
        consumed = jnp.minimum(target.consumed(state.target_cache), length - 1)
        return replace(
            state,
            length=length,
            target_cache=target.rollback(state.target_cache, consumed),
            drafter=self.engine.drafter.commit(state.drafter, draft, num_kept, length),
        )

    def stats(self, state: DecodeState) -> Any:
        """The inner engine's counters, and those further in."""
        return {"counters": state.counters, "inner": self.engine.drafter.stats(state.drafter)}


def _window(tokens: Array, begin: Array, width: int) -> Array:
    """int32 `[B, width]`: the tokens from `begin[b]` on."""
    return jnp.take_along_axis(tokens, begin[:, None] + jnp.arange(width)[None], axis=1)
