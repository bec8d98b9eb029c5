"""Tests of measures of predicted acceptance, by their definitions and by known good and bad predictions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.training.heads import calibration

LABELS = st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1, allow_subnormal=False)), min_size=2, max_size=12)


def brute_auc(scores, kept):
    won = total = 0.0
    for i, j in itertools.product(range(len(scores)), repeat=2):
        weight = kept[i] * (1 - kept[j])
        total += weight
        won += weight * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return won / total if total > 0 else float("nan")


@given(LABELS)
def test_auc_is_the_share_of_pairs_in_order(rows):
    scores, kept = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    np.testing.assert_allclose(calibration.auc(scores, kept), brute_auc(scores, kept), rtol=1e-6, atol=1e-9)
    assert np.isnan(calibration.auc(scores, np.ones(len(scores))))


def test_brier_and_log_loss_are_expectations_over_the_outcome():
    predicted, kept = np.array([0.2, 0.9]), np.array([0.5, 1.0])
    assert calibration.brier(predicted, kept) == pytest.approx((0.5 * 0.64 + 0.5 * 0.04 + 0.01) / 2)
    expected = -(0.5 * np.log(0.2) + 0.5 * np.log(0.8) + np.log(0.9)) / 2
    assert calibration.log_loss(predicted, kept) == pytest.approx(expected)
    assert calibration.log_loss(np.array([0.0]), np.array([1.0])) == pytest.approx(-np.log(1e-7))


def test_reliability_bins_match_hand_calculation():
    predicted = np.array([0.0, 0.05, 0.5, 0.55, 1.0])
    kept = np.array([0.0, 0.2, 1.0, 0.0, 1.0])
    diagram = calibration.reliability(predicted, kept, bins=2)
    np.testing.assert_allclose(diagram.share, [0.4, 0.6])
    np.testing.assert_allclose(diagram.predicted, [0.025, 2.05 / 3])
    np.testing.assert_allclose(diagram.kept, [0.1, 2 / 3])
    assert diagram.ece == pytest.approx(0.4 * 0.075 + 0.6 * 0.05 / 3)
    assert calibration.reliability(predicted, kept).ece > diagram.ece  # only the finer bins separate 0.5 and 0.55
    even = calibration.reliability(predicted, kept, bins=5, equal_mass=True)
    np.testing.assert_allclose(even.share, 0.2)
    np.testing.assert_allclose(even.predicted, predicted)


def test_equal_predictions_share_a_bin_of_equal_mass():
    kept = np.sort(np.random.default_rng(0).uniform(size=1000))
    assert calibration.reliability(np.full(1000, kept.mean()), kept, equal_mass=True).ece == pytest.approx(0, abs=1e-9)
    diagram = calibration.reliability(np.repeat([0.1, 0.3, 0.5, 0.9], [3, 1, 3, 3]), np.zeros(10), 5, equal_mass=True)
    np.testing.assert_allclose(diagram.share, [0.3, 0.1, 0.3, 0, 0.3])


@given(st.integers(1, 40), st.integers(1, 20))
def test_bins_of_equal_mass_differ_by_at_most_one_position_without_ties(count, bins):
    share = calibration.reliability(np.arange(count) / count, np.ones(count), bins, equal_mass=True).share * count
    assert np.ptp(np.round(share)) <= 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=30), st.randoms())
def test_no_measure_depends_on_the_order_of_rows(rows, random):
    """Uses labels with exact sums, so that rounding cannot depend on the order."""
    shuffled = random.sample(rows, len(rows))
    orders = [(np.array([r[0] for r in some]) / 8, np.array([r[1] for r in some]) / 8) for some in (rows, shuffled)]
    first, second = (calibration.measures(*arrays) for arrays in orders)
    np.testing.assert_allclose(list(first.values()), list(second.values()), rtol=1e-9, atol=1e-12)
    first, second = (calibration.isotonic(*arrays) for arrays in orders)
    np.testing.assert_array_equal(first.scores, second.scores)
    np.testing.assert_array_equal(first.values, second.values)


def test_true_probabilities_are_calibrated():
    draws = np.random.default_rng(0)
    kept = draws.beta(2, 1, 200_000)
    outcome = (draws.uniform(size=kept.size) < kept).astype(float)
    result = calibration.measures(kept, outcome)
    assert result["ece"] < 0.005 and result["ece_equal_mass"] < 0.006
    assert result["brier"] == pytest.approx(calibration.brier(kept, kept), abs=2e-3)
    assert result["log_loss"] == pytest.approx(calibration.log_loss(kept, kept), abs=3e-3)
    assert result["auc"] == pytest.approx(calibration.auc(kept, kept), abs=3e-3)
    assert calibration.measures(kept**2, outcome)["ece"] > 0.1
    assert (result["positions"], result["kept"]) == (kept.size, outcome.mean())


@given(LABELS)
def test_isotonic_gives_the_best_monotonic_fit(rows):
    scores, kept = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    fit = calibration.isotonic(scores, kept)
    assert (np.diff(fit.values) >= 0).all() and (np.diff(fit.scores) > 0).all()
    order = np.unique(scores)
    # least squares under an order, by its minimax formula (Barlow et al., 1972)
    means = [
        max(min(kept[(scores >= a) & (scores <= b)].mean() for b in order[n:]) for a in order[: n + 1])
        for n in range(len(order))
    ]
    apart = np.abs(np.subtract.outer(means, fit.values))  # every score has a pool's value, every pool a score
    assert apart.min(axis=0).max() < 1e-9 and apart.min(axis=1).max() < 1e-9
    assert fit(np.array([-1.0, 9.0])).tolist() == [fit.values[0], fit.values[-1]]
