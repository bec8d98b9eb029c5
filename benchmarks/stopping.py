"""Section `stopping`: short blocks under a large capacity, and what an acceptance head adds to a draft step."""

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
from speccascade_jax.assembly import assemble
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.engine import DecodeState
from speccascade_jax.heads import acceptance
from speccascade_jax.models.base import Params
from speccascade_jax.stopping import AcceptanceHead, Decision, DraftStep, Fixed, StopPolicy
from speccascade_jax.types import Array, Controls, PyTree

LENGTH = 4
"""Tokens of the blocks."""


@dataclass(frozen=True)
class Short(Fixed):
    """Always `length` tokens of a capacity of `block`."""

    length: int = 4
    adaptive: ClassVar[bool] = True

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        decision, state = super().__call__(params, state, step, controls)
        return decision._replace(proceed=decision.proceed & (step.slot + 1 < self.length)), state


def run(bench: Bench) -> Rows:
    """`capacity`: a row per engine, see `_capacity`; `heads`: a row per kind of head, see `_heads`."""
    return {"capacity": _capacity(bench), "heads": _heads(bench)}


def _capacity(bench: Bench) -> list[dict[str, Any]]:
    """The same blocks at T = 1 with their own capacity, and with a larger one, scored as wide as they are or whole.

    `ratio` is to the first.
    """
    length, capacity = LENGTH, bench.settings.capacity
    kinds: dict[str, tuple[StopPolicy, bool]] = {
        f"blocks of {length}": (Fixed(length), False),
        f"capacity {capacity}, scored as wide as they are": (Short(capacity, length), True),
        f"capacity {capacity}, scored whole": (Short(capacity, length), False),
    }
    calls, counts = {}, {}
    for name, (policy, adaptive) in bench.track(list(kinds.items())):
        engine, params = assemble(bench.pair, stop_policy=policy)
        engine = replace(engine, adaptive=adaptive)
        longest = bench.settings.max_new_tokens
        runs = [bench.run(engine, params, [row], longest, temperature=1.0) for row in range(bench.settings.examples)]
        stats = [jax.device_get(one(0)).stats for one in runs]
        counts[name] = [int(sum(s.target_calls.sum() for s in stats)), int(sum(s.draft_steps.sum() for s in stats))]
        calls[name] = one_by_one([partial(one, 0) for one in runs])
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
    """What a head adds to a drafted token, in place: the engine's own draft of full blocks at T = 1, with and without.

    `share` is the added time over that of a token drafted without a head; both within one turn.
    """
    features = acceptance.features(bench.pair.draft)
    if features is None:
        return []
    capacity, rows = bench.settings.capacity, []
    without = _blocks(bench, Fixed(capacity), {})
    # with as many tokens at least as at most, a head is asked every time and never heard
    asked = AcceptanceHead(block=capacity, least=capacity)
    for depth, law in bench.track([(depth, law) for law in (False, True) for depth in range(5)]):
        head = acceptance.initial(jax.random.key(0), features, depth, law)
        loops = {
            name: measure.long_enough(run, bench.settings.loop_seconds)
            for name, run in (("with", _blocks(bench, asked, {"stop": head})), ("without", without))
        }
        seconds = measure.interleave(loops, 4 * bench.settings.repeats)
        step = {name: seconds[name] / loops[name].count / capacity for name in loops}
        rows.append({
            "depth": depth,
            "reads": "state and law" if law else "state",
            "microseconds": measure.spread((step["with"] - step["without"]) * 1e6),
            "draft_step_microseconds": measure.spread(step["without"] * 1e6),
            "share": measure.spread(100 * (step["with"] / step["without"] - 1)),
        })  # fmt: skip
    return rows


def _blocks(bench: Bench, policy: StopPolicy, more: Params) -> Callable[[int], Any]:
    """`count -> result`: that many blocks for the first prompt, each taken back at once."""
    engine, params = assemble(bench.pair, stop_policy=Fixed(policy.block), stop_ids=())
    engine = replace(engine, drafter=ModelDrafter(bench.pair.draft.model, policy))
    params = {**params, "drafter": {**params["drafter"], **more}}
    state = bench.prefill(engine, params, [0])()
    controls = make_controls(1, temperature=1.0, stop_threshold=0.5)
    return lambda count: _looped(engine, params, state, controls, jnp.int32(count))


@partial(jax.jit, static_argnames="engine")
def _looped(engine: Any, params: Params, state: DecodeState, controls: Controls, count: Array) -> Array:
    def body(_: Any, state: DecodeState) -> DecodeState:
        room = jnp.full_like(state.length, engine.block)
        drafted = engine.draft(params, state, controls, room, False)
        drafter = engine.drafter.commit(drafted.drafter, drafted.draft, jnp.zeros_like(room), state.length)
        return replace(state, drafter=drafter, rounds=state.rounds + 1)

    return jax.lax.fori_loop(0, count, body, state).drafter.q_tilde.sum()
