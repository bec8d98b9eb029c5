"""Records into families: what differs in γ, what in h, and what is neither."""

from __future__ import annotations

import pytest

from speccascade_jax.engine.engine import BONUSES
from speccascade_jax.results.analysis import families
from tests.support import measured_records as made


def test_points_are_sorted_by_their_number():
    (found,) = families.of_records(reversed(made.sweep()))
    (longer,) = families.of_records([made.record("spec_decode", 0.25, 2.5, block=12), *made.sweep()])
    assert list(longer.fixed[0].spots) == [2, 4, 6, 8, 12]
    (fixed,), (adaptive,) = found.fixed, found.adaptive
    assert (fixed.name, fixed.symbol, list(fixed.spots)) == ("SpecDecode", "γ", [2, 4, 6, 8])
    assert (adaptive.name, adaptive.symbol) == ("SpecDec++", "h") and list(adaptive.spots) == list(made.ADAPTIVE)
    assert found.rival(adaptive) is fixed and len(found.records) == 11
    assert found.target.records[0]["point"]["method"] == "autoregressive"


def test_what_else_tells_methods_apart_stays_in_the_name():
    heads = [made.record("specdecpp", 0.3, 0.3, stop=h, rule="opt", head="x/w6.msgpack") for h in (0.3, 0.5)]
    entropy = made.record("stop_entropy", 0.4, 0.3, stop=0.3)
    others = [made.record("opt", 0.3, 0.3, block=4, law="opt", alpha=alpha) for alpha in (0.1, 0.2)]
    (found,) = families.of_records([*made.sweep(), entropy, *heads, *others])
    assert [family.name for family in found.adaptive] == ["SpecDec++", "SpecDec++ [OPT] w6", "SpecDecode [entropy]"]
    assert [family.on_rejection for family in found.adaptive] == [True, True, False]
    assert [family.law for family in found.fixed] == [
        ("spec_decode", None, False),
        ("opt", 0.1, False),
        ("opt", 0.2, False),
    ]
    assert found.fixed[1].name == "SpecCascade [OPT] α 0.1" and found.rival(found.adaptive[1]) is found.fixed[0]


def test_caps_bonuses_and_heads_are_families_of_their_own_with_all_their_points():
    stops = (0.3, 0.5)
    capped = [made.record("specdecpp", 0.3, 0.3, stop=h, block_size=10) for h in stops]
    (found,) = families.of_records([*made.sweep(), *capped])
    assert [(each.name, len(each.spots)) for each in found.adaptive] == [
        ("SpecDec++ (γ = 10)", 2),
        ("SpecDec++ (γ = 20)", 5),
    ]
    target = [made.record("specdecpp", 0.3, 0.3, stop=h, bonus="target") for h in stops]
    (found,) = families.of_records([*made.sweep(), *target])
    assert [each.name for each in found.adaptive] == ["SpecDec++ (bonus rule)", "SpecDec++ (bonus target)"]
    assert all(found.rival(each) is found.fixed[0] for each in found.adaptive)  # lossless: one law
    heads = [made.headed(made.record("specdecpp", 0.3, 0.3, stop=h, seed=n), n * "a") for n in (1, 2) for h in stops]
    (found,) = families.of_records(heads)
    assert [(each.name, len(each.spots)) for each in found.adaptive] == [
        ("SpecDec++ (head a)", 2),
        ("SpecDec++ (head aa)", 2),
    ]


def test_a_bonus_from_the_target_is_another_law_where_the_rule_is_lossy():
    lossy = {"law": "opt", "alpha": 0.1}
    fixed = [made.record("opt", 0.3, 0.3, block=block, **lossy) for block in (2, 4)]
    stops = [
        made.record("specdecpp", 0.3, 0.3, stop=0.3, bonus=bonus, rule="opt", lossless=False, **lossy)
        for bonus in BONUSES
    ]
    (found,) = families.of_records([*fixed, *stops])
    rivals = {each.name.partition("(")[2]: found.rival(each) for each in found.adaptive}
    assert rivals == {"bonus none)": found.fixed[0], "bonus rule)": found.fixed[0], "bonus target)": None}


def test_an_oracle_has_no_number_and_oracle_cascades_are_none():
    oracle = made.record("stop_oracle", 0.2, 0.0)
    cascade = made.record("oracle_cascade", 1.0, 0.0, law="diff", alpha=0.1)
    (found,) = families.of_records([*made.sweep(), oracle, cascade])
    capped = made.record("stop_oracle", 0.3, 0.0, block_size=5)
    (both,) = families.of_records([*made.sweep(), oracle, capped])
    assert list(both.oracles) == ["SpecDecode [oracle] (γ = 5)", "SpecDecode [oracle] (γ = 20)"]
    assert list(found.oracles) == ["SpecDecode [oracle]"] and len(found.fixed) == len(found.adaptive) == 1


def test_seeds_of_a_point_are_one_spot_and_tasks_are_apart():
    found = families.of_records([*made.sweep(), *made.sweep(seed=1)[6:]])
    assert len(found) == 1 and found[0].adaptive[0].spots[0.5].seeds == 2
    other = [made.record("spec_decode", 0.3, 0.3, block=4, task="xsum")]
    assert len(families.of_records([*made.sweep(), *other])) == 2


def test_records_without_either_are_refused_and_a_missing_target_is_named():
    with pytest.raises(ValueError, match="neither fixed block sizes nor stop thresholds"):
        families.of_records(made.sweep()[:2])
    (found,) = families.of_records(made.sweep()[2:])
    with pytest.raises(ValueError, match="no record of the target alone"):
        found.target  # noqa: B018
