"""Section `stopping`: short blocks under a large capacity, and what an acceptance head adds to a draft step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from benchmarks import measure
from benchmarks.loops import extend_loop
from benchmarks.rounds import one_by_one
from benchmarks.setting import Bench, Rows
from speccascade_jax.assembly import assemble
from speccascade_jax.heads import acceptance
from speccascade_jax.models.base import Params
from speccascade_jax.stopping import Decision, DraftStep, Fixed, StopPolicy
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
    """µs of a head on one row, and its share of a pass of the draft, both as loops."""
    features = acceptance.features(bench.pair.draft)
    if features is None:
        return []
    step = extend_loop(bench.pair.draft, bench.prompt([0]), 1, bench.slots(LENGTH))
    rows = []
    for depth, law in bench.track([(depth, law) for law in (False, True) for depth in range(5)]):
        head = acceptance.initial(jax.random.key(0), features, depth, law)
        laws = jnp.full((1, bench.pair.draft.model.vocab_size), 0.1)
        loops = {
            "head": measure.long_enough(_head_loop(head, laws, features), bench.settings.loop_seconds),
            "draft": measure.long_enough(step, bench.settings.loop_seconds),
        }
        seconds = measure.interleave(loops, 4 * bench.settings.repeats)
        of_head, of_step = (seconds[name] / loops[name].count for name in ("head", "draft"))
        rows.append({
            "depth": depth,
            "reads": "state and law" if law else "state",
            "microseconds": measure.spread(of_head * 1e6),
            "draft_step_microseconds": measure.spread(of_step * 1e6),
            "share": measure.spread(100 * of_head / of_step),
        })  # fmt: skip
    return rows


def _head_loop(params: Params, law: Array, features: int) -> Callable[[int], Any]:
    """`count -> result`: each turn's input hangs on the turn before, so that none is left out."""
    return lambda count: _looped(params, law, jnp.ones((1, features)), jnp.int32(count))


@jax.jit
def _looped(params: Params, law: Array, hidden: Array, count: Array) -> Array:
    def body(_: Any, hidden: Array) -> Array:
        inputs = hidden
        if acceptance.reads_law(params, hidden.shape[-1]):
            # the largest probability is looked for anew in every step
            inputs = acceptance.with_law(hidden, (law + hidden[:, :1]).max(-1), jnp.full(1, 0.5))
        return hidden * 0.5 + 1e-3 * acceptance.logits(params, inputs)[:, None]

    return jax.lax.fori_loop(0, count, body, hidden)
