"""Drafters made of others (paper 4): an engine that drafts for another engine, and tokens of a cheaper drafter behind.

`NestedDrafter` stacks engines to hierarchies of any depth (Algorithm 1). `AppendedDrafter` is the horizontal heuristic
(appendix D): tokens late in a block are the least likely to be kept, so they may be the cheapest to write (cascade
speculative drafting, Chen et al., 2023). Each token counts as drawn from the law of the one that drew it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import is_stop, write_slots
from speccascade_jax.core.checks import whole
from speccascade_jax.core.protocols import Drafter, Outcome, Request, Start, layers_read_by
from speccascade_jax.core.types import Array, Cache, Controls, Draft, LawPair, Laws, Params, PyTree, Round
from speccascade_jax.drafters.model import DrafterDefaults, ModelDrafter, with_laws
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.loop import run_rounds
from speccascade_jax.models.teacher_forcing import catch_up


@dataclass(frozen=True)
class NestedDrafter(DrafterDefaults):
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
        # the level above rejected tokens of ours, replaced one, or wrote more behind: the caches lack those
        missed = jnp.maximum(request.length - 1 - engine.target.consumed(state.target_cache), 0)
        behind = -(-missed // self.catches_up)
        state = self._at(params, state, request)
        begin, goal = state.length, jnp.minimum(self.budget, request.room)
        # calls so far, so that the difference at the end has those of this round, catching up included
        calls = state.counters.target_calls - jnp.where(request.active, behind, 0)

        # each inner round's laws behind those of the rounds before it, where they will be divided by
        def collect(held: Laws, turn: Round) -> Laws:
            return put_laws(held, self._handed(turn.pair, turn.law, held), turn.start - begin, turn.active)

        def unfinished(s: DecodeState) -> Array:
            return ~s.done & (s.length - begin < goal)

        state, held = run_rounds(engine, params, state, inner, unfinished, request.block, collect)
        length, bad = state.length - begin, self._bad(state, begin)
        if request.complete:
            calls -= ~state.done  # the look is a call that no counter of the inner engine has
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
        # all of them, not what is new: where rows were taken back, older ones differ too
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
            failed_at=jnp.full_like(state.failed_at, -1),  # of this round alone: the level above keeps earlier ones
        )

    def _peek(
        self, params: Params, state: DecodeState, inner: Controls, held: Laws, length: Array
    ) -> tuple[DecodeState, Laws, Array]:
        """The inner law at the bonus position (and whether it is unusable): a round whose token nobody draws."""
        verifier, no_room = self.engine.verifier, jnp.zeros_like(length)
        # no room, no tokens: the draft gives its law at the position if the rule reads one, and the target scores it
        drafted = self.engine.draft(params, state, inner, no_room, complete=verifier.reads_q)
        pair, bad, *_, cache = self.engine.score(params, state, drafted, inner, 1, drafted.target_cache)
        law = verifier.law(pair, inner.alpha[:, None, None])
        held = put_laws(held, self._handed(pair, law, held), length, ~state.done)
        # the pending token stays consumed here, one more than the invariant says; the next `catch_up` begins behind it
        cache = self.engine.target.rollback(cache, state.length)
        unusable = (bad[:, 0] | (drafted.draft.bad[:, 0] & verifier.reads_q)) & ~state.done
        return replace(state, drafter=drafted.drafter, laws=drafted.draft.laws, target_cache=cache), held, unusable

    def _handed(self, pair: LawPair, law: Array, held: Laws) -> Laws:
        """What the level above reads as raw, what it divides by, and the logs of both if it has room for them."""
        # a lossless engine's output is its target's, whose raw law is what rules above want to read as `q`
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
        at = state.failed_at.max(-1) - begin  # -1 in both where nothing failed, and then below 0
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


@flax.struct.dataclass
class AppendedState:
    """Of the two drafters; `tail_steps` int32 `[B]`: the tail's calls so far."""

    first: PyTree
    tail: PyTree
    tail_steps: Array


@dataclass(frozen=True)
class AppendedDrafter(DrafterDefaults):
    """`first`'s block, and behind it what `tail` goes on with; parameters are `{"first": …, "tail": …}`.

    A block that ends in a stop id, or where a row's room ends, has no tail.

    Each is fed what the other wrote in one block, not token by token: a tail's tokens save calls of `first`, and of all
    that draft for it.

    Attributes:
        first: a drafter of one's own catches up as it does; tail: sits out the tokens that `first` writes.
    """

    first: Drafter
    tail: ModelDrafter
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.first.reads_features:
            raise ValueError(f"{type(self.first).__name__} reads the target's features: it can have no tail")
        if layers_read_by(self.first):
            raise ValueError(f"{type(self.first).__name__} reads the target's hidden states: it can have no tail")
        # the first one reads in one call what the tail wrote and the token behind, and the tail no less than its block
        most = max(self.tail.block, self.tail.catches_up)
        object.__setattr__(self, "tail", replace(self.tail, sits_out=True, catches_up=most))
        object.__setattr__(self, "first", _catching_up(self.first, self.tail.block + 1))

    @property
    def block(self) -> int:
        return self.first.block + self.tail.block

    @property
    def slots(self) -> int:
        """How many slots of the round the first one may draw for."""
        return self.first.block

    def init(self, params: Params, start: Start) -> AppendedState:
        first, tail = self.first.init(params["first"], start), self.tail.init(params["tail"], start)
        return AppendedState(first, tail, jnp.zeros((start.prompt.tokens.shape[0],), jnp.int32))

    def propose(self, params: Params, state: AppendedState, request: Request) -> tuple[Draft, AppendedState, Cache]:
        """Let the first one draft, then the tail as if that were committed; the tail says the law behind the block."""
        # no law is wanted behind the first block: the tail's first law stands there
        draft, first, cache = self.first.propose(params["first"], state.first, replace(request, complete=False))
        last = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.length - 1, 0)[:, None], axis=1)[:, 0]
        ended = is_stop(last, request.stop_ids) & (draft.length > 0)
        rows = request.active & ~ended  # a stop id ends the row if it is kept: a tail would be thrown away
        behind = replace(
            request,
            tokens=write_slots(request.tokens, draft.tokens, request.length, axis=1),
            length=request.length + draft.length,
            room=request.room - draft.length,
            active=rows,
            # their own slots of the round: no bits are drawn twice
            keys=replace(request.keys, behind=request.keys.behind + self.slots),
            block=_blank(request.block, self.tail.block),
        )
        tail, after, _ = self.tail.propose(params["tail"], state.tail, behind)
        steps = state.tail_steps + tail.steps
        return _joined(draft, tail, rows), AppendedState(first, after, steps), cache

    def commit(self, params: Params, state: AppendedState, outcome: Outcome) -> AppendedState:
        """Both forget what was not kept."""
        first = self.first.commit(params["first"], state.first, outcome)
        return replace(state, first=first, tail=self.tail.commit(params["tail"], state.tail, outcome))

    def stats(self, state: AppendedState) -> Any:
        """Those of the first one, and `tail_steps`."""
        own = self.first.stats(state.first)
        return {**(own if isinstance(own, Mapping) else {"first": own}), "tail_steps": state.tail_steps}


def _catching_up(drafter: Any, most: int) -> Any:
    """The drafter, fed `most` missing tokens at once or what it is fed already, and so all that draft for it.

    What drafts for a level misses one more where this one kept all: the token that the level wrote behind it.
    """
    if isinstance(drafter, AppendedDrafter):
        tail = _catching_up(drafter.tail, most + drafter.first.block)
        return replace(drafter, first=_catching_up(drafter.first, most + drafter.tail.block), tail=tail)
    if not isinstance(drafter, ModelDrafter | NestedDrafter):
        return drafter
    if isinstance(drafter, NestedDrafter):
        engine = replace(drafter.engine, drafter=_catching_up(drafter.engine.drafter, most + 1))
        drafter = replace(drafter, engine=engine)
    return replace(drafter, catches_up=max(most, drafter.catches_up))


def _blank(laws: Laws, block: int) -> Laws:
    """Buffers for a block's laws, of the kinds that the given ones have."""
    rows, _, size = laws.q.shape
    blank = jnp.zeros((rows, block + 1, size), jnp.float32)
    return Laws(blank, blank, None if laws.logs is None else Laws(blank, blank))


def _joined(draft: Draft, tail: Draft, rows: Array) -> Draft:
    """One block of the two, in `rows` `[B]`; the others have the first alone."""
    width = draft.q.shape[1] - 1  # the buffers are the whole block's, tail and bonus included
    tokens = jnp.pad(draft.tokens, [(0, 0), (0, width - draft.tokens.shape[1])])
    bad = jnp.pad(draft.bad, [(0, 0), (0, width + 1 - draft.bad.shape[1])])
    kept = jnp.arange(width + 1)[None] < draft.length[:, None]
    bad = jnp.where(kept, bad, write_slots(jnp.zeros_like(bad), tail.bad, draft.length, axis=1) & rows[:, None])
    laws = put_laws(draft.laws, tail.laws, draft.length, rows)
    return with_laws(
        draft,
        laws,
        tokens=jnp.where(kept[:, :width], tokens, write_slots(tokens, tail.tokens, draft.length, axis=1)),
        length=draft.length + jnp.where(rows, tail.length, 0),
        greedy=draft.greedy & tail.greedy,  # a one-hot everywhere, or nowhere to be relied on
        steps=draft.steps + tail.steps,
        bad=bad,
        lawful=None,
        stop=_compared(draft, tail, width + 1, rows),
    )


def _compared(draft: Draft, tail: Draft, width: int, rows: Array) -> Array | None:
    """What the two stop policies compared, `[B, width]`: the tail's from the end of the first block on."""
    if draft.stop is None and tail.stop is None:
        return None
    blank = jnp.full((draft.length.shape[0], width), jnp.nan)
    first = blank if draft.stop is None else write_slots(blank, draft.stop, jnp.zeros_like(draft.length), axis=1)
    if tail.stop is None:
        return first
    behind = jnp.arange(width)[None] >= draft.length[:, None]
    return jnp.where(behind & rows[:, None], write_slots(blank, tail.stop, draft.length, axis=1), first)
