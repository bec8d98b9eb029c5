"""Drafters of one model.

`ModelDrafter` drafts token by token until its stop policy or the block's end says stop; `ExitDrafter` does so with the
target's own first layers in the target's cache (self-speculation). `PlannedDrafter` drafts as many tokens as pay: none
where drafting costs more than it saves (`block_size="auto"`). `BranchingDrafter` drafts a tree, several tokens behind
each, level by level (METHODS section 10). `NoDrafter` is the target alone through the same loop, which makes latencies
comparable.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import is_stop
from speccascade_jax.core.checks import MOST
from speccascade_jax.core.protocols import (
    BranchingModel,
    Counted,
    Decision,
    Drafter,
    DraftStep,
    LanguageModel,
    Outcome,
    Request,
    Start,
    StopPolicy,
)
from speccascade_jax.core.sampling import expand, laws_and_token, log_laws, raw_and_scaled, sample
from speccascade_jax.core.trees import Tree, without
from speccascade_jax.core.types import Array, Cache, Draft, Laws, Params, PyTree
from speccascade_jax.models.early_exit import HEAD, EarlyExit, exit_params
from speccascade_jax.models.teacher_forcing import catch_up
from speccascade_jax.stopping.block_planner import Cheapest, Evidence
from speccascade_jax.stopping.policies import Fixed


class DrafterDefaults:
    """A drafter that reads nothing of the target's features and has no statistics, unless it says so."""

    reads_features: ClassVar[bool] = False

    def stats(self, state: PyTree) -> Any:
        return None


class PolicyDrafter(DrafterDefaults):
    """A drafter whose blocks a stop policy ends."""

    stop: StopPolicy

    @property
    def block(self) -> int:
        return self.stop.block

    @property
    def adaptive(self) -> bool:
        return self.stop.adaptive


def with_laws(draft: Draft, laws: Laws, **changes: Any) -> Draft:
    """Returns the block with other laws, and other fields changed by name."""
    return replace(draft, q=laws.q, q_tilde=laws.q_tilde, logs=laws.logs, **changes)


def in_buffers(request: Request, tokens: Array, length: Array, steps: Array | None = None) -> Draft:
    """Returns a block `[B, G]` whose laws are still to be written, in the round's buffers.

    Args:
        steps: int32 `[B]`, passes of the draft so far, 0 by default.
    """
    rows, block = tokens.shape
    return Draft(
        tokens=tokens,
        length=length,
        q=request.block.q,
        q_tilde=request.block.q_tilde,
        greedy=request.controls.draft.temperature <= 0,
        steps=jnp.zeros((rows,), jnp.int32) if steps is None else steps,
        bad=jnp.zeros((rows, block + 1), bool),  # the law at the bonus position can be unusable too
        logs=request.block.logs,
    )


@dataclass(frozen=True)
class NoDrafter(DrafterDefaults):
    """Blocks of length 0; each round the target gives one token."""

    block: ClassVar[int] = 0
    adaptive: ClassVar[bool] = False

    def init(self, params: Params, start: Start) -> PyTree:
        return ()

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """An empty block, without a law (laws that read `q` can't be used)."""
        zero = jnp.zeros_like(request.length)
        # the buffers are stubs `[B, 1, 1]` here, handed on so that every round's state has one structure
        return in_buffers(request, zero[:, None][:, :0], zero, steps=zero), state, request.target.cache

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        return state


@flax.struct.dataclass
class ModelDrafterState:
    """The draft model's cache and the stop policy's own state."""

    cache: Cache
    policy: PyTree


class _Drafting(NamedTuple):
    """The loop's state; `going` rows take part in the next forward pass, `drawing` rows may draw from it.

    `drawn` float32 `[B]`: the probability that the current token was drawn with.
    """

    slot: Array
    going: Array
    drawing: Array
    current: Array
    drawn: Array
    state: ModelDrafterState
    draft: Draft


@dataclass(frozen=True)
class ModelDrafter(PolicyDrafter):
    """Drafts with `model` under `stop`; parameters are `{"model": …}` and, where the policy has some, `{"stop": …}`.

    Attributes:
        sits_out: whether there are rounds and rows that others draft for. It then leaves their rows of the laws'
            buffers alone.
        catches_up: how many tokens it is fed at once where it has missed some: more than one pays where others write
            what it misses. At most the engine's longest block, for which caches have room.
    """

    model: LanguageModel
    stop: StopPolicy
    sits_out: bool = False
    catches_up: int = 1

    def init(self, params: Params, start: Start) -> ModelDrafterState:
        cache = self.model.prefill(params["model"], start.prompt, start.slots, start.max_rollback)
        return ModelDrafterState(cache=cache, policy=self.stop.init(start.prompt.tokens.shape[0]))

    def propose(
        self, params: Params, state: ModelDrafterState, request: Request
    ) -> tuple[Draft, ModelDrafterState, Cache]:
        """Draw up to `block` tokens per row; see `Drafter.propose`.

        With `complete` a row that drew its last token takes one more pass, which gives the law at the bonus
        position and brings the cache up to date; without it the missing token is caught up next round.
        """
        # counted before it is caught up: passes that this takes are the draft's steps too
        behind = jnp.maximum(request.length - 1 - self.model.consumed(state.cache), 0)
        with jax.named_scope("catch_up"):
            cache = catch_up(
                self.model, params["model"], state.cache, request.tokens, request.length, request.active,
                block=self.catches_up,
            )  # fmt: skip
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)[:, 0]
        start = _Drafting(
            slot=jnp.zeros((), jnp.int32),
            # without room too, if the law behind the last token is wanted: that is one pass without a draw
            going=request.active & ((request.room > 0) | request.complete),
            drawing=request.active & (request.room > 0),
            current=pending,  # the first pass reads the committed token that no cache has yet
            drawn=jnp.ones(pending.shape, jnp.float32),
            state=replace(state, cache=cache),
            draft=self._empty(request, steps=jnp.where(request.active, -(-behind // self.catches_up), 0)),
        )

        # the bits of all slots in one call of the cipher; they are each slot's own, whenever the loop gets there
        slots = jnp.broadcast_to(jnp.arange(self.block, dtype=jnp.int32), (pending.shape[0], self.block))
        uniforms = request.keys.uniform(slots, rngs.DRAFT)

        def body(carry: _Drafting) -> _Drafting:
            return self._step(params, carry, request, uniforms)

        end = jax.lax.while_loop(lambda carry: jnp.any(carry.going), body, start)
        return end.draft, end.state, request.target.cache

    def _empty(self, request: Request, steps: Array) -> Draft:
        rows = request.length.shape[0]
        draft = in_buffers(request, jnp.zeros((rows, self.block), jnp.int32), jnp.zeros((rows,), jnp.int32), steps)
        return replace(draft, stop=jnp.full(draft.bad.shape, jnp.nan)) if self.stop.threshold else draft

    def _forward(self, params: Params, carry: _Drafting) -> tuple[Array, Array | None, Cache]:
        """Logits `[B, V]` after the current token; rows that don't take part keep their cache's length."""
        cache = carry.state.cache
        before = self.model.consumed(cache)
        out, cache = self.model.extend(params["model"], cache, carry.current[:, None])
        # all rows are fed, for one program; those that wait forget it at once
        cache = self.model.rollback(cache, jnp.where(carry.going, before + 1, before))
        hidden = None if out.hidden is None else out.hidden[:, 0]
        return out.logits[:, 0, : self.model.vocab_size], hidden, cache

    def _step(self, params: Params, carry: _Drafting, request: Request, uniforms: Array) -> _Drafting:
        """One forward pass and, where the policy says so, one drawn token."""
        logits, hidden, cache = self._forward(params, carry)
        with jax.named_scope("sampling"):
            at = jnp.minimum(carry.slot, self.block - 1)  # the bonus slot draws nothing: any bits do there
            uniform = jax.lax.dynamic_index_in_dim(uniforms, at, axis=1, keepdims=False)
            # drawn before the policy is asked, but not shown to it: what it sees cannot depend on the token
            (q, q_tilde, max_q), token = laws_and_token(logits, request.controls.draft, uniform)
        seen = DraftStep(q, max_q, hidden, carry.slot, position=request.length + carry.slot, drawn=carry.drawn)
        decision, policy = self.stop(params.get("stop"), carry.state.policy, seen, request.controls)
        # a policy's state is a row's own: it stands still while the row does not draw
        policy = jax.tree.map(
            lambda new, old: jnp.where(expand(carry.drawing, new.ndim), new, old), policy, carry.state.policy
        )
        draws = carry.drawing & decision.draw & (carry.slot < self.block)
        ends = is_stop(token, request.stop_ids) | (carry.slot + 1 >= request.room)
        laws = Laws(q, q_tilde)
        if request.block.logs is not None:  # from logits: float32 laws are 0 where a logit lies 87 below the best
            laws = replace(laws, logs=log_laws(logits, q_tilde, request.controls.draft))
        draft = self._record(carry, laws, token, draws, ~jnp.isfinite(logits.max(-1)))
        draft = replace(draft, stop=_compared(carry, decision))
        return _Drafting(
            slot=carry.slot + 1,
            # a stop id or the limit ends the row if it is kept: no bonus, so no law is needed there
            going=draws & ~ends & (decision.proceed | request.complete),
            drawing=draws & ~ends & decision.proceed,
            current=jnp.where(draws, token, carry.current),
            drawn=jnp.take_along_axis(q_tilde, token[:, None], axis=1)[:, 0],
            state=replace(carry.state, cache=cache, policy=policy),
            draft=draft,
        )

    def _record(self, carry: _Drafting, laws: Laws, token: Array, draws: Array, bad: Array) -> Draft:
        old, slot = carry.draft, carry.slot
        write = jax.lax.dynamic_update_slice_in_dim
        # there are `G` tokens but `G + 1` laws: in the bonus slot the last token is written over by itself
        at = jnp.minimum(slot, max(self.block - 1, 0))
        kept = jax.lax.dynamic_slice_in_dim(old.tokens, at, 1, axis=1)[:, 0]
        tokens = write(old.tokens, jnp.where(draws, token, kept)[:, None], at, axis=1)
        if self.sits_out:
            laws = jax.tree.map(partial(self._own_rows, carry), old.laws, laws)
        # slots a row does not reach are overwritten with junk that nothing reads: cheaper than a select over V
        written: Laws = jax.tree.map(lambda held, new: write(held, new[:, None], slot, axis=1), old.laws, laws)
        return with_laws(
            old,
            written,
            tokens=tokens,
            length=old.length + draws,
            steps=old.steps + carry.going,
            bad=write(old.bad, (bad & carry.going)[:, None], slot, axis=1),
        )

    def _own_rows(self, carry: _Drafting, buffer: Array, new: Array) -> Array:
        """`new` `[B, V]` in the rows that take part, what stands in the buffer in the others."""
        held = jax.lax.dynamic_index_in_dim(buffer, carry.slot, axis=1, keepdims=False)
        return jnp.where(carry.going[:, None], new, held)

    def commit(self, params: Params, state: ModelDrafterState, outcome: Outcome) -> ModelDrafterState:
        """Forget what was drafted beyond `length − 1`."""
        # what it drafted may be less than what was committed: a rollback never goes forward
        consumed = self.model.consumed(state.cache)
        return replace(state, cache=self.model.rollback(state.cache, jnp.minimum(consumed, outcome.length - 1)))


def _compared(carry: _Drafting, decision: Decision) -> Array | None:
    """`Draft.stop` with what the policy compared in this slot, in the rows that it was asked for."""
    held = carry.draft.stop  # absent where no policy has a threshold: traces show no numbers then
    if held is None or decision.value is None:
        return held
    value = jnp.where(carry.drawing, decision.value, jnp.nan)
    return jax.lax.dynamic_update_slice_in_dim(held, value[:, None], carry.slot, axis=1)


@dataclass(frozen=True)
class ExitDrafter(PolicyDrafter):
    """Drafts with an early exit of the target under `stop`; parameters are `{}`, `{"head": …}`, and the policy's own.

    What the exit writes into the lower layers of the target's cache is what the target writes there anew when it scores
    the block: the same tokens at the same places. So the cache is handed on as it is, at the length that it had.

    Attributes:
        exit: of the very model that is drafted for; its parameters are read from the request.
        sits_out: as of `ModelDrafter`.
    """

    exit: EarlyExit
    stop: StopPolicy
    sits_out: bool = False

    def init(self, params: Params, start: Start) -> PyTree:
        return self.stop.init(start.prompt.tokens.shape[0])

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """Draw a block as a model would, with the target's parameters and cache."""
        whole = request.target.cache
        own: dict[str, Any] = {"model": exit_params(request.target.params, self.exit.layer, params.get(HEAD))}
        if "stop" in params:
            own["stop"] = params["stop"]
        # the exit's cache is a part of the target's: there is nothing to catch up, and nothing to keep for a next round
        began = ModelDrafterState(cache=self.exit.view(whole), policy=state)
        draft, ended, _ = ModelDrafter(self.exit, self.stop, self.sits_out).propose(own, began, request)
        return draft, ended.policy, self.exit.put(whole, ended.cache)

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        """Nothing to take back: the target's cache is its own engine's."""
        return state


# --- blocks of planned length


@flax.struct.dataclass
class PlannedState:
    """The drafting model's cache, and what its lengths are chosen by.

    Attributes:
        cache: `()` where nothing is ever drafted.
        place, turns: int32 scalars, the phase's length and how many of its rounds are left.
        evidence: of earlier phases; counted: of this one's rounds so far.
        chosen: int32 `[B, N]`, rounds of each row by length.
    """

    cache: Cache
    place: Array
    turns: Array
    evidence: Evidence
    counted: Counted
    chosen: Array


@dataclass(frozen=True)
class PlannedDrafter(DrafterDefaults):
    """Drafts with `model` blocks of the length that `plan` chooses before each phase: a `Planner`.

    Parameters are `{"model": …, "costs": Costs}`. The plan reads finished rounds alone, never what is about to be
    drafted, so that any of its choices leaves the law as it is. A round of length 0 makes no call of the model.

    Without the model's parameters nothing is ever drafted, and the program is the target's alone, with nothing of a
    draft in it: `methods.block_costs.ready` leaves them out where no draft pays.
    """

    model: LanguageModel
    plan: Cheapest
    adaptive: ClassVar[bool] = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.plan.lengths

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return tuple(ModelDrafter(self.model, Fixed(length)) if length else NoDrafter() for length in self.lengths)

    @property
    def block(self) -> int:
        return self.lengths[-1]

    def init(self, params: Params, start: Start) -> PlannedState:
        """The prompt is read, if there is a model to read it.

        Raises:
            ValueError: parameters without costs.
        """
        if "costs" not in params:
            raise ValueError(
                "costs are not known: add them to the parameters with methods.block_costs.ready, or by hand"
            )
        rows, cache = start.prompt.tokens.shape[0], ()  # an empty cache: programs without drafts hold no draft at all
        if "model" in params:
            cache = self.model.prefill(params["model"], start.prompt, start.slots, start.max_rollback)
        none, zero = jnp.zeros((rows,), jnp.int32), jnp.zeros((), jnp.int32)
        return PlannedState(
            cache=cache,
            place=zero,
            turns=zero,
            evidence=self.plan.init(rows),
            counted=Counted(none, none, none),
            chosen=jnp.zeros((rows, len(self.lengths)), jnp.int32),
        )

    def places(self, params: Params) -> tuple[int, ...]:
        """All lengths, or none but 0."""
        return tuple(range(len(self.lengths))) if "model" in params else (self.lengths.index(0),)

    def settle(
        self, params: Params, state: PlannedState, tokens: Array, length: Array, room: Array, active: Array
    ) -> tuple[PlannedState, Array]:
        """Choose, and bring the cache up to date if there are to be drafts."""
        if "model" not in params:  # one phase for the whole generation
            return replace(state, turns=jnp.full_like(state.turns, MOST)), jnp.zeros_like(length)
        # the last phase's counts first: what is chosen now may rest on all finished rounds, and on nothing else
        evidence = self.plan.update(state.evidence, state.counted)
        place, turns = self.plan.choose(params["costs"], evidence, active, room)
        drafts = active & (jnp.asarray(self.lengths, jnp.int32)[place] > 0)
        with jax.named_scope("catch_up"):
            behind = length - 1 - self.model.consumed(state.cache)
            late = drafts & (behind > 1)  # rounds without drafts lie between
            cache = catch_up(self.model, params["model"], state.cache, tokens, length, late, block=self.block)
        settled = replace(
            state,
            cache=cache,
            place=place,
            turns=turns,
            evidence=evidence,
            counted=jax.tree.map(jnp.zeros_like, state.counted),  # they are evidence now, and counted once
        )
        return settled, jnp.where(late, -(-behind // self.block), 0)

    def entered(self, state: PlannedState, place: int) -> PyTree:
        return ModelDrafterState(state.cache, ()) if self.lengths[place] else ()

    def left(self, state: PlannedState, place: int, own: PyTree, counted: Counted) -> PlannedState:
        """With what the rounds showed, which counts when the next phase is settled."""
        return replace(
            state,
            cache=own.cache if self.lengths[place] else state.cache,
            # a row that ended took part in fewer: the phase is as old as its oldest row
            turns=state.turns - counted.rounds.max(),
            counted=jax.tree.map(jnp.add, state.counted, counted),
            chosen=state.chosen.at[:, place].add(counted.rounds),
        )

    def stats(self, state: PlannedState) -> Any:
        """`chosen`: rounds of each row by length."""
        return {"chosen": state.chosen}


# --- trees


@dataclass(frozen=True)
class BranchingDrafter(DrafterDefaults):
    """Drafts `tree` with `model`; parameters are `{"model": …}`.

    A node's children are drawn one after the other without replacement: each from the law behind the node without those
    before it, normalised (`core.trees.without`). A level is one call of the model. The last one is fed only where the
    law behind it is asked for.
    """

    model: BranchingModel
    tree: Tree
    adaptive: ClassVar[bool] = False

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
        # one level more for the law behind the leaves; static, as is every level's place among the entries
        draft, levels = self._empty(request, draws), self.tree.depth + request.complete
        entries = jnp.concatenate([pending, draft.tokens], axis=1)
        # bits by node, not by depth: siblings draw with bits of their own
        nodes = jnp.broadcast_to(jnp.arange(self.block, dtype=jnp.int32), draft.tokens.shape)
        uniforms = request.keys.uniform(nodes, rngs.DRAFT)
        for depth in range(levels):
            first, end = self.tree.level(depth)
            logits, cache = self._fed(own, cache, entries[:, first:end], first, end)
            draft, laws = self._record(draft, logits, request, first)
            entries = self._drawn(entries, laws, uniforms, first, end)
        # slots of a tree are no positions, so nothing is cut here but rows that took no part
        cache = self.model.rollback(cache, jnp.where(rows, self.model.consumed(cache), before))
        steps = jnp.where(rows, levels, 0) + jnp.where(request.active, behind, 0)
        return replace(draft, tokens=entries[:, 1:], steps=steps), cache, request.target.cache

    def _empty(self, request: Request, draws: Array) -> Draft:
        tokens = jnp.zeros((request.length.shape[0], self.block), jnp.int32)
        draft = in_buffers(request, tokens, length=jnp.where(draws, self.tree.depth, 0))  # a path has so many
        return replace(draft, spent=jnp.where(draws, self.block, 0))

    def _fed(self, params: Params, cache: Cache, tokens: Array, first: int, end: int) -> tuple[Array, Cache]:
        """Logits `[B, T, V]` behind entries of a level."""
        if first == 0:  # the root is the pending token: a step like any other
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

        # entry `n + 1` of the laws is the one behind node `n`: a level's entries lie side by side
        written: Laws = jax.tree.map(write, draft.laws, laws)
        bad = write(draft.bad, ~jnp.isfinite(logits.max(-1)))
        return with_laws(draft, written, bad=bad), laws

    def _drawn(self, entries: Array, laws: Laws, uniforms: Array, first: int, end: int) -> Array:
        """The entries with the children of a level's."""
        children, taken = self.tree.children[first:end], jnp.zeros(laws.q.shape, bool)
        for turn in range(children.shape[1]):  # all first children at once, then all second ones, which exclude those
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
        last, _ = self.tree.level(self.tree.depth)  # leaves are fed only where the law behind them was wanted
        deepest = jnp.where(consumed - (before - 1) > last, self.tree.depth, self.tree.depth - 1)
        cache = self.model.keep(state, before - 1, outcome.path[:, : self.tree.depth + 1])
        kept = before + jnp.minimum(outcome.num_kept, deepest)
        return self.model.rollback(cache, jnp.minimum(jnp.where(outcome.active, kept, consumed), outcome.length - 1))
