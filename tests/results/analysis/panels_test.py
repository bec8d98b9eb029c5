"""Tests of Table 2's summaries, of the grouping of records into panels, and of curve names, on handmade records."""

import copy

import pytest

from speccascade_jax.evaluation.curves import facts
from speccascade_jax.methods.settings import Level, Settings
from speccascade_jax.results.analysis import panels as summary
from speccascade_jax.results.analysis.panels import panels, table2
from speccascade_jax.results.report.tables import table2 as tables
from tests.support import fake_records as fake


def _record(method, alpha=None, quality=20.0, latency=1.0, seed=0, inconclusive=False, **point):
    block = None if method in (summary.TARGET, summary.DRAFT) else 5
    point_settings = {
        **fake.coordinates()[0],
        "method": method,
        "alpha": alpha,
        "seed": seed,
        "block_size": block,
        **point,
    }
    point_settings["bonus"] = None if point_settings["block_size"] is None else point_settings.get("bonus") or "rule"
    record = copy.deepcopy(fake.run(point_settings))
    record["quality"] |= {"value": quality, "low": quality - 1, "high": quality + 1}
    record["relative_latency"] |= {"value": latency, "low": latency - 0.1, "high": latency + 0.1}
    return record | {"inconclusive": inconclusive}


_ENDS = [_record(summary.TARGET), _record(summary.DRAFT, quality=12.0, latency=0.1)]


def _rows(*records, **how):
    (panel,) = panels([*_ENDS, *records])
    return {row.method: row for row in table2(panel, **how)}


def test_rows_hold_the_fastest_point_and_the_best_point():
    measured = {0.1: (21.0, 0.9), 0.2: (20.0, 0.7), 0.3: (19.9, 0.5), 0.0: (25.0, 1.1)}
    row = _rows(*(_record("opt", alpha, *values) for alpha, values in measured.items()))["opt"]
    assert row.fastest.alpha == 0.2  # a quality equal to the target's is enough
    assert row.best.alpha == 0.1  # the better point is slower than the target


def test_tolerance_and_margin_relax_both_conditions():
    records = [_record("opt", 0.3, quality=19.9, latency=0.5), _record("opt", 0.0, quality=25.0, latency=1.1)]
    strict, loose = _rows(*records)["opt"], _rows(*records, tolerance=0.2, margin=0.1)["opt"]
    assert (strict.fastest.alpha, strict.best.alpha) == (0.0, 0.3)
    assert (loose.fastest.alpha, loose.best.alpha) == (0.3, 0.0)


def test_the_second_speed_up_allows_a_stated_loss_of_quality():
    """Checks 46.05 against 46.12, which has no speed-up if only equal quality counts."""
    measured = {0.1: (19.93, 0.9), 0.3: (19.0, 0.5), 0.5: (18.9, 0.2)}
    records = [_record("opt", alpha, *values) for alpha, values in measured.items()]
    row = _rows(*records)["opt"]
    assert row.fastest is None and row.near.alpha == 0.3  # a loss of 1 is allowed, 1.1 is not
    assert [_rows(*records, loss=loss)["opt"].near.alpha for loss in (0.5, 2.0)] == [0.1, 0.5]
    assert _rows(*records, loss=0.05)["opt"].near is None


def test_the_target_at_lower_temperatures_is_attached_to_a_panel():
    hot = [*_ENDS, _record("opt", 0.3, quality=21.0, latency=0.8)]
    cold = [copy.deepcopy(_ENDS[0]) for _ in range(2)]
    for record, temperature, quality in zip(cold, (0.5, 0.0), (20.5, 22.0), strict=True):
        record["key"] += f"{temperature}"
        record["point"] |= {"temperature": temperature, "latency_examples": 0}
        record["quality"]["value"] = quality
        del record["latency"], record["relative_latency"]
    all_panels = panels([*hot, *cold])
    (panel,) = (candidate for candidate in all_panels if candidate.curves)
    assert panel.setting["temperature"] == 1.0
    assert [(temperature, spot.quality.value) for temperature, spot in panel.cooler.items()] == [
        (0.0, 22.0),
        (0.5, 20.5),
    ]
    assert not [candidate for candidate in all_panels if candidate.setting["temperature"] == 0.0][0].cooler
    (grid,) = tables.table2_grids(all_panels)
    note = (
        "The target alone at lower temperatures, which sharpen its distribution as some rules do: 22.00 at T = 0, "
        "20.50 at T = 0.5."
    )
    assert note in grid.notes


def test_a_method_without_a_qualifying_point_has_a_dash():
    none = _record("opt", 0.3, quality=10.0, latency=1.5)
    row = _rows(none)["opt"]
    assert row.fastest is None and row.best is None
    (grid,) = tables.table2_grids(panels([*_ENDS, none]))
    assert grid.rows[0] == ["SpecCascade [OPT]", "1", "–", "–", "–"]


def test_inconclusive_points_do_not_count_and_are_named():
    records = [*_ENDS, _record("opt", 0.3, quality=30.0, latency=0.2, inconclusive=True)]
    assert _rows(*records[2:])["opt"].fastest is None
    (grid,) = tables.table2_grids(panels(records))
    assert any("Inconclusive (nothing was drafted), left out: SpecCascade [OPT] (α 0.3)" in note for note in grid.notes)
    (points,) = [tables.points_grid(panel) for panel in panels(records)]
    assert points.rows[-1][0] == "SpecCascade [OPT] (inconclusive)"


def test_seeds_are_averaged_and_give_the_spread():
    records = [_record("opt", 0.1, quality=q, latency=r, seed=n) for n, (q, r) in enumerate([(20, 0.5), (22, 0.7)])]
    (panel,) = panels([*_ENDS, *records])
    (spot,) = panel.curves["opt"]
    assert (spot.seeds, spot.quality.value, spot.latency.value) == (2, 21, pytest.approx(0.6))
    assert spot.quality.high - spot.quality.value == pytest.approx(2**0.5)
    assert "1–2 seeds" in panel.sizes() and "in the chat template" not in panel.sizes()
    (panel,) = panels([_record(summary.TARGET, chat=True)])
    assert "examples for quality in the chat template" in panel.sizes()


def test_points_that_cannot_be_compared_are_in_separate_panels():
    changes = {"block_size": 3, "bonus": "none", "temperature": 0.0, "task": "multi30k", "quality_examples": 500}
    records = [*_ENDS, _record("opt", 0.1), *(_record("opt", 0.1, **{n: value}) for n, value in changes.items())]
    assert len(panels(records)) == 6
    repeated = [_record("opt", 0.1), _record("opt", 0.1)]
    repeated[0]["device"]["kind"] = "another"
    repeated[1]["fingerprints"] = repeated[1]["fingerprints"] | {"examples": "others"}
    assert len(panels([*records, repeated[0]])) == len(panels([*records, repeated[1]])) == 7
    assert sum(panel.target is not None for panel in panels(records)) == 3  # one panel for each block size and bonus


def test_a_panel_without_the_target_is_refused_by_name():
    (panel,) = panels([_record("opt", 0.1)])
    with pytest.raises(ValueError, match=r"no record of the target alone \(autoregressive\) for tiny_translation"):
        table2(panel)


def test_methods_are_in_the_papers_order_and_alphas_ascend():
    (panel,) = panels([fake.run(point) for point in reversed(fake.coordinates())])
    assert list(panel.curves) == ["spec_decode", "lossy", "chow", "diff", "opt", "token_v3"]
    alphas = [[spot.alpha for spot in curve] for curve in panel.curves.values()]
    assert alphas == [sorted(curve_alphas) for curve_alphas in alphas] and max(map(len, alphas)) > 1


def test_records_without_latency_still_make_curves():
    records = [_record(summary.TARGET), _record("opt", 0.1)]
    for record in records:
        del record["latency"], record["relative_latency"], record["target_latency"]
    (panel,) = panels(records)
    assert panel.curves["opt"][0].latency is None
    (row,) = table2(panel)
    assert row.fastest is None and row.best is None
    assert not {"latency", "range", "ms per example"} & {*tables.points_grid(panel).header}


def test_a_point_measured_again_counts_as_one_seed():
    first, again = _record("opt", 0.1), _record("opt", 0.1)
    again["key"], again["quality"] = "again", again["quality"] | {"value": first["quality"]["value"] + 1}
    (panel,) = summary.panels([_record("autoregressive", None), first, again])
    (spot,) = panel.curves["opt"]
    assert spot.seeds == 1 and spot.quality.value == first["quality"]["value"] + 1


def test_joined_settings_share_a_panel_and_are_in_the_names_of_curves():
    records = [*_ENDS, _record("opt", 0.1), _record("opt", 0.1, bonus="none")]
    records += [_record(name, 0.1, block_size=3) for name in ("opt", "token_v3")]
    rule, none = sorted(panels(records, together=("block_size",)), key=lambda panel: -len(panel.curves))
    assert list(rule.curves) == ["opt (γ = 3)", "opt (γ = 5)", "token_v3"]
    assert rule.setting["block_size"] is None and rule.title().endswith("T = 1, bonus rule")
    assert rule.asides() == ["SpecCascade [Token]: γ = 3."]
    # all curves of this panel have this block size
    assert list(none.curves) == ["opt"] and none.setting["block_size"] == 5
    (joined,) = panels(records, together=("block_size", "bonus"))
    assert list(joined.curves)[:2] == ["opt (γ = 3, bonus rule)", "opt (γ = 5, bonus none)"]
    with pytest.raises(ValueError, match="together='temperature' is not one of block_size, bonus, draft_temperature"):
        panels(records, together=("temperature",))


def test_drafts_of_two_temperatures_share_a_panel_and_the_first_is_its_end():
    greedy = {"draft_temperature": 0.0}
    ends = [*_ENDS, _record(summary.TARGET, **greedy), _record(summary.DRAFT, quality=13.0, latency=0.1, **greedy)]
    (panel,) = panels([*ends, _record("opt", 0.1), _record("opt", 0.1, **greedy)], together=("draft_temperature",))
    assert list(panel.curves)[-2:] == ["opt (draft T = 0)", "opt (draft T = own)"]
    assert panel.target.seeds == 1 and (panel.draft.quality.value, len(panel.curves)) == (12.0, 3)


def test_methods_without_a_swept_block_size_are_in_every_panel():
    changes = {"swept_block": False, "bonus": "target"}
    cascade = [_record("token_cascade", alpha, block_size=10, **changes) for alpha in (0.1, 0.2)]
    whole = _record("seq_cascade", -3.0, swept_block=False) | {"inconclusive": False}
    whole["point"] |= {"block_size": None, "bonus": None}
    three, five = panels([*_ENDS, *cascade, whole, _record("opt", 0.1), _record("opt", 0.1, block_size=3)])
    for panel, size in ((three, 3), (five, 5)):
        assert panel.setting["block_size"] == size
        assert list(panel.curves) == ["seq_cascade", "token_cascade", "opt"]
        assert panel.asides() == ["TokenCascade [Chow]: γ = 10, bonus target."]
    (alone,) = panels([*_ENDS, *cascade, _record("token_cascade", 0.1, block_size=5, **changes)])
    assert list(alone.curves) == ["token_cascade (γ = 5)", "token_cascade (γ = 10)"] and "γ" not in alone.title()


def test_stop_thresholds_form_one_curve_if_the_rule_has_no_alpha():
    changes = {"family": "specdecpp", "block_size": 20, "swept_block": False}
    stopped = [_record("specdecpp", stop_threshold=h, **changes) for h in (0.7, 0.3)]
    with_alpha = _record("bild", 2.0, stop_threshold=0.5, family="bild", block_size=10, swept_block=False)
    (panel,) = panels([*_ENDS, *stopped, with_alpha])
    assert [(spot.alpha, spot.axis) for spot in panel.curves["specdecpp"]] == [(0.3, "h"), (0.7, "h")]
    assert [(spot.alpha, spot.axis) for spot in panel.curves["bild@0.5"]] == [(2.0, "α")]


def _headed(stop, head, path=None, quality=20.0, rule=""):
    named = {"family": f"specdecpp{rule}", "stop_threshold": stop, "swept_block": False, "head": path}
    record = _record("specdecpp", 0.1 if rule else None, quality=quality, **named)
    record["fingerprints"] = record["fingerprints"] | ({"head": head} if head else {})
    return record | {"key": f"{record['key']}{head}{path}"}


def test_heads_with_other_weights_form_other_curves_whatever_their_file_names():
    first, second = [_headed(h, "a" * 32) for h in (0.1, 0.3)], [_headed(h, "b" * 32) for h in (0.3, 0.5)]
    (panel,) = panels([*_ENDS, *first])
    assert list(panel.curves) == ["specdecpp"]
    (panel,) = panels([*_ENDS, *first, *second])
    places = {curve: [spot.alpha for spot in spots] for curve, spots in panel.curves.items()}
    assert places == {"specdecpp (head aaaaaa)": [0.1, 0.3], "specdecpp (head bbbbbb)": [0.3, 0.5]}
    assert tables.points_grid(panel).rows[-1][0].startswith("SpecDec++ (head")
    (panel,) = panels([*_ENDS, _headed(0.3, "a" * 32, rule="[opt]"), _headed(0.3, "b" * 32, rule="[opt]")])
    assert list(panel.curves) == ["specdecpp[opt]@0.3 (head aaaaaa)", "specdecpp[opt]@0.3 (head bbbbbb)"]


def test_numbered_curves_and_panels_are_sorted_by_number():
    """Checks the numeric order of curves of methods without a fixed rank, of curve suffixes, and of panels."""
    sizes = (5, 10, 3, 20)
    records = [_record("autoregressive"), *(_record(f"my.token_v{n}", 0.5) for n in (10, 2, 1))]
    records += [_record("opt", 0.5, block_size=n) for n in sizes]
    assert [panel.setting["block_size"] for panel in panels(records)] == sorted(sizes)
    together = panels(records, together=("block_size",))[0]
    names = list(together.curves)
    assert [name for name in names if "token" in name] == ["my.token_v1", "my.token_v2", "my.token_v10"]
    assert [name for name in names if "opt" in name] == [f"opt (γ = {n})" for n in sorted(sizes)]


def labelled(**chosen):
    settings = Settings(**chosen)
    return {"point": {"head": settings.head, "stop_threshold": settings.stop_threshold, **facts(settings)}}


@pytest.mark.parametrize(("chosen", "text"), [
    ({"method": "token_v3"}, "SpecCascade [Token]"),
    ({"method": "fuzzy"}, "FSD [js]"),
    ({"method": "fuzzy", "rule": "fuzzy_kl_top50"}, "FSD [kl_top50]"),
    ({"method": "oracle_cascade", "rule": "opt"}, "Oracle [OPT]"),
    ({"method": "bild", "stop_threshold": 0.3}, "BiLD α_f 0.3"),
    ({"method": "bild", "rule": "fuzzy_tv", "stop_threshold": 0.3}, "BiLD [tv] α_f 0.3"),
    ({"method": "specdecpp", "stop_threshold": 0.7}, "SpecDec++ h 0.7"),
    ({"method": "specdecpp", "rule": "opt", "head": "x/depth3_wrej6.msgpack", "stop_threshold": 0.7},
     "SpecDec++ [OPT] depth3_wrej6 h 0.7"),
    ({"method": "seq_cascade"}, "SeqCascade [sum]"),
    ({"method": "spec_decode", "drafters": (Level(model="mid", budget=3, rule="opt", alpha=0.2),)},
     "SpecDecode [draft 5 → mid 3 rule opt alpha 0.2]"),
])  # fmt: skip
def test_a_curve_is_named_by_its_method_and_its_settings(chosen, text):
    assert summary.label(labelled(**chosen)) == text


def test_labels_end_with_distinguishing_settings_and_may_omit_the_threshold():
    stopped = labelled(method="specdecpp", stop_threshold=0.7)
    assert summary.label(stopped, " (γ = 20)", threshold=False) == "SpecDec++ (γ = 20)"


def test_curves_are_in_the_papers_order():
    ordered = ["bild", "spec_decode", "opt", "token_v3", "fuzzy"]
    shuffled = [ordered[n] for n in (3, 4, 0, 2, 1)]
    assert sorted(shuffled, key=lambda name: summary.place(labelled(method=name), name)) == ordered
