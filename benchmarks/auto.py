"""Section `auto`: `block_size="auto"` beside every fixed γ, 0 included, by batch size and temperature."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.rounds import one_by_one
from benchmarks.setting import SPEC_DECODE, Bench, Rows
from speccascade_jax.core.names import TARGET
from speccascade_jax.engine.generate import Generation
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.methods.settings import AUTO

TURNS = 4
"""Times as many turns as elsewhere: what is compared differs by little."""
SEEDS = 2
"""Generations of the same prompts at temperatures above 0, whose lengths differ."""


def run(bench: Bench) -> Rows:
    """A row per batch size, temperature and γ, see `_rows`; the largest batch first, whose prompts hold all others."""
    points = [(size, heat) for size in sorted(bench.settings.batches, reverse=True) for heat in (0.0, 1.0)]
    rows = [row for size, heat in bench.track(points) for row in _rows(bench, size, heat)]
    return {"auto": sorted(rows, key=lambda row: (row["batch"], row["temperature"]))}


def _rows(bench: Bench, size: int, temperature: float) -> list[dict[str, Any]]:
    """The same examples in batches of `size`, every γ in each turn; `ratio` is to the best of the fixed ones.

    The best is chosen by every other turn and the ratios are of the rest: the least of several noisy medians is below
    what it stands for, and would make everything else look slow.
    """
    fixed = [recorded(Settings(method=SPEC_DECODE.method, block_size=length)) for length in bench.settings.beside_auto]
    methods = {"0": recorded(Settings(method=TARGET))} | {str(each.block_size): each for each in fixed}
    methods[AUTO] = recorded(Settings(method=SPEC_DECODE.method, block_size=AUTO))
    examples = max(size, min(bench.settings.examples, max(bench.settings.batches)))
    groups = [range(start, start + size) for start in range(0, examples - size + 1, size)]
    calls, made = dict[str, measure.Call](), dict[str, list[Generation]]()
    for name, method in methods.items():
        runs = [bench.generator(method, group, temperature) for group in groups]
        each = [partial(one, seed) for one in runs for seed in range(SEEDS if temperature else 1)]
        made[name] = [jax.device_get(one()) for one in each]  # compiles
        calls[name] = one_by_one(each)
    seconds = measure.interleave(calls, TURNS * bench.settings.repeats)
    tokens = {name: sum(int(np.sum(each.lengths)) for each in of) for name, of in made.items()}
    times = {name: seconds[name] / tokens[name] for name in methods}
    # turns go to and fro: the first of every two pairs holds both directions
    chosen_by = np.arange(TURNS * bench.settings.repeats) % 4 < 2
    best = min((name for name in methods if name != AUTO), key=lambda name: float(np.median(times[name][chosen_by])))
    return [
        {
            "batch": size,
            "temperature": temperature,
            "block_size": name,
            "ms_per_token": measure.spread(times[name] * 1e3),
            "ratio": measure.spread((times[name] / times[best])[~chosen_by]),
            "rounds": _chosen(bench, made[name]) if name == AUTO else "",
        }
        for name in methods
    ]


def _chosen(bench: Bench, made: list[Generation]) -> str:
    """Rounds by the length aimed at, as words."""
    drafter: Any = bench.engine(recorded(Settings(method=SPEC_DECODE.method, block_size=AUTO)))[0].drafter
    rounds = np.sum([each.inner["chosen"].sum(0) for each in made], axis=0).tolist()
    return ", ".join(f"{length}: {each}" for length, each in zip(drafter.lengths, rounds, strict=True) if each)
