"""Section `steps`: time per token of each model alone, divided by the time to read its weights and caches."""

from __future__ import annotations

from typing import Any

from benchmarks import measure
from benchmarks.bandwidth import step_bytes
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.core.types import count
from speccascade_jax.evaluation.points import Settings, recorded


def run(bench: Bench) -> Rows:
    """Measures one row per model, see `_row`."""
    return {
        "steps": [_row(bench, name, method) for name, method in bench.track((("target", TARGET), ("draft", DRAFT)))]
    }


def _row(bench: Bench, name: str, method: str) -> dict[str, Any]:
    """Measures one model's time per token, and two floors: the times to read the bytes that a step reads.

    `ms_per_token` is marginal: the time of a long generation minus the time of a short one, over the difference in
    tokens, without stop ids. It includes neither prefill nor the transfers to and from the device. `cache_floor_ms`
    uses the bandwidth that is measured with as many bytes as a step reads, which may stay in the processor's cache.
    `memory_floor_ms` uses the bandwidth that is measured with far more bytes than the cache holds.
    """
    bound = getattr(bench.pair, name)
    engine, params = bench.engine(recorded(Settings(method=method)), stop_ids=())
    long = bench.settings.max_new_tokens
    short = max(1, long // 4)
    calls: dict[str, measure.Call] = {
        length: _greedy(bench, engine, params, tokens) for length, tokens in (("long", long), ("short", short))
    }
    calls["prefill"] = bench.prefill(engine, params, [0])
    for call in calls.values():
        call()
    size = step_bytes(bench, bound)
    streams = {"cache": bench.stream(size), "memory": bench.stream(bench.settings.working_set)}
    calls |= {name: stream.loop for name, stream in streams.items()}
    seconds = measure.interleave(calls, 4 * bench.settings.repeats)
    marginal = (seconds["long"] - seconds["short"]) / (long - short)
    cache, memory = (measure.floor_seconds(size, stream.bandwidth(seconds[name])) for name, stream in streams.items())
    return {
        "model": name,
        "parameters": count(bound.params),
        "megabytes_read": size / 1e6,
        "cache_floor_ms": measure.spread(cache * 1e3),
        "memory_floor_ms": measure.spread(memory * 1e3),
        "ms_per_token": measure.spread(marginal * 1e3),
        "cache_ratio": measure.spread(marginal / cache),
        "memory_ratio": measure.spread(marginal / memory),
        "prefill_ms": measure.spread(seconds["prefill"] * 1e3),
        "whole_ms_per_token": measure.spread(seconds["long"] / long * 1e3),
    }


def _greedy(bench: Bench, engine: Any, params: Any, tokens: int) -> measure.Call:
    run = bench.run(engine, params, [0], tokens)
    return lambda: run(0)
