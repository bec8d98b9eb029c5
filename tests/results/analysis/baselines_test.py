"""Requests sent at random: from end to end, by the expected statistics, and never from resamples."""

import numpy as np
import pytest

from speccascade_jax.results.analysis import baselines, panels
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from tests.support import made_records as hand

ENDS = [hand.TARGET, hand.point(panels.DRAFT, gain=-9, ratio=0.1, noise=0)]


def panel(*records):
    (found,) = panels.panels([*ENDS, *(records or (hand.point("opt", gain=1, ratio=0.5),))])
    return found


def test_the_line_runs_from_the_target_to_the_draft():
    found = baselines.line(panel())
    assert (found.latency[0], found.latency[-1]) == pytest.approx((1.0, 0.1))
    assert found.quality == pytest.approx(np.linspace(hand.HARD.mean(), hand.HARD.mean() - 9, 41))


def test_corpus_scores_are_those_of_mixed_statistics_not_a_straight_line():
    statistics = {0: [30, 20, 12, 8, 40, 36, 32, 28, 40, 40], 1: [10, 4, 1, 0, 30, 26, 22, 18, 30, 40]}
    ends = [record | {"quality": record["quality"] | {"metric": "bleu"}} for record in ENDS]
    for n, record in enumerate(ends):
        held = {"ids": list(range(64)), "statistics": {"bleu": [statistics[n]] * 64}}
        record["quality"] = record["quality"] | {"per_example": held}
    (found,) = panels.panels([*ends, hand.point("opt") | {"quality": ends[0]["quality"]}])
    line = baselines.line(found)
    assert np.abs(np.diff(line.quality, 2)).max() > 1e-6 and (np.diff(line.quality) < 0).all()


def test_without_single_examples_the_line_is_straight_and_without_an_end_there_is_none():
    for record in (stripped := [hand.strip(hand.point(end)) for end in (panels.TARGET, panels.DRAFT)]):
        record["quality"]["value"] = 30.0 if record is stripped[0] else 20.0
    (found,) = panels.panels([*stripped, hand.point("opt")])
    assert baselines.line(found).quality == pytest.approx(np.linspace(30, 20, 41))
    (alone,) = panels.panels([hand.TARGET, hand.point("opt")])
    assert baselines.line(alone) is None and baselines.gain(alone, alone.spots[0], Bootstrap()) is None
    assert baselines.notes(alone, Bootstrap()) == []


def test_gains_are_over_the_line_at_equal_latency():
    found = panel(hand.point("opt", gain=-2, ratio=0.55, noise=0))
    gain = baselines.gain(found, found.spots[0], Bootstrap())
    assert gain.value == pytest.approx(-2 + 9 * 0.5) and gain.low <= gain.value <= gain.high
    fast = panel(hand.point("opt", gain=-2, ratio=0.05, noise=0))  # faster than the draft: the draft's quality counts
    assert baselines.gain(fast, fast.spots[0], Bootstrap()).value == pytest.approx(7)
    slow = panel(hand.point("opt", gain=-2, ratio=3.0, noise=0))
    assert baselines.gain(slow, slow.spots[0], Bootstrap()).value == pytest.approx(-2)
