"""Section `trees`: drafts that branch beside chains: tokens per call, speed-up, and what calls predict."""

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
    """A row per shape and temperature, lossless.

    `speed_up`: per token, over the target alone beside it. `predicted`: of a generation's rounds and the calls of each,
    without prefill. `on_paper`: of a device on which a call takes as long whatever its width, as on an accelerator that
    is bound by reading weights: the draft's share of a call is its share of the bytes.
    """
    tables, shapes = [], bench.settings.shapes
    widths = sorted({1} | {width for shape in shapes for width in (*_levels(shape), _tree(shape).size + 1)})
    costs = _costs(bench, widths)
    for temperature, shape in bench.track([(t, shape) for t in bench.settings.temperatures for shape in shapes]):
        method = recorded(Settings(method="spec_decode", tree=shape))
        (found,) = timed(bench, [method], temperature)
        tables.append(_row(bench, shape, found, costs))
    return {"trees": tables}


def _tree(shape: tuple[int, ...]) -> Tree:
    return Tree.of_branching(shape)


def _levels(shape: tuple[int, ...]) -> list[int]:
    """Tokens of each of the draft's calls: the pending one, and every level but the last."""
    return [math.prod(shape[:depth]) for depth in range(len(shape))]


def _costs(bench: Bench, widths: list[int]) -> dict[str, dict[int, float]]:
    """Seconds of a call of either model on so many tokens."""
    slots, prompt, each = bench.slots(max(widths)), bench.prompt([0]), {}
    for name, bound in (("draft", bench.pair.draft), ("target", bench.pair.target)):
        loops = {
            str(width): measure.long_enough(extend_loop(bound, prompt, width, slots), bench.settings.loop_seconds)
            for width in widths
        }
        turns = measure.interleave(loops, bench.settings.repeats)
        each[name] = {width: float(np.median(turns[str(width)])) / loops[str(width)].count for width in widths}
    return each


def _row(bench: Bench, shape: tuple[int, ...], one: Timed, costs: dict[str, dict[int, float]]) -> dict[str, Any]:
    tree, seen, own, alone = _tree(shape), one.measures, one.timings, one.alone
    trials = (alone.seconds.sum(1) / alone.tokens.sum(1)) / (own.seconds.sum(1) / own.tokens.sum(1))
    efficiency = seen["block_efficiency"]
    drafts = sum(costs["draft"][width] for width in _levels(shape))
    predicted = efficiency * costs["target"][1] / (costs["target"][tree.size + 1] + drafts)
    share = count(bench.pair.draft.params) / count(bench.pair.target.params)
    return {
        "shape": "·".join(map(str, shape)),
        "drafted": tree.size,
        "temperature": one.temperature,
        "tokens_per_round": efficiency,
        "speed_up": measure.spread(trials) | {"value": 1 / latency.relative_latency(own, alone)["per_token"]},
        "predicted": predicted,
        "on_paper": efficiency / (1 + len(shape) * share),
        "same_output": one.same if one.temperature == 0 else None,
    }
