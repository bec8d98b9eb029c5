"""Tests of predicted latencies: arithmetic by hand, bands, pairing with the target, and reasons for no prediction."""

import copy

import numpy as np
import pytest

from speccascade_jax.results.analysis import panels, prediction, significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.report.tables import table2
from speccascade_jax.results.store import program_costs
from tests.support import program_costs as made
from tests.support.program_costs import H100, V5E


def of_method(records, method, alpha=None):
    return next(r for r in records if r["point"]["method"] == method and r["point"]["alpha"] == alpha)


def seconds(record):
    costs = made.of([record], V5E)
    names = program_costs.programs(record, V5E)
    return prediction.seconds(record, *(costs[program_costs.key(names[part])] for part in ("prefill", "round")))


def example(method, calls, steps, drafted, unverified=0, **point):
    """Returns a record of one example with these counts."""
    record = copy.deepcopy(of_method(made.records(), method, 0.5 if method == "chow" else None))
    record["per_example"] = {"ids": [7], "target_calls": [calls], "draft_steps": [steps], "drafted": [drafted]}
    record["counts"]["unverified"] = unverified
    record["point"] |= point
    return record


def test_times_of_a_method_whose_draft_never_catches_up():
    """Checks 4 calls and 22 passes: `chow` reads q, so the bonus position's pass completes the draft's cache."""
    parts = seconds(example("chow", calls=4, steps=22, drafted=18))
    # a round: commit 3, unnamed 2, draft 1.5 and catch-up 0.5 before their loops; a call: 100 + 7 + 5
    assert parts.rounds[0] == pytest.approx(
        1e-6 * np.array([4 * (7 + 112) + 22 * 11, 4 * (1 + 25) + 22 * 4, 22 * 2, 4 * (6 + 50) + 22 * 30])
    )
    assert parts.prefill[0] == pytest.approx(1e-6 * np.array([40, 300, 0, 60]))
    # the prefill is bound by compute, the rounds by memory; starting an op is free, or costs all of it
    assert parts.total(0.0) == pytest.approx([1e-6 * (300 + 718 + 44)])
    assert parts.total(1.0) == pytest.approx([1e-6 * (300 + 718 + 44 + 60 + 884)])


def test_times_of_a_method_that_catches_up():
    """Checks 5 rounds in which 20 tokens were drafted by 20 passes, and 3 further steps caught up."""
    parts = seconds(example("spec_decode", calls=5, steps=23, drafted=20))
    assert parts.rounds[0, 0] == pytest.approx(1e-6 * (5 * 119 + 20 * 11 + 3 * 13))
    assert parts.rounds[0, 2] == pytest.approx(1e-6 * (20 * 2 + 3 * 1))


def test_passes_without_a_token_catch_up_at_most_once_a_round():
    record = example("chow", calls=5, steps=32, drafted=20)
    assert [x.item() for x in prediction.counts(record, complete=False)] == [5, 5, 27, 5]


def test_rounds_without_a_call_of_the_target_cost_no_scoring():
    parts = seconds(example("chow", calls=4, steps=22, drafted=18, unverified=1))
    assert parts.rounds[0, 0] == pytest.approx(1e-6 * (5 * 7 + 4 * 112 + 22 * 11))


def test_a_tree_takes_a_pass_for_each_level():
    """Checks 3 rounds of a tree of two levels with 6 tokens: of 8 steps, 6 draft and 2 catch up."""
    record = example("spec_decode", calls=3, steps=8, drafted=18, tree=[2, 2])
    assert [x.item() for x in prediction.counts(record, complete=False)] == [3, 3, 6, 2]
    assert [x.item() for x in prediction.counts(record, complete=True)] == [3, 3, 8, 0]


@pytest.mark.parametrize(("method", "memory"), [("autoregressive", 9 * 94), ("autoregressive_draft", 9 * 11)])
def test_a_model_alone_takes_a_round_for_each_of_its_calls(method, memory):
    calls, steps = (9, 0) if method == "autoregressive" else (0, 9)
    assert seconds(example(method, calls, steps, 0)).rounds[0, 0] == pytest.approx(1e-6 * memory)


def test_latencies_are_relative_to_the_target_on_the_same_examples():
    """Checks the ratio of sums with the target's examples in another order, and both ends of the band."""
    records = made.records()
    target, chow = of_method(records, "autoregressive"), of_method(records, "chow", 0.5)
    ours, theirs = seconds(chow), seconds(target)
    order = np.random.default_rng(0).permutation(64)
    target["per_example"] = {name: [values[n] for n in order] for name, values in target["per_example"].items()}
    predicted = of_method(prediction.predict(records, V5E, made.of(records, V5E)), "chow", 0.5)
    ratios = [ours.total(x).sum() / theirs.total(x).sum() for x in (0.0, 0.5, 1.0)]
    relative = predicted["relative_latency"]
    assert relative["value"] == pytest.approx(ratios[1])
    assert (relative["low"], relative["high"]) == pytest.approx((min(ratios), max(ratios)))
    by_id = np.argsort(chow["per_example"]["ids"])
    assert predicted["latency"]["per_example_ms"][0] == pytest.approx(1e3 * ours.total(0.5)[by_id])
    assert predicted["target_latency"]["ms_per_example"]["value"] == pytest.approx(1e3 * theirs.total(0.5).mean())
    assert predicted["predicted"]["parts"]["ops"] == pytest.approx((ours.prefill + ours.rounds)[:, 3].mean())


def test_the_interval_covers_the_band_and_the_examples():
    """Checks the speed-up's interval, and that measured latencies are as before."""
    records = made.records()
    (panel,) = panels.panels(prediction.predict(records, V5E, made.of(records, V5E)))
    spot = panel.curves["chow"][1]
    interval, bootstrap = significance.latency(spot, Bootstrap()), Bootstrap()
    alone = [bootstrap.latency_ratio([end]) for end in spot.records[0]["predicted"]["ends"]]
    assert interval.low == min(x.low for x in alone) < spot.latency.low < spot.latency.value
    assert interval.high == max(x.high for x in alone) > spot.latency.high > spot.latency.value
    (measured,) = panels.panels(records)
    spot = measured.curves["chow"][1]
    assert significance.latency(spot, bootstrap) == bootstrap.latency_ratio(spot.records)


def tables(records, hardware, factor=1.0):
    predicted = prediction.predict(records, hardware, made.of(records, hardware, factor=factor))
    return [(grid.title, grid.rows, grid.notes) for grid in table2.grids(panels.panels(predicted))]


def test_counts_of_another_machine_give_the_same_tables():
    """Checks a store with other times, keys and devices; and that other hardware gives other tables."""
    elsewhere = made.records()
    for number, record in enumerate(elsewhere):
        record |= {"key": f"other {number}", "device": record["device"] | {"kind": "TPU v6", "processor": "none"}}
        del record["latency"], record["target_latency"], record["relative_latency"]
    assert tables(elsewhere, V5E) == tables(made.records(), V5E)
    assert tables(made.records(), H100, factor=0.5)[0][1] != tables(made.records(), V5E)[0][1]


def test_each_hardware_has_panels_of_its_own():
    records = made.records()
    predicted = [r for place in (V5E, H100) for r in prediction.predict(records, place, made.of(records, V5E, H100))]
    shown = panels.panels(records + predicted)
    assert [panel.predicted for panel in shown] == ["", "v5e", "h100"]
    assert [panel.title().partition(", predicted for ")[2] for panel in shown] == ["", "v5e", "h100"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"failed_examples": [3]}, "some of its examples failed"),
        ({"levels": [{}]}, "the calls of its levels"),
        ({"point": {"block_size": "auto"}}, "its block lengths are chosen"),
        ({"fingerprints": {"head": "1f"}}, "its acceptance head"),
        ({"point": {"choose": "greedy"}}, "its drafters are chosen"),
        ({"point": {"timed": False}}, "an oracle has no latency"),
    ],
)
def test_a_point_without_a_prediction_says_why(change, reason):
    records = made.records()
    changed = of_method(records, "chow", 0.5)
    changed |= change | {part: changed[part] | change.get(part, {}) for part in ("point", "fingerprints")}
    predicted = prediction.predict(records, V5E, made.of(records, V5E))
    lacking = [record for record in predicted if "relative_latency" not in record]
    assert [record["key"] for record in lacking] == [changed["key"]]
    assert lacking[0]["predicted"]["refused"].startswith(reason)
    panel = next(panel for panel in panels.panels(predicted) if lacking[0] in panel.records)
    assert any(note.startswith(f"No prediction for SpecCascade: {reason}") for note in table2.grids([panel])[0].notes)


def test_without_the_target_nothing_is_predicted():
    records = [record for record in made.records() if record["point"]["method"] != "autoregressive"]
    predicted = prediction.predict(records, V5E, made.of(records, V5E))
    assert not any("latency" in record for record in predicted)
    assert {r["predicted"]["refused"][:41] for r in predicted} == {"there is no record of the target alone on"}


def test_a_program_that_cannot_be_compiled_is_named():
    records, refused = made.records(), "it does not fit v5e: 3 bytes are missing"
    costs = made.of(records, V5E)
    program = program_costs.programs(of_method(records, "chow", 0.5), V5E)["round"]
    costs[program_costs.key(program)] = {"program": program, "refused": refused}
    lacking = [r for r in prediction.predict(records, V5E, costs) if "latency" not in r]
    assert {(r["point"]["method"], r["predicted"]["refused"]) for r in lacking} == {("chow", refused)}


def test_programs_depend_on_settings_but_not_on_alpha_or_the_seed():
    records = made.records()
    chow, other = of_method(records, "chow", 0.5), of_method(records, "chow", 0.3)
    other["point"]["seed"] = 3
    assert program_costs.programs(chow, V5E) == program_costs.programs(other, V5E)
    first = program_costs.programs(chow, V5E)
    for name, value in {"block_size": 3, "temperature": 1.0, "top_k": 5, "verify": "block", "mesh": [1, 2]}.items():
        changed = copy.deepcopy(chow)
        changed["point"][name] = value
        assert program_costs.programs(changed, V5E)["round"] != first["round"], name
    cold, warm = copy.deepcopy(chow), copy.deepcopy(chow)
    cold["point"]["temperature"], warm["point"]["temperature"] = 0.3, 0.7
    assert program_costs.programs(cold, V5E) == program_costs.programs(warm, V5E)
    assert program_costs.programs(chow | {"prompt_length": 48}, V5E)["prefill"]["prompt_length"] == 48
    # the sweep of 14 points runs 4 methods and both ends, and all methods share the prefill
    assert len(program_costs.missing(records, [V5E], {})) == 4 + 2 + 3


def test_costs_survive_their_file(tmp_path):
    costs, path = made.of(made.records(), V5E), program_costs.path_of(tmp_path / "a.jsonl")
    assert program_costs.read(path) == {}
    program_costs.write(path, costs)
    assert path.name == "a.costs.json" and program_costs.read(path) == costs
    path.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="holds no costs of compiled programs: move it away"):
        program_costs.read(path)
    with pytest.raises(ValueError):
        program_costs.write(path, costs)
