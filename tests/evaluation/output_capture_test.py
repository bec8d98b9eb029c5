"""What a sweep keeps: outputs whose scores are the record's, where tokens came from, traces that count alike."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.evaluation import experiment, rerun
from speccascade_jax.evaluation.measuring import judge
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.metrics import quality
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import ResultStore, read_records

EVALUATION = Evaluation(
    task="tiny_translation", quality_examples=10, quality_batch=4, latency_examples=0, max_new_tokens=12, keep_traces=3
)
TOKEN = Settings(method="token_v3", alpha=0.4, temperature=1.0)


@pytest.fixture(scope="module")
def session(pair):
    return Session(ModelPair(name="tables"), EVALUATION, pair=pair)


def point(session, settings=TOKEN, **changed):
    return Point(pair=session.source, evaluation=replace(session.evaluation, **changed), settings=settings)


def measured(session, *points):
    """Records as a sweep has them before they are stored."""
    results = judge(session, points)
    described = ({"key": f"{n:032d}", "fingerprints": session.loaded} for n in range(len(points)))
    return [{**told, **result} for told, result in zip(described, results, strict=True)]


def test_kept_outputs_are_what_was_scored_and_counted(session, tmp_path):
    path = tmp_path / "a.jsonl"
    records = measured(session, point(session), point(session, replace(TOKEN, alpha=0.9)))
    with ResultStore(path) as store:
        for record in records:
            store.append(record)
    for record, stored in zip(records, read_records(path), strict=True):
        assert outputs.ENTRY not in stored and outputs.ENTRY in record
        found = outputs.read(path, stored)
        assert [each.id for each in found] == [example.id for example in session.examples]
        assert [each.prompt for each in found] == [example.source for example in session.examples]
        scored = quality.score(["bleu"], [each.output for each in found], [each.reference for each in found])
        assert scored["bleu"] == pytest.approx(stored["quality"]["value"])
        sources = "".join(each.sources for each in found)
        counts = stored["counts"]
        assert len(sources) == counts["committed"] == sum(len(each.tokens) for each in found)
        assert sources.count("d") == counts["kept"] and sources.count("r") <= counts["rejected"]
        assert sum(len(each.rounds) for each in found) == counts["rounds"]
        assert all(sum(each.rounds) == len(each.tokens) == len(each.sources) for each in found)
        assert ["".join(each.pieces).strip() for each in found] == [each.output for each in found]
        assert [each.trace is not None for each in found] == [True] * 3 + [False] * 7
        committed = dict(zip(stored["per_example"]["ids"], stored["per_example"]["committed"], strict=True))
        for each in found[:3]:
            assert each.trace.counts()["committed"] == committed[each.id]
            assert (
                "".join(step.source[0] for r in each.trace.rounds for step in r.steps if step.committed) == each.sources
            )


def test_what_is_kept_changes_no_number(session):
    kept, traced, none = (
        judge(session, [point(session, **more)])[0] for more in ({"keep_traces": 0}, {}, {"keep_outputs": False})
    )
    assert none.get(outputs.ENTRY) is None
    assert all(each.trace is None for each in kept[outputs.ENTRY])
    for record in (kept, traced):
        assert {name: value for name, value in record.items() if name != outputs.ENTRY} == none


def test_it_is_no_part_of_what_a_point_is(session):
    one, other = point(session), point(session, keep_outputs=False, keep_traces=0)
    assert one == other and one.configuration() == other.configuration() and session.key(one) == session.key(other)
    assert "keep" not in one.configuration() and "keep_outputs" not in one.coordinates()


def test_methods_of_several_generations_keep_texts_without_sources(session):
    (record,) = judge(session, [point(session, Settings(method="seq_cascade", alpha=0.5, temperature=1.0))])
    assert all(each.sources == "" and each.output == "".join(each.pieces).strip() for each in record[outputs.ENTRY])


def test_a_killed_write_leaves_no_record_without_outputs(session, tmp_path, monkeypatch):
    (record,) = measured(session, point(session))
    monkeypatch.setattr(outputs, "write", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with ResultStore(tmp_path / "a.jsonl") as store:
        with pytest.raises(OSError, match="no space"):
            store.append(record)
        assert store.done_keys() == set()


def test_a_store_that_takes_records_over_takes_their_outputs(session, tmp_path):
    (record,) = measured(session, point(session))
    with ResultStore(tmp_path / "a.jsonl") as store:
        store.append(record)
    with ResultStore(tmp_path / "b.jsonl") as store:
        assert store.take_over([record["key"]], [tmp_path / "a.jsonl"]) == 1
        assert outputs.read(tmp_path / "b.jsonl", store.records[0]) == outputs.read(tmp_path / "a.jsonl", record)


def test_points_that_were_measured_without_outputs_are_counted(session, tmp_path, capsys):
    (kept,) = measured(session, point(session))
    (bare,) = measured(session, point(session, keep_outputs=False))
    bare["key"] = "f" * 32
    with ResultStore(tmp_path / "a.jsonl") as store:
        store.append(kept)
        experiment.tell_without_outputs(store, EVALUATION, [kept["key"], bare["key"]])
        assert capsys.readouterr().out == ""
        store.append(bare)
        experiment.tell_without_outputs(store, replace(EVALUATION, keep_outputs=False), [bare["key"]])
        experiment.tell_without_outputs(store, EVALUATION, [kept["key"]])  # another's points are not this run's matter
        assert capsys.readouterr().out == ""
        experiment.tell_without_outputs(store, EVALUATION, [kept["key"], bare["key"]])
        assert "no outputs of 1 of these 2 points lie beside" in capsys.readouterr().out
        next(outputs.folder(store.path).glob("examples-*")).unlink()
        assert not outputs.kept(store.path, kept) and outputs.read(store.path, kept) is None


def test_damaged_outputs_are_named(session, tmp_path):
    (record,) = measured(session, point(session))
    with ResultStore(tmp_path / "a.jsonl") as store:
        store.append(record)
    own = outputs.folder(tmp_path / "a.jsonl") / f"{record['key']}.jsonl"
    own.write_text(own.read_text()[:-20])
    with pytest.raises(
        ValueError, match=rf"{record['key']}.jsonl:10 is damaged .*measure its point into another store"
    ):
        outputs.read(tmp_path / "a.jsonl", record)


def rows(path, *lengths):
    path.write_text("source,reference\n" + "".join(f"{'cold ' * n},kalt\n" for n in lengths))
    return path


def opened(session, task, examples):
    """A session on another task."""
    asked = replace(EVALUATION, task=task, quality_examples=examples)
    return Session(session.source, asked, pair=session.pair)


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_long_prompts_are_cut_or_passed_over_and_counted(session, tmp_path, too_long):
    task = FileTask(path=rows(tmp_path / "a.csv", 2, 90, 3, 90, 4), too_long=too_long, max_input_length=40)
    with pytest.warns(UserWarning, match=r"a: [12] prompts of more than 40 tokens were (cut|passed over)"):
        found = opened(session, task, 3)
    assert [each.id for each in found.examples] == ([0, 1, 2] if too_long == "cut" else [0, 2, 4])
    assert found.fitted.told() == ({"prompts_cut": 1} if too_long == "cut" else {"prompts_skipped": 2})
    if too_long == "skip":
        with pytest.raises(ValueError, match=r"a has 3 examples of at most 40 tokens, fewer than the 4"):
            opened(session, task, 4)


def test_several_references_are_refused_where_a_metric_takes_one(session, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"source": "cold", "reference": ["kalt", "kühl"]}) + "\n")
    with pytest.raises(ValueError, match="example 0 has 2 references; bleu compares with one"):
        opened(session, str(path), 1)


def test_outputs_stand_in_the_order_of_the_examples(session, tmp_path):
    """They are decoded by length."""
    own = opened(session, str(rows(tmp_path / "a.csv", 6, 2, 8, 1, 4)), 5)
    assert list(np.argsort(np.asarray(own.prompts.length), kind="stable")) != list(range(5))
    (record,) = judge(own, [Point(pair=own.source, evaluation=own.evaluation, settings=TOKEN)])
    kept = record[outputs.ENTRY]
    assert [each.id for each in kept] == list(range(5)) == [example.id for example in own.examples]
    assert [each.prompt for each in kept] == [example.source for example in own.examples]
    assert [each.trace is not None for each in kept] == [True] * 3 + [False] * 2


def test_a_prompt_of_just_the_limit_is_whole(session, tmp_path, recwarn):
    path = rows(tmp_path / "a.csv", 8)
    longest = len(opened(session, str(path), 1).fitted.prompts[0])
    found = opened(session, FileTask(path=path, max_input_length=longest), 1)
    assert found.fitted.told() == {} and not [each for each in recwarn if "were cut" in str(each.message)]


def test_a_task_made_in_python_is_measured_and_says_how_to_run_it_again(session):
    task = Task(name="own", splits=("test",), read=lambda split: [Example(n, "cold", "kalt") for n in range(4)])
    own = opened(session, task, 4)
    chosen = Point(pair=own.source, evaluation=own.evaluation, settings=TOKEN)
    (record,) = judge(own, [chosen])
    assert record["quality"]["examples"] == 4
    assert "task = %gin.REQUIRED  # a Task made in Python, give it as 'module.NAME'" in chosen.configuration()


@pytest.mark.laws
def test_a_record_runs_again_to_the_same_tokens_by_its_configuration(tmp_path, monkeypatch):
    """A file task in a scope of its own, through gin, as `run --from_record` does it."""
    import gin

    monkeypatch.chdir(tmp_path)
    task = FileTask(path=str(rows(tmp_path / "a.csv", 2, 3, 4)), max_output_length=10)
    evaluation = Evaluation(task=task, quality_examples=3, latency_examples=0)
    given = {"pair": ModelPair(name="tatoeba_en_de"), "settings": TOKEN}
    first = experiment.run(evaluation=evaluation, output="results/a.jsonl", **given)
    record, store = rerun.find(first["key"][:10])
    assert record["key"] == first["key"] and str(store) == "results/a.jsonl"
    with gin.unlock_config():
        gin.clear_config()
        gin.parse_config(record["configuration"])
    second = gin.get_configurable(experiment.run)(output="results/b.jsonl")
    gin.clear_config()
    said = rerun.compared(record, store, second, "results/b.jsonl")
    assert said == "the same key; the same tokens in 3 of 3 outputs"
    changed = second | {"key": "f" * 32, "provenance": {**second["provenance"], "code": "x"}}
    assert "another key" in rerun.compared(record, store, changed, "results/b.jsonl")
    assert "other code" in rerun.compared(record, store, changed, "results/b.jsonl")


def test_records_are_found_by_the_beginning_of_their_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ResultStore("results/a.jsonl") as store:
        for key in ("aaaa1111", "aaaa2222"):
            store.append({"key": key, "configuration": "x"})
        store.append({"key": "bbbb1111"})
    assert rerun.find("aaaa2")[0]["key"] == "aaaa2222"
    for key, said in (
        ("aaaa", "2 records"),
        ("cccc", "no record of results"),
        ("aa", "at least 4"),
        ("bbbb", "of no point"),
    ):
        with pytest.raises(ValueError, match=said):
            rerun.find(key)
