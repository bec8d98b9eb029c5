"""Section `auto`: time per token with planned and with fixed block lengths γ, by batch size and temperature.

`block_size="auto"` plans the lengths; γ = 0 is the target alone.
"""

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
"""Factor of this section's number of turns over that of others, because the compared times differ by little."""
SEEDS = 2
"""Number of seeds per prompt above temperature 0, where output lengths depend on the seed."""


def run(bench: Bench) -> Rows:
    """Measures one row per batch size, temperature and γ, see `_rows`.

    The largest batch is measured first, because its prompts include the prompts of all smaller ones.
    """
    points = [(size, heat) for size in sorted(bench.settings.batches, reverse=True) for heat in (0.0, 1.0)]
    rows = [row for size, heat in bench.track(points) for row in _rows(bench, size, heat)]
    return {"auto": sorted(rows, key=lambda row: (row["batch"], row["temperature"]))}


def _rows(bench: Bench, size: int, temperature: float) -> list[dict[str, Any]]:
    """Times batches of `size` rows with every γ in each turn; `ratio` is the time over that of the best fixed γ.

    The best γ is chosen on half of the turns, and the ratios are computed on the other half. The smallest of several
    noisy medians is biased downwards, so a choice on the same turns would make everything else look too slow.
    """
    fixed = [recorded(Settings(method=SPEC_DECODE.method, block_size=length)) for length in bench.settings.beside_auto]
    methods = {"0": recorded(Settings(method=TARGET))} | {str(entry.block_size): entry for entry in fixed}
    methods[AUTO] = recorded(Settings(method=SPEC_DECODE.method, block_size=AUTO))
    examples = max(size, min(bench.settings.examples, max(bench.settings.batches)))
    groups = [range(start, start + size) for start in range(0, examples - size + 1, size)]
    calls, generations = dict[str, measure.Call](), dict[str, list[Generation]]()
    for name, method in methods.items():
        runs = [bench.generator(method, group, temperature) for group in groups]
        entry = [partial(call, seed) for call in runs for seed in range(SEEDS if temperature else 1)]
        generations[name] = [jax.device_get(call()) for call in entry]  # the first calls compile
        calls[name] = one_by_one(entry)
    seconds = measure.interleave(calls, TURNS * bench.settings.repeats)
    tokens = {name: sum(int(np.sum(entry.lengths)) for entry in of) for name, of in generations.items()}
    times = {name: seconds[name] / tokens[name] for name in methods}
    # The best γ is chosen on the first two of every four turns. The order of the calls alternates by turn, so both
    # halves contain both orders equally often.
    chosen_by = np.arange(TURNS * bench.settings.repeats) % 4 < 2
    best = min((name for name in methods if name != AUTO), key=lambda name: float(np.median(times[name][chosen_by])))
    return [
        {
            "batch": size,
            "temperature": temperature,
            "block_size": name,
            "ms_per_token": measure.spread(times[name] * 1e3),
            "ratio": measure.spread((times[name] / times[best])[~chosen_by]),
            "rounds": _chosen(bench, generations[name]) if name == AUTO else "",
        }
        for name in methods
    ]


def _chosen(bench: Bench, generations: list[Generation]) -> str:
    """Returns, as text, how many rounds `auto` spent with each block length, such as `3: 12, 5: 40`."""
    drafter: Any = bench.engine(recorded(Settings(method=SPEC_DECODE.method, block_size=AUTO)))[0].drafter
    rounds = np.sum([entry.inner["chosen"].sum(0) for entry in generations], axis=0).tolist()
    return ", ".join(f"{length}: {entry}" for length, entry in zip(drafter.lengths, rounds, strict=True) if entry)
