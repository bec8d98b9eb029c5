"""What is chosen: the least time per token, by enumeration; what it is chosen by: finished rounds."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.stopping.lengths import LENGTHS, REMEMBERED, Cheapest, Evidence
from tests.support.planning import costs

NONE = Evidence(jnp.zeros(1), jnp.zeros(1))
YES = jnp.ones(1, bool)


def chosen(seconds, acceptance, *, lengths=LENGTHS, evidence=NONE, active=YES, room=100, ready=True, **more):
    plan = Cheapest(lengths, more.pop("bonus", "rule"))
    rooms = jnp.broadcast_to(jnp.asarray(room), active.shape)
    given = costs(seconds, acceptance=acceptance, **more)
    return lengths[int(plan.choose(given, evidence, active, rooms, jnp.asarray(ready)))]


def tokens_by_enumeration(length, acceptance, bonus):
    """E of what a round commits: every number of kept drafts with its chance."""
    found = 0.0
    for kept in range(length + 1):
        whole = kept == length
        chance = acceptance**kept * (1.0 if whole else 1.0 - acceptance)
        found += chance * (kept + (not whole or bonus != "none" or length == 0))
    return found


@pytest.mark.parametrize("bonus", ["rule", "none"])
def test_the_least_time_per_token(bonus):
    best = []
    for draft in (0.05, 0.3):
        for slope in (0.05, 0.3, 0.9):
            seconds = [1.0 + draft * n + slope * n for n in LENGTHS]
            for acceptance in (0.05, 0.3, 0.6, 0.8, 0.95, 0.99):
                rates = [t / tokens_by_enumeration(n, acceptance, bonus) for n, t in zip(LENGTHS, seconds, strict=True)]
                best.append(LENGTHS[int(np.argmin(rates))])
                assert chosen(seconds, acceptance, bonus=bonus) == best[-1], (draft, slope, acceptance)
    assert {0, 10} <= set(best) and (1 in best) == (bonus == "rule")


def test_a_batch_goes_by_the_mean_of_its_active_rows():
    seconds = [1.0 + 0.3 * n for n in LENGTHS]
    seen = Evidence(jnp.asarray([1000.0, 0.0]), jnp.asarray([1001.0, 1000.0]))

    def of(*active):
        return chosen(seconds, 0.5, evidence=seen, active=jnp.asarray(active))

    assert of(True, False) == 10 and of(False, True) == 0
    assert of(True, True) not in (0,)
    assert of(False, False) in LENGTHS


def test_no_more_is_drafted_than_fits():
    seconds = [1.0 + 0.05 * n for n in LENGTHS]
    assert chosen(seconds, 0.99) == 10
    assert chosen(seconds, 0.99, room=1) == 0, "the target's own token is all that fits"
    assert chosen(seconds, 0.99, room=3) == 2


def test_reading_the_prompt_must_pay_over_half_of_what_fits():
    """A gain of 0.5 · (tokens per second) over 50 tokens is 20 seconds here."""
    lengths, seconds = (0, 1), [1.0, 1.0 + 1e-6]
    gained = 50 * (1.0 - 1.0 / 1.7)
    for prefill, expected in ((gained - 0.5, 1), (gained + 0.5, 0)):
        assert chosen(seconds, 0.7, lengths=lengths, prefill=prefill, ready=False) == expected
        assert chosen(seconds, 0.7, lengths=lengths, prefill=prefill) == 1, "it has been read"


def test_what_was_seen_outweighs_the_prior_and_is_forgotten():
    seconds = [1.0 + 0.2 * n for n in LENGTHS]
    assert chosen(seconds, 0.8) > 0
    bad = Evidence(jnp.zeros(1), jnp.full(1, 60.0))
    assert chosen(seconds, 0.8, evidence=bad) == 0
    nothing = SimpleNamespace(
        active=YES, draft=SimpleNamespace(length=jnp.zeros(1, int)), num_kept=jnp.zeros(1, int), rejected=~YES
    )
    rounds = 0
    while chosen(seconds, 0.8, evidence=bad) == 0 and rounds < 100:
        bad, rounds = Cheapest().update(bad, nothing), rounds + 1
    assert 5 < rounds < 50, "it is tried again, and not at once"


def test_evidence_is_what_finished_rounds_kept_and_rejected():
    old = Evidence(jnp.full(4, 10.0), jnp.full(4, 20.0))
    outcome = SimpleNamespace(
        active=jnp.asarray([True, True, True, False]),
        draft=SimpleNamespace(length=jnp.asarray([4, 4, 0, 4])),
        num_kept=jnp.asarray([4, 2, 0, 0]),
        rejected=jnp.asarray([False, True, False, False]),
    )
    new = Cheapest().update(old, outcome)
    np.testing.assert_allclose(new.kept, REMEMBERED * 10 + np.array([4, 2, 0, 0]), rtol=1e-6)
    np.testing.assert_allclose(new.examined, REMEMBERED * 20 + np.array([4, 3, 0, 0]), rtol=1e-6)
