"""Tests of what a sweep says, and processes agree on, before it measures; `tests/experiments/` tests whole sweeps."""

import pytest

from speccascade_jax.evaluation import experiment, points, session
from speccascade_jax.evaluation.session import Identity
from speccascade_jax.results.store import result_store
from speccascade_jax.runtime import hosts
from tests.support import fake_records
from tests.support.stores import written


def identity(key, code, jax="1"):
    return Identity(key, key, {"code": code, "toolchain": {"jax": jax}})


@pytest.mark.parametrize(("first", "message"), [
    (identity("a", "1"), None),
    (identity("b", "1"), "other weights or examples than process 0, or runs on another kind of machine: copy the same"),
    (identity("a", "2"), "other code than process 0: copy the same files to all hosts"),
    (identity("a", "2", jax="2"), None),
])  # fmt: skip
def test_a_process_with_other_files_than_the_first_is_refused(first, message, monkeypatch, tmp_path):
    answers = [{first.key: first.provenance}, ["done"]]
    monkeypatch.setattr(hosts, "agreed", lambda value: answers.pop(0))
    store = experiment.Follower(tmp_path / "store.jsonl")
    if message is None:
        experiment._agree(store, [identity("a", "1")])
        assert store.done_keys() == {"done"}
        return
    with pytest.raises(ValueError, match=message):
        experiment._agree(store, [identity("a", "1")])


def test_a_sweep_names_other_results_of_its_store_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    store = tmp_path / "mine.jsonl"
    (first, second), more = (fake_records.coordinates(task=task)[:2] for task in ("gsm8k", "tiny_translation"))
    written(store, *map(fake_records.run, [first, second, more[0]]))
    monkeypatch.setattr(experiment, "open_session", lambda points: pytest.fail("loaded"))
    pair, evaluation = points.ModelPair(name="tatoeba_en_de"), points.Evaluation(task="tiny_translation")
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        experiment.sweep(pair=pair, evaluation=evaluation, methods=["opt"], output=str(store))
    said = f"{store} holds other results (2 of gsm8k, tatoeba_en_de), which tables and report show too; --output=PATH"
    assert said in capsys.readouterr().out


def test_a_store_of_the_same_task_and_pair_holds_no_other_results(capsys, tmp_path):
    point = points.Point(
        pair=points.ModelPair(name="tatoeba_en_de"),
        evaluation=points.Evaluation(task="tiny_translation"),
        settings=points.Settings(method="opt", alpha=0.1),
    )
    with result_store.ResultStore(written(tmp_path / "a.jsonl", fake_records.run(point.coordinates()))) as store:
        experiment.tell_other_panels(store, point)
    assert capsys.readouterr().out == ""


def test_an_alpha_outside_its_range_is_warned_of_before_anything_is_loaded(monkeypatch):
    point = points.Point(
        pair=points.ModelPair(name="tatoeba_en_de"),
        evaluation=points.Evaluation(task="tiny_translation"),
        settings=points.Settings(method="opt", alpha=100),
    )
    monkeypatch.setattr(session, "Session", lambda *_: pytest.fail("loaded"))
    with pytest.warns(UserWarning, match="alpha=100 of 'opt' lies outside -1"), pytest.raises(pytest.fail.Exception):
        session.open_session([point])
