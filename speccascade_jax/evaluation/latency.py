"""Wall-clock latency at batch size 1, in turns with a baseline in the same process (docs/methods.md, section 9).

On a shared machine, two programs that are measured one after the other see different loads. Here, the methods and the
baseline run in turns on every example, and the order alternates.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from speccascade_jax.results.store.record import Latency, RecordInterval
from speccascade_jax.runtime import hosts
from speccascade_jax.runtime.progress import counted

Run = Callable[[int, int], Any]
"""Compiled call `(example, trial) -> generation`. The generation has one row; `lengths` is its number of tokens, and
`stats` holds its `Counters`.
"""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds, generated tokens and forward passes of both models for every run, each `[trials, examples]`.

    When the draft decodes alone, the engine counts its passes as `target_calls`; the function `latency` returns them as
    draft steps.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    draft_steps: np.ndarray
    target_calls: np.ndarray


def interleave(
    baseline: Run, methods: Sequence[Run], *, examples: int, trials: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Timings, list[Timings]]:
    """Times several methods and one shared baseline, in turns on the same examples.

    A turn is one trial on one example. The order in a turn is: first method, baseline, other methods; every second turn
    reverses this order. With one or two methods, each method therefore runs directly before or after the baseline, and
    as often first as last. With more methods, each one runs directly after each other one equally often.

    Args:
        baseline: a compiled and warmed-up call; its result is awaited (`block_until_ready`).
        methods: compiled and warmed-up calls; each result is awaited like the baseline's.
        examples: number of examples.
        trials: number of trials.
        clock: returns the time in seconds; tests pass a fake clock.

    Returns:
        The timings of the baseline, and a list with the timings of each method.

    Raises:
        ValueError: `methods` is empty.
    """
    if not methods:
        raise ValueError("there are no methods to time against the baseline: give one or more")
    runs = [methods[0], baseline, *methods[1:]]
    seconds, counts = np.zeros((len(runs), trials, examples)), np.zeros((len(runs), 3, trials, examples), np.int64)
    for trial, example in counted(list(itertools.product(range(trials), range(examples))), "timing in turns", "turns"):
        hosts.stop_here()  # checked in every turn: all trials may take longer than the grace period after SIGTERM
        for n in _order(len(runs), trial + example):
            begin = clock()
            result = jax.block_until_ready(runs[n](example, trial))
            seconds[n, trial, example] = clock() - begin
            row_counts = (result.lengths, result.stats.draft_steps, result.stats.target_calls)
            counts[n, :, trial, example] = [np.sum(np.asarray(count)) for count in row_counts]
    names = ("tokens", "draft_steps", "target_calls")
    # all processes use the first process's times, because later decisions must not differ between processes
    seconds = np.asarray(hosts.agreed(seconds.tolist()))
    timings = [Timings(seconds=s, **dict(zip(names, c, strict=True))) for s, c in zip(seconds, counts, strict=True)]
    return timings[1], [timings[0], *timings[2:]]


def _order(runs: int, turn: int) -> list[int]:
    """Returns the order of the runs in one turn.

    Every second turn reverses the order. With more than three runs, the order also changes every two turns, such that
    each run comes directly after each other one equally often: a run is slower after one that fills the caches with
    other weights (Williams, 1949, "Experimental designs balanced for the estimation of residual effects").
    """
    # The order 0, 1, n - 1, 2, n - 2, …: the differences between neighbours are all different (modulo n). So its cyclic
    # shifts together contain every ordered pair of neighbours once.
    zigzag = [(n + 1) // 2 if n % 2 else (runs - n // 2) % runs for n in range(runs)]
    order = [(turn // 2 + n) % runs for n in zigzag] if runs > 3 else list(range(runs))
    return order if turn % 2 == 0 else order[::-1]


def latency(timings: Timings, *, draft_alone: bool = False) -> Latency:
    """Computes milliseconds per example and per token: the value of each trial, and their median, minimum and maximum.

    `per_example_ms` is a list `[trials][examples]` in the task's order of examples. `results.analysis.bootstrap`
    resamples these times and the baseline's, to estimate a confidence interval of their ratio.
    `results.analysis.forward_times` fits a model of the times to the tokens and forward passes of the same runs.

    With `draft_alone`, the draft took the target's place in the engine, so its counted target calls are returned as
    draft steps.
    """
    steps, calls = timings.draft_steps, timings.target_calls
    if draft_alone:
        steps, calls = calls, np.zeros_like(calls)
    total, tokens = timings.seconds.sum(1) * 1e3, np.maximum(timings.tokens.sum(1), 1)
    return {
        "ms_per_example": _over_trials(total / timings.seconds.shape[1]),
        "ms_per_token": _over_trials(total / tokens),
        "per_example_ms": np.round(timings.seconds * 1e3, 6).tolist(),  # 6 decimals: nanoseconds
        "per_example_tokens": timings.tokens.tolist(),
        "per_example_draft_steps": steps.tolist(),
        "per_example_target_calls": calls.tolist(),
        "tokens_per_example": float(timings.tokens.mean()),
        "examples": timings.seconds.shape[1],
        "trials": timings.seconds.shape[0],
    }


def relative_latency(method: Timings, baseline: Timings) -> RecordInterval:
    """Computes the ratio of the method's total time to the baseline's, and the ratio within each trial.

    `low` and `high` are the smallest and the largest ratio of a trial. `per_token` divides each total time by its
    number of tokens first, because sampled outputs differ in length.
    """
    trials = method.seconds.sum(1) / baseline.seconds.sum(1)
    tokens = max(int(method.tokens.sum()), 1) / max(int(baseline.tokens.sum()), 1)
    ratio = float(method.seconds.sum() / baseline.seconds.sum())
    return _over_trials(trials) | {"value": ratio, "per_token": ratio / tokens}


def _over_trials(values: np.ndarray) -> RecordInterval:
    low, median, high = (float(of(values)) for of in (np.min, np.median, np.max))
    return {"value": median, "low": low, "high": high, "trials": values.tolist()}
