"""Tests of comparing ways of choosing on a tiny pair: records, tables, and the oracle."""

import shutil

import numpy as np
import pytest

from speccascade_jax.engine.generate import compilations
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.enumeration import enumerate_points
from speccascade_jax.evaluation.points import Arm, Evaluation, Settings, recorded
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.report.tables import selection
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import read_records
from speccascade_jax.selection import report

ARMS = (Arm(drafter="draft", name="first"), "middle")


def domains(**changed):
    # batch 1 for quality and for time, so one program serves both
    base = {"quality_examples": 8, "quality_batch": 1, "latency_examples": 8, "latency_trials": 3, "max_new_tokens": 5}
    return [Evaluation(task=task, **base | changed) for task in ("tiny_translation", "tiny_translation_de_en")]


def compare(pair, path, **changed):
    settings = {"pair": pair, "domains": domains(), "drafters": ARMS, "ways": (), "output": str(path)}
    return report.compare(**settings | {"block_sizes": (2,)} | changed)


@pytest.fixture(scope="module")
def store(pair, tmp_path_factory):
    return compare(pair, tmp_path_factory.mktemp("store") / "selection.jsonl")


@pytest.mark.tools
def test_records_hold_the_chosen_arms(store):
    records = [record for record in read_records(store) if "selection" in record]
    assert len(records) == 2 * 3
    for record in records:
        spec, arms = record["selection"], record["per_example"]["arm"]
        assert spec["arms"] == ["first", "middle"] and spec["rules"] == ["spec_decode"] * 2 and not spec["lossy_arms"]
        assert len(arms) == 8 and record["point"]["lossless"] and record["point"]["chosen"] == spec["choose"]
        if spec["choose"] != "random":
            assert set(arms) == {spec["arms"].index(spec["choose"])}
        else:
            assert set(arms) == {0, 1}


@pytest.mark.tools
def test_the_table_holds_every_way_and_domain(store):
    grid, costs = selection.selection_grids(panels.panels(read_records(store)))
    assert [row[0] for row in grid.rows] == [
        "target alone", "first alone", "middle alone", "always first", "always middle", "random", selection.ORACLE,
    ]  # fmt: skip
    shown = ("BLEU", "speed-up", "ms/token", "accepted", "choices")
    assert grid.header[1:6] == [f"tiny_translation: {measure}" for measure in shown]
    assert grid.header[6].startswith("tiny_translation_de_en") and grid.header[-1] == "mean speed-up"
    assert all(len(row) == len(grid.header) for row in grid.rows)
    assert "first " in grid.rows[5][5] and "[" in grid.rows[1][2] and not any("LOSSY" in note for note in grid.notes)
    assert [row[:2] for row in costs.rows] == [["always first", "first alone"], ["always middle", "middle alone"]]
    assert all("[" in cell for row in costs.rows for cell in row[2:])


@pytest.mark.tools
def test_the_oracle_takes_the_arm_that_was_fastest_in_the_other_trials(store):
    panel = panels.panels(read_records(store))[0]
    always = [spot for spot in panel.spots if selection.fixed_arm(spot) is not None]
    times = ([[2.0, 18.0], [2.0, 18.0], [18.0, 18.0]], [[4.0, 4.0]] * 3)
    for spot, ms in zip(always, times, strict=True):
        record = spot.records[0]
        shape = np.full((3, 2), 2)
        record["latency"] |= {"per_example_ms": ms, "per_example_tokens": shape.tolist()}
        record["target_latency"] |= {"per_example_ms": shape.tolist(), "per_example_tokens": shape.tolist()}
    oracle = selection.oracle([selection.per_token(spot) for spot in always])
    # first query, third trial: the first arm is best by its other trials (1 ms a token), although it took 9 here
    assert oracle.records[0]["latency"]["per_example_ms"] == [[2.0, 2.0], [2.0, 2.0], [9.0, 2.0]]
    assert selection._speed_up(oracle) == pytest.approx(6 / 19)
    assert oracle.records[0]["per_example"]["arm"] == [1, 1, 1, 1, 0, 1]
    # total time over total tokens for each trial, as in every row; a mean over queries would give another value
    assert oracle.records[0]["latency"]["ms_per_token"]["value"] == pytest.approx(2.0)
    assert selection.oracle(always[:1]) is None


@pytest.mark.tools
def test_the_oracles_time_is_all_time_over_all_tokens(store):
    panel = panels.panels(read_records(store))[0]
    always = [spot for spot in panel.spots if selection.fixed_arm(spot) is not None]
    for spot in always:
        for name in ("latency", "target_latency"):
            spot.records[0][name] |= {"per_example_ms": [[2.0, 27.0]] * 3, "per_example_tokens": [[1, 9]] * 3}
    oracle = selection.oracle([selection.per_token(spot) for spot in always])
    # total time over total tokens, not the mean (2 + 3) / 2
    assert oracle.records[0]["latency"]["ms_per_token"]["value"] == pytest.approx(29 / 10)
    assert selection.ratio(oracle) == 1.0


@pytest.fixture(scope="module")
def two_sets(pair, tmp_path_factory):
    """Returns a store of two sets that order the same drafters differently.

    An oracle over both sets would mix up the drafters' times.
    """
    more = report.Among(drafters=("autoregressive", "middle", Arm(drafter="draft", name="first")))
    return compare(pair, tmp_path_factory.mktemp("sets") / "two.jsonl", domains=domains()[:1], further=(more,))


@pytest.mark.tools
def test_one_table_holds_all_sets_of_drafters_each_with_its_own_oracle(two_sets):
    records = read_records(two_sets)
    assert sum("selection" in record for record in records) == 3 + 4
    alone = [record for record in records if record["point"]["method"] == "spec_decode" and "selection" not in record]
    assert len(alone) == 2, "drafters of several sets are timed alone once"
    times = {str(record["target_latency"]["per_example_ms"]) for record in records}
    assert len(times) == 1, "all beside the same runs of the target"
    grid, costs = selection.selection_grids(panels.panels(records))
    rows = [row[0] for row in grid.rows]
    assert rows[3:5] == ["always first of A", "always middle of A"]
    assert set(rows[5:8]) == {f"always {name} of B" for name in ("autoregressive", "first", "middle")}
    assert rows[-2:] == ["each query's best arm of A", "each query's best arm of B"]
    shares = [grid.rows[n][5].replace(" ", "").split(",") for n in (-2, -1)]
    assert [len(cells) for cells in shares] == [2, 3] and shares[1][0].startswith("autoregressive")
    assert grid.notes[:2] == ["A: first: draft | middle.", "B: autoregressive | middle | first: draft."]
    assert ["random of B", "random of A"] in [row[:2] for row in costs.rows]
    assert ["always middle of B", "middle alone"] in [row[:2] for row in costs.rows]


@pytest.mark.tools
def test_the_cost_of_a_further_drafter_matches_values_computed_by_hand(two_sets):
    records = read_records(two_sets)
    for record in records:
        arms = len(record.get("selection", {"arms": ()})["arms"])
        slower = {0: 1.0, 2: 2.0, 3: 2.1}[arms]
        record["latency"]["per_example_ms"] = [[slower] * 8] * 3
        record["latency"]["per_example_tokens"] = record["target_latency"]["per_example_tokens"] = [[1] * 8] * 3
        record["target_latency"]["per_example_ms"] = [[1.0] * 8] * 3
        record["relative_latency"]["value"] = slower
    _, costs = selection.selection_grids(panels.panels(records))
    of_sets = [row for row in costs.rows if not row[1].endswith("alone")]
    assert len(of_sets) == 4 and {row[2] for row in of_sets} == {"1.050 [1.050, 1.050]"}


def test_points_that_are_timed_together_share_sampling_and_block_size(pair):
    methods = report.methods_of(report.Among(drafters=ARMS), (), alone=True)
    swept = {"methods": methods, "block_sizes": (2, 3), "samplings": [{}, {"temperature": 1.0}]}
    groups = report.together(enumerate_points(pair=pair, evaluation=domains()[0], **swept))
    assert [len(group) for group in groups] == [2 + 5, 5, 2 + 5, 5]
    methods = report.methods_of(report.Among(drafters=(Arm(drafter="draft", block_size=3), "middle")), (), alone=True)
    assert [method.drafters for method in methods if not method.choose] == [("middle",)]


LOSSY = (Arm(drafter="draft", name="first", rule="chow"), "middle")


def test_a_lossy_arm_is_refused_unless_requested(pair, tmp_path):
    with pytest.raises(ValueError, match="takes rule spec_decode, not 'chow'"):
        compare(pair, tmp_path / "refused.jsonl", drafters=LOSSY)
    with pytest.raises(ValueError, match="'chow', which is lossy"):
        recorded(Settings(drafters=LOSSY, choose="random", block_size=2, alpha=0.3))


@pytest.mark.sample(1)
@pytest.mark.tools
@pytest.mark.parametrize(
    ("chosen", "rules", "lossy", "said"),
    [
        ({"drafters": LOSSY, "alpha": 0.3}, ["chow", "spec_decode"], ["first"], "first (chow)"),
        ({"method": "token_v3", "alpha": 0.5, "drafters": ("draft", "middle", "autoregressive")},
         ["token_v3"] * 3, ["draft", "middle"], "draft (token_v3) or middle (token_v3)"),
    ],
)  # fmt: skip
def test_the_table_names_requested_lossy_arms(pair, tmp_path, chosen, rules, lossy, said):
    """Covers a lossy method, which makes all its arms lossy."""
    settings = Settings(block_size=2, temperature=1.0, choose="random", lossy_arms=True, **chosen)
    evaluation = domains(latency_examples=0)[0]
    record = experiment.run(pair=pair, evaluation=evaluation, settings=settings, output=str(tmp_path / "a.jsonl"))
    selected = record["selection"]
    assert (selected["rules"], selected["lossy_arms"]) == (rules, lossy) and not record["point"]["lossless"]
    (grid,) = selection.selection_grids(panels.panels([record]))
    assert f"LOSSY: outputs of rows that {said} drafted" in "\n".join(grid.notes)


@pytest.mark.tools
def test_a_run_without_a_choice_has_no_selection_table(store):
    records = [record for record in read_records(store) if "selection" not in record]
    with pytest.raises(ValueError, match="no record is of a method that chooses among drafters"):
        selection.selection_grids(panels.panels(records))


@pytest.mark.tools
def test_outputs_are_stored_and_missing_ones_are_counted(pair, store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "evaluate_together", lambda *_: pytest.fail("measured again"))
    copy = tmp_path / store.name
    shutil.copy(store, copy)
    shutil.copytree(outputs.folder(store), outputs.folder(copy))
    compare(pair, copy)
    assert "no stored outputs" not in capsys.readouterr().out
    (outputs.folder(copy) / f"{read_records(copy)[0]['key']}.jsonl").unlink()
    compare(pair, copy)
    said = capsys.readouterr().out
    assert said.count("no stored outputs") == 1 and "1 of these 7 points have no stored outputs beside" in said


@pytest.mark.tools
def test_trained_policies_are_rows_and_foreign_ones_are_refused_before_compiling(pair, write_policy, tmp_path):
    arms = (ARMS[0], Arm(drafter=ARMS[1]))

    def policy(name, best, **card):
        return write_policy(tmp_path / name / "policy.msgpack", arms, best, trained=name, queries=7, **card)

    second, first = policy("second", 1), policy("first", 0)
    foreign = policy("others", 0, arms=("a", "b"), prints=("0", "0"))
    settings = {"domains": domains(latency_examples=0)[:1], "alone": False, "ways": ("greedy", "dynamic")}
    records = read_records(compare(pair, tmp_path / "a.jsonl", policies=(second, first), **settings))
    trained_records = [record for record in records if "trained" in record.get("selection", {})]
    chosen = {(record["selection"]["trained"], record["selection"]["choose"]): record for record in trained_records}
    assert set(chosen) == {(name, way) for name in ("second", "first") for way in ("greedy", "dynamic")}
    assert {tuple(r["per_example"]["arm"]) for (name, _), r in chosen.items() if name == "second"} == {(1,) * 8}
    assert len({r["fingerprints"]["policy"] for r in chosen.values()}) == 2
    assert chosen["first", "greedy"]["selection"]["queries"] == 7
    (grid,) = selection.selection_grids(panels.panels(records))
    assert {"greedy π (first)", "dynamic π (second)"} <= {row[0] for row in grid.rows}
    before = compilations()
    with pytest.raises(ValueError, match=rf"^{foreign}: the selection policy chooses among a, b, but method") as caught:
        compare(pair, tmp_path / "b.jsonl", policies=(second, foreign), **settings)
    assert "\n" not in str(caught.value) and compilations() == before


def test_a_dry_run_lists_the_points(pair, tmp_path, capsys):
    assert compare(pair, tmp_path / "none.jsonl", dry_run=True, temperatures=(0.5, 1.0)) is None
    said = capsys.readouterr().out
    assert "tiny_translation_de_en: spec_decode[middle of first: draft | middle]" in said
    assert not list(tmp_path.iterdir())
