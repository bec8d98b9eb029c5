"""The loop over rounds, which all methods share; methods differ only in the engine's components.

An engine may have a planner instead of a drafter. Its rounds then run in phases. A phase is a loop over rounds of an
engine with one of the planner's drafters. In a phase, drafting, verification and counting have the width of that
drafter's blocks, so a round costs no more than in an engine with that drafter alone. One compiled program contains a
loop for each drafter, and only the loop of the chosen drafter runs.
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
    """Runs rounds until `unfinished(state)`, bool `[B]`, is False in every row; returns the state and the last `carry`.

    Rows in which it is already False do not take part in a round. After each round, `on_round(carry, round)` returns
    the new `carry`, which collects results of the rounds.
    """

    def body(state_and_carry: tuple[DecodeState, PyTree]) -> tuple[DecodeState, PyTree]:
        state, carry = state_and_carry
        if engine.planner is not None:  # one iteration of this loop is a phase, which loops over rounds itself
            state = _settled(engine.planner, params, state, unfinished)
            return _phase(engine, engine.planner, params, state, controls, unfinished, carry, on_round)
        # `step` skips rows that are `done`, so a row that must wait is marked as done during this round only
        waits = ~unfinished(state) & ~state.done
        after, turn = engine.step(params, replace(state, done=state.done | waits), controls)
        return replace(after, done=after.done & ~waits), on_round(carry, turn)

    if engine.planner is not None and len(engine.planner.places(params["drafter"])) == 1:
        return body((state, carry))  # with only one possible drafter, a single phase lasts for the whole generation
    return jax.lax.while_loop(lambda state_and_carry: jnp.any(unfinished(state_and_carry[0])), body, (state, carry))


def one_round(engine: Engine, params: Params, state: DecodeState, controls: Controls) -> tuple[DecodeState, Round]:
    """Runs a single round, the next one of `run_rounds`, for all rows that have not ended; jittable on its own."""
    planner = engine.planner
    if planner is None:
        return engine.step(params, state, controls)

    def unfinished(state: DecodeState) -> Array:
        return ~state.done

    # a new phase begins only if the current one has no rounds left; else every call would begin one
    state = at_most_once(state.drafter.turns == 0, lambda s: _settled(planner, params, s, unfinished), state)

    def first(state: DecodeState) -> Round:
        phase_engine = replace(engine, drafter=planner.drafters[0])
        return _as_wide(phase_engine.step(params, _own_state(planner, phase_engine, state, 0), controls)[1], engine)

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(first, state))
    return _phase(engine, planner, params, state, controls, unfinished, blank, lambda _, turn: turn, most=1)


def _settled(planner: Planner, params: Params, state: DecodeState, unfinished: Unfinished) -> DecodeState:
    """Lets the planner choose the next phase's drafter and returns the state in which the phase begins."""
    room = state.limit - state.length
    settled, passes = planner.settle(
        params["drafter"], state.drafter, state.tokens, state.length, room, unfinished(state)
    )
    # passes that bring the draft's cache up to date count as draft steps, although they belong to no round
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
    """Runs the remaining rounds of the current phase, but at most `most` rounds."""
    turns, settled, places = state.drafter.turns, state.drafter.place, planner.places(params["drafter"])
    turns = turns if most is None else jnp.minimum(turns, most)

    def goes_on(state: DecodeState) -> Array:
        # with only one possible drafter the phase lasts until all rows end, so its rounds need not be counted
        endless = len(places) == 1 and most is None
        return unfinished(state) if endless else unfinished(state) & (state.counters.rounds < turns)

    def padded(carry: PyTree, turn: Round) -> PyTree:
        return on_round(carry, _as_wide(turn, engine))

    def rounds(place: int, state_and_carry: tuple[DecodeState, PyTree]) -> tuple[DecodeState, PyTree]:
        (state, carry), phase_engine = state_and_carry, replace(engine, drafter=planner.drafters[place])
        begin = _own_state(planner, phase_engine, state, place)
        # counters start at 0 in every phase, so `rounds` of a row that has not ended is the phase's number of rounds
        end, carry = run_rounds(phase_engine, params, begin, controls, goes_on, carry, padded)
        new = end.counters
        drafter_state = planner.left(state.drafter, place, end.drafter, Counted(new.rounds, new.kept, new.tried))
        # the phase's buffers are dropped, because the next phase's distributions may have another width
        return replace(end, drafter=drafter_state, laws=state.laws, tally=state.tally.plus(new)), carry

    state_and_carry = (state, carry)
    if len(places) == 1:
        return rounds(places[0], state_and_carry)
    for place in places:
        # the phase's initial state is made inside the loop, so that it is computed only for the chosen drafter
        state_and_carry = at_most_once(settled == place, partial(rounds, place), state_and_carry)
    return state_and_carry


def _own_state(planner: Planner, phase_engine: Engine, state: DecodeState, place: int) -> DecodeState:
    """Returns the state in which a phase begins: buffers as wide as the phase's blocks, and counters that are zero."""
    rows = state.length.shape[0]
    return replace(
        state,
        drafter=planner.entered(state.drafter, place),
        laws=phase_engine.blank_laws(rows),
        tally=Tally.zeros(rows, phase_engine.block),
    )


def _as_wide(turn: Round, engine: Engine) -> Round:
    """Pads a round's record with zeros to the width of the planner's longest block, the same in all phases."""
    missing, vocab_size = engine.block + 1 - turn.tokens.shape[1], engine.target.vocab_size

    def pad(values: Array) -> Array:  # `[B]` has no positions; every other array has them on its second axis
        return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)) if values.ndim > 1 else values

    def law(values: Array) -> Array:
        return jnp.broadcast_to(values, (*values.shape[:2], vocab_size))

    if turn.draft.tokens.shape[1] == 0:  # a phase that drafts nothing has stub distributions
        draft, pair = turn.draft, turn.pair
        draft = replace(draft, q=law(draft.q), q_tilde=law(draft.q_tilde), logs=jax.tree.map(law, draft.logs))
        turn = replace(turn, draft=draft, pair=replace(jax.tree.map(law, pair), greedy=pair.greedy))
    wide: Round = jax.tree.map(pad, turn)
    return wide
