"""Section `speedup`: time per token over the target's alone, beside what acceptance and step times predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.loops import extend_loop
from benchmarks.prediction import Costs, expected_tokens, speed_up
from benchmarks.rounds import call_loops, one_by_one
from benchmarks.setting import Bench, Rows, Run
from speccascade_jax import timing
from speccascade_jax.generation import Generation
from speccascade_jax.metrics.efficiency import summarise
from speccascade_jax.points import TARGET, Method


class Recorded:
    """Runs by example as `timing.interleave` calls them, whose results are kept."""

    def __init__(self, runs: Sequence[Run]):
        self._runs, self.results = runs, dict[tuple[int, int], Generation]()

    def __call__(self, example: int, trial: int) -> Generation:
        result = self.results[trial, example] = self._runs[example](trial)
        return result

    def tokens(self) -> list[np.ndarray]:
        """The outputs, int32 `[max_new_tokens]` each, in order of trial and example."""
        return [np.asarray(self.results[key].tokens) for key in sorted(self.results)]

    def measures(self) -> dict[str, Any]:
        """The measures of METHODS section 9 over all runs."""
        stats = [jax.device_get(result.stats) for result in self.results.values()]
        return summarise(jax.tree.map(lambda *parts: np.concatenate(parts), *stats))


def run(bench: Bench) -> Rows:
    """One row per rule, α, γ and temperature, see `_row`; two methods at a time share the runs of the target."""
    settings, rows = bench.settings, []
    groups = [settings.methods[n : n + 2] for n in range(0, len(settings.methods), 2)]
    points = [(block, group) for block in settings.block_sizes for group in groups]
    costs: dict[int, Costs] = {}
    for block, group in bench.track(points):
        methods = [replace(method, block_size=block) for method in group]
        costs[block] = costs.get(block) or _costs(bench, methods[0])
        for temperature in settings.temperatures:
            rows += _rows(bench, methods, temperature, costs[block])
    return {"speedup": sorted(rows, key=lambda row: row["temperature"])}


def _rows(bench: Bench, methods: Sequence[Method], temperature: float, costs: Costs) -> list[dict[str, Any]]:
    examples, trials = bench.settings.examples, bench.settings.repeats
    baseline, *others = (
        Recorded([bench.generator(method, [row], temperature) for row in range(examples)])
        for method in (Method(name=TARGET), *methods)
    )
    for recorded in (baseline, *others):
        jax.block_until_ready(recorded(0, 0))  # compiles
    alone, timings = timing.interleave(baseline, others, examples=examples, trials=trials)
    out = []
    for method, recorded, timed in zip(methods, others, timings, strict=True):
        row = _row(method, recorded, timed, alone, costs)
        same = [bool((a == b).all()) for a, b in zip(recorded.tokens(), baseline.tokens(), strict=True)]
        must = method.name == "spec_decode" and temperature == 0
        out.append(row | {"temperature": temperature, "same_output": sum(same) / len(same) if must else None})
    return out


def _row(
    method: Method, recorded: Recorded, timed: timing.Timings, alone: timing.Timings, costs: Costs
) -> dict[str, Any]:
    """A point's row.

    `speed_up` is per token, sampled outputs differ in length; its extremes are over trials (seeds). `predicted` takes
    the rounds and draft steps that were counted, `textbook` the acceptance rate alone, through `expected_tokens`.
    `same_output` is the share of outputs equal to the target's, where they must be.
    """
    assert method.block_size is not None
    seen, block = recorded.measures(), method.block_size
    tokens, tokens_alone = float(timed.tokens.mean()), float(alone.tokens.mean())
    rounds, steps = (seen[name] / timed.tokens.size for name in ("target_calls", "draft_steps"))
    per_token = timing.relative_latency(timed, alone)["per_token"]
    trials = (alone.seconds.sum(1) / alone.tokens.sum(1)) / (timed.seconds.sum(1) / timed.tokens.sum(1))
    acceptance = seen["acceptance_rate"]
    guessed = None if acceptance is None else tokens / expected_tokens(acceptance, block)
    predicted = speed_up(costs, rounds, steps, tokens, tokens_alone)
    # a rule that reads q takes one more pass per round, for the bonus position
    passes = block + (1 if steps > block * rounds else 0)
    return {
        "rule": method.name,
        "alpha": method.alpha,
        "block_size": block,
        "acceptance_rate": acceptance,
        "tokens_per_round": seen["block_efficiency"],
        "tokens": tokens,
        "target_ms_per_token": float(alone.seconds.sum() / alone.tokens.sum() * 1e3),
        "speed_up": measure.spread(trials) | {"value": 1 / per_token},
        "textbook": guessed and speed_up(costs, guessed, guessed * passes, tokens, tokens_alone),
        "predicted": predicted,
        "of_predicted": 1 / per_token / predicted,
    }


def _costs(bench: Bench, method: Method) -> Costs:
    """Step times and prefill with this method's block, in turns."""
    engine, params = bench.engine(method)
    alone, alone_params = bench.engine(Method(name=TARGET))
    rows = range(bench.settings.examples)
    step = extend_loop(bench.pair.target, bench.prompt([0]), 1, bench.slots(0))
    loops = call_loops(bench, engine.block) | {"step": measure.long_enough(step, bench.settings.loop_seconds)}
    calls: dict[str, measure.Call] = {
        "prefill": one_by_one([bench.prefill(engine, params, [row]) for row in rows]),
        "prefill_alone": one_by_one([bench.prefill(alone, alone_params, [row]) for row in rows]),
    }
    for call in calls.values():
        call()
    seconds = measure.interleave({**calls, **loops}, bench.settings.repeats)
    counts = {name: loop.count for name, loop in loops.items()} | dict.fromkeys(calls, len(rows))
    each = {name: float(np.median(seconds[name])) / count for name, count in counts.items()}
    return Costs(score=each.pop("target"), **each)
