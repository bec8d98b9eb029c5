"""Section `decode`: whole calls of `decode` at batch 1, prefill included, against those of the target alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.setting import Bench, Rows
from speccascade_jax.api import decode
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation import latency
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.pairs.pair import load_pair
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.store.record import Record
from speccascade_jax.runtime.program_memory import release_when_crowded

CROWDED = 0.15
"""The share of the allowed memory maps beyond which programs are dropped before a group compiles.

Otherwise `decode` could drop them while it is timed.
"""


@dataclass(frozen=True)
class Row:
    """The entries of a call that `latency.interleave` reads: its tokens and forward passes."""

    lengths: Any
    stats: Any


@dataclass(frozen=True)
class Passes:
    """The forward passes of the two models in one call."""

    draft_steps: int
    target_calls: int


def run(bench: Bench) -> Rows:
    """Measures one row per method and temperature; groups of two methods share the calls of the target."""
    methods, settings = bench.settings.decoded, bench.settings
    if bench.pair.name == Path(settings.pair).name:  # a pair made in memory cannot be loaded again
        bench = bench.with_pair(load_pair(settings.pair, draft_dtype=settings.draft_dtype), settings.examples)
    groups = [methods[n : n + 2] for n in range(0, len(methods), 2)]
    chosen = [(heat, group) for heat in bench.settings.temperatures for group in groups]
    return {"decode": [row for heat, group in bench.track(chosen) for row in _rows(bench, group, heat)]}


def _rows(bench: Bench, methods: Sequence[Settings], temperature: float) -> list[dict[str, Any]]:
    texts, trials = bench.decoded, bench.settings.repeats
    calls = [
        partial(_call, bench, texts, point, temperature) for point in (recorded(Settings(method=TARGET)), *methods)
    ]
    release_when_crowded(share=CROWDED)
    for call in calls:
        for example in range(len(texts)):
            call(example, 0)  # compiles a program for each bucket of prompts
    alone, timed = latency.interleave(calls[0], calls[1:], examples=len(texts), trials=trials)
    facts = {"draft_dtype": bench.settings.draft_dtype, "temperature": temperature}
    return [facts | _row(method, timings, alone) for method, timings in zip(methods, timed, strict=True)]


def _call(bench: Bench, texts: Sequence[str], method: Settings, temperature: float, example: int, trial: int) -> Row:
    """Runs one call; each trial has its own seed, each example its own id."""
    options: dict[str, Any] = {} if method.block_size is None else {"block_size": method.block_size}
    if method.alpha is not None:
        options["alpha"] = method.alpha
    out = decode(
        bench.pair, texts[example], method=method.method, temperature=temperature, seed=trial, example_ids=[example],
        max_new_tokens=bench.settings.max_new_tokens, **options,
    )  # fmt: skip
    return Row(out.lengths, Passes(out.stats["draft_steps"], out.stats["target_calls"]))


def _row(method: Settings, timings: latency.Timings, alone: latency.Timings) -> dict[str, Any]:
    """Returns a row; `speed_up` is the target's time per call over the method's, with an interval.

    The interval is over examples and trials.
    """
    same: dict[str, Any] = {"key": "", "point": {"first_example": 0}, "fingerprints": {"examples": ""}}
    record = same | {"latency": latency.latency(timings), "target_latency": latency.latency(alone)}
    ratio = Bootstrap().latency_ratio([cast(Record, record)]) if timings.seconds.shape[1] >= 8 else None
    value = float(alone.seconds.sum() / timings.seconds.sum())
    interval = {"value": value, "low": value, "high": value}
    if ratio is not None:
        interval = {"value": 1 / ratio.value, "low": 1 / ratio.high, "high": 1 / ratio.low}
    tokens = float(timings.tokens.mean()), float(alone.tokens.mean())
    return {
        "rule": method.method,
        "alpha": method.alpha,
        "block_size": method.block_size,
        "tokens": tokens[0],
        "target_tokens": tokens[1],
        "target_ms": 1e3 * float(alone.seconds.mean()),
        "ms": 1e3 * float(timings.seconds.mean()),
        "tokens_per_call": float(timings.tokens.sum() / timings.target_calls.sum()),
        "speed_up": interval,
        "per_token": value * tokens[0] / tokens[1],
    }
