"""Tests of families: points that differ in γ, in h, or in neither; fronts, and verdicts on fronts."""

import numpy as np
import pytest

from speccascade_jax.engine.engine import BONUSES
from speccascade_jax.results.analysis import families
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from tests.support import measured_records as made


def sizes(found):
    """Returns name and number of points of each adaptive family."""
    return [(family.name, len(family.spots)) for family in found.adaptive]


def test_points_are_sorted_by_their_number():
    (panel_families,) = families.of_records(reversed(made.sweep()))
    (longer,) = families.of_records([made.record("spec_decode", 0.25, 2.5, block=12), *made.sweep()])
    assert list(longer.fixed[0].spots) == [2, 4, 6, 8, 12]
    (fixed,), (adaptive,) = panel_families.fixed, panel_families.adaptive
    assert (fixed.name, fixed.symbol, list(fixed.spots)) == ("SpecDecode", "γ", [2, 4, 6, 8])
    assert (adaptive.name, adaptive.symbol) == ("SpecDec++", "h") and list(adaptive.spots) == list(made.ADAPTIVE)
    assert panel_families.rival(adaptive) is fixed and len(panel_families.records) == 11
    assert panel_families.target.records[0]["point"]["method"] == "autoregressive"


def test_other_settings_that_distinguish_methods_stay_in_the_name():
    heads = [made.record("specdecpp", 0.3, 0.3, stop=h, rule="opt", head="x/w6.msgpack") for h in (0.3, 0.5)]
    entropy = made.record("stop_entropy", 0.4, 0.3, stop=0.3)
    cascades = [made.record("opt", 0.3, 0.3, block=4, law="opt", alpha=alpha) for alpha in (0.1, 0.2)]
    (panel_families,) = families.of_records([*made.sweep(), entropy, *heads, *cascades])
    assert [family.name for family in panel_families.adaptive] == [
        "SpecDec++",
        "SpecDec++ [OPT] w6",
        "SpecDecode [entropy]",
    ]
    assert [family.on_rejection for family in panel_families.adaptive] == [True, True, False]
    laws = [("spec_decode", None, False), ("opt", 0.1, False), ("opt", 0.2, False)]
    assert [family.law for family in panel_families.fixed] == laws
    assert (
        panel_families.fixed[1].name == "SpecCascade [OPT] α 0.1"
        and panel_families.rival(panel_families.adaptive[1]) is panel_families.fixed[0]
    )


def test_caps_bonuses_and_heads_form_families_with_all_their_points():
    stops = (0.3, 0.5)
    capped = [made.record("specdecpp", 0.3, 0.3, stop=h, block_size=10) for h in stops]
    (panel_families,) = families.of_records([*made.sweep(), *capped])
    assert sizes(panel_families) == [("SpecDec++ (γ = 10)", 2), ("SpecDec++ (γ = 20)", 5)]
    target = [made.record("specdecpp", 0.3, 0.3, stop=h, bonus="target") for h in stops]
    (panel_families,) = families.of_records([*made.sweep(), *target])
    assert [family.name for family in panel_families.adaptive] == ["SpecDec++ (bonus rule)", "SpecDec++ (bonus target)"]
    # all families are lossless, so they have the target's distribution
    assert all(panel_families.rival(family) is panel_families.fixed[0] for family in panel_families.adaptive)
    heads = [made.headed(made.record("specdecpp", 0.3, 0.3, stop=h, seed=n), n * "a") for n in (1, 2) for h in stops]
    (panel_families,) = families.of_records(heads)
    assert sizes(panel_families) == [("SpecDec++ (head a)", 2), ("SpecDec++ (head aa)", 2)]


def test_a_bonus_from_the_target_changes_the_distribution_of_a_lossy_rule():
    lossy = {"law": "opt", "alpha": 0.1}
    fixed = [made.record("opt", 0.3, 0.3, block=block, **lossy) for block in (2, 4)]
    opt = lossy | {"stop": 0.3, "rule": "opt", "lossless": False}
    stops = [made.record("specdecpp", 0.3, 0.3, bonus=bonus, **opt) for bonus in BONUSES]
    (panel_families,) = families.of_records([*fixed, *stops])
    rivals = {family.name.partition("(")[2]: panel_families.rival(family) for family in panel_families.adaptive}
    assert rivals == {
        "bonus none)": panel_families.fixed[0],
        "bonus rule)": panel_families.fixed[0],
        "bonus target)": None,
    }


def test_oracles_have_no_number_and_oracle_cascades_are_not_listed():
    oracle = made.record("stop_oracle", 0.2, 0.0)
    cascade = made.record("oracle_cascade", 1.0, 0.0, law="diff", alpha=0.1)
    (panel_families,) = families.of_records([*made.sweep(), oracle, cascade])
    capped = made.record("stop_oracle", 0.3, 0.0, block_size=5)
    (with_capped,) = families.of_records([*made.sweep(), oracle, capped])
    assert list(with_capped.oracles) == ["SpecDecode [oracle] (γ = 5)", "SpecDecode [oracle] (γ = 20)"]
    assert (
        list(panel_families.oracles) == ["SpecDecode [oracle]"]
        and len(panel_families.fixed) == len(panel_families.adaptive) == 1
    )


def test_seeds_of_a_point_form_one_spot_and_tasks_are_separate():
    panel_families = families.of_records([*made.sweep(), *made.sweep(seed=1)[6:]])
    assert len(panel_families) == 1 and panel_families[0].adaptive[0].spots[0.5].seeds == 2
    xsum = [made.record("spec_decode", 0.3, 0.3, block=4, task="xsum")]
    assert len(families.of_records([*made.sweep(), *xsum])) == 2


def test_records_without_blocks_and_thresholds_or_without_a_target_are_refused():
    with pytest.raises(ValueError, match="neither fixed block sizes nor stop thresholds"):
        families.of_records(made.sweep()[:2])
    (panel_families,) = families.of_records(made.sweep()[2:])
    with pytest.raises(ValueError, match="no record of the target alone"):
        panel_families.target  # noqa: B018


def verdicts(records):
    (panel_families,) = families.of_records(records)
    return {comparison.block: comparison for comparison in families.compare(panel_families, Bootstrap(samples=300))}


@pytest.mark.parametrize(("discard", "points", "rate"), [
    # the front consists of straight lines between points, given in any order
    (0.4, [(0.8, 0.2), (0.0, 0.6), (0.4, 0.3)], 0.3),
    (0.1, [(0.8, 0.2), (0.0, 0.6), (0.4, 0.3)], 0.6 - 0.3 / 4),
    (0.6, [(0.8, 0.2), (0.0, 0.6), (0.4, 0.3)], 0.25),
    # dominated points are not on the front
    (0.2, [(0.1, 0.5), (0.2, 0.6), (0.3, 0.3)], 0.4),
    (0.3, [(0.1, 0.5), (0.3, 0.9), (0.3, 0.3)], 0.3),
    # beyond its last point the front is level, and before its first there is none
    (5.0, [(0.1, 0.5), (0.3, 0.3), (0.5, 0.4)], 0.3),
    (0.05, [(0.1, 0.5), (0.3, 0.3)], np.nan),
])  # fmt: skip
def test_a_front_holds_the_points_that_no_other_point_beats(discard, points, rate):
    front = [families.Rates(np.asarray([x]), np.asarray([y])) for x, y in points]
    (front_rate,) = families.front_at(front, np.asarray([discard]))
    assert front_rate == pytest.approx(rate, nan_ok=True)


def test_rates_are_ratios_of_sums():
    record = made.record("spec_decode", 0.4, 0.5, block=4)
    counts = record["per_example"]
    (panel_families,) = families.of_records([made.record("autoregressive", 1, 0), record])
    rates = families.rates(panel_families.fixed[0].spots[4], Bootstrap())
    total = sum(counts["committed"])
    assert rates.discard[0] == sum(counts["discarded"]) / total
    assert rates.verification[0] == sum(counts["target_calls"]) / total
    assert rates.verification[1:].std() > 0 and len(rates.discard) == 1001


def test_a_better_front_dominates_and_a_worse_one_loses():
    better = verdicts(made.sweep())
    assert [comparison.verdict for comparison in better.values()] == [families.DOMINATES] * 4
    assert all(
        comparison.difference.value == pytest.approx(comparison.front - comparison.rates[1])
        for comparison in better.values()
    )
    worse = {h: (1.4 * v, d) for h, (v, d) in made.ADAPTIVE.items()}
    worse_verdicts = verdicts(made.sweep(worse | {0.05: (0.7, 0.05)}))
    assert [comparison.verdict for comparison in worse_verdicts.values()] == [families.LOSES] * 4
    assert all(comparison.difference.low > 0 for comparison in worse_verdicts.values())


def test_the_same_policy_under_another_name_ties():
    same = {block / 10: rates for block, rates in made.FIXED.items()}
    same_verdicts = verdicts(made.sweep(same, seed=0, noise=0.1) + made.sweep(same, seed=1, noise=0.1)[6:])
    assert {same_verdicts[block].verdict for block in (4, 6, 8)} == {families.TIES}


def test_blocks_that_the_front_does_not_reach_get_no_verdict():
    high_verdicts = verdicts(made.sweep({0.7: (0.27, 0.8), 0.9: (0.25, 1.4)}))
    assert [high_verdicts[block].verdict for block in (2, 4)] == [families.BEYOND] * 2
    assert high_verdicts[2].difference is None and np.isnan(high_verdicts[2].front)
    assert high_verdicts[6].verdict == high_verdicts[8].verdict == families.DOMINATES


def test_resamples_below_the_front_do_not_count_for_it():
    """Checks γ = 2, which discards slightly more than the front's first point: on many resamples it discards less."""
    comparison = verdicts(made.sweep({0.1: (0.30, 0.28), 0.3: (0.28, 0.5)}, noise=0.6, seed=5))[2]
    assert (
        comparison.difference.value < -0.1 and comparison.difference.high > 0.4 and comparison.verdict == families.TIES
    )


def test_examples_are_paired_by_id_whatever_their_order():
    shuffled, order = made.sweep(), np.random.default_rng(3).permutation(made.EXAMPLES)
    for record in shuffled[6:]:
        record["per_example"] = {name: [row[n] for n in order] for name, row in record["per_example"].items()}
    plain, mixed = (verdicts(records)[4].difference for records in (made.sweep(), shuffled))
    assert plain == pytest.approx(mixed)


def test_only_fixed_blocks_of_the_same_distribution_are_rivals():
    opt_blocks = [made.record("opt", *rates, block=block, law="opt", alpha=0.2) for block, rates in made.FIXED.items()]
    (panel_families,) = families.of_records([*made.sweep(), *opt_blocks])
    assert {comparison.fixed.name for comparison in families.compare(panel_families, Bootstrap(samples=10))} == {
        "SpecDecode"
    }


def test_the_comparison_is_paired_over_examples():
    """Checks that example difficulty, which is in both sides, cancels: the difference is narrower than either rate."""
    comparison = verdicts(made.sweep())[4]
    (families_,) = families.of_records(made.sweep())
    alone = Bootstrap(samples=300).interval(families.rates(families_.fixed[0].spots[4], Bootstrap(300)).verification)
    assert comparison.difference.high - comparison.difference.low < 0.8 * (alone.high - alone.low)
