"""Wall-clock latency at batch 1, interleaved with a baseline in the same process (METHODS section 9).

On a shared machine, two programs that are measured one after the other see different loads. Here every run of a method
is next to a run of the baseline on the same example, and the order alternates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from speccascade_jax.results.store.record import Latency, RecordInterval
from speccascade_jax.runtime import hosts

Run = Callable[[int, int], Any]
"""A compiled call, `(example, trial) -> generation`. Its result has `lengths`, the number of tokens of its one row, and
`stats`, its `Counters`.
"""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds, generated tokens and forward passes of both models for every run, each `[trials, examples]`.

    If the draft decodes alone, its passes are in `target_calls`, as the engine counts them (`latency`).
    """

    seconds: np.ndarray
    tokens: np.ndarray
    draft_steps: np.ndarray
    target_calls: np.ndarray


def interleave(
    baseline: Run, methods: Sequence[Run], *, examples: int, trials: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Timings, list[Timings]]:
    """Times methods back to back with a baseline that they share.

    For every trial and example the order is: first method, baseline, other methods. Every other turn reverses it. So
    one or two methods are immediate neighbours of the baseline, and come first as often as last. With more methods, the
    runs begin in turn.

    Args:
        baseline: a compiled and warmed-up call; its result is awaited (`block_until_ready`).
        methods: compiled and warmed-up calls; each result is awaited like the baseline's.
        examples: number of examples.
        trials: number of trials.
        clock: returns seconds; tests pass a fake one.

    Returns:
        The baseline's timings and each method's.

    Raises:
        ValueError: no methods.
    """
    if not methods:
        raise ValueError("there are no methods to time against the baseline: give one or more")
    runs = [methods[0], baseline, *methods[1:]]
    seconds, counts = np.zeros((len(runs), trials, examples)), np.zeros((len(runs), 3, trials, examples), np.int64)
    for trial in range(trials):
        for example in range(examples):
            for n in _order(len(runs), trial + example):
                begin = clock()
                result = jax.block_until_ready(runs[n](example, trial))
                seconds[n, trial, example] = clock() - begin
                row_counts = (result.lengths, result.stats.draft_steps, result.stats.target_calls)
                counts[n, :, trial, example] = [np.sum(np.asarray(count)) for count in row_counts]
    names = ("tokens", "draft_steps", "target_calls")
    seconds = np.asarray(hosts.agreed(seconds.tolist()))  # processes' clocks differ, and decisions may depend on them
    timings = [Timings(seconds=s, **dict(zip(names, c, strict=True))) for s, c in zip(seconds, counts, strict=True)]
    return timings[1], [timings[0], *timings[2:]]


def _order(runs: int, turn: int) -> list[int]:
    """Returns the order of the runs: reversed every other turn; more than three runs also rotate every two turns."""
    begin = turn // 2 % runs if runs > 3 else 0
    order = [(begin + n) % runs for n in range(runs)]
    return order if turn % 2 == 0 else order[::-1]


def latency(timings: Timings, *, draft_alone: bool = False) -> Latency:
    """Computes milliseconds per example and per token: median over trials, lowest, highest, and the trials themselves.

    `per_example_ms`, `[trials][examples]` in the task's order, and the baseline's are the input of a bootstrap of their
    ratio over examples and trials (`results.analysis.bootstrap`). The tokens and forward passes of the same runs are
    the regressors of a model of the times (`results.analysis.forward_times`).

    With `draft_alone`, the draft decodes alone in the target's place in the engine, so its passes are draft steps.
    """
    steps, calls = timings.draft_steps, timings.target_calls
    if draft_alone:
        steps, calls = calls, np.zeros_like(calls)
    total, tokens = timings.seconds.sum(1) * 1e3, np.maximum(timings.tokens.sum(1), 1)
    return {
        "ms_per_example": _over_trials(total / timings.seconds.shape[1]),
        "ms_per_token": _over_trials(total / tokens),
        "per_example_ms": np.round(timings.seconds * 1e3, 6).tolist(),  # clocks resolve nanoseconds
        "per_example_tokens": timings.tokens.tolist(),
        "per_example_draft_steps": steps.tolist(),
        "per_example_target_calls": calls.tolist(),
        "tokens_per_example": float(timings.tokens.mean()),
        "examples": timings.seconds.shape[1],
        "trials": timings.seconds.shape[0],
    }


def relative_latency(method: Timings, baseline: Timings) -> RecordInterval:
    """Computes the ratio of the method's total time to the baseline's, and the ratio within each trial.

    `low` and `high` are the extremes over trials. `per_token` divides each total by its number of tokens first, because
    sampled outputs differ in length.
    """
    trials = method.seconds.sum(1) / baseline.seconds.sum(1)
    tokens = max(int(method.tokens.sum()), 1) / max(int(baseline.tokens.sum()), 1)
    ratio = float(method.seconds.sum() / baseline.seconds.sum())
    return _over_trials(trials) | {"value": ratio, "per_token": ratio / tokens}


def _over_trials(values: np.ndarray) -> RecordInterval:
    low, median, high = (float(of(values)) for of in (np.min, np.median, np.max))
    return {"value": median, "low": low, "high": high, "trials": values.tolist()}
