"""Section `speedup`: speed-up per token over the target alone, and its prediction from acceptance and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.loops import extend_loop
from benchmarks.prediction import Costs, expected_tokens, speed_up
from benchmarks.rounds import call_loops, one_by_one
from benchmarks.setting import Bench, Rows, Run
from speccascade_jax.core.names import TARGET
from speccascade_jax.engine.counters import summarise
from speccascade_jax.engine.generate import Generation
from speccascade_jax.evaluation import latency
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.rules.deferral import RULES


class Recorded:
    """A callable for `latency.interleave` that runs a method on an example and keeps the results."""

    def __init__(self, runs: Sequence[Run]):
        self._runs, self.results = runs, dict[tuple[int, int], Generation]()

    def __call__(self, example: int, trial: int) -> Generation:
        result = self.results[trial, example] = self._runs[example](trial)
        return result

    def tokens(self) -> list[np.ndarray]:
        """Returns the outputs, int32 `[max_new_tokens]` each, in order of trial and example."""
        return [np.asarray(self.results[key].tokens) for key in sorted(self.results)]

    def measures(self) -> dict[str, Any]:
        """Returns the measures of METHODS section 9 over all runs."""
        stats = [jax.device_get(result.stats) for result in self.results.values()]
        return summarise(jax.tree.map(lambda *parts: np.concatenate(parts), *stats))


def run(bench: Bench) -> Rows:
    """Measures one row per rule, α, γ and temperature, see `_row`.

    Two methods at a time are timed in turns with the target. The costs for the prediction are measured before and after
    each such group.
    """
    settings, rows = bench.settings, []
    points = []
    for block in dict.fromkeys(block for method in settings.methods for block in settings.blocks(method)):
        methods = [replace(method, block_size=block) for method in settings.methods if block in settings.blocks(method)]
        points += [methods[n : n + 2] for n in range(0, len(methods), 2)]
    for methods in bench.track(points):
        calls = _calls(bench, methods[0])
        before = measure.interleave(calls, settings.repeats)
        groups = [timed(bench, methods, temperature) for temperature in settings.temperatures]
        after = measure.interleave(calls, settings.repeats)
        costs = _costs(calls, {name: np.concatenate([before[name], after[name]]) for name in calls})
        rows += [_row(point, costs) for group in groups for point in group]
    return {"speedup": sorted(rows, key=lambda row: row["temperature"])}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The timed runs of a method, and of the target alone in the same turns."""

    method: Settings
    temperature: float
    measures: dict[str, Any]
    timings: latency.Timings
    alone: latency.Timings
    same: float
    """The share of outputs that are equal to the target's."""


def timed(bench: Bench, methods: Sequence[Settings], temperature: float) -> list[Timed]:
    """Times one or two methods in turns with the target alone; each trial has its own seed."""
    examples, trials = bench.settings.examples, bench.settings.repeats
    baseline, *method_runs = (
        Recorded([bench.generator(method, [row], temperature) for row in range(examples)])
        for method in (recorded(Settings(method=TARGET)), *methods)
    )
    for run in (baseline, *method_runs):
        jax.block_until_ready(run(0, 0))  # the first run compiles
    alone, timings = latency.interleave(baseline, method_runs, examples=examples, trials=trials)
    out = []
    for method, run, times in zip(methods, method_runs, timings, strict=True):
        same = [bool((a == b).all()) for a, b in zip(run.tokens(), baseline.tokens(), strict=True)]
        share = sum(same) / len(same)
        seen = run.measures()
        out.append(Timed(method=method, temperature=temperature, measures=seen, timings=times, alone=alone, same=share))
    return out


def _row(point: Timed, costs: Costs) -> dict[str, Any]:
    """Returns the row of a method at one temperature.

    `speed_up` is per token, because sampled outputs differ in length; its `low` and `high` are over trials (seeds).
    `predicted` uses the counted rounds and draft steps, `textbook` only the acceptance rate. `same_output` is the share
    of outputs equal to the target's, for a lossless rule at temperature 0; otherwise `None`.
    """
    method, seen, timed, alone = point.method, point.measures, point.timings, point.alone
    assert method.block_size is not None
    tokens, tokens_alone = float(timed.tokens.mean()), float(alone.tokens.mean())
    rounds, steps = (seen[name] / timed.tokens.size for name in ("target_calls", "draft_steps"))
    measured = 1 / latency.relative_latency(timed, alone)["per_token"]
    trials = (alone.seconds.sum(1) / alone.tokens.sum(1)) / (timed.seconds.sum(1) / timed.tokens.sum(1))
    predicted = speed_up(costs, rounds, steps, tokens, tokens_alone)
    must = RULES[method.method].lossless and point.temperature == 0
    return {
        "rule": method.method,
        "alpha": method.alpha,
        "block_size": method.block_size,
        "temperature": point.temperature,
        "acceptance_rate": seen["acceptance_rate"],
        "tokens_per_round": seen["block_efficiency"],
        "tokens": tokens,
        "target_ms_per_token": float(alone.seconds.sum() / alone.tokens.sum() * 1e3),
        "costs_ms": {name: 1e3 * value for name, value in asdict(costs).items()},
        "speed_up": measure.spread(trials) | {"value": measured},
        "predicted": predicted,
        "of_predicted": measured / predicted,
        "textbook": _textbook(point, costs, tokens, tokens_alone),
        "same_output": point.same if must else None,
    }


def _textbook(point: Timed, costs: Costs, tokens: float, tokens_alone: float) -> float | None:
    """Returns the speed-up predicted from the acceptance rate alone; `None` if nothing was drafted."""
    acceptance, block = point.measures["acceptance_rate"], point.method.block_size
    if acceptance is None or not isinstance(block, int):
        return None
    rounds = tokens / expected_tokens(acceptance, block)
    # a rule that reads q needs one more pass of the draft per round, for the bonus position
    passes = block + (RULES[point.method.method].reads_q and point.method.bonus == "rule")
    return speed_up(costs, rounds, rounds * passes, tokens, tokens_alone)


def _calls(bench: Bench, method: Settings) -> dict[str, measure.Loop]:
    """Returns the calls that measure `Costs` for a method's block size: loops of model calls, and prefills."""
    engine, params = bench.engine(method)
    alone, alone_params = bench.engine(recorded(Settings(method=TARGET)))
    rows = range(bench.settings.examples)
    step = extend_loop(bench.pair.target, bench.prompt([0]), 1, bench.slots(0))
    prefill = one_by_one([bench.prefill(engine, params, [row]) for row in rows])
    prefill_alone = one_by_one([bench.prefill(alone, alone_params, [row]) for row in rows])
    for call in (prefill, prefill_alone):
        call()
    return call_loops(bench, engine.block) | {
        "step": measure.long_enough(step, bench.settings.loop_seconds),
        "prefill": measure.Loop(lambda _: prefill(), len(rows)),
        "prefill_alone": measure.Loop(lambda _: prefill_alone(), len(rows)),
    }


def _costs(calls: dict[str, measure.Loop], seconds: dict[str, np.ndarray]) -> Costs:
    medians = {name: float(np.median(seconds[name])) / loop.count for name, loop in calls.items()}
    return Costs(score=medians.pop("target"), **medians)
