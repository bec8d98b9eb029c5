"""What trials of lengths tell of rounds and of acceptance. No time is looked at for its size."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccascade_jax.core.types import BoundModel
from speccascade_jax.methods import round_timing
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.pair import Pair


def test_an_output_s_end_is_a_draft_that_was_not_kept():
    """Of two rows, one of which was over before all the rounds of the trial."""
    bound = BoundModel(params=(), model=Fake(16))
    engine, params = assemble(Pair(target=bound, draft=bound), block_size="auto")
    counts = {
        "kept": [5, 3],
        "tried": [6, 4],
        "rounds": [round_timing.WALKED, round_timing.WALKED - 1],
        "committed": [21, 9],
    }
    found = SimpleNamespace(stats=SimpleNamespace(**{name: np.array(each) for name, each in counts.items()}))
    assert round_timing.Rounds(engine, params, lambda *_: found).walked() == round_timing.Walked(8, 11, 1, 30)


def test_lengths_of_outputs_without_an_end_count_too():
    """30 tokens and one end beside an output that ends half-way; more than fits is no length."""
    assert round_timing.Walked(8, 11, 1, 30).length(20) == (30 + 10) / 2
    assert round_timing.Walked(8, 11, 0, 30).length(20) == 20
    assert round_timing.Walked(8, 11, 0, 0).acceptance == pytest.approx((8 + 7) / 21)


def test_rounds_and_the_draft_s_reading_are_told_from_calls_of_known_parts():
    """Before the rounds 5 seconds, 3 without a draft; rounds of 1, 1.5 and 2, as many as the outputs need."""
    before, reading, each, rounds = 5.0, 3.0, (1.0, 1.5, 2.0), (9, 6, 4)
    calls = {(place, 9): (before + n * t, n) for place, (t, n) in enumerate(zip(each, rounds, strict=True))}
    calls |= {
        (0, 1): (before + 1.0, 1),
        (round_timing.ALONE, 1): (reading + 1.0, 1),
        (round_timing.ALONE, 9): (reading + 9.0, 9),
    }
    found = round_timing.told_from(calls, 9, (0, 1, 3), True)
    np.testing.assert_allclose(found.rounds, each)
    assert found.prefill == pytest.approx(before - reading) and found.steady
    always = {call: calls[call] for call in calls if call[0] != round_timing.ALONE}
    np.testing.assert_allclose(round_timing.told_from(always, 9, (1, 2, 3), False).rounds, each)
    calls[2, 9] = (before + 2.0, 1)  # over after one round: nothing is known of it
    np.testing.assert_allclose(round_timing.told_from(calls, 9, (0, 1, 3), True).rounds, (1.0, 1.5, 2.5))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0, 1.1, 1.3], (1.0, 1.1, 1.3)),
        ([1.2, 1.1, 1.3], (1.1, 1.1, 1.3)),
        ([1.0, 1.1, np.nan], (1.0, 1.1, 1.3)),
        ([1.0, np.nan, 1.3], (1.0, 1.1, 1.3)),
        ([1.0, np.nan, np.nan], (1.0, 2.0, 4.0)),
        ([np.nan] * 3, (1.0, 2.0, 4.0)),
    ],
)
def test_gaps_and_disturbances_in_what_was_timed(seconds, expected):
    np.testing.assert_allclose(round_timing.rising(seconds, (0, 1, 3)), expected)


@pytest.mark.parametrize(("noise", "precise"), [(0.001, True), (0.2, False)])
def test_how_well_shares_are_known_hangs_on_their_spread(noise, precise):
    """A machine that is slower from one turn to the next, all of it, says nothing of that."""
    random = np.random.default_rng(0)
    turns = np.outer(random.uniform(1, 3, 12), [1.0, 2.0, 4.0]) * random.normal(1, noise, (12, 3))
    assert round_timing.precise(turns) is precise and not round_timing.agree(turns)
