"""Drafters that contain other drafters (Globerson et al., 2025): an engine that drafts for an engine, and a tail.

`NestedDrafter` stacks engines into hierarchies of any depth (Algorithm 1). `AppendedDrafter` is the horizontal
heuristic (appendix D): a cheap drafter continues another's block with a *tail*, because late tokens of a block are the
least likely to be kept (cascade speculative drafting, Chen et al., 2023). Each token counts as drawn from the
distribution of the model that drew it.
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
from speccascade_jax.core.logit_laws import as_law_pair
from speccascade_jax.core.protocols import Drafter, Outcome, Request, Start, layers_read_by
from speccascade_jax.core.types import Array, Cache, Controls, Draft, LawPair, Laws, Params, PyTree, Round
from speccascade_jax.drafters.model import DrafterDefaults, ModelDrafter, with_laws
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.loop import run_rounds
from speccascade_jax.engine.proposals import proposed
from speccascade_jax.models.teacher_forcing import catch_up


@dataclass(frozen=True)
class NestedDrafter(DrafterDefaults):
    """A drafter that runs an inner `engine` for `budget` tokens and proposes **all** of them to the outer engine.

    Every token, even a replacement or a bonus, counts as drawn from the inner engine's distribution, and the outer
    engine's acceptance divides by it. A lossless inner engine reports its target's raw distribution as `q`, and a lossy
    one reports its own `π`. The inner engine reads `controls.inner[arm]` and uses the outer engine's stop ids.

    Attributes:
        engine: the inner engine.
        budget: the least number of tokens in a block, unless a stop id or the length limit ends the block earlier.
        arm: this engine's index among the engines that draft for the same outer engine.
        catches_up: how many missed tokens one call feeds to the inner target (as in `ModelDrafter`).
    """

    engine: Engine
    budget: int
    arm: int = 0
    catches_up: int = 1

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1)
        if not self.engine.verify_final:
            raise ValueError("an engine with unverified final blocks cannot be a drafter: set its verify_final=True")
        if self.engine.tree is not None:
            raise ValueError("an engine that drafts trees cannot be a drafter: give its own drafter a block size")
        if self.engine.planner is not None:
            raise ValueError("an engine that plans its blocks cannot be a drafter: give its own drafter a block size")
        if self.engine.layers:
            # the outer engine rolls tokens back and commits others; `catch_up` feeds those to the inner model but does
            # not return the hidden states that such a drafter needs
            name = type(self.engine.drafter).__name__
            raise ValueError(f"{name} reads the target's hidden states: use it to draft for the target only")

    @property
    def block(self) -> int:
        """The longest block; it exceeds the budget, because the last inner round may add a whole block and a bonus."""
        return self.budget + self.engine.block

    @property
    def adaptive(self) -> bool:
        """Whether the inner engine's blocks may end early."""
        return self.engine.drafter.adaptive

    def init(self, params: Params, start: Start) -> DecodeState:
        """Returns the inner engine's state before its first round."""
        # the inner buffers need room for an inner block after the last token of the outer engine
        room = start.slots - start.prompt.tokens.shape[1] + self.block
        level = rngs.below(start.level, self.arm)
        return self.engine.init(
            params, start.prompt, start.rng, start.example_ids, room, level, taken_back=start.max_rollback
        )

    def propose(self, params: Params, state: DecodeState, request: Request) -> tuple[Draft, DecodeState, Cache]:
        """Runs inner rounds until every row has reached its budget, a stop id or the length limit."""
        assert len(request.controls.inner) > self.arm, "a nested drafter needs its Controls.inner"
        inner, engine = request.controls.inner[self.arm], replace(self.engine, stop_ids=request.stop_ids)
        # the inner caches lack the tokens that the outer engine wrote itself, such as replacements
        missed = jnp.maximum(request.length - 1 - engine.target.consumed(state.target_cache), 0)
        catch_up_calls = -(-missed // self.catches_up)
        state = self._at(params, state, request)
        begin, goal = state.length, jnp.minimum(self.budget, request.room)
        # `calls` is the number of inner target calls before this round; subtracted at the end, it gives the calls of
        # this round, including those that feed missed tokens
        calls = state.counters.target_calls - jnp.where(request.active, catch_up_calls, 0)

        # each inner round's distributions are written after those of earlier inner rounds, into the buffers that the
        # outer engine reads
        def collect(collected: Laws, turn: Round) -> Laws:
            return put_laws(collected, self._handed(turn.pair, turn.law, collected), turn.start - begin, turn.active)

        def unfinished(s: DecodeState) -> Array:
            return ~s.done & (s.length - begin < goal)

        state, collected = run_rounds(engine, params, state, inner, unfinished, request.block, collect)
        length, bad = state.length - begin, self._bad(state, begin)
        if request.complete:
            calls -= ~state.done  # `_peek` makes a target call that the inner engine does not count
            state, collected, unseen = self._peek(params, state, inner, collected, length)
            bad |= unseen[:, None] & (jnp.arange(self.block + 1)[None] == length[:, None])
        draft = Draft(
            tokens=jnp.take_along_axis(state.tokens, begin[:, None] + jnp.arange(self.block)[None], axis=1),
            length=length,
            q=collected.q,
            q_tilde=collected.q_tilde,
            logs=collected.logs,
            greedy=self._greedy(inner, collected.q_tilde, length + request.complete),
            steps=state.counters.target_calls - calls,
            bad=bad,
        )
        return draft, state, request.target.cache

    def _at(self, params: Params, state: DecodeState, request: Request) -> DecodeState:
        """Returns the inner state with the outer engine's tokens, which are also fed to the inner target's cache."""
        width = min(request.tokens.shape[1], state.tokens.shape[1])
        # all tokens are copied, not only new ones, because older tokens differ too in rows that were rolled back
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
            failed_at=jnp.full_like(state.failed_at, -1),  # the outer engine keeps earlier failures
        )

    def _peek(
        self, params: Params, state: DecodeState, inner: Controls, collected: Laws, length: Array
    ) -> tuple[DecodeState, Laws, Array]:
        """Computes the inner engine's distribution at the bonus position, and whether it is non-finite."""
        verifier, no_room = self.engine.verifier, jnp.zeros_like(length)
        # with room 0 no token is drawn; the inner drafter gives its distribution if the rule reads it, and the target
        # scores the position
        drafted = self.engine.draft(params, state, inner, no_room, complete=verifier.reads_q)
        scored, bad, *_, cache = self.engine.score(params, state, drafted, inner, 1, drafted.target_cache)
        pair = as_law_pair(scored)
        law = verifier.law(pair, inner.alpha[:, None, None])
        collected = put_laws(collected, self._handed(pair, law, collected), length, ~state.done)
        # Here the cache has consumed the last committed token too, one token more than the engine's invariant allows.
        # The next `catch_up` starts after that token.
        cache = self.engine.target.rollback(cache, state.length)
        unusable = (bad[:, 0] | (drafted.draft.bad[:, 0] & verifier.reads_q)) & ~state.done
        return replace(state, drafter=drafted.drafter, laws=drafted.draft.laws, target_cache=cache), collected, unusable

    def _handed(self, pair: LawPair, law: Array, buffers: Laws) -> Laws:
        """Returns the distributions for the outer engine: the raw one, and the one that its acceptance divides by.

        They include logs if `buffers` has room for logs.
        """
        # A lossless inner engine samples from its target's distribution, so outer rules take its `p` as `q`.
        lossless = self.engine.verifier.lossless
        laws = Laws(pair.p if lossless else law, law)
        if buffers.logs is None:
            return laws
        logs = Laws(pair.log("p"), pair.log("p_tilde")) if lossless else Laws(jnp.log(law), jnp.log(law))
        return replace(laws, logs=logs)

    def _greedy(self, inner: Controls, laws: Array, entries: Array) -> Array:
        """Returns bool `[B]`: whether the first `entries` `[B]` of the block's distributions are one-hot.

        Under a lossy rule the output depends on all inner models, so the distributions are examined, and not the
        temperature of one model.
        """
        if self.engine.verifier.lossless:
            return inner.target.temperature <= 0
        unused = jnp.arange(laws.shape[1])[None] >= entries[:, None]
        return ((laws.max(-1) >= 1.0) | unused).all(-1)

    def _bad(self, state: DecodeState, begin: Array) -> Array:
        """Returns bool `[B, G + 1]`: where the inner engine met non-finite logits."""
        position = state.failed_at.max(-1) - begin  # both are -1 if nothing failed, so the difference is negative
        return (jnp.arange(self.block + 1)[None] == position[:, None]) & (position >= 0)[:, None]

    def commit(self, params: Params, state: DecodeState, outcome: Outcome) -> DecodeState:
        """Rolls every inner cache back to the tokens that the outer engine committed."""
        target = self.engine.target
        consumed = jnp.minimum(target.consumed(state.target_cache), outcome.length - 1)
        return replace(
            state,
            length=outcome.length,
            target_cache=target.rollback(state.target_cache, consumed),
            # the outcome's features belong to the outer engine's target
            drafter=self.engine.round_drafter.commit(params["drafter"], state.drafter, replace(outcome, features=None)),
        )

    def stats(self, state: DecodeState) -> Any:
        """Returns the inner engine's counters, and the statistics of its drafter."""
        return {"counters": state.counters, "inner": self.engine.drafter.stats(state.drafter)}


def put_laws(buffers: Laws, new: Laws, first_entries: Array, rows: Array) -> Laws:
    """Writes `new` `[B, W, V]` into `buffers` from entry `first_entries` `[B]` on, in `rows` `[B]` only.

    The other rows stay unchanged. They may have no room for `W` entries, and JAX would then shift the write backwards,
    onto valid entries.
    """
    width = new.q.shape[1]

    def put(buffer: Array, update: Array) -> Array:
        def one(row: Array, block: Array, start: Array, takes_part: Array) -> Array:
            before = jax.lax.dynamic_slice_in_dim(row, start, width, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(takes_part, block, before), start, axis=0)

        if len(rows) == 1:  # with a single row there are no other rows to protect
            return jax.lax.dynamic_update_slice_in_dim(buffer, update, first_entries[0], axis=1)
        return jax.vmap(one)(buffer, update, first_entries, rows)

    return jax.tree.map(put, buffers, new)


@flax.struct.dataclass
class AppendedState:
    """The state of an `AppendedDrafter`.

    Attributes:
        first, tail: the states of its two drafters.
        tail_steps: int32 `[B]`, how many calls the tail's model has made so far.
    """

    first: PyTree
    tail: PyTree
    tail_steps: Array


@dataclass(frozen=True)
class AppendedDrafter(DrafterDefaults):
    """A drafter that lets `tail` continue the block of `first`; parameters are `{"first": …, "tail": …}`.

    No tail follows a block of `first` that ends in a stop id or at the row's limit. Each drafter reads the other's
    tokens in one call and not token by token, so a tail saves calls of `first` and of all drafters inside it.

    Attributes:
        first: the drafter that begins the block; a user's own drafter must itself read the tail's tokens.
        tail: the drafter that continues the block.
    """

    first: Drafter
    tail: ModelDrafter
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.first.reads_features:
            raise ValueError(f"{type(self.first).__name__} reads the target's features: leave its tail out")
        if layers_read_by(self.first):
            raise ValueError(f"{type(self.first).__name__} reads the target's hidden states: leave its tail out")
        # one call of `first` must be able to read the tail's tokens and the token after them, and one call of `tail`
        # must be able to read as many tokens as its own block has
        most = max(self.tail.block, self.tail.catches_up)
        object.__setattr__(self, "tail", replace(self.tail, sits_out=True, catches_up=most))
        object.__setattr__(self, "first", _catching_up(self.first, self.tail.block + 1))

    @property
    def block(self) -> int:
        """The sum of both drafters' longest blocks."""
        return self.first.block + self.tail.block

    @property
    def slots(self) -> int:
        """The number of slots whose random bits belong to the first drafter."""
        return self.first.block

    def init(self, params: Params, start: Start) -> AppendedState:
        """Returns the initial states of both drafters, and 0 steps of the tail for every row."""
        first, tail = self.first.init(params["first"], start), self.tail.init(params["tail"], start)
        return AppendedState(first, tail, jnp.zeros((start.prompt.tokens.shape[0],), jnp.int32))

    def propose(self, params: Params, state: AppendedState, request: Request) -> tuple[Draft, AppendedState, Cache]:
        """Lets `first` draft, then lets `tail` continue as if those tokens were committed.

        The tail gives the distribution at the bonus position.
        """
        # The position after the first block needs no distribution of `first`: the tail's first distribution fills it.
        draft, first, cache = proposed(self.first, params["first"], state.first, replace(request, complete=False))
        last = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.length - 1, 0)[:, None], axis=1)[:, 0]
        ended = is_stop(last, request.stop_ids) & (draft.length > 0)
        rows = request.active & ~ended  # if a stop id is kept it ends the row, so a tail would be discarded
        tail_request = replace(
            request,
            tokens=write_slots(request.tokens, draft.tokens, request.length, axis=1),
            length=request.length + draft.length,
            room=request.room - draft.length,
            active=rows,
            # the tail uses slots after those of the first drafter, so that no random bits are used twice
            keys=replace(request.keys, behind=request.keys.behind + self.slots),
            block=_blank(request.block, self.tail.block),
        )
        tail, after, _ = self.tail.propose(params["tail"], state.tail, tail_request)
        steps = state.tail_steps + tail.steps
        return _joined(draft, tail, rows), AppendedState(first, after, steps), cache

    def commit(self, params: Params, state: AppendedState, outcome: Outcome) -> AppendedState:
        """Commits the outcome to both drafters."""
        first = self.first.commit(params["first"], state.first, outcome)
        return replace(state, first=first, tail=self.tail.commit(params["tail"], state.tail, outcome))

    def stats(self, state: AppendedState) -> Any:
        """Returns the first drafter's statistics, and `tail_steps`."""
        first_stats = self.first.stats(state.first)
        return {
            **(first_stats if isinstance(first_stats, Mapping) else {"first": first_stats}),
            "tail_steps": state.tail_steps,
        }


def _catching_up(drafter: Any, most: int) -> Any:
    """Makes a drafter, and all drafters inside it, read at least `most` missed tokens per call.

    If an inner engine kept all its drafts, its own drafter has missed one token more: the bonus after them.
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
    """Returns zeroed buffers for the distributions of `block` tokens, with logs if the buffers `laws` have them."""
    rows, _, size = laws.q.shape
    blank = jnp.zeros((rows, block + 1, size), jnp.float32)
    return Laws(blank, blank, None if laws.logs is None else Laws(blank, blank))


def _joined(draft: Draft, tail: Draft, rows: Array) -> Draft:
    """Appends the tail's block to the first one in `rows` `[B]`; the other rows keep the first block alone."""
    width = draft.q.shape[1] - 1  # the buffers have the whole block's width, tail and bonus included
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
        greedy=draft.greedy & tail.greedy,  # true only if the distributions of both are one-hot
        steps=draft.steps + tail.steps,
        bad=bad,
        lawful=None,
        stop=_compared(draft, tail, width + 1, rows),
    )


def _compared(draft: Draft, tail: Draft, width: int, rows: Array) -> Array | None:
    """Returns the numbers that both drafters' stop policies compared, `[B, width]`, the tail's after the first's."""
    if draft.stop is None and tail.stop is None:
        return None
    blank = jnp.full((draft.length.shape[0], width), jnp.nan)
    first = blank if draft.stop is None else write_slots(blank, draft.stop, jnp.zeros_like(draft.length), axis=1)
    if tail.stop is None:
        return first
    after_first = jnp.arange(width)[None] >= draft.length[:, None]
    return jnp.where(after_first & rows[:, None], write_slots(blank, tail.stop, draft.length, axis=1), first)
