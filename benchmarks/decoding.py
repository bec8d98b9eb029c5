"""Section `decode`: speed-up of whole calls of `decode` at batch 1 over the target alone, prefill included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.setting import Bench, Rows
from speccascade_jax.api import decode
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation import latency
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.pairs.pair import Pair, load_pair
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.store.record import Record
from speccascade_jax.runtime.program_memory import release_when_crowded

CROWDED = 0.15
"""Share of the allowed memory maps above which compiled programs are dropped before a group of methods is timed.

Otherwise `decode` itself could drop programs while it is timed.
"""


@dataclass(frozen=True)
class Row:
    """Result of one call: its length and forward passes, which `latency.interleave` reads, and its tokens."""

    lengths: Any
    stats: Any
    tokens: np.ndarray


@dataclass(frozen=True)
class Passes:
    """Numbers of forward passes of the two models in one call."""

    draft_steps: int
    target_calls: int


def run(bench: Bench) -> Rows:
    """Measures one row per temperature, method and dtype of the draft.

    Methods are timed in groups, in turns with the target: all dtypes of one method, or two methods in one dtype.
    """
    settings = bench.settings
    pairs = {dtype: bench.pair for dtype in settings.draft_dtypes}
    if bench.pair.name == Path(settings.pair).name:  # a pair made in memory cannot be loaded again
        pairs = {dtype: load_pair(settings.pair, draft_dtype=dtype) for dtype in pairs}
    variants = [(method, dtype) for method in settings.decoded for dtype in pairs]
    size = max(2, len(pairs))
    groups = [variants[n : n + size] for n in range(0, len(variants), size)]
    chosen = [(heat, group) for heat in settings.temperatures for group in groups]
    return {"decode": [row for heat, group in bench.track(chosen) for row in _rows(bench, pairs, group, heat)]}


def _rows(
    bench: Bench, pairs: Mapping[str, Pair], variants: Sequence[tuple[Settings, str]], temperature: float
) -> list[dict[str, Any]]:
    texts, trials = bench.decoded, bench.settings.repeats
    target = recorded(Settings(method=TARGET)), next(iter(pairs))
    calls = [partial(_call, bench, pairs[dtype], method, temperature) for method, dtype in (target, *variants)]
    release_when_crowded(share=CROWDED)
    # the first calls compile a program for each bucket of prompt lengths
    outputs = [[call(example, 0).tokens for example in range(len(texts))] for call in calls]
    alone, timed = latency.interleave(calls[0], calls[1:], examples=len(texts), trials=trials)
    rows = []
    for number, (method, dtype) in enumerate(variants):
        row = {"draft_dtype": dtype, "temperature": temperature} | _row(method, timed[number], alone)
        if len(pairs) > 1:
            equal = [np.array_equal(*tokens) for tokens in zip(outputs[number + 1], outputs[1], strict=True)]
            row |= {"over_first": _speed_up(timed[number], timed[0]), "same_as_first": float(np.mean(equal))}
        rows.append(row)
    return rows


def _call(bench: Bench, pair: Pair, method: Settings, temperature: float, example: int, trial: int) -> Row:
    """Runs one call of `decode`; the seed is the trial's number, and the example's number is its id."""
    options: dict[str, Any] = {} if method.block_size is None else {"block_size": method.block_size}
    if method.alpha is not None:
        options["alpha"] = method.alpha
    out = decode(
        pair, bench.decoded[example], method=method.method, temperature=temperature, seed=trial, example_ids=[example],
        max_new_tokens=bench.settings.max_new_tokens, **options,
    )  # fmt: skip
    return Row(out.lengths, Passes(out.stats["draft_steps"], out.stats["target_calls"]), np.asarray(out.tokens))


def _row(method: Settings, timings: latency.Timings, alone: latency.Timings) -> dict[str, Any]:
    """Returns a method's table row; `speed_up` is the time per call of the target alone over that of the method."""
    speed_up = _speed_up(timings, alone)
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
        "speed_up": speed_up,
        "per_token": speed_up["value"] * tokens[0] / tokens[1],
    }


def _speed_up(timings: latency.Timings, baseline: latency.Timings) -> dict[str, float]:
    """Returns the baseline's time over that of `timings`, with a 95% interval over examples and trials.

    With fewer than 8 examples there is no interval: `low` and `high` equal `value`.
    """
    same: dict[str, Any] = {"key": "", "point": {"first_example": 0}, "fingerprints": {"examples": ""}}
    record = same | {"latency": latency.latency(timings), "target_latency": latency.latency(baseline)}
    if timings.seconds.shape[1] < 8:
        return dict.fromkeys(("value", "low", "high"), float(baseline.seconds.sum() / timings.seconds.sum()))
    ratio = Bootstrap().latency_ratio([cast(Record, record)])
    return {"value": 1 / ratio.value, "low": 1 / ratio.high, "high": 1 / ratio.low}
