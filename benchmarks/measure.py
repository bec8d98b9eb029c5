"""The timing of all benchmarks: in turns, repeated, as ratios within one turn, against a floor in bytes.

On a shared machine a time means little, and a ratio of two neighbours in time means a lot. Compared calls therefore run
in turns, forwards and backwards alternately, and ratios are taken within each turn, before the median.
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
"""`value` (the median), `low` and `high`."""


def interleave(
    calls: Mapping[str, Call], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, np.ndarray]:
    """Times every call in every turn, in seconds.

    Args:
        calls: compiled and warmed-up calls; their results are waited for.
        repeats: turns; the order is reversed every other turn.
        clock: seconds; a fake one in tests.

    Returns:
        Name -> `[repeats]`.
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
    """Returns median, lowest and highest."""
    return {"value": float(np.median(values)), "low": float(np.min(values)), "high": float(np.max(values))}


@dataclass(frozen=True)
class Loop:
    """A jitted loop over something too short to be timed alone.

    Attributes:
        run: runs the loop the given number of times; the number is traced, so that changing it does not compile.
        count: the number of repetitions when the loop is called.
    """

    run: Callable[[int], Any]
    count: int

    def __call__(self) -> Any:
        return self.run(self.count)


def long_enough(run: Callable[[int], Any], seconds: float, clock: Callable[[], float] = time.perf_counter) -> Loop:
    """Returns a `Loop` of `run` whose call takes about `seconds`; compiles it and warms it up.

    The quickest of three tries counts. A single try that was held up would pass for a long one, and a loop that is too
    short measures the cost of starting it.
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
    """Returns the least time in which `size` bytes pass at `bandwidth` bytes per second, turn by turn.

    Raises:
        ValueError: a bandwidth that is not positive.
    """
    if not np.all(np.asarray(bandwidth) > 0):
        raise ValueError(f"bandwidth={bandwidth} bytes per second must be positive")
    return size / bandwidth


def memory(compiled: jax.stages.Compiled) -> Any:
    """Returns the compiler's account of a program's memory: bytes of arguments, outputs, temporaries and code.

    Raises:
        ValueError: the backend gives no account.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError(f"the backend {jax.default_backend()!r} does not report a program's memory")
    return analysis
