"""Wall-clock latency at batch 1, interleaved with a baseline in the same process (METHODS section 9).

On a shared machine two programs measured one after the other compare the machine with itself at another hour. Here
every run of a method stands next to a run of the baseline on the same example, and who goes first alternates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Run = Callable[[int, int], Any]
"""`(example, trial) -> generation`: a compiled call whose result has `lengths`, the number of tokens of its one row."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds and generated tokens of every run, each `[trials, examples]`."""

    seconds: np.ndarray
    tokens: np.ndarray


def interleave(
    baseline: Run, methods: Sequence[Run], *, examples: int, trials: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Timings, list[Timings]]:
    """Time one or two methods back to back with a baseline that they share.

    For every trial and example the order is method, baseline (, other method), reversed every other time, so that each
    method is an immediate neighbour of the baseline and goes first as often as last.

    Args:
        baseline, methods: compiled and warmed-up calls; the result is waited for (`block_until_ready`).
        examples, trials: how many of each.
        clock: seconds; a fake one in tests.

    Returns:
        The baseline's timings and each method's.

    Raises:
        ValueError: not one or two methods.
    """
    if not 1 <= len(methods) <= 2:
        raise ValueError(f"{len(methods)} methods cannot all be neighbours of one baseline; give one or two")
    runs = [methods[0], baseline, *methods[1:]]
    seconds, tokens = np.zeros((len(runs), trials, examples)), np.zeros((len(runs), trials, examples), np.int64)
    for trial in range(trials):
        for example in range(examples):
            order = range(len(runs)) if (trial + example) % 2 == 0 else reversed(range(len(runs)))
            for n in order:
                begin = clock()
                result = jax.block_until_ready(runs[n](example, trial))
                seconds[n, trial, example] = clock() - begin
                tokens[n, trial, example] = np.sum(np.asarray(result.lengths))
    timings = [Timings(seconds=s, tokens=t) for s, t in zip(seconds, tokens, strict=True)]
    return timings[1], [timings[0], *timings[2:]]


def latency(timings: Timings) -> dict[str, Any]:
    """Milliseconds per example and per token: median over trials, lowest and highest, and the trials themselves.

    `per_example_ms`, `[trials][examples]` in the task's order, with the same of the baseline that ran beside it is what
    a bootstrap of their ratio over examples and trials needs (`metrics.paired`).
    """
    total, tokens = timings.seconds.sum(1) * 1e3, np.maximum(timings.tokens.sum(1), 1)
    return {
        "ms_per_example": _over_trials(total / timings.seconds.shape[1], np.median),
        "ms_per_token": _over_trials(total / tokens, np.median),
        "per_example_ms": np.round(timings.seconds * 1e3, 6).tolist(),  # clocks count nanoseconds
        "tokens_per_example": float(timings.tokens.mean()),
        "examples": timings.seconds.shape[1],
        "trials": timings.seconds.shape[0],
    }


def relative_latency(method: Timings, baseline: Timings) -> dict[str, Any]:
    """The method's time over the baseline's: ratio of totals, and the ratio within each trial with its extremes.

    `per_token` is the same with each total divided by the tokens it made: sampled outputs differ in length.
    """
    trials = method.seconds.sum(1) / baseline.seconds.sum(1)
    tokens = max(int(method.tokens.sum()), 1) / max(int(baseline.tokens.sum()), 1)
    ratio = float(method.seconds.sum() / baseline.seconds.sum())
    return _over_trials(trials, lambda _: ratio) | {"per_token": ratio / tokens}


def _over_trials(values: np.ndarray, centre: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {
        "value": float(centre(values)),
        "low": float(values.min()),
        "high": float(values.max()),
        "trials": [float(value) for value in values],
    }
