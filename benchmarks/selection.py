"""Section `selection`: time of a single drafter, and of the same drafter if it is always chosen from 2, 4 or 8.

All settings write the same tokens, so the difference in time is the cost of choosing and of the unused drafters. A test
checks that no unused drafter is called; this section measures the remaining cost.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.rounds import one_by_one
from benchmarks.setting import Bench, Rows
from speccascade_jax.evaluation.points import Arm, Settings

ARMS = (2, 4, 8)
WIDEST = 8
"""Rows of the largest batch; each row makes its own choice."""


def run(bench: Bench) -> Rows:
    """Measures one row per batch size and number of drafters at temperature 0; 1 is the drafter without a selection."""
    sizes = [size for size in bench.settings.batches if size <= WIDEST]
    return {"selection": [row for size in bench.track(sizes) for row in _rows(bench, size)]}


def _rows(bench: Bench, size: int) -> list[dict[str, Any]]:
    examples = max(size, bench.settings.examples)
    starts = range(0, examples - size + 1, size)
    calls, rounds = {}, {}
    for count in (1, *ARMS):
        runs = [bench.generator(_method(bench.lossless, count), range(start, start + size)) for start in starts]
        rounds[count] = sum(int(np.max(jax.device_get(run(0)).stats.rounds)) for run in runs)
        calls[str(count)] = one_by_one([partial(run, 0) for run in runs])
    seconds = measure.interleave(calls, 2 * bench.settings.repeats)
    return [
        {
            "batch": size,
            "drafters": count,
            "ms_per_round": measure.spread(1e3 * seconds[str(count)] / rounds[count]),
            "added_us": measure.spread(1e6 * (seconds[str(count)] - seconds["1"]) / rounds[count]),
            "ratio": measure.spread(seconds[str(count)] / seconds["1"]),
        }
        for count in (1, *ARMS)
    ]


def _method(alone: Settings, count: int) -> Settings:
    """Returns a selection among `count` drafters that always chooses the first one.

    All drafters are the pair's draft, because other weights would take the same time.
    """
    if count == 1:
        return alone
    arms = tuple(Arm(drafter="draft", name=f"draft{n}") for n in range(count))
    return replace(alone, drafters=arms, choose="draft0")
