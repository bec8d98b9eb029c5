"""Section `steps`: greedy decoding of each model alone, against the time its weights and caches need to arrive."""

from __future__ import annotations

from typing import Any

from benchmarks import measure
from benchmarks.bandwidth import step_bytes, weight_bytes
from benchmarks.setting import Bench, Rows
from speccascade_jax.points import DRAFT, TARGET, Method


def run(bench: Bench) -> Rows:
    """One row per model, see `_row`."""
    return {
        "steps": [_row(bench, name, method) for name, method in bench.track((("target", TARGET), ("draft", DRAFT)))]
    }


def _row(bench: Bench, name: str, method: str) -> dict[str, Any]:
    """A model's row.

    `ms_per_token` is marginal: a long generation minus a short one, without stop ids, over the tokens between them, so
    that neither prefill nor the way to the device and back is in it. `ratio` is over the floor at the bandwidth of a
    working set of this size, `memory_ratio` over the one at memory's bandwidth.
    """
    bound = getattr(bench.pair, name)
    engine, params = bench.engine(Method(name=method), stop_ids=())
    long = bench.settings.max_new_tokens
    short = max(1, long // 4)
    calls: dict[str, measure.Call] = {
        length: _greedy(bench, engine, params, tokens) for length, tokens in (("long", long), ("short", short))
    }
    calls["prefill"] = bench.prefill(engine, params, [0])
    for call in calls.values():
        call()
    seconds = measure.interleave(calls, 4 * bench.settings.repeats)
    marginal = (seconds["long"] - seconds["short"]) / (long - short)
    size = step_bytes(bench, bound)
    own = measure.floor_seconds(size, bench.bandwidth(size)["value"])
    memory = measure.floor_seconds(size, bench.bandwidth(bench.settings.working_set)["value"])
    return {
        "model": name,
        "parameters": measure.size_of(bound.params) // 4,
        "megabytes_read": size / 1e6,
        "weights_share": weight_bytes(bench, bound) / size,
        "floor_ms": own * 1e3,
        "memory_floor_ms": memory * 1e3,
        "ms_per_token": measure.spread(marginal * 1e3),
        "ratio": measure.spread(marginal / own),
        "memory_ratio": measure.spread(marginal / memory),
        "prefill_ms": measure.spread(seconds["prefill"] * 1e3),
        "whole_ms_per_token": measure.spread(seconds["long"] / long * 1e3),
    }


def _greedy(bench: Bench, engine: Any, params: Any, tokens: int) -> measure.Call:
    run = bench.run(engine, params, [0], tokens)
    return lambda: run(0)
