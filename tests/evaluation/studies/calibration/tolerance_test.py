"""What a tolerance allows: shares of resamples against arithmetic, and what is refused."""

import numpy as np
import pytest

from speccascade_jax.evaluation.studies.calibration.bench import Bench, Window
from speccascade_jax.evaluation.studies.calibration.tolerance import Tolerance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import calibration_fakes

WINDOW = Window(first=0, judged=200, timed=16)


@pytest.fixture
def records(tmp_path):
    """`records(quality, latency)` are those of a setting, and of the target, on the same 200 examples."""

    def make(quality=1.0, latency=0.5, target=1.0):
        laws = {"autoregressive": (target, 1.0, 0.0), "opt": (quality, latency, 0.5)}
        points = [calibration_fakes.point("opt", 0.2), calibration_fakes.point("autoregressive")]
        with ResultStore(tmp_path / f"{quality}-{latency}-{target}.jsonl") as store:
            fakes = calibration_fakes.FakeSession(lambda settings: laws[settings.method])
            measured = Bench(store, fakes).measure(points, WINDOW)
        return [measured[each] for each in points]

    return make


def test_a_loss_is_relative_to_the_targets_quality(records):
    ours, target = records(quality=0.95)
    lost = 1 - ours[0]["quality"]["value"] / target[0]["quality"]["value"]
    for allowed, kept in ((lost + 1e-9, True), (lost - 1e-9, False)):
        found = Tolerance(max_loss=allowed).kept(ours, target, Bootstrap())
        assert found.shape == (1001,) and bool(found[0]) is kept and 0.4 < found[1:].mean() < 0.6
    shares = [Tolerance(max_loss=each).share(ours, target, Bootstrap()) for each in (0.03, 0.05, 0.07)]
    assert shares[0] < 0.01 < shares[1] < 0.99 < shares[2]


def test_the_share_is_that_of_paired_resamples(records):
    """Counted anew from the examples' scores, resample by resample."""
    ours, target = records(quality=0.985)
    own, other = (np.asarray(each[0]["quality"]["per_example"]["statistics"]["rougeL"]) for each in (ours, target))
    drawn = Bootstrap()._resamples(200)[1:].astype(int)
    counted = [np.repeat(own, n).mean() >= 0.98 * np.repeat(other, n).mean() for n in drawn]
    assert Tolerance(max_loss=0.02).share(ours, target, Bootstrap()) == np.mean(counted)
    assert 0.55 < np.mean(counted) < 0.995


def test_the_targets_own_output_loses_nothing(records):
    _, target = records()
    assert Tolerance(max_loss=0).share(target, target, Bootstrap()) == 1


def test_both_bounds_must_be_kept_on_the_same_resample(records):
    ours, target = records(quality=0.97, latency=0.6)
    apart = [Tolerance(max_loss=0.03), Tolerance(max_latency=0.6)]
    kept = [each.kept(ours, target, Bootstrap()) for each in apart]
    both = Tolerance(max_loss=0.03, max_latency=0.6).kept(ours, target, Bootstrap())
    assert (both == (kept[0] & kept[1])).all() and 0.05 < both.mean() < min(each.mean() for each in kept)


def test_under_a_bound_of_quality_time_is_what_counts(records):
    ours, _ = records(quality=0.9, latency=0.6)
    fast = ours[0]["relative_latency"]["value"]
    assert Tolerance(max_loss=0.01).cost(ours) == Tolerance(max_loss=0.01, max_latency=0.6).cost(ours) == fast
    assert Tolerance(max_latency=0.6).cost(ours) == -ours[0]["quality"]["value"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "max_loss and max_latency are both None: give one, for example max_loss=0.01"),
        ({"max_loss": 1.0}, r"max_loss=1.0 is no share in \[0, 1\)"),
        ({"max_loss": -0.01}, "max_loss=-0.01 is no share"),
        ({"max_loss": "1%"}, "max_loss='1%' is not a finite number"),
        ({"max_latency": 0}, "max_latency=0 is not above 0"),
        ({"max_latency": float("nan")}, "max_latency=nan is not a finite number"),
        ({"max_loss": 0.1, "confidence": 1.0}, "confidence=1.0 is not between 0.5 and 1"),
        ({"max_loss": 0.1, "confidence": 90}, "confidence=90 is not between"),
    ],
)
def test_what_has_no_meaning_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Tolerance(**given)


def test_a_target_without_quality_has_none_to_lose(records):
    ours, target = records(target=0.0)
    with pytest.raises(ValueError, match="the target's rougeL is 0 on 200 examples, .* give max_latency"):
        Tolerance(max_loss=0.01).check(target)
    # on few examples that may be chance: nobody is dropped for it
    assert Tolerance(max_loss=0.01).share(ours, target, Bootstrap()) == 1.0
    Tolerance(max_latency=0.6).check(target)
