"""Intervals of latencies hold the truth as often as they say, on simulated machines, noisy and at times busy."""

import numpy as np
import pytest
from scipy import stats

from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval, _wider

RATIO = 0.7


def timed(rng, trials, examples, ratio=RATIO, spread=0.25, drift=0.03):
    """Milliseconds of a method and of the target beside it, `[trials, examples]` each.

    Outputs and speed-ups differ by example (log-normal), runs by 8%; one run in fifty takes twice as long; busy spells
    of 20 runs on average slow down whatever runs then by 1.2 to 2.5; a whole trial of one of the two by `drift`.
    """
    target = np.exp(rng.normal(3.4, 0.4, examples))
    own = target * ratio * np.exp(rng.normal(-(spread**2) / 2, spread, examples))
    runs = np.exp(rng.normal(0, 0.08, (2, trials, examples))) * np.where(rng.random((2, trials, examples)) < 0.02, 2, 1)
    busy, at = np.ones(2 * trials * examples), 0
    while at < len(busy):
        at += rng.geometric(1 / 60)
        length = rng.geometric(1 / 20)
        busy[at : at + length] *= rng.uniform(1.2, 2.5)
        at += length
    runs *= np.moveaxis(busy.reshape(trials, examples, 2), -1, 0)
    return own * runs[0] * np.exp(rng.normal(0, drift, (trials, 1))), target * runs[1]


def record(key, own, target, first=0):
    return {
        "key": key,
        "point": {"method": "opt", "alpha": 0.5, "seed": 0, "first_example": first},
        "fingerprints": {"examples": "same"},
        "latency": {"per_example_ms": own},
        "target_latency": {"per_example_ms": target},
    }


def found(rng, n, *, trials, examples, **world) -> Interval:
    own, target = timed(rng, trials, examples, **world)
    return Bootstrap(samples=400).latency_ratio([record(f"{n}-{rng.integers(1 << 30)}", own, target)])


@pytest.mark.laws
@pytest.mark.parametrize("trials", [3, 4, 5, 7, 10])
def test_intervals_hold_the_truth_in_93_to_97_of_100(trials):
    rng, inside, many = np.random.default_rng(trials), 0, 0
    for examples in (8, 12, 16, 64):
        for spread in (0.05, 0.25):
            for drift in (0.0, 0.03):
                for n in range(150):
                    one = found(rng, n, trials=trials, examples=examples, spread=spread, drift=drift)
                    assert 0 < one.low <= one.value <= one.high < np.inf
                    inside, many = inside + (one.low <= RATIO <= one.high), many + 1
    assert 0.93 <= inside / many <= 0.97, inside / many  # 0.0045 is one standard deviation


def test_two_trials_far_apart_leave_no_interval_below_zero():
    """What gave `2.01× [1.47, -28.09]`: extrapolated weights made totals negative."""
    target = np.linspace(50, 150, 12)
    one = Bootstrap().latency_ratio([record("a", [target * 0.2, target * 1.4], [target, target])])
    assert 0 < one.low < 0.2 and one.high > 1.4
    both = Bootstrap().latency_ratio([record("a", [target, target * 7], [target * 7, target])])
    assert 0 < both.low < both.value < both.high


def test_an_interval_is_no_narrower_than_the_floor():
    assert Interval(1.0, 0.99, 1.02).at_least(np.log(1.25)) == pytest.approx((1.0, 0.8, 1.25))
    assert Interval(2.0, 1.0, 4.0).at_least(np.log(1.25)) == (2.0, 1.0, 4.0)


def test_trials_say_how_far_off_trials_are():
    """16 examples that agree in every trial, 5 trials that do not: the interval is Student's of the trials."""
    target, rng = np.linspace(50, 150, 16), np.random.default_rng(0)
    shifts = 0.1 * rng.normal(size=5)
    one = record("a", np.outer(np.exp(shifts), target), np.tile(target, (5, 1)))
    interval = Bootstrap(samples=20_000).latency_ratio([one])
    half = 2.776 * np.exp(shifts).std(ddof=1) / np.exp(shifts).mean() / np.sqrt(5)
    assert np.log([interval.low, interval.high]) == pytest.approx(np.log(interval.value) + [-half, half], abs=0.006)


@pytest.mark.parametrize("examples", [8, 9, 16, 64, 500])
def test_few_examples_widen_as_students_t_does(examples):
    expected = stats.t.ppf(0.975, examples - 1) / stats.norm.ppf(0.975) * (examples / (examples - 1)) ** 0.5
    assert _wider(examples) == pytest.approx(expected, rel=1e-3)
