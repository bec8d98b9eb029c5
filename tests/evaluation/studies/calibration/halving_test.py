"""Successive halving on records from formulas: who goes on, who wins, what is measured."""

import itertools

import pytest

from speccascade_jax.evaluation.studies.calibration import halving
from speccascade_jax.evaluation.studies.calibration.bench import Bench, Window
from speccascade_jax.evaluation.studies.calibration.halving import Verdict
from speccascade_jax.evaluation.studies.calibration.tolerance import Tolerance
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import calibration_fakes

ALPHAS = tuple(n / 10 for n in range(10))
TARGET = calibration_fakes.point("autoregressive")
CANDIDATES = [
    calibration_fakes.point("spec_decode", block_size=3),
    *(calibration_fakes.point("opt", alpha, block_size=block) for block in (3, 5) for alpha in ALPHAS),
]


def law(settings):
    """`opt` loses 1% of quality, and 1% more per tenth of α, which wins 5% of time; γ = 5 is 3% slower than γ = 3."""
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
    found = _windows(400, first=7)
    assert [(each.first, each.judged) for each in found] == [(7, 50), (7, 100), (7, 200), (7, 400)]
    assert [each.timed for each in found] == [8, 8, 8, 16]  # eight are the fewest for an interval
    assert [each.judged for each in _windows(33)] == [33] and [each.judged for each in _windows(10)] == [10]


@pytest.mark.parametrize(("max_loss", "alpha"), [(0.0, None), (0.045, 0.3), (0.065, 0.5)])
def test_the_fastest_that_keeps_the_loss_is_found(bench, max_loss, alpha):
    found = _search(bench, max_loss=max_loss)
    assert (found.chosen.point.settings.alpha, found.chosen.point.settings.block_size) == (alpha, 3)
    assert found.chosen.share >= 0.9


def test_the_best_that_is_fast_enough_is_found(bench):
    found = _search(bench, max_latency=0.67)
    assert (found.chosen.point.settings.alpha, found.chosen.point.settings.block_size) == (0.5, 3)


def test_fewer_and_fewer_candidates_are_measured(bench):
    windows = _windows()
    _search(bench, windows, max_loss=0.045)
    sizes = [
        sum(p.evaluation.quality_examples == each.judged and p.method != TARGET.method for p in bench.session.asked)
        for each in windows
    ]
    assert sizes[0] == len(CANDIDATES) and all(after <= -(-before // 2) for before, after in itertools.pairwise(sizes))
    assert len(set(bench.session.asked)) == len(bench.session.asked)


def test_the_alphas_of_a_block_size_are_measured_together(bench):
    groups = []
    evaluate = bench.session.evaluate
    bench.session.evaluate = lambda points: groups.append(list(points)) or evaluate(points)
    bench.measure([TARGET, *CANDIDATES], _windows()[0])
    assert sorted(map(len, groups)) == [1, 1, 10, 10]
    assert all(len({(p.settings.method, p.settings.block_size) for p in group}) == 1 for group in groups)


def test_the_target_is_measured_like_the_others_so_that_a_table_of_the_store_has_it_beside_them(bench):
    target, other = (each[0] for each in bench.measure([TARGET, CANDIDATES[0]], _windows()[0]).values())
    sizes = ("first_example", "quality_examples", "latency_examples", "latency_trials")
    assert [target["point"][name] for name in sizes] == [other["point"][name] for name in sizes]
    assert "latency" in target and target["quality"]["examples"] == 50


def test_every_point_is_measured_with_every_seed(tmp_path):
    with ResultStore(tmp_path / "store.jsonl") as store:
        bench = Bench(store, calibration_fakes.FakeSession(law), seeds=(3, 5))
        measured = bench.measure(CANDIDATES[1:3], _windows()[0])
    assert [[r["point"]["seed"] for r in records] for records in measured.values()] == [[3, 5]] * 2
    assert [records[0]["point"]["alpha"] for records in measured.values()] == [0.0, 0.1]


def test_a_killed_search_goes_on_and_one_that_ended_measures_nothing(tmp_path):
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

    (_, first), (found, second), (again, third) = run(stop_after=25), run(), run()
    assert len(first) == 25 and second and not third and not {*first} & {*second}
    assert again == found


def _verdicts(*shares_and_costs):
    return [Verdict(calibration_fakes.point("opt", n), (), *each) for n, each in enumerate(shares_and_costs)]


def test_who_is_neither_surer_nor_cheaper_than_another_ranks_behind():
    given = _verdicts((0.45, 0.1), (0.5, 0.9), (0.99, 0.8), (0.3, 0.05), (0.45, 0.05))
    assert [given.index(each) for each in halving.ranked(given)] == [2, 4, 1, 3, 0]
    equal = _verdicts((0.5, 0.5), (0.5, 0.5))
    assert len(halving.ranked(equal)) == 2


def test_a_search_keeps_the_whole_way_from_safe_to_cheap():
    """On few examples the cheap ones look likely enough: were they all that goes on, the answer would be lost."""
    given = _verdicts(
        *((1 - 0.05 * n, 1 - 0.1 * n) for n in range(8)), *((0.9 - 0.05 * n, 1 - 0.1 * n) for n in range(8))
    )
    kept = halving.survivors(given, confidence=0.9, least=1)
    assert sorted(given.index(each) for each in kept) == list(range(8))


def test_half_goes_on_the_hopeless_do_not_and_the_safest_does():
    given = _verdicts((1.0, 0.99), (0.6, 0.3), (0.7, 0.4), (0.8, 0.5), (0.09, 0.1), (0.2, 0.2), (0.55, 0.6))
    kept = [given.index(each) for each in halving.survivors(given, confidence=0.9, least=1)]
    assert kept == [1, 2, 3, 0]
    assert [given.index(v) for v in halving.survivors(given, confidence=0.9, least=9)] == [1, 2, 3, 0, 5, 6]
    hopeless = _verdicts((0.02, 0.5), (0.03, 0.6), (0.0, 0.1))
    assert [hopeless.index(each) for each in halving.survivors(hopeless, confidence=0.9, least=2)] == [1]


def test_the_cheapest_of_those_before_the_first_failure_is_chosen():
    given = _verdicts((1.0, 0.9), (0.95, 0.4), (0.9, 0.5), (0.89, 0.1), (0.99, 0.05))
    found = halving.choose(given, 0.9)
    # the last would pass too, but the test ended before it: that is what keeps many tries from being lucky once
    assert found.chosen is given[1] and [given.index(each) for each in found.others] == [2, 0, 4, 3]
    nobody = halving.choose(given[3:], 0.9)
    assert nobody.chosen is None and nobody.others == [given[4], given[3]]
