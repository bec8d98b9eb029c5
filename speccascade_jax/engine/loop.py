"""The only loop over rounds. What tells the methods apart is what is plugged into the engine, never the loop.

Where a planner stands in the drafter's place, rounds come in phases. A phase is rounds of an engine with one of the
planner's drafters: what drafts, verifies and counts is just as wide as its blocks, and a round costs what it costs
under that block size alone. All phases are loops of one program, of which all but the settled one make no turn.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from speccascade_jax.core.protocols import Counted, Planner
from speccascade_jax.core.types import Array, Controls, Params, PyTree, Round
from speccascade_jax.engine.counters import Tally
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.scoring import at_most_once
from speccascade_jax.runtime import moved

__getattr__ = moved.attributes_of("speccascade_jax.engine.engine")

Unfinished = Callable[[DecodeState], Array]
OnRound = Callable[[PyTree, Round], PyTree]


def run_rounds(
    engine: Engine,
    params: Params,
    state: DecodeState,
    controls: Controls,
    unfinished: Unfinished,
    carry: PyTree,
    on_round: OnRound,
) -> tuple[DecodeState, PyTree]:
    """Rounds while any row is `unfinished(state)` `[B]`.

    `on_round(carry, round)` reduces what the rounds did. Rows that are not unfinished sit the round out.
    """

    def body(both: tuple[DecodeState, PyTree]) -> tuple[DecodeState, PyTree]:
        state, carry = both
        if engine.planner is not None:  # one turn of this loop is a phase, a loop over rounds of its own
            state = _settled(engine.planner, params, state, unfinished)
            return _phase(engine, engine.planner, params, state, controls, unfinished, carry, on_round)
        # a row that waits is done for this round only: `done` alone says who takes part, and is given back below
        waits = ~unfinished(state) & ~state.done
        after, turn = engine.step(params, replace(state, done=state.done | waits), controls)
        return replace(after, done=after.done & ~waits), on_round(carry, turn)

    if engine.planner is not None and len(engine.planner.places(params["drafter"])) == 1:
        return body((state, carry))  # one phase, for nothing is ever settled anew
    return jax.lax.while_loop(lambda both: jnp.any(unfinished(both[0])), body, (state, carry))


def one_round(engine: Engine, params: Params, state: DecodeState, controls: Controls) -> tuple[DecodeState, Round]:
    """The next of the rounds that `run_rounds` makes, of all rows that are not done. Jittable alone."""
    planner = engine.planner
    if planner is None:
        return engine.step(params, state, controls)

    def unfinished(state: DecodeState) -> Array:
        return ~state.done

    # a phase that has turns left goes on: a plan asked anew each round would never keep its promise
    state = at_most_once(state.drafter.turns == 0, lambda s: _settled(planner, params, s, unfinished), state)

    def first(state: DecodeState) -> Round:
        own = replace(engine, drafter=planner.drafters[0])
        return _as_wide(own.step(params, _own_state(planner, own, state, 0), controls)[1], engine)

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(first, state))
    return _phase(engine, planner, params, state, controls, unfinished, blank, lambda _, turn: turn, most=1)


def _settled(planner: Planner, params: Params, state: DecodeState, unfinished: Unfinished) -> DecodeState:
    """The state at the beginning of a phase."""
    room = state.limit - state.length
    settled, passes = planner.settle(
        params["drafter"], state.drafter, state.tokens, state.length, room, unfinished(state)
    )
    # catching up is the draft's work too, though no round has begun
    counters = replace(state.counters, draft_steps=state.counters.draft_steps + passes)
    return replace(state, drafter=settled, tally=Tally.of(counters))


def _phase(
    engine: Engine,
    planner: Planner,
    params: Params,
    state: DecodeState,
    controls: Controls,
    unfinished: Unfinished,
    carry: PyTree,
    on_round: OnRound,
    most: int | None = None,
) -> tuple[DecodeState, PyTree]:
    """The rounds that are left of the phase, `most` of them at most."""
    turns, settled, places = state.drafter.turns, state.drafter.place, planner.places(params["drafter"])
    turns = turns if most is None else jnp.minimum(turns, most)

    def goes_on(state: DecodeState) -> Array:
        # where there is but one length nothing is ever chosen anew, and no round has to count towards it
        endless = len(places) == 1 and most is None
        return unfinished(state) if endless else unfinished(state) & (state.counters.rounds < turns)

    def padded(carry: PyTree, turn: Round) -> PyTree:
        return on_round(carry, _as_wide(turn, engine))

    def rounds(place: int, both: tuple[DecodeState, PyTree]) -> tuple[DecodeState, PyTree]:
        (state, carry), own = both, replace(engine, drafter=planner.drafters[place])
        begin = _own_state(planner, own, state, place)
        # counted from 0 in every phase: a row that is not done has taken part in all of its rounds
        end, carry = run_rounds(own, params, begin, controls, goes_on, carry, padded)
        new = end.counters
        left = planner.left(state.drafter, place, end.drafter, Counted(new.rounds, new.kept, new.tried))
        # the phase's buffers end with it: its laws have another width than the next one's
        return replace(end, drafter=left, laws=state.laws, tally=state.tally.plus(new)), carry

    both = (state, carry)
    if len(places) == 1:
        return rounds(places[0], both)
    for place in places:
        # what a phase begins with is made inside, where it is settled alone
        both = at_most_once(settled == place, partial(rounds, place), both)
    return both


def _own_state(planner: Planner, own: Engine, state: DecodeState, place: int) -> DecodeState:
    """What a phase's engine begins with: buffers of its own widths, and nothing counted."""
    rows = state.length.shape[0]
    return replace(
        state,
        drafter=planner.entered(state.drafter, place),
        laws=own.blank_laws(rows),
        tally=Tally.zeros(rows, own.block),
    )


def _as_wide(turn: Round, engine: Engine) -> Round:
    """A round of a phase as one of the longest block: zero at the positions that it has not."""
    missing, vocab_size = engine.block + 1 - turn.tokens.shape[1], engine.target.vocab_size

    def pad(values: Array) -> Array:  # `[B]` says nothing of positions; all else has them on its second axis
        return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)) if values.ndim > 1 else values

    def law(values: Array) -> Array:
        return jnp.broadcast_to(values, (*values.shape[:2], vocab_size))

    if turn.draft.tokens.shape[1] == 0:  # where nothing drafts there are no laws of drafts
        draft, pair = turn.draft, turn.pair
        draft = replace(draft, q=law(draft.q), q_tilde=law(draft.q_tilde), logs=jax.tree.map(law, draft.logs))
        turn = replace(turn, draft=draft, pair=replace(jax.tree.map(law, pair), greedy=pair.greedy))
    wide: Round = jax.tree.map(pad, turn)
    return wide
