"""Who is called best and who is tied, on records whose examples are made by hand."""

import pytest

from speccascade_jax.results import comparisons, panels
from speccascade_jax.results.bootstrap import Bootstrap
from tests.support.made_records import TARGET, point, strip


def spots(*records):
    (panel,) = panels.panels([TARGET, *records])
    return panel, [curve[0] for curve in panel.curves.values()]


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
