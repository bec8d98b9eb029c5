"""Section `rounds`: time of the engine divided by the time of the model calls that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.loops import extend_loop
from benchmarks.random_models import random_pair
from benchmarks.setting import Bench, Rows
from speccascade_jax.evaluation.points import Settings


def run(bench: Bench) -> Rows:
    """Measures one row per rule (with its first α), γ and temperature, and the lossless rule with larger models."""
    settings = bench.settings
    first = {method.method: method for method in reversed(settings.methods)}
    methods = [first[name] for name in dict.fromkeys(method.method for method in settings.methods)]
    rows = []
    for method in bench.track([replace(m, block_size=block) for m in methods for block in settings.blocks(m)]):
        for temperature in settings.temperatures:
            rows.append(_row(bench, method, temperature))
    for name in bench.track(settings.engine_sizes):
        # two examples are enough, because outputs of random models never end early, so all take the same time
        larger = bench.with_pair(random_pair(name, bench.pair.vocabulary), examples=2)
        rows += [_row(larger, replace(larger.lossless, block_size=block), 0.0) for block in settings.block_sizes[:2]]
    return {"rounds": rows}


def _row(bench: Bench, method: Settings, temperature: float) -> dict[str, Any]:
    """Measures a method at one temperature; all times are per example.

    `engine_ms` is the time of `generate` without the work before the first round. `calls_ms` is draft_steps · t_draft +
    target_calls · t_target(γ + 1 tokens), where t_draft and t_target are measured as loops in the same turns. `ratio`
    is `engine_ms` over `calls_ms`.
    """
    rows = range(bench.settings.examples)
    generations = [bench.generator(method, [row], temperature) for row in rows]
    stats = [jax.device_get(run(0)).stats for run in generations]
    draft_steps, target_calls, committed = (
        int(sum(np.sum(getattr(s, name)) for s in stats)) for name in ("draft_steps", "target_calls", "committed")
    )
    engine, params = bench.engine(method)
    loops = call_loops(bench, engine.block)
    prefills = [bench.prefill(engine, params, [row]) for row in rows]
    calls: dict[str, measure.Call] = {
        "engine": one_by_one([partial(run, 0) for run in generations]),
        "prefill": one_by_one(prefills),
        **loops,
    }
    calls["prefill"]()
    seconds = measure.interleave(calls, 2 * bench.settings.repeats)
    draft, target = (seconds[name] / loops[name].count for name in ("draft", "target"))
    inside, expected = seconds["engine"] - seconds["prefill"], draft_steps * draft + target_calls * target
    return {
        "target": bench.pair.name,
        "rule": method.method,
        "alpha": method.alpha,
        "block_size": method.block_size,
        "temperature": temperature,
        "draft_steps": draft_steps / len(rows),
        "target_calls": target_calls / len(rows),
        "tokens": committed / len(rows),
        "draft_step_ms": measure.spread(draft * 1e3),
        "target_call_ms": measure.spread(target * 1e3),
        "calls_ms": measure.spread(expected / len(rows) * 1e3),
        "engine_ms": measure.spread(inside / len(rows) * 1e3),
        "prefill_ms": measure.spread(seconds["prefill"] / len(rows) * 1e3),
        "ratio": measure.spread(inside / expected),
    }


def call_loops(bench: Bench, block: int) -> dict[str, measure.Loop]:
    """Returns loops of a draft step and of scoring a block of `block` tokens, in caches of the engine's size."""
    pair, prompt, slots = bench.pair, bench.prompt([0]), bench.slots(block)
    return {
        "draft": measure.long_enough(extend_loop(pair.draft, prompt, 1, slots), bench.settings.loop_seconds),
        "target": measure.long_enough(extend_loop(pair.target, prompt, block + 1, slots), bench.settings.loop_seconds),
    }


def one_by_one(runs: Sequence[Callable[[], Any]]) -> measure.Call:
    """Returns one call that runs all `runs` and waits for each, because overlapping runs would measure throughput."""

    def call() -> None:
        for run in runs:
            jax.block_until_ready(run())

    return call
