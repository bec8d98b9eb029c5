"""Section `stopping`: cost of short blocks in an engine with room for long ones, and time of an acceptance head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from benchmarks import measure
from benchmarks.rounds import one_by_one
from benchmarks.setting import Bench, Rows
from speccascade_jax.api import make_controls
from speccascade_jax.core.protocols import Decision, DraftStep, Outcome, StopPolicy
from speccascade_jax.core.types import Array, Controls, Params, PyTree
from speccascade_jax.engine.engine import DecodeState
from speccascade_jax.methods.build import assemble
from speccascade_jax.models import teacher_forcing
from speccascade_jax.stopping import acceptance_head
from speccascade_jax.stopping.policies import Fixed

LENGTH = 4
"""Number of tokens in each short block."""


@dataclass(frozen=True)
class Short(Fixed):
    """A stop policy that always drafts `length` tokens, in an engine with room for `block` tokens."""

    length: int = 4
    adaptive: ClassVar[bool] = True

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        decision, state = super().__call__(params, state, step, controls)
        return decision._replace(proceed=decision.proceed & (step.slot + 1 < self.length)), state


@dataclass(frozen=True)
class Whole(Short):
    """The policy `Short` without `adaptive`, so that the target scores every block padded to `block` tokens."""

    adaptive: ClassVar[bool] = False


def run(bench: Bench) -> Rows:
    """Returns the table `capacity`, a row per engine (see `_capacity`), and `heads`, a row per head (see `_heads`)."""
    return {"capacity": _capacity(bench), "heads": _heads(bench)}


def _capacity(bench: Bench) -> list[dict[str, Any]]:
    """Times the same short blocks at T = 1 in three engines.

    The first engine allows exactly these blocks. The other two allow blocks of up to `capacity` tokens: one scores a
    short block in a call of about its length, the other one always in a call of the full length. `ratio` is the time
    over that of the first engine.
    """
    length, capacity = LENGTH, bench.settings.capacity
    kinds: dict[str, StopPolicy] = {
        f"blocks of {length}": Fixed(length),
        f"capacity {capacity}, scored at block width": Short(capacity, length),
        f"capacity {capacity}, scored at full width": Whole(capacity, length),
    }
    calls, counts = {}, {}
    for name, policy in bench.track(list(kinds.items())):
        engine, params = assemble(bench.pair, stop=lambda _, policy=policy: policy)
        longest = bench.settings.max_new_tokens
        runs = [bench.run(engine, params, [row], longest, temperature=1.0) for row in range(bench.settings.examples)]
        stats = [jax.device_get(run_once(0)).stats for run_once in runs]
        counts[name] = [int(sum(s.target_calls.sum() for s in stats)), int(sum(s.draft_steps.sum() for s in stats))]
        calls[name] = one_by_one([partial(run_once, 0) for run_once in runs])
    seconds = measure.interleave(calls, 4 * bench.settings.repeats)
    first = next(iter(kinds))
    return [
        {
            "engine": name,
            "target_calls": counts[name][0] / bench.settings.examples,
            "draft_steps": counts[name][1] / bench.settings.examples,
            "ms_per_example": measure.spread(seconds[name] / bench.settings.examples * 1e3),
            "ratio": measure.spread(seconds[name] / seconds[first]),
        }
        for name in kinds
    ]


def _heads(bench: Bench) -> list[dict[str, Any]]:
    """Measures the µs of an acceptance head on one row, in a loop, and its share of the time of drafting a token.

    The temperature is 1. The time of drafting a token includes the draft's pass, its distribution and the draw. The
    head is timed alone, and not as the difference of two engines, because two programs for the same work differ by far
    more than the time of a head.
    """
    features = teacher_forcing.features(bench.pair.draft)
    if features is None:
        return []
    capacity, rows = bench.settings.capacity, []
    blocks = measure.long_enough(_blocks(bench, capacity), bench.settings.loop_seconds)
    for depth, law in bench.track([(depth, law) for law in (False, True) for depth in bench.settings.head_depths]):
        head = acceptance_head.initial(jax.random.key(0), features, depth, law)
        loops = {"head": measure.long_enough(_head_loop(head, features), bench.settings.loop_seconds), "blocks": blocks}
        seconds = measure.interleave(loops, 4 * bench.settings.repeats)
        of_head, of_step = seconds["head"] / loops["head"].count, seconds["blocks"] / blocks.count / capacity
        rows.append({
            "depth": depth,
            "reads": "state and distribution" if law else "state",
            "microseconds": measure.spread(of_head * 1e6),
            "draft_step_microseconds": measure.spread(of_step * 1e6),
            "share": measure.spread(100 * of_head / of_step),
        })  # fmt: skip
    return rows


def _head_loop(head: Params, features: int) -> Callable[[int], Any]:
    """Returns a function that applies the head `count` times; each input depends on the output before it.

    Without this dependence the compiler could omit repetitions.
    """
    return lambda count: _asked(head, jnp.ones((1, features)), jnp.int32(count))


@jax.jit
def _asked(head: Params, hidden: Array, count: Array) -> Array:
    def body(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, kept = carry
        inputs = hidden
        if acceptance_head.reads_law(head, hidden.shape[-1]):
            inputs = acceptance_head.with_law(hidden, kept, 0.5 * kept)
        kept = jax.nn.sigmoid(acceptance_head.logits(head, inputs))
        return hidden * 0.5 + 1e-3 * kept[:, None], kept

    return jax.lax.fori_loop(0, count, body, (hidden, jnp.ones(1)))[1]


def _blocks(bench: Bench, capacity: int) -> Callable[[int], Any]:
    """Returns a function that drafts `count` full blocks for the first prompt, and rolls each back at once."""
    engine, params = assemble(bench.pair, block_size=capacity, stop_ids=())
    state = bench.prefill(engine, params, [0])()
    controls = make_controls(1, temperature=1.0)
    return lambda count: _drafted(engine, params, state, controls, jnp.int32(count))


@partial(jax.jit, static_argnames="engine")
def _drafted(engine: Any, params: Params, state: DecodeState, controls: Controls, count: Array) -> Array:
    def body(_: Any, state: DecodeState) -> DecodeState:
        room = jnp.full_like(state.length, engine.block)
        drafted = engine.draft(params, state, controls, room, False)
        none = jnp.zeros_like(room)
        outcome = Outcome(drafted.draft, none, none, state.length, none > 0, ~state.done, None)
        drafter = engine.drafter.commit(params["drafter"], drafted.drafter, outcome)
        return replace(state, drafter=drafter, laws=drafted.draft.laws, rounds=state.rounds + 1)

    return jax.lax.fori_loop(0, count, body, state).laws.q_tilde.sum()
