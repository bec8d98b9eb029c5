"""Tests of marks for best and tied entries, and of the line of random requests, on handmade examples."""

import copy

import numpy as np
import pytest

from speccascade_jax.results.analysis import panels, significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from tests.results.analysis.bootstrap_test import timed
from tests.support import fake_records
from tests.support.made_records import HARD, TARGET, point, strip, working


def spots(*records):
    (panel,) = panels.panels([TARGET, *records])
    return panel, [curve[0] for curve in panel.curves.values()]


def quality_marks(*records):
    return significance.quality_marks(spots(*records)[1], Bootstrap())


def latency_marks(*records):
    panel, shown = spots(*records)
    return significance.latency_marks(shown, Bootstrap(), significance.noise(panel))


@pytest.mark.parametrize(("marks_of", "methods", "marks"), [
    (quality_marks, {"chow": {}, "diff": {"gain": 5}, "opt": {"gain": 1}}, ["", "*", ""]),
    (latency_marks, {"chow": {"ratio": 0.9}, "diff": {"ratio": 0.95}, "opt": {"ratio": 0.5}}, ["", "", "*"]),
    # ties are marked on both sides, and no entry is best
    (quality_marks, {"chow": {"gain": -5}, "diff": {"own": 7}, "opt": {"own": 8}}, ["", "≈", "≈"]),
    (latency_marks, {"chow": {"ratio": 0.9}, "diff": {"ratio": 0.5, "own": 7}, "opt": {"ratio": 0.5, "own": 8}},
     ["", "≈", "≈"]),
    # entries with equal outputs are tied
    (quality_marks, {"chow": {"gain": 1, "noise": 0}, "diff": {"gain": 1, "noise": 0}, "opt": {"noise": 0}},
     ["≈", "≈", ""]),
    # with a noisy third that ties, no entry is best
    (quality_marks, {"chow": {"gain": 3, "noise": 0.5}, "diff": {"gain": 2, "noise": 0.5},
                     "opt": {"gain": 1, "noise": 40}}, ["≈", "", "≈"]),
    # examples are paired: the two separate intervals, each 7 points wide, would make this a tie
    (quality_marks, {"chow": {"noise": 0.5}, "opt": {"gain": 0.5, "noise": 0.5}}, ["", "*"]),
    (quality_marks, {"opt": {"gain": 9}}, [""]),
])  # fmt: skip
def test_entries_are_best_or_tied(marks_of, methods, marks):
    assert marks_of(*(point(name, **changes) for name, changes in methods.items())) == marks


def test_a_single_entry_gets_no_mark():
    (spot,) = spots(point("opt", gain=9))[1]
    assert significance.quality_marks([None, spot, None], Bootstrap()) == ["", "", ""]


def test_records_without_single_examples_are_never_marked_as_best():
    old = strip(point("chow", gain=-9))
    assert quality_marks(old, point("diff", gain=5), point("opt")) == ["", "", ""]
    assert quality_marks(old, point("diff", own=7), point("opt", own=8)) == ["", "≈", "≈"]
    assert quality_marks(strip(point("chow", gain=9)), point("diff", gain=5), point("opt")) == ["", "", ""]
    panel, (spot, *_) = spots(old, point("opt"))
    assert significance.quality_gain(panel, spot, Bootstrap()) is significance.latency(spot, Bootstrap()) is None
    said = "No interval and no mark for the quality of 1 and the latency of 1 of 3 points: their records hold no"
    assert significance.uncompared(panel) == [f"{said} results of single examples, or of fewer than 8."]
    assert significance.uncompared(spots(point("opt"))[0]) == []


def test_gains_are_relative_to_the_target():
    panel, (spot,) = spots(point("opt", gain=2, ratio=0.7))
    gain, ratio = significance.quality_gain(panel, spot, Bootstrap()), significance.latency(spot, Bootstrap())
    assert gain.value == pytest.approx(spot.quality.value - panel.target.quality.value) and gain.excludes(0)
    assert ratio.value == pytest.approx(spot.latency.value) and ratio.excludes(1)
    assert significance.quality_gain(panel, panel.target, Bootstrap()) is None


def test_seeds_are_compared_by_their_mean():
    records = [point(name, gain=gain, seed=seed) for name, gain in (("chow", 0), ("opt", 2)) for seed in (0, 1, 2)]
    panel, (chow, opt) = spots(*records)
    assert len(opt.records) == opt.seeds == 3
    gain = significance.quality_gain(panel, opt, Bootstrap())
    assert gain.value == pytest.approx(opt.quality.value - panel.target.quality.value)
    assert significance.quality_marks([chow, opt], Bootstrap()) == ["", "*"]


def fewer(record, trials):
    record = copy.deepcopy(record)
    for entry in ("latency", "target_latency"):
        record[entry]["per_example_ms"] = record[entry]["per_example_ms"][:trials]
    return record


def test_latencies_of_fewer_than_three_trials_get_no_mark():
    records = [point("chow", ratio=0.9), point("diff", ratio=0.95), point("opt", ratio=0.5)]
    assert latency_marks(*records) == ["", "", "*"]
    two = [fewer(record, 2) for record in records]
    assert latency_marks(*two) == ["", "", ""]
    assert any("No mark for latencies of fewer than 3 trials" in note for note in notes(*two))
    seeds = [fewer(point(name, ratio=ratio, seed=seed), 2)
             for name, ratio in (("chow", 0.9), ("opt", 0.5)) for seed in (0, 1)]  # fmt: skip
    assert latency_marks(*seeds) == ["", "*"]  # two seeds of two trials are four trials


def notes(*records):
    return list(significance.noise_notes(spots(*records)[0]))


def busy(ratio):
    target = point("autoregressive", ratio=ratio, noise=0)
    panel, *_ = panels.panels([target, point("chow", ratio=0.8), point("opt", ratio=0.7)])
    return panel


def test_the_target_timed_against_itself_is_the_noise_floor():
    """Checks methods 14% apart on a machine whose target differs from itself by 17%: no latency is marked as best."""
    quiet, loud = busy(1.01), busy(1.17)
    for panel, marks in ((quiet, ["", "*"]), (loud, ["≈", "≈"])):
        shown, floor = [curve[0] for curve in panel.curves.values()], significance.noise(panel)
        assert significance.latency_marks(shown, Bootstrap(), floor) == marks
    assert significance.noise(loud) == pytest.approx(np.log(1.17))
    wide = significance.latency(shown[1], Bootstrap(), significance.noise(loud))
    assert wide.low <= wide.value / 1.17 and wide.high >= wide.value * 1.17 * 0.999
    (said, widths), quiet_said = significance.noise_notes(loud), list(significance.noise_notes(quiet))
    assert said == BUSY and "differ by up to 17.0% over all trials" in widths
    assert len(quiet_said) == 1 and "differ by up to 1.0%" in quiet_said[0]
    assert BUSY in significance.noise_notes(busy(1 / 1.12))


BUSY = "The machine was busy, and the latencies are unreliable: measure again when nothing else runs."


def in_trials(record, *ratios, work=0):
    """Returns the record with these latencies relative to the target's by trial, and the calls that `work` stands for.

    Outputs differ in length between methods, as those of lossy rules do.
    """
    alone = np.asarray(record["target_latency"]["per_example_ms"])
    record["latency"]["per_example_ms"] = (alone * np.asarray(ratios)[:, None]).tolist()
    record["relative_latency"]["value"] = float(np.mean(ratios))
    record = working(record, work) if work else record
    if work:
        record["latency"]["per_example_tokens"][0][0] += len(record["point"]["method"])
    return record


QUIET = {"target": (1.02, 0.98, 1.01), "first": (0.60, 0.61, 0.59), "second": (0.60, 0.59, 0.61)}


@pytest.mark.parametrize(("changes", "warned"), [
    ({}, False),
    # two methods that made the same calls are 1.10 and 1.43 times as fast as the target: a pair of equal work
    ({"first": (1 / 1.10,) * 3, "second": (1 / 1.43,) * 3}, True),
    # trials of the target against itself: together they read 1.04
    ({"target": (1.22, 0.89, 1.05)}, True),
    # one trial of one method, beside another that made the same calls
    ({"first": (0.48, 0.50, 0.76)}, True),
])  # fmt: skip
def test_a_busy_machine_is_noticed_by_every_pair_of_equal_work(changes, warned):
    ratios = QUIET | changes
    target = in_trials(point("autoregressive", noise=0), *ratios["target"])
    first, second = (in_trials(point(name), *ratios[key], work=1) for name, key in
                     (("chow", "first"), ("token_v3", "second")))  # fmt: skip
    (panel,) = panels.panels([target, first, second])
    said = list(significance.noise_notes(panel))
    assert (BUSY in said) == warned, said
    if not warned:
        assert "2.0% over all trials" not in said[0] and "by up to 4.1% between single trials" in said[0]


def test_trials_of_one_point_with_equal_calls_are_equal_work():
    """Checks a greedy method, which makes the same calls in every trial."""
    record = in_trials(point("chow"), 0.48, 0.50, 0.76, work=1)
    for name in significance.CALLS:
        record["latency"][f"per_example_{name}"] = [record["latency"][f"per_example_{name}"][0]] * 3
    (panel,) = panels.panels([TARGET, record])
    assert significance.trial_noise(panel) == pytest.approx(np.log(0.76 / 0.48))
    assert significance.noise(panel) == pytest.approx(0.0, abs=1e-6)


def test_methods_that_made_the_same_calls_are_always_tied():
    """Checks `lossy_greedy` at 1.53x and `token_v3` at 1.35x, which wrote the same tokens by the same calls."""
    ours, theirs = point("lossy", ratio=0.65), point("token_v3", ratio=0.74)
    chow = point("chow", ratio=0.5)
    assert latency_marks(ours, theirs) == ["*", ""]
    same = [working(ours, 1), working(theirs, 1)]
    assert latency_marks(*same) == ["≈", "≈"]
    panel, _ = spots(*same, working(chow, 2))
    assert significance.noise(panel) == pytest.approx(np.log(0.74 / 0.65), abs=0.02)
    shown = spots(*same)[1]
    assert significance.latency_marks(shown, Bootstrap(), 0.0) == ["≈", "≈"]  # whatever their latencies are
    # the best one ties with one of the two within noise, and so with the other
    best = working(point("chow", ratio=0.64), 2)
    assert latency_marks(*same, best) == ["≈", "≈", "≈"]
    assert sorted(latency_marks(*same, working(point("chow", ratio=0.3), 2))) == ["", "", "*"]


@pytest.mark.laws
@pytest.mark.parametrize("methods", [2, 5])
@pytest.mark.parametrize("trials", [3, 10])
def test_identical_methods_differ_significantly_in_at_most_5_percent_of_tables(methods, trials):
    rng, apart = np.random.default_rng(methods * trials), 0
    base = [point(name, noise=0) for name in ("autoregressive", "chow", "diff", "opt", "token_v3", "lossy")]
    for n in range(200):
        records = []
        for record in base[: 1 + methods]:
            method_ms, target = timed(rng, trials, 16, ratio=1.0 if record is base[0] else 0.7, spread=0.0)
            retimed = record | {
                "key": f"{record['key']} {n}",
                "latency": record["latency"] | {"per_example_ms": method_ms},
            }
            retimed |= {"relative_latency": record["relative_latency"] | {"value": method_ms.sum() / target.sum()}}
            records.append(retimed | {"target_latency": record["target_latency"] | {"per_example_ms": target}})
        (panel,) = panels.panels(records)
        shown = [curve[0] for curve in panel.curves.values()]
        marks = significance.latency_marks(shown, Bootstrap(samples=400), significance.noise(panel))
        apart += set(marks) != {"≈"}
    assert apart / 200 <= 0.05, apart / 200


def failing(record, count=2):
    """Returns the record without its first examples, as if a model had failed on them."""
    lost, judged = record["quality"]["per_example"]["ids"][:count], record["quality"]["per_example"]
    judged = {"ids": judged["ids"][count:], "statistics": {n: x[count:] for n, x in judged["statistics"].items()}}
    return record | {"quality": record["quality"] | {"per_example": judged}, "failed_examples": lost}


def test_a_point_with_failed_examples_has_no_interval_and_a_note():
    """Checks that a point with fewer examples is compared with no other, and no entry of its column is best."""
    records = [failing(point("chow", gain=9)), point("diff", gain=5), point("opt")]
    assert quality_marks(*records) == ["", "", ""]
    panel, (spot, *rest) = spots(*records)
    assert significance.quality_gain(panel, spot, Bootstrap()) is None
    assert significance.quality_gain(panel, rest[0], Bootstrap()) is not None
    (said,) = significance.uncompared(panel)
    assert "NaN or infinite logits" in said and f"{spot.label}: 2 examples" in said


ENDS = [TARGET, point(panels.DRAFT, gain=-9, ratio=0.1, noise=0)]


def between(*records):
    (panel,) = panels.panels([*ENDS, *(records or (point("opt", gain=1, ratio=0.5),))])
    return panel


def test_the_line_of_random_requests_runs_from_target_to_draft():
    line = significance.random_line(between())
    assert (line.latency[0], line.latency[-1]) == pytest.approx((1.0, 0.1))
    assert line.quality == pytest.approx(np.linspace(HARD.mean(), HARD.mean() - 9, 41))


def test_corpus_scores_of_random_requests_come_from_mixed_statistics():
    statistics = {0: [30, 20, 12, 8, 40, 36, 32, 28, 40, 40], 1: [10, 4, 1, 0, 30, 26, 22, 18, 30, 40]}
    ends = [record | {"quality": record["quality"] | {"metric": "bleu"}} for record in ENDS]
    for n, record in enumerate(ends):
        per_example = {"ids": list(range(64)), "statistics": {"bleu": [statistics[n]] * 64}}
        record["quality"] = record["quality"] | {"per_example": per_example}
    (panel,) = panels.panels([*ends, point("opt") | {"quality": ends[0]["quality"]}])
    line = significance.random_line(panel)
    assert np.abs(np.diff(line.quality, 2)).max() > 1e-6 and (np.diff(line.quality) < 0).all()


def test_the_line_of_random_requests_is_straight_without_single_examples_and_absent_without_an_end():
    for record in (stripped := [strip(point(end)) for end in (panels.TARGET, panels.DRAFT)]):
        record["quality"]["value"] = 30.0 if record is stripped[0] else 20.0
    (panel,) = panels.panels([*stripped, point("opt")])
    assert significance.random_line(panel).quality == pytest.approx(np.linspace(30, 20, 41))
    (alone,) = panels.panels([TARGET, point("opt")])
    assert significance.random_line(alone) is None
    assert significance.gain_over_random(alone, alone.spots[0], Bootstrap()) is None
    assert significance.random_notes(alone, Bootstrap()) == []


def test_gains_over_random_requests_are_computed_at_equal_latency():
    panel = between(point("opt", gain=-2, ratio=0.55, noise=0))
    gain = significance.gain_over_random(panel, panel.spots[0], Bootstrap())
    assert gain.value == pytest.approx(-2 + 9 * 0.5) and gain.low <= gain.value <= gain.high
    # faster than the draft: compared with the draft's quality
    fast = between(point("opt", gain=-2, ratio=0.05, noise=0))
    assert significance.gain_over_random(fast, fast.spots[0], Bootstrap()).value == pytest.approx(7)
    slow = between(point("opt", gain=-2, ratio=3.0, noise=0))
    assert significance.gain_over_random(slow, slow.spots[0], Bootstrap()).value == pytest.approx(-2)


def test_places_are_paired_differences_to_the_target():
    (panel, *_) = panels.panels([fake_records.run(point) for point in fake_records.coordinates()])
    panel_places = significance.places(panel)
    target = next(end for end in panel_places.ends if end.spot is panel.target)
    assert target.difference == (0.0, 0.0, 0.0)
    for name, curve in panel_places.curves.items():
        for place, spot in zip(curve, panel.curves[name], strict=True):
            assert place.difference.value == pytest.approx(spot.quality.value - panel.target.quality.value)
            assert place.difference.low <= place.difference.value <= place.difference.high
    if panel_places.chosen:
        assert panel_places.chosen.difference.value >= -panel_places.margin and panel_places.chosen.latency.value < 1
