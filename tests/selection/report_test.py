"""Ways of choosing beside each other on a tiny pair: records, tables, and what nobody can know."""

import numpy as np
import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Arm, Evaluation, Method, ModelPair, Sampling
from speccascade_jax.results import panels
from speccascade_jax.results.store import read_records
from speccascade_jax.results.tables import selection
from speccascade_jax.selection import report
from tests.support import tiny_pair

ARMS = (Arm(drafter="draft", name="first"), "middle")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return ModelPair(name=str(tiny_pair.write(tmp_path_factory.mktemp("pair"), middle=True)))


def domains(**changed):
    given = {"quality_examples": 8, "quality_batch": 4, "latency_examples": 8, "latency_trials": 3, "max_new_tokens": 5}
    return [Evaluation(task=task, **given | changed) for task in ("tiny_translation", "tiny_translation_de_en")]


def compare(pair, path, **changed):
    told = {"pair": pair, "domains": domains(), "drafters": ARMS, "ways": (), "output": str(path)}
    return report.compare(**told | {"block_sizes": (2,)} | changed)


@pytest.fixture(scope="module")
def store(pair, tmp_path_factory):
    return compare(pair, tmp_path_factory.mktemp("store") / "selection.jsonl")


def test_records_say_what_was_chosen(store):
    records = [record for record in read_records(store) if "selection" in record]
    assert len(records) == 2 * 3
    for record in records:
        told, arms = record["selection"], record["per_example"]["arm"]
        assert told["arms"] == ["first", "middle"] and told["rules"] == ["spec_decode"] * 2 and not told["lossy_arms"]
        assert len(arms) == 8 and record["point"]["lossless"] and record["point"]["chosen"] == told["choose"]
        if told["choose"] != "random":
            assert set(arms) == {told["arms"].index(told["choose"])}
        else:
            assert set(arms) == {0, 1}


def test_the_table_holds_every_way_and_domain(store):
    (grid,) = selection.selection_grids(panels.panels(read_records(store)))
    assert [row[0] for row in grid.rows] == [
        "target alone", "always first", "always middle", "random", selection.ORACLE,
    ]  # fmt: skip
    shown = ("bleu", "speed-up", "ms/token", "accepted", "choices")
    assert grid.header[1:6] == [f"tiny_translation: {what}" for what in shown]
    assert grid.header[6].startswith("tiny_translation_de_en") and grid.header[-1] == "mean speed-up"
    assert all(len(row) == len(grid.header) for row in grid.rows)
    assert "first " in grid.rows[3][5] and "[" in grid.rows[1][2] and not any("LOSSY" in note for note in grid.notes)


def test_the_oracle_takes_the_arm_that_was_fastest_in_the_other_trials(store):
    panel = panels.panels(read_records(store))[0]
    always = [spot for spot in panel.spots if selection._way(spot).startswith("always")]
    times = ([[2.0, 18.0], [2.0, 18.0], [18.0, 18.0]], [[4.0, 4.0]] * 3)
    for spot, ms in zip(always, times, strict=True):
        record = spot.records[0]
        shape = np.full((3, 2), 2)
        record["latency"] |= {"per_example_ms": ms, "per_example_tokens": shape.tolist()}
        record["target_latency"] |= {"per_example_ms": shape.tolist(), "per_example_tokens": shape.tolist()}
    found = selection.oracle([selection.per_token(spot) for spot in always])
    # of the first query the other trials of the third are 1 and 1 a token: the first arm, although it took 9 there
    assert found.records[0]["latency"]["per_example_ms"] == [[2.0, 2.0], [2.0, 2.0], [9.0, 2.0]]
    assert selection._speed_up(found) == pytest.approx(6 / 19)
    assert found.records[0]["per_example"]["arm"] == [1, 1, 1, 1, 0, 1]
    assert selection.oracle(always[:1]) is None


def test_a_lossy_arm_is_refused_unless_asked_for_and_then_the_table_says_so(pair, tmp_path):
    lossy = (Arm(drafter="draft", name="first", rule="chow"), "middle")
    with pytest.raises(ValueError, match="takes rule spec_decode, not 'chow'"):
        compare(pair, tmp_path / "refused.jsonl", drafters=lossy)
    with pytest.raises(ValueError, match="'chow', which is lossy"):
        Method(name="speculative", drafters=lossy, choose="random", block_size=2, alpha=0.3)
    method = Method(name="speculative", drafters=lossy, choose="random", lossy_arms=True, block_size=2, alpha=0.3)
    record = experiment.run(
        pair=pair,
        evaluation=domains()[0],
        method=method,
        sampling=Sampling(temperature=1.0),
        output=str(tmp_path / "a.jsonl"),
    )
    assert record["selection"]["lossy_arms"] and record["selection"]["rules"] == ["chow", "spec_decode"]
    assert not record["point"]["lossless"]
    (grid,) = selection.selection_grids(panels.panels([record]))
    assert any("LOSSY: outputs of rows that first (chow) drafted" in note for note in grid.notes)


def test_a_run_without_a_choice_has_no_such_table(store):
    records = [record for record in read_records(store) if "selection" not in record]
    with pytest.raises(ValueError, match="no record chose among drafters"):
        selection.selection_grids(panels.panels(records))


def test_points_are_listed(pair, tmp_path, capsys):
    assert compare(pair, tmp_path / "none.jsonl", dry_run=True, temperatures=(0.5, 1.0)) is None
    said = capsys.readouterr().out
    assert "tiny_translation_de_en: spec_decode[middle of first: draft | middle]" in said and not list(
        tmp_path.iterdir()
    )
