"""Tests of the threshold search in Appendix D of Holsman et al. (2025), on records made by formulas."""

import dataclasses

import pytest

from speccascade_jax.evaluation.studies.calibration import thresholds
from speccascade_jax.evaluation.studies.calibration.halving import Bench, Window
from speccascade_jax.evaluation.studies.calibration.thresholds import AppendixD
from speccascade_jax.methods.settings import sampling_of
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import calibration_fakes

BASE = calibration_fakes.point("autoregressive", temperature=0.6, top_p=0.9)
WINDOW, SUBSET = Window(first=0, judged=200, timed=16), Window(first=0, judged=50, timed=8)


def law(settings):
    """Returns fake results: target 100%, draft 80%; the baseline is fastest in blocks of 10 and keeps 0.62.

    Fuzzy keeps 0.4 + τ/2. It loses 1% of quality per tenth of τ above 0.3: at 0.7 it just holds, and at 0.8 it does
    not.
    """
    if settings.method == "autoregressive_draft":
        return 0.8, 0.1, 1.0
    if settings.alpha is None:
        return 1.0, 0.8 + 0.01 * abs((settings.block_size or 10) - 10), 0.62
    return 1.005 - 0.1 * max(settings.alpha - 0.3, 0), 0.7 - 0.3 * settings.alpha, min(0.4 + settings.alpha / 2, 1.0)


def _run(tmp_path, law=law, settings=None, seeds=(0, 1), base=BASE):
    with ResultStore(tmp_path / "store.jsonl") as store:
        loaded = calibration_fakes.FakeSession(law, noise=0.0)
        return thresholds.run(Bench(store, loaded, seeds), base, settings or AppendixD(), WINDOW, SUBSET), loaded


def test_the_search_over_thresholds_follows_the_paper(tmp_path, capsys):
    trail, loaded = _run(tmp_path)
    assert trail.block_size == 10 and trail.baseline_acceptance == pytest.approx(0.62)
    assert trail.threshold == 0.4  # the threshold 0.4 keeps 0.60 of the tokens, and 0.5 keeps 0.65
    assert trail.floor == pytest.approx(trail.target - 0.2 * (trail.target - trail.draft))
    assert [step.threshold for step in trail.steps] == [0.4, 0.5, 0.6, 0.7, 0.8]
    assert [step.held for step in trail.steps] == [True] * 4 + [False]
    assert trail.stopped == "quality fell below the floor"
    assert [point.settings.alpha for point in trail.levels.values()] == pytest.approx([0.5, 0.6, 0.7])
    assert list(trail.levels) == ["Low", "Med", "High"]
    thresholds.show(trail, AppendixD())
    said = capsys.readouterr().out
    assert "0.8" in said and "(too low)" in said and "fastest with block size 10" in said


def test_the_draft_is_greedy_and_the_target_draws_the_bonus(tmp_path):
    _, loaded = _run(tmp_path)
    assert {tuple(sampling_of(point.settings).values()) for point in loaded.asked} == {(0.6, 0.9, 0, 0.0)}
    assert {point.settings.bonus for point in loaded.asked} == {"target", None}
    rules = {point.method.rule(point.settings).name for point in loaded.asked if point.settings.alpha}
    assert rules == {"fuzzy_js_reference"}


def test_blocks_grow_when_nearly_all_drafted_tokens_are_kept(tmp_path):
    def generous(settings):
        quality, latency, kept = law(settings)
        return (quality, latency, kept) if settings.alpha is None else (quality, latency, kept + 0.22)

    trail, _ = _run(tmp_path, generous)
    # keeps 0.62 + τ/2, so 0.1 is nearest to 0.62, and from 0.6 on at least 0.9 is kept
    assert [(step.threshold, step.block_size) for step in trail.steps] == [
        (0.1, 10), (0.2, 10), (0.3, 10), (0.4, 10), (0.5, 10), (0.6, 10), (0.7, 15), (0.8, 20),
    ]  # fmt: skip
    lengths = {point.settings.alpha: point.settings.block_size for point in trail.levels.values()}
    assert lengths == {0.3: 10, 0.5: 10, 0.7: 15}


def test_the_search_ends_if_all_tokens_are_kept_or_the_range_of_thresholds_ends(tmp_path):
    def harmless(settings):
        return law(settings) if settings.alpha is None else (1.0, 0.5, min(0.5 + settings.alpha / 2, 1.0))

    trail, _ = _run(tmp_path, harmless, AppendixD(lengths=(5,)))
    assert trail.steps[-1].threshold == 1.0 and trail.stopped == "every drafted token is kept"

    def stubborn(settings):
        return law(settings) if settings.alpha is None else (1.0, 0.5, 0.6)

    trail, _ = _run(tmp_path / "other", stubborn, AppendixD(rule="fuzzy_js"))
    assert trail.steps[-1].threshold == 1.0 and trail.stopped == "the range of fuzzy_js ends at 1"


def test_means_over_seeds_decide(tmp_path):
    trail, loaded = _run(tmp_path, seeds=(0, 1, 2))
    assert {point.seed for point in loaded.asked} == {0, 1, 2}
    counts = {}
    for point in loaded.asked:
        counts[dataclasses.replace(point, seed=0)] = counts.get(dataclasses.replace(point, seed=0), 0) + 1
    assert set(counts.values()) == {3} and len(trail.steps) == 5


def test_a_target_that_is_not_better_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the target's quality, .* is not above the draft's, .* on 200 examples"):
        _run(tmp_path, lambda settings: (1.0, 0.5, 0.5))


def test_a_first_threshold_that_loses_too_much_is_refused(tmp_path):
    def bad(settings):
        return law(settings) if settings.alpha is None else (0.9, 0.5, 0.62)

    trail, *_ = _run(tmp_path, bad)
    assert not trail.levels and len(trail.steps) == 1
    with pytest.raises(ValueError, match=r"quality at the first threshold, 0\.1, is .*, below the floor .*: give"):
        trail.check()


@pytest.mark.parametrize(("changes", "message"), [
    ({"rule": "chow"}, "rule='chow' has no divergence to bound: choose fuzzy_js_reference"),
    ({"rule": "fuzzy_jss"}, "unknown rule 'fuzzy_jss': did you mean fuzzy_js"),
    ({"baseline": "lossy"}, "baseline='lossy' is not one of spec_decode, sd_reference"),
    ({"lengths": (10, 5)}, r"lengths=\(10, 5\) must be a tuple of increasing block sizes"),
    ({"lengths": 5}, "lengths=5 must be a tuple"),
    ({"lengths": ()}, r"lengths=\(\) must be a tuple"),
    ({"lengths": (0, 5)}, "lengths=0 is not a whole number >= 1"),
    ({"lost": 1.0}, "lost=1.0 is not between 0 and 1"),
])  # fmt: skip
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        thresholds.check(BASE, AppendixD(**changes))


def test_the_kept_share_of_drafted_tokens_decides_instead_of_examined_tokens(tmp_path):
    """Checks which share of kept tokens decides.

    Only one token is examined of a block that is rejected at its first one, so kept / examined says little about the
    length.
    """

    def examined_few(settings):
        quality, latency, kept = law(settings)
        return quality, latency, min(kept + 0.35, 1.0), kept

    trail, _ = _run(tmp_path, examined_few)
    assert trail.baseline_acceptance == pytest.approx(0.62) and trail.threshold == 0.4
    # from 0.5 on, at least 0.9 of examined tokens are kept, but fewer of the drafted ones
    assert {step.block_size for step in trail.steps} == {10}
    assert all(step.acceptance == pytest.approx(min(step.utilisation + 0.35, 1.0)) for step in trail.steps)

    def examined_many(settings):
        quality, latency, kept = law(settings)
        return quality, latency, kept, min(kept + 0.4, 1.0)

    grown, _ = _run(tmp_path / "other", examined_many)
    assert grown.baseline_acceptance == pytest.approx(1.0) and {step.block_size for step in grown.steps} > {10, 15}
