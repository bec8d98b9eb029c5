"""Timing of all benchmarks: calls run in repeated turns, and are compared within a turn or with a floor in bytes.

On a shared machine absolute times vary a lot, but the ratio of two calls that run right after each other varies little.
Compared calls therefore run in turns, every other turn in reverse order. Ratios are computed within each turn, and then
their median is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Call = Callable[[], Any]
Spread = dict[str, float]
"""A dictionary with the keys `value` (the median), `low` and `high`."""


def interleave(
    calls: Mapping[str, Call], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, np.ndarray]:
    """Times every call in every turn, in seconds.

    Args:
        calls: compiled and warmed-up calls; a call ends when its result is ready.
        repeats: number of turns; the order is reversed every other turn.
        clock: returns seconds; tests pass a fake one.

    Returns:
        Seconds in each turn by name of the call, float64 `[repeats]`.
    """
    names = list(calls)
    seconds = {name: np.zeros(repeats) for name in names}
    for turn in range(repeats):
        for name in names if turn % 2 == 0 else reversed(names):
            begin = clock()
            jax.block_until_ready(calls[name]())
            seconds[name][turn] = clock() - begin
    return seconds


def spread(values: np.ndarray) -> Spread:
    """Returns the median, the lowest and the highest of some measurements."""
    return {"value": float(np.median(values)), "low": float(np.min(values)), "high": float(np.max(values))}


@dataclass(frozen=True)
class Loop:
    """A jitted loop over work that is too short to be timed alone.

    Attributes:
        run: runs the loop the given number of times; the number is traced, so that changing it does not compile.
        count: the number of repetitions in one call of this object.
    """

    run: Callable[[int], Any]
    count: int

    def __call__(self) -> Any:
        return self.run(self.count)


def long_enough(run: Callable[[int], Any], seconds: float, clock: Callable[[], float] = time.perf_counter) -> Loop:
    """Returns a `Loop` of `run` whose call takes about `seconds`; compiles it and warms it up.

    The number of repetitions is computed from the quickest of three tries. A single try could be delayed by other
    processes; the loop would then be too short, and its time mostly the overhead of starting it.
    """
    jax.block_until_ready(run(1))
    count = 1

    def once() -> float:
        begin = clock()
        jax.block_until_ready(run(count))
        return clock() - begin

    while True:
        spent = min(once() for _ in range(3))
        if spent >= seconds / 4 or count >= 1 << 20:
            return Loop(run, max(1, round(count * seconds / max(spent, 1e-9))))
        count *= 4


def floor_seconds(size: float, bandwidth: np.ndarray) -> np.ndarray:
    """Returns the seconds that reading `size` bytes takes at `bandwidth` bytes per second, one value per turn.

    Raises:
        ValueError: a bandwidth is not positive.
    """
    if not np.all(np.asarray(bandwidth) > 0):
        raise ValueError(f"bandwidth={bandwidth} bytes per second must be positive")
    return size / bandwidth


def memory(compiled: jax.stages.Compiled) -> Any:
    """Returns the bytes that the compiler reports for a program's arguments, outputs, temporaries and code.

    Raises:
        ValueError: the backend does not report memory.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError(f"the backend {jax.default_backend()!r} does not report a program's memory")
    return analysis
