"""Fronts and verdicts on fronts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from speccascade_jax.results.analysis import families, pareto
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from tests.support import measured_records as made


def front(*points):
    """Rates of one corpus and no resample."""
    return [pareto.Rates(np.asarray([x]), np.asarray([y])) for x, y in points]


def at(discard, *points):
    return float(pareto.front_at(front(*points), np.asarray([discard]))[0])


def verdicts(records):
    (found,) = families.of_records(records)
    return {each.block: each for each in pareto.compare(found, Bootstrap(samples=300))}


def test_a_front_is_joined_by_straight_lines_whatever_its_order():
    points = [(0.8, 0.2), (0.0, 0.6), (0.4, 0.3)]
    assert at(0.4, *points) == pytest.approx(0.3)
    assert at(0.1, *points) == pytest.approx(0.6 - 0.3 / 4)
    assert at(0.6, *points) == pytest.approx(0.25)


def test_points_that_another_beats_are_not_on_it():
    assert at(0.2, (0.1, 0.5), (0.2, 0.6), (0.3, 0.3)) == pytest.approx(0.4)
    assert at(0.3, (0.1, 0.5), (0.3, 0.9), (0.3, 0.3)) == pytest.approx(0.3)


def test_beyond_its_end_it_is_level_and_before_its_beginning_there_is_none():
    assert at(5.0, (0.1, 0.5), (0.3, 0.3), (0.5, 0.4)) == pytest.approx(0.3)
    assert np.isnan(at(0.05, (0.1, 0.5), (0.3, 0.3)))


def test_rates_are_ratios_of_sums():
    record = made.record("spec_decode", 0.4, 0.5, block=4)
    counts = record["per_example"]
    (found,) = families.of_records([made.record("autoregressive", 1, 0), record])
    rates = pareto.rates(found.fixed[0].spots[4], Bootstrap())
    total = sum(counts["committed"])
    assert rates.discard[0] == sum(counts["discarded"]) / total
    assert rates.verification[0] == sum(counts["target_calls"]) / total
    assert rates.verification[1:].std() > 0 and len(rates.discard) == 1001


def test_a_better_front_dominates_and_a_worse_one_loses():
    better = verdicts(made.sweep())
    assert [each.verdict for each in better.values()] == [pareto.DOMINATES] * 4
    assert all(each.difference.value == pytest.approx(each.front - each.rates[1]) for each in better.values())
    worse = {h: (1.4 * v, d) for h, (v, d) in made.ADAPTIVE.items()}
    found = verdicts(made.sweep(worse | {0.05: (0.7, 0.05)}))
    assert [each.verdict for each in found.values()] == [pareto.LOSES] * 4
    assert all(each.difference.low > 0 for each in found.values())


def test_the_same_policy_under_another_name_ties():
    same = {block / 10: rates for block, rates in made.FIXED.items()}
    found = verdicts(made.sweep(same, seed=0, noise=0.1) + made.sweep(same, seed=1, noise=0.1)[6:])
    assert {found[block].verdict for block in (4, 6, 8)} == {pareto.TIES}


def test_what_the_front_does_not_reach_is_not_judged():
    found = verdicts(made.sweep({0.7: (0.27, 0.8), 0.9: (0.25, 1.4)}))
    assert [found[block].verdict for block in (2, 4)] == [pareto.BEYOND] * 2
    assert found[2].difference is None and np.isnan(found[2].front)
    assert found[6].verdict == found[8].verdict == pareto.DOMINATES


def test_resamples_below_the_front_do_not_speak_for_it():
    """γ = 2 discards hardly more than the front's first point: on many resamples less."""
    found = verdicts(made.sweep({0.1: (0.30, 0.28), 0.3: (0.28, 0.5)}, noise=0.6, seed=5))[2]
    assert found.difference.value < -0.1 and found.difference.high > 0.4 and found.verdict == pareto.TIES


def test_examples_are_paired_by_id_whatever_their_order():
    shuffled, order = made.sweep(), np.random.default_rng(3).permutation(made.EXAMPLES)
    for record in shuffled[6:]:
        record["per_example"] = {name: [row[n] for n in order] for name, row in record["per_example"].items()}
    plain, mixed = (verdicts(records)[4].difference for records in (made.sweep(), shuffled))
    assert plain == pytest.approx(mixed)


def test_only_fixed_blocks_of_the_same_law_are_rivals():
    other = [made.record("opt", *rates, block=block, law="opt", alpha=0.2) for block, rates in made.FIXED.items()]
    (found,) = families.of_records([*made.sweep(), *other])
    assert {each.fixed.name for each in pareto.compare(found, Bootstrap(samples=10))} == {"SpecDecode"}


def test_the_comparison_is_paired_over_examples():
    """What makes an example hard is in both: the difference is far surer than either rate."""
    found = verdicts(made.sweep())[4]
    (families_,) = families.of_records(made.sweep())
    alone = Bootstrap(samples=300).interval(pareto.rates(families_.fixed[0].spots[4], Bootstrap(300)).verification)
    assert found.difference.high - found.difference.low < 0.8 * (alone.high - alone.low)
