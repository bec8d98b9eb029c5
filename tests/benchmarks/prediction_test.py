"""Tests of the prediction from acceptance and step times."""

import numpy as np
import pytest

from benchmarks.prediction import Costs, expected_tokens, speed_up


@pytest.mark.parametrize("block", [1, 3, 7])
def test_expected_tokens_equal_the_geometric_sum(block):
    for acceptance in (0.3, 0.8):
        assert expected_tokens(acceptance, block) == pytest.approx((1 - acceptance ** (block + 1)) / (1 - acceptance))
    assert expected_tokens(1.0, block) == block + 1 and expected_tokens(0.0, block) == 1


def test_expected_tokens_equal_the_mean_of_simulated_rounds():
    kept = np.random.default_rng(0).random((100_000, 5)) < 0.7
    tokens = 1 + np.cumprod(kept, axis=1).sum(1)
    assert expected_tokens(0.7, 5) == pytest.approx(tokens.mean(), abs=0.02)


def test_an_acceptance_outside_0_to_1_is_rejected():
    with pytest.raises(ValueError, match=r"acceptance=1.2 is outside \[0, 1\]"):
        expected_tokens(1.2, 3)


def test_free_drafts_that_are_always_kept_give_one_block_per_target_call():
    assert speed_up(Costs(draft=0.0, score=1.0, step=1.0), 10, 50, 60, 60) == pytest.approx(6.0)


def test_the_predicted_speed_up_includes_every_cost():
    costs = Costs(draft=0.1, score=2.0, step=1.0, prefill=3.0, prefill_alone=2.0)
    alone, together = (2.0 + 20 * 1.0) / 20, (3.0 + 5 * 2.0 + 25 * 0.1) / 22
    assert speed_up(costs, 5, 25, 22, 20) == pytest.approx(alone / together)
