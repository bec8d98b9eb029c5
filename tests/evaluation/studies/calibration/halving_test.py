"""Tests of successive halving on records made by formulas: tolerances, candidates, survivors, and the winner."""

import itertools

import numpy as np
import pytest

from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.calibration import halving
from speccascade_jax.evaluation.studies.calibration.halving import Bench, Tolerance, Verdict, Window
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import calibration_fakes, text_pair

ALPHAS = tuple(n / 10 for n in range(10))
TARGET = calibration_fakes.point("autoregressive")
CANDIDATES = [
    calibration_fakes.point("spec_decode", block_size=3),
    *(calibration_fakes.point("opt", alpha, block_size=block) for block in (3, 5) for alpha in ALPHAS),
]


def law(settings):
    """Returns fake results: `opt` loses 1% of quality, and 1% more per tenth of α, which saves 5% of time.

    γ = 5 is 3% slower than γ = 3.
    """
    if settings.alpha is None:
        return 1.0, 0.95 if settings.method == "spec_decode" else 1.0, 0.5
    return 0.99 - 0.1 * settings.alpha, 0.9 - 0.5 * settings.alpha + 0.015 * (settings.block_size - 3), 0.5


@pytest.fixture
def bench(tmp_path):
    with ResultStore(tmp_path / "store.jsonl") as store:
        yield Bench(store, calibration_fakes.FakeSession(law, noise=0.5))


def _windows(count=200, first=0):
    return halving.rungs(Window(first=first, judged=count, timed=16))


def _search(bench, windows=None, **tolerance):
    windows = windows or _windows()
    fresh = Window(first=windows[-1].end, judged=150, timed=16)
    return halving.search(bench, CANDIDATES, TARGET, Tolerance(**tolerance), windows, fresh)


def test_rungs_double_up_to_all_examples():
    rungs = _windows(400, first=7)
    assert [(window.first, window.judged) for window in rungs] == [(7, 50), (7, 100), (7, 200), (7, 400)]
    assert [window.timed for window in rungs] == [8, 8, 8, 16]  # an interval needs at least eight examples
    assert [window.judged for window in _windows(33)] == [33] and [window.judged for window in _windows(10)] == [10]


@pytest.mark.parametrize(("tolerance", "alpha"), [
    ({"max_loss": 0.0}, None), ({"max_loss": 0.045}, 0.3), ({"max_loss": 0.065}, 0.5),
    ({"max_latency": 0.67}, 0.5),  # the best quality among the settings that are fast enough
])  # fmt: skip
def test_the_fastest_setting_within_the_allowed_loss_is_found(bench, tolerance, alpha):
    choice = _search(bench, **tolerance)
    assert (choice.chosen.point.settings.alpha, choice.chosen.point.settings.block_size) == (alpha, 3)
    assert choice.chosen.share >= 0.9


def test_fewer_and_fewer_candidates_are_measured(bench):
    windows = _windows()
    _search(bench, windows, max_loss=0.045)
    asked = [point for point in bench.session.asked if point.method != TARGET.method]
    sizes = [sum(point.evaluation.quality_examples == window.judged for point in asked) for window in windows]
    assert sizes[0] == len(CANDIDATES) and all(after <= -(-before // 2) for before, after in itertools.pairwise(sizes))
    assert len(set(bench.session.asked)) == len(bench.session.asked)


def test_the_alphas_of_a_block_size_are_measured_together(bench):
    groups = []
    evaluate = bench.session.evaluate
    bench.session.evaluate = lambda points: groups.append(list(points)) or evaluate(points)
    bench.measure([TARGET, *CANDIDATES], _windows()[0])
    assert sorted(map(len, groups)) == [1, 1, 10, 10]
    assert all(len({(p.settings.method, p.settings.block_size) for p in group}) == 1 for group in groups)


def test_the_target_is_measured_like_the_candidates(bench):
    target, candidate = (records[0] for records in bench.measure([TARGET, CANDIDATES[0]], _windows()[0]).values())
    sizes = ("first_example", "quality_examples", "latency_examples", "latency_trials")
    assert [target["point"][name] for name in sizes] == [candidate["point"][name] for name in sizes]
    assert "latency" in target and target["quality"]["examples"] == 50


def test_every_point_is_measured_with_every_seed(tmp_path):
    with ResultStore(tmp_path / "store.jsonl") as store:
        bench = Bench(store, calibration_fakes.FakeSession(law), seeds=(3, 5))
        measured = bench.measure(CANDIDATES[1:3], _windows()[0])
    assert [[r["point"]["seed"] for r in records] for records in measured.values()] == [[3, 5]] * 2
    assert [records[0]["point"]["alpha"] for records in measured.values()] == [0.0, 0.1]


def test_a_killed_search_resumes_and_a_finished_search_measures_nothing(tmp_path):
    def run(stop_after=None):
        with ResultStore(tmp_path / "store.jsonl") as store:
            loaded = calibration_fakes.FakeSession(law)
            evaluate = loaded.evaluate

            def until_killed(points):
                for record in evaluate(points):
                    yield record
                    if len(loaded.asked) == stop_after:
                        raise KeyboardInterrupt

            loaded.evaluate = until_killed
            try:
                return _search(Bench(store, loaded), max_loss=0.045), loaded.asked
            except KeyboardInterrupt:
                return None, loaded.asked

    (_, first), (choice, second), (repeated_choice, third) = run(stop_after=25), run(), run()
    assert len(first) == 25 and second and not third and not {*first} & {*second}
    assert repeated_choice == choice


def _verdicts(*shares_and_costs):
    return [Verdict(calibration_fakes.point("opt", n), (), *numbers) for n, numbers in enumerate(shares_and_costs)]


def test_dominated_candidates_rank_lower():
    verdicts = _verdicts((0.45, 0.1), (0.5, 0.9), (0.99, 0.8), (0.3, 0.05), (0.45, 0.05))
    assert [verdicts.index(verdict) for verdict in halving.ranked(verdicts)] == [2, 4, 1, 3, 0]
    equal = _verdicts((0.5, 0.5), (0.5, 0.5))
    assert len(halving.ranked(equal)) == 2


def test_the_survivors_of_a_search_range_from_safe_to_cheap_candidates():
    """Checks the survivors on few examples, where cheap candidates look good, but the answer may be a safer one."""
    verdicts = _verdicts(*((best - 0.05 * n, 1 - 0.1 * n) for best in (1, 0.9) for n in range(8)))
    kept = halving.survivors(verdicts, confidence=0.9, least=1)
    assert sorted(verdicts.index(verdict) for verdict in kept) == list(range(8))


def test_the_best_half_and_the_safest_candidate_survive_but_hopeless_ones_do_not():
    verdicts = _verdicts((1.0, 0.99), (0.6, 0.3), (0.7, 0.4), (0.8, 0.5), (0.09, 0.1), (0.2, 0.2), (0.55, 0.6))
    kept = [verdicts.index(verdict) for verdict in halving.survivors(verdicts, confidence=0.9, least=1)]
    assert kept == [1, 2, 3, 0]
    assert [verdicts.index(v) for v in halving.survivors(verdicts, confidence=0.9, least=9)] == [1, 2, 3, 0, 5, 6]
    hopeless = _verdicts((0.02, 0.5), (0.03, 0.6), (0.0, 0.1))
    assert [hopeless.index(verdict) for verdict in halving.survivors(hopeless, confidence=0.9, least=2)] == [1]


def test_the_cheapest_candidate_before_the_first_failure_is_chosen():
    verdicts = _verdicts((1.0, 0.9), (0.95, 0.4), (0.9, 0.5), (0.89, 0.1), (0.99, 0.05))
    choice = halving.choose(verdicts, 0.9)
    # the last one would pass too, but the test ended before it, so that many tries cannot pass by luck
    assert choice.chosen is verdicts[1] and [verdicts.index(verdict) for verdict in choice.others] == [2, 0, 4, 3]
    nobody = halving.choose(verdicts[3:], 0.9)
    assert nobody.chosen is None and nobody.others == [verdicts[4], verdicts[3]]


@pytest.mark.parametrize("among_timed", [pytest.param(True, marks=pytest.mark.laws), False])
def test_a_failed_example_ends_the_calibration_and_is_named(pair, tmp_path, among_timed):
    small = text_pair.evaluation(quality_examples=12, quality_batch=12, latency_examples=4, latency_trials=1)
    loaded, speculative = Session(text_pair.SOURCE, small, pair), text_pair.point("spec_decode", small, block_size=2)
    outputs = np.asarray(loaded.prepare(text_pair.point("autoregressive", small), np.arange(12))(0).tokens)
    broken, lost = text_pair.damaged(
        pair, outputs, wanted=lambda rows: (min(rows) < 4) is among_timed and max(rows) >= 4
    )
    well = next(n for n in range(4, 12) if n not in lost)
    opened = Session(text_pair.SOURCE, small, broken)
    with ResultStore(tmp_path / "found.jsonl") as store:
        bench = Bench(store, opened)
        why = r"spec_decode .* has failed_examples and cannot be compared: example .*: NaN or infinite logits of"
        with pytest.raises(FloatingPointError, match=why):
            bench.measure([speculative], Window(first=0, judged=12, timed=4))
        # a window without failed examples still works
        (record,) = bench.measure([speculative], Window(first=well, judged=1, timed=0))[speculative]
    assert record["quality"]["examples"] == 1 and "failed_examples" not in record


WINDOW = Window(first=0, judged=200, timed=16)


@pytest.fixture
def records(tmp_path):
    """Returns `records(quality, latency)`: those of a setting, and of the target, on the same 200 examples."""

    def make(quality=1.0, latency=0.5, target=1.0):
        laws = {"autoregressive": (target, 1.0, 0.0), "opt": (quality, latency, 0.5)}
        points = [calibration_fakes.point("opt", 0.2), calibration_fakes.point("autoregressive")]
        with ResultStore(tmp_path / f"{quality}-{latency}-{target}.jsonl") as store:
            fakes = calibration_fakes.FakeSession(lambda settings: laws[settings.method])
            measured = Bench(store, fakes).measure(points, WINDOW)
        return [measured[point] for point in points]

    return make


def test_a_loss_is_relative_to_the_targets_quality(records):
    ours, target = records(quality=0.95)
    lost = 1 - ours[0]["quality"]["value"] / target[0]["quality"]["value"]
    for allowed, kept in ((lost + 1e-9, True), (lost - 1e-9, False)):
        holds = Tolerance(max_loss=allowed).kept(ours, target, Bootstrap())
        assert holds.shape == (1001,) and bool(holds[0]) is kept and 0.4 < holds[1:].mean() < 0.6
    shares = [Tolerance(max_loss=max_loss).share(ours, target, Bootstrap()) for max_loss in (0.03, 0.05, 0.07)]
    assert shares[0] < 0.01 < shares[1] < 0.99 < shares[2]


def test_the_share_counts_paired_resamples(records):
    """Compares the share with a new count from the examples' scores, resample by resample."""
    ours, target = records(quality=0.985)
    our_scores, target_scores = (
        np.asarray(side[0]["quality"]["per_example"]["statistics"]["rougeL"]) for side in (ours, target)
    )
    drawn = Bootstrap()._resamples(200)[1:].astype(int)
    counted = [np.repeat(our_scores, n).mean() >= 0.98 * np.repeat(target_scores, n).mean() for n in drawn]
    assert Tolerance(max_loss=0.02).share(ours, target, Bootstrap()) == np.mean(counted)
    assert 0.55 < np.mean(counted) < 0.995


def test_the_targets_own_output_loses_nothing(records):
    _, target = records()
    assert Tolerance(max_loss=0).share(target, target, Bootstrap()) == 1


def test_both_bounds_must_hold_on_the_same_resample(records):
    ours, target = records(quality=0.97, latency=0.6)
    apart = [Tolerance(max_loss=0.03), Tolerance(max_latency=0.6)]
    kept = [item.kept(ours, target, Bootstrap()) for item in apart]
    joint = Tolerance(max_loss=0.03, max_latency=0.6).kept(ours, target, Bootstrap())
    assert (joint == (kept[0] & kept[1])).all() and 0.05 < joint.mean() < min(item.mean() for item in kept)


def test_the_cost_is_time_under_a_bound_of_quality(records):
    ours, _ = records(quality=0.9, latency=0.6)
    fast = ours[0]["relative_latency"]["value"]
    assert Tolerance(max_loss=0.01).cost(ours) == Tolerance(max_loss=0.01, max_latency=0.6).cost(ours) == fast
    assert Tolerance(max_latency=0.6).cost(ours) == -ours[0]["quality"]["value"]


@pytest.mark.parametrize(("given", "message"), [
    ({}, "max_loss and max_latency are both None: give one, for example max_loss=0.01"),
    ({"max_loss": 1.0}, r"max_loss=1.0 is not in \[0, 1\)"),
    ({"max_loss": -0.01}, "max_loss=-0.01 is not in"),
    ({"max_loss": "1%"}, "max_loss='1%' is not a finite number"),
    ({"max_latency": 0}, "max_latency=0 is not above 0"),
    ({"max_latency": float("nan")}, "max_latency=nan is not a finite number"),
    ({"max_loss": 0.1, "confidence": 1.0}, "confidence=1.0 is not between 0.5 and 1"),
    ({"max_loss": 0.1, "confidence": 90}, "confidence=90 is not between"),
])  # fmt: skip
def test_invalid_tolerances_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Tolerance(**given)


def test_a_target_of_quality_zero_is_refused(records):
    ours, target = records(target=0.0)
    with pytest.raises(ValueError, match="the target's rougeL is 0 on 200 examples, .* give max_latency"):
        Tolerance(max_loss=0.01).check(target)
    # few examples may give this by chance, so no candidate is dropped for it
    assert Tolerance(max_loss=0.01).share(ours, target, Bootstrap()) == 1.0
    Tolerance(max_latency=0.6).check(target)
