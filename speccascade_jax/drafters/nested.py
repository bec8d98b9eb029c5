"""An engine that drafts for another engine: hierarchies of any depth (paper 4, Algorithm 1)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.checks import whole
from speccascade_jax.core.protocols import Outcome, Request, Start
from speccascade_jax.core.types import Array, Cache, Controls, Draft, LawPair, Laws, Params, Round
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.loop import run_rounds
from speccascade_jax.models.teacher_forcing import catch_up


@dataclass(frozen=True)
class NestedDrafter:
    """Runs `engine` until it holds at least `budget` tokens and hands **all** of them up with their laws.

    Every token, replaced or bonus too, counts as drawn from the inner engine's law, which is what the level above
    divides by. A lossless inner engine hands up its target's raw law as `q`; another one its own law `π`.
    The inner engine reads `controls.inner[arm]` and stops where the outer one does.

    Attributes:
        arm: its place among the engines that draft for the same one by turns.
        catches_up: how many tokens the inner model is fed at once where it has missed some (`ModelDrafter`).
    """

    engine: Engine
    budget: int
    arm: int = 0
    catches_up: int = 1
    reads_features: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1)
        if not self.engine.verify_final:
            raise ValueError("an engine that leaves final blocks unverified cannot draft: set its verify_final=True")
        if self.engine.tree is not None:
            raise ValueError("an engine whose drafts branch cannot draft: give its drafter a block size")
        if self.engine.planner is not None:
            raise ValueError("an engine that plans its blocks cannot draft: give its drafter a block size")
        if self.engine.layers:
            # the engine above takes tokens back and commits others, which `catch_up` feeds without reading any states
            name = type(self.engine.drafter).__name__
            raise ValueError(f"{name} reads the target's hidden states: it drafts for the target only, not in a level")

    @property
    def block(self) -> int:
        """Overshoot included: the last inner round may add a whole block and its bonus."""
        return self.budget + self.engine.block

    @property
    def adaptive(self) -> bool:
        """Whether blocks inside end early."""
        return self.engine.drafter.adaptive

    def init(self, params: Params, start: Start) -> DecodeState:
        """The inner engine's state, one level down."""
        # its own block may stand behind the outer one's, in its buffers
        room = start.slots - start.prompt.tokens.shape[1] + self.block
        level = rngs.below(start.level, self.arm)
        return self.engine.init(
            params, start.prompt, start.rng, start.example_ids, room, level, taken_back=start.max_rollback
        )

    def propose(self, params: Params, state: DecodeState, request: Request) -> tuple[Draft, DecodeState, Cache]:
        """Run inner rounds until every row holds its budget, a stop id or its room is reached."""
        assert len(request.controls.inner) > self.arm, "a nested drafter needs its Controls.inner"
        inner, engine = request.controls.inner[self.arm], replace(self.engine, stop_ids=request.stop_ids)
        missed = jnp.maximum(request.length - 1 - engine.target.consumed(state.target_cache), 0)
        behind = -(-missed // self.catches_up)
        state = self._at(params, state, request)
        begin, goal = state.length, jnp.minimum(self.budget, request.room)
        calls = state.counters.target_calls - jnp.where(request.active, behind, 0)

        def collect(held: Laws, turn: Round) -> Laws:
            return put_laws(held, self._handed(turn.pair, turn.law, held), turn.start - begin, turn.active)

        def unfinished(s: DecodeState) -> Array:
            return ~s.done & (s.length - begin < goal)

        state, held = run_rounds(engine, params, state, inner, unfinished, request.block, collect)
        length, bad = state.length - begin, self._bad(state, begin)
        if request.complete:
            calls -= ~state.done
            state, held, unseen = self._peek(params, state, inner, held, length)
            bad |= unseen[:, None] & (jnp.arange(self.block + 1)[None] == length[:, None])
        draft = Draft(
            tokens=jnp.take_along_axis(state.tokens, begin[:, None] + jnp.arange(self.block)[None], axis=1),
            length=length,
            q=held.q,
            q_tilde=held.q_tilde,
            logs=held.logs,
            greedy=self._greedy(inner),
            steps=state.counters.target_calls - calls,
            bad=bad,
        )
        return draft, state, request.target.cache

    def _at(self, params: Params, state: DecodeState, request: Request) -> DecodeState:
        """The inner state at the outer one's tokens, its caches caught up."""
        width = min(request.tokens.shape[1], state.tokens.shape[1])
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, request.tokens[:, :width], 0, axis=1)
        cache = catch_up(
            self.engine.target, params["target"], state.target_cache, tokens, request.length, request.active,
            block=self.catches_up,
        )  # fmt: skip
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
        self, params: Params, state: DecodeState, inner: Controls, held: Laws, length: Array
    ) -> tuple[DecodeState, Laws, Array]:
        """The inner law at the bonus position (and whether it is unusable): a round whose token nobody draws."""
        verifier, no_room = self.engine.verifier, jnp.zeros_like(length)
        drafted = self.engine.draft(params, state, inner, no_room, complete=verifier.reads_q)
        pair, bad, *_, cache = self.engine.score(params, state, drafted, inner, 1, drafted.target_cache)
        law = verifier.law(pair, inner.alpha[:, None, None])
        held = put_laws(held, self._handed(pair, law, held), length, ~state.done)
        cache = self.engine.target.rollback(cache, state.length)
        unusable = (bad[:, 0] | (drafted.draft.bad[:, 0] & verifier.reads_q)) & ~state.done
        return replace(state, drafter=drafted.drafter, laws=drafted.draft.laws, target_cache=cache), held, unusable

    def _handed(self, pair: LawPair, law: Array, held: Laws) -> Laws:
        """What the level above reads as raw, what it divides by, and the logs of both if it has room for them."""
        lossless = self.engine.verifier.lossless
        laws = Laws(pair.p if lossless else law, law)
        if held.logs is None:
            return laws
        logs = Laws(pair.log("p"), pair.log("p_tilde")) if lossless else Laws(jnp.log(law), jnp.log(law))
        return replace(laws, logs=logs)

    def _greedy(self, inner: Controls) -> Array:
        """Whether what is handed up is a one-hot everywhere: under a lossy rule a sampled draft shows through."""
        greedy = inner.target.temperature <= 0
        return greedy if self.engine.verifier.lossless else greedy & (inner.draft.temperature <= 0)

    def _bad(self, state: DecodeState, begin: Array) -> Array:
        """Non-finite logits inside, at the position they stood."""
        at = state.failed_at.max(-1) - begin
        return (jnp.arange(self.block + 1)[None] == at[:, None]) & (at >= 0)[:, None]

    def commit(self, params: Params, state: DecodeState, outcome: Outcome) -> DecodeState:
        """Roll every inner cache back to what the outer engine kept."""
        target = self.engine.target
        consumed = jnp.minimum(target.consumed(state.target_cache), outcome.length - 1)
        return replace(
            state,
            length=outcome.length,
            target_cache=target.rollback(state.target_cache, consumed),
            # the features are those of the model above
            drafter=self.engine.round_drafter.commit(params["drafter"], state.drafter, replace(outcome, features=None)),
        )

    def stats(self, state: DecodeState) -> Any:
        """The inner engine's counters, and those further in."""
        return {"counters": state.counters, "inner": self.engine.drafter.stats(state.drafter)}


def put_laws(held: Laws, new: Laws, at: Array, rows: Array) -> Laws:
    """`new` `[B, W, V]` in `held` from entry `at` `[B]` on, in `rows` `[B]` alone.

    The others keep what they hold: they wait at the end of their room, where a write would be shifted over their laws.
    """
    width = new.q.shape[1]

    def put(buffer: Array, update: Array) -> Array:
        def one(row: Array, block: Array, start: Array, takes_part: Array) -> Array:
            before = jax.lax.dynamic_slice_in_dim(row, start, width, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(takes_part, block, before), start, axis=0)

        if len(rows) == 1:  # a row alone never waits for others
            return jax.lax.dynamic_update_slice_in_dim(buffer, update, at[0], axis=1)
        return jax.vmap(one)(buffer, update, at, rows)

    return jax.tree.map(put, held, new)
