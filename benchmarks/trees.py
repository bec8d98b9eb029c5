"""Section `trees`: tokens per call and speed-ups of trees and chains, and speed-ups predicted from call times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.loops import extend_loop
from benchmarks.setting import Bench, Rows
from benchmarks.speedup import Timed, timed
from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import count
from speccascade_jax.evaluation import latency
from speccascade_jax.evaluation.points import Settings, recorded


def run(bench: Bench) -> Rows:
    """Measures one row per shape of a tree and temperature, with lossless decoding.

    `speed_up` is per token, over the target alone in the same turns. `predicted` is computed from the number of rounds
    and the measured times of their calls, without prefill. `on_paper` assumes a device that is limited by reading the
    weights. On it, a call takes the same time for any number of tokens, and the times of draft and target calls have
    the ratio of the models' bytes.
    """
    tables, shapes = [], bench.settings.shapes
    widths = sorted({1} | {width for shape in shapes for width in (*_levels(shape), _tree(shape).size + 1)})
    costs = _costs(bench, widths)
    for temperature, shape in bench.track([(t, shape) for t in bench.settings.temperatures for shape in shapes]):
        method = recorded(Settings(method="spec_decode", tree=shape))
        (timed_method,) = timed(bench, [method], temperature)
        tables.append(_row(bench, shape, timed_method, costs))
    return {"trees": tables}


def _tree(shape: tuple[int, ...]) -> Tree:
    return Tree.of_branching(shape)


def _levels(shape: tuple[int, ...]) -> list[int]:
    """Returns the number of tokens in each draft call: the pending token first, then each depth but the last."""
    return [math.prod(shape[:depth]) for depth in range(len(shape))]


def _costs(bench: Bench, widths: list[int]) -> dict[str, dict[int, float]]:
    """Measures the seconds of a call of each model, by the number of tokens in the call."""
    slots, prompt, call_seconds = bench.slots(max(widths)), bench.prompt([0]), {}
    for name, bound in (("draft", bench.pair.draft), ("target", bench.pair.target)):
        loops = {
            str(width): measure.long_enough(extend_loop(bound, prompt, width, slots), bench.settings.loop_seconds)
            for width in widths
        }
        turns = measure.interleave(loops, bench.settings.repeats)
        call_seconds[name] = {width: float(np.median(turns[str(width)])) / loops[str(width)].count for width in widths}
    return call_seconds


def _row(bench: Bench, shape: tuple[int, ...], point: Timed, costs: dict[str, dict[int, float]]) -> dict[str, Any]:
    tree, seen, timings, alone = _tree(shape), point.measures, point.timings, point.alone
    trials = (alone.seconds.sum(1) / alone.tokens.sum(1)) / (timings.seconds.sum(1) / timings.tokens.sum(1))
    efficiency = seen["block_efficiency"]
    drafts = sum(costs["draft"][width] for width in _levels(shape))
    predicted = efficiency * costs["target"][1] / (costs["target"][tree.size + 1] + drafts)
    share = count(bench.pair.draft.params) / count(bench.pair.target.params)
    return {
        "shape": "·".join(map(str, shape)),
        "drafted": tree.size,
        "temperature": point.temperature,
        "tokens_per_round": efficiency,
        "speed_up": measure.spread(trials) | {"value": 1 / latency.relative_latency(timings, alone)["per_token"]},
        "predicted": predicted,
        "on_paper": efficiency / (1 + len(shape) * share),
        "same_output": point.same if point.temperature == 0 else None,
    }
