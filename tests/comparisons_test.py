"""Who is called best and who is tied, on records whose examples are made by hand."""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from speccascade_jax import comparisons, summary
from speccascade_jax.metrics.paired import Bootstrap

_spec = importlib.util.spec_from_file_location(
    "fake_records", Path(__file__).parent / "experiments" / "fake_records.py"
)
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)

HARD = np.random.default_rng(0).normal(50, 15, 64)
SLOW = np.random.default_rng(1).uniform(60, 180, 16)


def point(method, gain=0.0, ratio=1.0, noise=2.0, seed=0, own=None):
    """A record with `gain` over the target in every example and `ratio` of its time, up to noise."""
    ends = (summary.TARGET, summary.DRAFT)
    block = {"block_size": None, "bonus": None} if method in ends else {"block_size": 5, "bonus": "rule"}
    record = copy.deepcopy(fake.run({**fake.coordinates()[0], "method": method, "alpha": None, "seed": seed, **block}))
    rng = np.random.default_rng([own if own is not None else len(method), seed])
    scores = HARD + gain + rng.normal(0, noise, 64)
    times = SLOW * ratio * np.exp(rng.normal(0, noise / 50, 16))
    held = {"ids": list(range(64)), "statistics": {"rougeL": scores.tolist()}}
    record["quality"] |= {"metric": "rougeL", "value": float(scores.mean()), "per_example": held}
    record["relative_latency"]["value"] = times.sum() / SLOW.sum()
    record["latency"]["per_example_ms"], record["target_latency"]["per_example_ms"] = times.tolist(), SLOW.tolist()
    return record


TARGET = point(summary.TARGET, noise=0)


def spots(*records):
    (panel,) = summary.panels([TARGET, *records])
    return panel, [curve[0] for curve in panel.curves.values()]


def strip(record):
    """The record as versions before this one wrote it."""
    del record["quality"]["per_example"], record["latency"]["per_example_ms"]
    return record


def quality_marks(*records):
    return comparisons.quality_marks(spots(*records)[1], Bootstrap())


def test_a_clear_winner_is_best():
    records = [point("chow"), point("diff", gain=5), point("opt", gain=1)]
    assert quality_marks(*records) == ["", "*", ""]
    records = [point("chow", ratio=0.9), point("diff", ratio=0.95), point("opt", ratio=0.5)]
    assert comparisons.latency_marks(spots(*records)[1], Bootstrap()) == ["", "", "*"]


def test_ties_are_marked_on_both_sides_and_nobody_is_best():
    records = [point("chow", gain=-5), point("diff", own=7), point("opt", own=8)]
    assert quality_marks(*records) == ["", "≈", "≈"]
    records = [point("chow", ratio=0.9), point("diff", ratio=0.5, own=7), point("opt", ratio=0.5, own=8)]
    assert comparisons.latency_marks(spots(*records)[1], Bootstrap()) == ["", "≈", "≈"]


def test_equal_outputs_tie():
    records = [point("chow", gain=1, noise=0), point("diff", gain=1, noise=0), point("opt", noise=0)]
    assert quality_marks(*records) == ["≈", "≈", ""]


def test_a_noisy_third_that_ties_leaves_no_best():
    records = [point("chow", gain=3, noise=0.5), point("diff", gain=2, noise=0.5), point("opt", gain=1, noise=40)]
    assert quality_marks(*records) == ["≈", "", "≈"]


def test_a_small_difference_is_found_because_examples_are_paired():
    """The two intervals of the records, each 7 points wide, would call this a tie."""
    assert quality_marks(point("chow", gain=0, noise=0.5), point("opt", gain=0.5, noise=0.5)) == ["", "*"]


def test_an_entry_alone_is_not_best_of_anything():
    assert quality_marks(point("opt", gain=9)) == [""]
    (spot,) = spots(point("opt", gain=9))[1]
    assert comparisons.quality_marks([None, spot, None], Bootstrap()) == ["", "", ""]


def test_without_single_examples_nothing_is_called_better():
    old = strip(point("chow", gain=-9))
    assert quality_marks(old, point("diff", gain=5), point("opt")) == ["", "", ""]
    assert quality_marks(old, point("diff", own=7), point("opt", own=8)) == ["", "≈", "≈"]
    assert quality_marks(strip(point("chow", gain=9)), point("diff", gain=5), point("opt")) == ["", "", ""]
    panel, (spot, *_) = spots(old, point("opt"))
    assert comparisons.quality_gain(panel, spot, Bootstrap()) is comparisons.latency(spot, Bootstrap()) is None
    assert comparisons.uncompared(panel) == (
        "No interval and no mark for the quality of 1 and the latency of 1 of 3 points: their records hold no single "
        "examples, or fewer than 8"
    )


def test_nothing_is_said_where_all_were_compared():
    assert comparisons.uncompared(spots(point("opt"))[0]) is None


def test_gains_are_over_the_target():
    panel, (spot,) = spots(point("opt", gain=2, ratio=0.7))
    gain, ratio = comparisons.quality_gain(panel, spot, Bootstrap()), comparisons.latency(spot, Bootstrap())
    assert gain.value == pytest.approx(spot.quality.value - panel.target.quality.value) and gain.excludes(0)
    assert ratio.value == pytest.approx(spot.latency.value) and ratio.excludes(1)
    assert comparisons.quality_gain(panel, panel.target, Bootstrap()) is None


def test_seeds_are_compared_by_their_mean():
    records = [point(name, gain=gain, seed=seed) for name, gain in (("chow", 0), ("opt", 2)) for seed in (0, 1, 2)]
    panel, (chow, opt) = spots(*records)
    assert len(opt.records) == opt.seeds == 3
    gain = comparisons.quality_gain(panel, opt, Bootstrap())
    assert gain.value == pytest.approx(opt.quality.value - panel.target.quality.value)
    assert comparisons.quality_marks([chow, opt], Bootstrap()) == ["", "*"]
