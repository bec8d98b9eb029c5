"""Tests of timing in turns, of loops that are long enough to be timed, and of memory floors."""

import numpy as np
import pytest

from benchmarks import measure


class _Clock:
    """A clock that calls move forward."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now

    def call(self, name, seconds):
        def run(*_):
            self.now += seconds
            self.log.append(name)

        return run


def test_every_call_has_its_own_seconds_and_the_order_alternates():
    clock = _Clock()
    calls = {name: clock.call(name, seconds) for name, seconds in (("a", 1.0), ("b", 3.0))}
    seconds = measure.interleave(calls, 3, clock)
    assert "".join(clock.log) == "abbaab"
    np.testing.assert_allclose(seconds["a"], [1, 1, 1])
    np.testing.assert_allclose(seconds["b"], [3, 3, 3])


def test_a_loop_runs_until_it_takes_the_requested_time():
    clock = _Clock()

    def run(count):
        clock.now += 1e-3 * count

    loop = measure.long_enough(run, 0.1, clock)
    assert loop.count == 100
    before = clock.now
    loop()
    assert clock.now - before == pytest.approx(0.1)


def test_one_delayed_call_does_not_shorten_the_loop_and_a_long_call_runs_once():
    clock, stalls = _Clock(), [0.0, 0.5, 0.0, 0.0, 0.5]

    def run(count):
        clock.now += 1e-3 * count + (stalls.pop(0) if stalls else 0.0)

    assert measure.long_enough(run, 0.1, clock).count == 100
    assert measure.long_enough(clock.call("slow", 5.0), 0.1, clock).count == 1


def test_spread_is_median_lowest_and_highest():
    assert measure.spread(np.asarray([3.0, 1.0, 10.0])) == {"value": 3.0, "low": 1.0, "high": 10.0}


def test_the_floor_is_bytes_over_bandwidth():
    np.testing.assert_allclose(measure.floor_seconds(45e6, np.asarray([45e9, 90e9])), [1e-3, 5e-4])
    with pytest.raises(ValueError, match=r"bandwidth=\[1. 0.\]"):
        measure.floor_seconds(1.0, np.asarray([1.0, 0.0]))
