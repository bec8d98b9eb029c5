"""Tests of forward times: planted coefficients, agreement with scipy, refusal of collinear counts; throughputs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.analysis import families, forward_times
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.forward_times import Throughputs
from tests.support import measured_records as made

RNG = np.random.default_rng(0)
CALLS = RNG.integers(3, 60, 200)
STEPS = RNG.integers(10, 150, 200)


@given(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0), st.floats(0, 1.0))
def test_planted_times_are_recovered_exactly(draft, target, constant):
    seconds = constant + draft * STEPS + target * CALLS
    fitted = forward_times.fit(seconds, draft_steps=STEPS, target_calls=CALLS)
    assert (fitted.draft, fitted.target) == pytest.approx((draft, target), rel=1e-6)
    assert fitted.constant == pytest.approx(constant, rel=1e-6, abs=1e-9)
    assert fitted.r_squared == pytest.approx(1.0) and fitted.generations == 200
    assert fitted.seconds(200, STEPS.sum(), CALLS.sum()) == pytest.approx(seconds.sum())


def test_a_fit_with_one_regressor_equals_scipys():
    seconds = 0.01 + 0.003 * CALLS + RNG.normal(0, 0.01, 200)
    fitted, theirs = forward_times.fit(seconds, target_calls=CALLS), stats.linregress(CALLS, seconds)
    assert (fitted.target, fitted.constant) == pytest.approx((theirs.slope, theirs.intercept))
    # scipy assumes equal variance of the residuals, we do not
    assert fitted.errors["target_calls"] == pytest.approx(theirs.stderr, rel=0.1)
    assert fitted.errors["generation"] == pytest.approx(theirs.intercept_stderr, rel=0.1)
    assert fitted.r_squared == pytest.approx(theirs.rvalue**2) and 0.5 < fitted.r_squared < 0.999
    assert fitted.draft == 0 and "draft_steps" not in fitted.errors


def test_standard_errors_equal_the_scatter_of_estimates():
    noises, counts = np.random.default_rng(2).normal(0, 0.05, (400, 200)), {"draft_steps": STEPS, "target_calls": CALLS}
    fits = [forward_times.fit(0.01 + 0.002 * STEPS + 0.01 * CALLS + noise, **counts) for noise in noises]
    for name, values in {"draft_steps": [f.draft for f in fits], "target_calls": [f.target for f in fits]}.items():
        assert np.std(values) == pytest.approx(np.mean([f.errors[name] for f in fits]), rel=0.12)


def drifting(rng) -> tuple[np.ndarray, np.ndarray]:
    """Returns seconds and clusters: ten records of twenty generations, each run on a machine of a different speed."""
    records = np.repeat(np.arange(10), 20)
    speed = np.exp(rng.normal(0, 0.1, 10))[records]
    return (0.01 + 0.002 * STEPS + 0.01 * CALLS) * speed + rng.normal(0, 0.002, 200), records


def test_standard_errors_are_clustered_by_record():
    """Checks clustered errors; per generation, estimates scatter by over 1.5 times their reported errors."""
    off = {"records": [], "generations": []}
    for n in range(300):
        seconds, records = drifting(np.random.default_rng(n))
        for name, clusters in (("records", records), ("generations", None)):
            fitted = forward_times.fit(seconds, draft_steps=STEPS, target_calls=CALLS, clusters=clusters)
            off[name].append((fitted.target - 0.01) / fitted.errors["target_calls"])
    assert np.std(off["records"]) < 1.5 < np.std(off["generations"])


def test_draws_have_their_nominal_coverage():
    counts, inside = np.ones(1001), 0
    true = 0.01 + 0.002 * 100 + 0.01 * 30
    for n in range(300):
        seconds, records = drifting(np.random.default_rng(n))
        fitted = forward_times.fit(seconds, draft_steps=STEPS, target_calls=CALLS, clusters=records)
        drawn = fitted.draws(1000, (n, 0)).seconds(1, 100 * counts, 30 * counts)
        assert drawn[0] == pytest.approx(fitted.seconds(1, 100, 30)) and drawn.min() > 0
        inside += np.quantile(drawn[1:], 0.025) <= true <= np.quantile(drawn[1:], 0.975)
    assert 0.9 <= inside / 300 <= 0.99, inside / 300


def test_few_clusters_widen_errors_and_draws():
    """Checks four records: the sandwich with its factor 4/3, and draws from Student's t with few degrees of freedom."""
    rng, records = np.random.default_rng(5), np.repeat(np.arange(4), 50)
    seconds = 0.01 + 0.01 * CALLS * np.exp(rng.normal(0, 0.1, 4))[records]
    fitted = forward_times.fit(seconds, target_calls=CALLS, clusters=records)
    design = np.stack([CALLS, np.ones(200)], axis=-1)
    residuals = seconds - design @ [fitted.target, fitted.constant]
    scores = np.stack([(design * residuals[:, None])[records == n].sum(0) for n in range(4)])
    bread = np.linalg.inv(design.T @ design)
    expected = 4 / 3 * bread @ scores.T @ scores @ bread
    assert fitted.errors["target_calls"] == pytest.approx(np.sqrt(expected[0, 0]), rel=1e-6)
    off = fitted.draws(40_000, (0, 0)).off[:, 1] / fitted.errors["target_calls"]
    # this quantile is 3.08; that of a normal distribution is 1.28
    assert np.quantile(off, 0.9) == pytest.approx(stats.t.ppf(0.9, 1), rel=0.05)


def test_draws_stay_positive_if_errors_exceed_the_times():
    steps = 5 * CALLS + RNG.integers(-40, 41, 200)
    seconds = 0.1 * CALLS * np.exp(RNG.normal(0, 1.5, 200))
    drawn = forward_times.fit(seconds, draft_steps=steps, target_calls=CALLS).draws(1000, (0, 0))
    assert drawn.seconds(1, np.full(1001, 1.0), np.full(1001, 3.0)).min() > 0


def test_a_fit_without_a_constant_is_worse_and_attributes_its_time_to_others():
    seconds = 0.2 + 0.002 * STEPS + 0.01 * CALLS
    fitted = forward_times.fit(seconds, draft_steps=STEPS, target_calls=CALLS, intercept=False)
    assert fitted.constant == 0 and fitted.draft > 0.0025 and fitted.r_squared < 0.99
    exact = forward_times.fit(seconds - 0.2, draft_steps=STEPS, target_calls=CALLS, intercept=False)
    assert (exact.draft, exact.target, exact.r_squared) == pytest.approx((0.002, 0.01, 1.0))


@pytest.mark.parametrize("intercept", [True, False])
def test_counts_of_one_block_size_are_refused_as_collinear(intercept):
    steps = 5 * CALLS - RNG.integers(0, 2, 200)  # in some generations the last block is shorter
    with pytest.raises(ValueError, match=r"nearly collinear over these 200 .* \(r = [01]\..*several block siz"):
        forward_times.fit(0.1 * CALLS, draft_steps=steps, target_calls=CALLS, intercept=intercept)
    mixed = np.where(np.arange(200) < 100, 2, 8) * CALLS
    assert forward_times.fit(0.1 * CALLS, draft_steps=mixed, target_calls=CALLS).target == pytest.approx(0.1)


def test_too_few_generations_and_outputs_of_one_length_are_refused():
    with pytest.raises(ValueError, match="9 timed generations are too few .* raise latency_examples"):
        forward_times.fit(np.ones(9), target_calls=CALLS[:9])
    with pytest.raises(ValueError, match=r"same target_calls \(7\)"):
        forward_times.fit(np.ones(20), target_calls=np.full(20, 7))


def test_planted_times_are_recovered_from_records():
    records = made.sweep()
    fitted = forward_times.speculative(records)
    assert (fitted.draft, fitted.target, fitted.constant) == pytest.approx((0.002, 0.011, 0.004))
    assert fitted.generations == 9 * 32 and fitted.r_squared == pytest.approx(1.0)
    target, draft = forward_times.alone(records, TARGET), forward_times.alone(records, DRAFT)
    assert (target.target, target.constant, target.draft) == pytest.approx((0.010, 0.003, 0.0))
    assert target.generations == 12 * 32  # the runs of its own record, and those beside all eleven others
    assert (draft.draft, draft.target, draft.generations) == (pytest.approx(0.002), 0.0, 32)

    del records[2]["latency"], records[2]["target_latency"]
    assert forward_times.speculative(records).generations == 8 * 32


def test_the_suggested_threshold_follows_theorem_3_1():
    assert forward_times.suggested_threshold(0.0234, 0.112) == pytest.approx(1 - 0.0234 / 0.112)
    cost_draft, cost_target, delta = 0.0234, 0.112 - 0.0234, 0.05
    general = (cost_target + delta) / (cost_draft + cost_target + delta)
    assert forward_times.suggested_threshold(0.0234, 0.112, delta) == pytest.approx(general)
    for draft, target in ((0.2, 0.1), (-0.001, 0.1), (0.1, 0.1)):
        with pytest.raises(ValueError, match="theorem 3.1 needs 0 < t_draft < t_target"):
            forward_times.suggested_threshold(draft, target)


def of(records) -> Throughputs:
    (panel_families,) = families.of_records(records)
    return Throughputs(panel_families, Bootstrap(samples=100))


def test_predictions_from_planted_times_are_exact():
    throughputs = of(made.sweep())
    for family in (*throughputs.families.fixed, *throughputs.families.adaptive):
        for spot in family.spots.values():
            assert throughputs.error(spot) == pytest.approx(0, abs=1e-9)
    assert throughputs.error(throughputs.families.target) == pytest.approx(0, abs=1e-9)
    (tokens, *resampled), target = throughputs.predicted(throughputs.families.target), made.TOKENS
    assert tokens == pytest.approx(target.sum() / (0.003 * len(target) + 0.010 * target.sum()))
    assert len(resampled) == 100 and np.std(resampled) > 0


def test_a_slow_run_has_a_large_prediction_error():
    # many runs beside this record determine the forward times
    records = [*made.sweep(), *(made.sweep(seed=seed)[6] for seed in range(1, 20))]
    slow = made.record("spec_decode", *made.FIXED[4], block=4, slower=1.25)
    throughputs = of([record for record in records if record["point"]["block_size"] != 4] + [slow])
    assert throughputs.error(throughputs.families.fixed[0].spots[4]) == pytest.approx(1.25 - 1, abs=0.05)


def test_forward_times_fitted_to_noise_are_refused():
    records = made.sweep()
    for record in records[2:]:
        timed = record["latency"]
        timed["per_example_ms"] = (1000 - np.asarray(timed["per_example_draft_steps"])).tolist()
    throughputs = of(records)
    with pytest.raises(ValueError, match="t_draft = -1 ms, fitted with R² 1.000, predicts nothing.* quiet machine"):
        throughputs.predicted(throughputs.families.fixed[0].spots[4])


def test_best_settings_are_the_fastest_of_their_kind():
    records = made.sweep()
    throughputs = of(records)
    fixed, adaptive = throughputs.families.fixed[0], throughputs.families.adaptive[0]
    seconds = {h: 0.002 * (1 + d - v) + 0.011 * v for h, (v, d) in made.ADAPTIVE.items()}
    best = throughputs.best_predicted(adaptive)
    assert best.number == min(seconds, key=seconds.get) == 0.5
    assert best.speed_up[0] == pytest.approx(best.tokens[0] / throughputs.predicted(throughputs.families.target)[0])
    assert best.speed_up[0] > throughputs.best_predicted(fixed).speed_up[0] > 1
    assert throughputs.best_measured(adaptive).number == 0.5


def test_the_best_measured_setting_is_relative_to_its_own_target():
    records = made.sweep()
    for entry in ("latency", "target_latency"):  # a period in which all runs took twice as long
        timed = np.asarray(records[8][entry]["per_example_ms"])
        records[8][entry]["per_example_ms"] = (2 * timed).tolist()
    throughputs = of(records)
    assert records[8]["point"]["stop_threshold"] == 0.5
    assert throughputs.best_measured(throughputs.families.adaptive[0]).number == 0.5


def test_the_loss_at_the_theorems_threshold_is_computed():
    throughputs = of(made.sweep())
    suggestion = throughputs.suggestion(throughputs.families.adaptive[0])
    assert suggestion.threshold == pytest.approx(1 - 0.002 / 0.011) and suggestion.between == (0.7, 0.9)
    low, high = (throughputs.predicted(throughputs.families.adaptive[0].spots[h])[0] for h in suggestion.between)
    weight = (suggestion.threshold - 0.7) / 0.2
    assert suggestion.tokens[0] == pytest.approx((1 - weight) * low + weight * high)
    assert suggestion.best.number == 0.5 and suggestion.lost[0] == pytest.approx(
        1 - suggestion.tokens[0] / suggestion.best.tokens[0]
    )
    assert suggestion.lost[0] > 0


def test_measured_thresholds_are_not_interpolated_and_those_beyond_use_the_nearest():
    suggested = 1 - 0.002 / 0.011
    measured = of(made.sweep({0.3: (0.38, 0.25), suggested: (0.26, 0.4), 0.9: (0.245, 1.40)}))
    suggestion = measured.suggestion(measured.families.adaptive[0])
    assert suggestion.between == (pytest.approx(suggested),) and suggestion.lost[0] == 0
    short = of(made.sweep({0.3: (0.38, 0.25), 0.5: (0.31, 0.45)}))
    suggestion = short.suggestion(short.families.adaptive[0])
    assert suggestion.between == (0.5,) and suggestion.tokens[0] == suggestion.best.tokens[0]
    with pytest.raises(ValueError, match="has no stop threshold"):
        short.suggestion(short.families.fixed[0])
