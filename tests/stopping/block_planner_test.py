"""Tests of planned block lengths: the least time per token, by enumeration, chosen from finished rounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.protocols import Counted
from speccascade_jax.stopping.block_planner import LENGTHS, REMEMBERED, Cheapest, Evidence
from tests.support.planning import costs

NONE = Evidence(jnp.zeros(1), jnp.zeros(1))
YES = jnp.ones(1, bool)


def chosen(seconds, acceptance, *, lengths=LENGTHS, evidence=NONE, active=YES, room=100, **more):
    plan = Cheapest(lengths, more.pop("bonus", "rule"))
    rooms = jnp.broadcast_to(jnp.asarray(room), active.shape)
    measured = costs(seconds, acceptance=acceptance, **more)
    return lengths[int(plan.choose(measured, evidence, active, rooms)[0])]


def tokens_by_enumeration(length, acceptance, bonus):
    """Returns the expected tokens of a round, summed over every number of kept drafts."""
    expected = 0.0
    for kept in range(length + 1):
        whole = kept == length
        chance = acceptance**kept * (1.0 if whole else 1.0 - acceptance)
        expected += chance * (kept + (not whole or bonus != "none" or length == 0))
    return expected


@pytest.mark.parametrize("bonus", ["rule", "none"])
def test_the_plan_has_the_least_time_per_token(bonus):
    best = []
    for draft in (0.05, 0.3):
        for slope in (0.05, 0.3, 0.9):
            seconds = [1.0 + draft * n + slope * n for n in LENGTHS]
            for acceptance in (0.05, 0.3, 0.6, 0.8, 0.95, 0.99):
                rates = [t / tokens_by_enumeration(n, acceptance, bonus) for n, t in zip(LENGTHS, seconds, strict=True)]
                best.append(LENGTHS[int(np.argmin(rates))])
                assert chosen(seconds, acceptance, bonus=bonus) == best[-1], (draft, slope, acceptance)
    assert {0, 8} <= set(best) and (1 in best) == (bonus == "rule")


def test_the_plan_of_a_batch_uses_the_mean_of_its_active_rows():
    seconds = [1.0 + 0.3 * n for n in LENGTHS]
    seen = Evidence(jnp.asarray([1000.0, 0.0]), jnp.asarray([1001.0, 1000.0]))

    def of(*active):
        return chosen(seconds, 0.5, evidence=seen, active=jnp.asarray(active))

    assert of(True, False) == 8 and of(False, True) == 0
    assert of(True, True) not in (0,)
    assert of(False, False) in LENGTHS


def test_a_plan_drafts_no_more_tokens_than_fit():
    seconds = [1.0 + 0.05 * n for n in LENGTHS]
    assert chosen(seconds, 0.99) == 8
    assert chosen(seconds, 0.99, room=1) == 0, "only the target's own token fits"
    assert chosen(seconds, 0.99, room=3) == 2


@pytest.mark.parametrize(("length", "room"), [(50, 100), (200, 50)])
def test_the_drafts_prefill_must_pay_over_a_mean_output(length, room):
    """50 tokens at 1 second each gain the time that rounds of 1.7 tokens save."""
    plan, seconds = Cheapest((0, 1)), [1.0, 1.0 + 1e-6]
    gained = 50 * (1.0 - 1.0 / 1.7)
    for prefill, expected in ((gained - 0.5, True), (gained + 0.5, False)):
        assert bool(plan.drafts(costs(seconds, acceptance=0.7, prefill=prefill, length=length), room)) is expected
    assert chosen(seconds, 0.7, lengths=(0, 1), prefill=1e9) == 1, "the prompt has been read already"


def test_evidence_outweighs_the_prior_and_is_forgotten():
    seconds = [1.0 + 0.2 * n for n in LENGTHS]
    assert chosen(seconds, 0.8) > 0
    bad = Evidence(jnp.zeros(1), jnp.full(1, 60.0))
    assert chosen(seconds, 0.8, evidence=bad) == 0
    none, rounds = jnp.zeros(1, int), 0
    nothing = Counted(none + 1, none, none)
    while chosen(seconds, 0.8, evidence=bad) == 0 and rounds < 100:
        bad, rounds = Cheapest().update(bad, nothing), rounds + 1
    assert 5 < rounds < 50, "drafting is tried again, but not at once"


def test_evidence_counts_accepted_and_rejected_drafts_of_finished_rounds():
    old = Evidence(jnp.full(4, 10.0), jnp.full(4, 20.0))
    rounds, kept, tried = np.array([4, 4, 2, 0]), np.array([4, 2, 0, 0]), np.array([4, 3, 0, 0])
    new = Cheapest().update(old, Counted(*(jnp.asarray(counts) for counts in (rounds, kept, tried))))
    np.testing.assert_allclose(new.kept, REMEMBERED**rounds * 10 + kept, rtol=1e-6)
    np.testing.assert_allclose(new.tried, REMEMBERED**rounds * 20 + tried, rtol=1e-6)


def test_a_phase_lasts_for_several_rounds():
    plan, seconds = Cheapest((0, 1), drafting=3, resting=7), costs([1.0, 1.2], acceptance=0.5)
    rejected = Evidence(jnp.zeros(1), jnp.full(1, 60.0))

    def rounds(evidence):
        return [int(number) for number in plan.choose(seconds, evidence, YES, jnp.full(1, 100))]

    assert rounds(NONE) == [1, 3] and rounds(rejected) == [0, 7]
