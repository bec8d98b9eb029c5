"""Predicted and measured throughput, the paper's own numbers among them."""

import numpy as np
import pytest

from speccascade_jax.results.analysis import families
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.throughput import Throughputs
from tests.support import measured_records as made


def of_rates(draft: float, target: float, verification_rate: float, discard_rate: float) -> float:
    """Tokens per second by paper 3's equation 2.3, which holds where `draft_steps` are the drafted tokens."""
    return 1.0 / (draft + draft * discard_rate + (target - draft) * verification_rate)


def of(records) -> Throughputs:
    (found,) = families.of_records(records)
    return Throughputs(found, Bootstrap(samples=100))


def test_the_papers_oracle_has_its_throughput():
    """0.164 ± 0.078 of a prompt's tokens: 27.06 ± 4.13 tokens/s is the mean over prompts, above that of the mean."""
    at_mean = of_rates(0.0234, 0.112, 0.164, 0.0)
    assert at_mean == pytest.approx(26.364, abs=0.001) and abs(at_mean - 27.06) < 4.13
    shape = (0.164 * (1 - 0.164) / 0.078**2 - 1) * np.asarray([0.164, 1 - 0.164])
    rates = np.random.default_rng(0).beta(*shape, 20_000)
    assert np.mean([of_rates(0.0234, 0.112, rate, 0.0) for rate in rates]) == pytest.approx(27.06, abs=0.3)


def test_the_papers_target_alone_and_table_1_with_its_rows_named_rightly():
    assert pytest.approx(1 / 0.108, abs=0.005) == 9.26
    speed_ups = {
        "SpecDec": ((17.62, 18.55, 19.14), (1.90, 2.00, 2.07)),
        "++": ((18.88, 20.61, 20.95), (2.04, 2.23, 2.26)),
    }
    for tokens, ratios in speed_ups.values():
        assert [each / 9.26 for each in tokens] == pytest.approx(ratios, abs=0.006)


def test_equation_2_3_is_2_1_per_token():
    tokens, calls, discarded = 1000, 300, 450
    drafted = tokens + discarded - calls
    per_token = (0.0234 * drafted + 0.112 * calls) / tokens
    assert of_rates(0.0234, 0.112, calls / tokens, discarded / tokens) == pytest.approx(1 / per_token)


def test_with_planted_times_predictions_are_exact():
    found = of(made.sweep())
    for family in (*found.families.fixed, *found.families.adaptive):
        for spot in family.spots.values():
            assert found.error(spot) == pytest.approx(0, abs=1e-9)
    assert found.error(found.families.target) == pytest.approx(0, abs=1e-9)
    (tokens, *resampled), target = found.predicted(found.families.target), made.TOKENS
    assert tokens == pytest.approx(target.sum() / (0.003 * len(target) + 0.010 * target.sum()))
    assert len(resampled) == 100 and np.std(resampled) > 0


def test_a_run_slower_than_the_rest_shows_as_its_error():
    records = [*made.sweep(), *(made.sweep(seed=seed)[6] for seed in range(1, 20))]  # many beside it fix the times
    slow = made.record("spec_decode", *made.FIXED[4], block=4, slower=1.25)
    found = of([record for record in records if record["point"]["block_size"] != 4] + [slow])
    assert found.error(found.families.fixed[0].spots[4]) == pytest.approx(1.25 - 1, abs=0.05)


def test_forward_times_of_noise_predict_nothing():
    records = made.sweep()
    for record in records[2:]:
        record["latency"]["per_example_ms"] = [
            [1000 - step for step in trial] for trial in record["latency"]["per_example_draft_steps"]
        ]
    found = of(records)
    with pytest.raises(ValueError, match="t_draft = -1 ms, fitted with R² 1.000, predicts nothing.* quiet machine"):
        found.predicted(found.families.fixed[0].spots[4])


def test_the_best_setting_of_each_kind():
    records = made.sweep()
    found = of(records)
    fixed, adaptive = found.families.fixed[0], found.families.adaptive[0]
    seconds = {h: 0.002 * (1 + d - v) + 0.011 * v for h, (v, d) in made.ADAPTIVE.items()}
    best = found.best_predicted(adaptive)
    assert best.at == min(seconds, key=seconds.get) == 0.5
    assert best.speed_up[0] == pytest.approx(best.tokens[0] / found.predicted(found.families.target)[0])
    assert best.speed_up[0] > found.best_predicted(fixed).speed_up[0] > 1
    assert found.best_measured(adaptive).at == 0.5


def test_the_best_measured_is_the_best_beside_its_own_target():
    records = made.sweep()
    for entry in ("latency", "target_latency"):  # an hour in which all took twice as long
        timed = np.asarray(records[8][entry]["per_example_ms"])
        records[8][entry]["per_example_ms"] = (2 * timed).tolist()
    found = of(records)
    assert records[8]["point"]["stop_threshold"] == 0.5
    assert found.best_measured(found.families.adaptive[0]).at == 0.5


def test_what_the_theorems_threshold_leaves_on_the_table():
    found = of(made.sweep())
    given = found.suggestion(found.families.adaptive[0])
    assert given.at == pytest.approx(1 - 0.002 / 0.011) and given.between == (0.7, 0.9)
    low, high = (found.predicted(found.families.adaptive[0].spots[h])[0] for h in given.between)
    weight = (given.at - 0.7) / 0.2
    assert given.tokens[0] == pytest.approx((1 - weight) * low + weight * high)
    assert given.best.at == 0.5 and given.lost[0] == pytest.approx(1 - given.tokens[0] / given.best.tokens[0])
    assert given.lost[0] > 0


def test_a_measured_threshold_needs_no_line_and_one_beyond_takes_the_nearest():
    suggested = 1 - 0.002 / 0.011
    measured = of(made.sweep({0.3: (0.38, 0.25), suggested: (0.26, 0.4), 0.9: (0.245, 1.40)}))
    given = measured.suggestion(measured.families.adaptive[0])
    assert given.between == (pytest.approx(suggested),) and given.lost[0] == 0
    short = of(made.sweep({0.3: (0.38, 0.25), 0.5: (0.31, 0.45)}))
    given = short.suggestion(short.families.adaptive[0])
    assert given.between == (0.5,) and given.tokens[0] == given.best.tokens[0]
    with pytest.raises(ValueError, match="has no stop threshold"):
        short.suggestion(short.families.fixed[0])
