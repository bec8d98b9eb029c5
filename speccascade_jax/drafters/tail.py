"""Tokens of a cheaper drafter behind those of another: the horizontal heuristic of paper 4, appendix D.

Tokens late in a block are the least likely to be kept, so they may be the cheapest to write (cascade speculative
drafting, Chen et al., 2023). Each token counts as drawn from the law of the one that drew it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.arrays import is_stop, write_slots
from speccascade_jax.core.protocols import Drafter, Outcome, Request, Start, layers_read_by
from speccascade_jax.core.types import Array, Cache, Draft, Laws, Params, PyTree
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter, put_laws


@flax.struct.dataclass
class AppendedState:
    """Of the two drafters; `tail_steps` int32 `[B]`: the tail's calls so far."""

    first: PyTree
    tail: PyTree
    tail_steps: Array


@dataclass(frozen=True)
class AppendedDrafter:
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
    reads_features: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.first.reads_features:
            raise ValueError(f"{type(self.first).__name__} reads the target's features: it can have no tail")
        if layers_read_by(self.first):
            raise ValueError(f"{type(self.first).__name__} reads the target's hidden states: it can have no tail")
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
        draft, first, cache = self.first.propose(params["first"], state.first, replace(request, complete=False))
        last = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.length - 1, 0)[:, None], axis=1)[:, 0]
        ended = is_stop(last, request.stop_ids) & (draft.length > 0)
        rows = request.active & ~ended
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
    width = draft.q.shape[1] - 1
    tokens = jnp.pad(draft.tokens, [(0, 0), (0, width - draft.tokens.shape[1])])
    bad = jnp.pad(draft.bad, [(0, 0), (0, width + 1 - draft.bad.shape[1])])
    kept = jnp.arange(width + 1)[None] < draft.length[:, None]
    bad = jnp.where(kept, bad, write_slots(jnp.zeros_like(bad), tail.bad, draft.length, axis=1) & rows[:, None])
    laws = put_laws(draft.laws, tail.laws, draft.length, rows)
    return replace(
        draft,
        tokens=jnp.where(kept[:, :width], tokens, write_slots(tokens, tail.tokens, draft.length, axis=1)),
        length=draft.length + jnp.where(rows, tail.length, 0),
        q=laws.q,
        q_tilde=laws.q_tilde,
        logs=laws.logs,
        greedy=draft.greedy & tail.greedy,
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
