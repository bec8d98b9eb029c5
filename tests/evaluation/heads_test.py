"""Tests of acceptance heads in sweeps: heads are checked before any measurement, and records identify the head."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.evaluation import experiment, measuring, session
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.points import Point, Settings
from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.evaluation.studies.spec_bench.answering import Speaker, get_conversation
from speccascade_jax.pairs import head_files
from tests.support import conformance, text_pair
from tests.support.acceptance_heads import head_for

SMALL, SOURCE = text_pair.evaluation(max_new_tokens=4, quality_batch=3), text_pair.SOURCE
TRAINED_ON = {"temperature": 1.0}


@pytest.fixture(scope="module")
def tables():
    return conformance.tabular_pair(*conformance.tables(5, seed=3))


def saved(path, pair, seed=0, **card):
    head = head_for(pair, seed=seed)
    head_files.save(path, head_files.Head(head.params, replace(head.card, **card)))
    return Settings(method="specdecpp", stop_threshold=0.5, head=str(path), **TRAINED_ON)


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("silent")
def test_missing_and_foreign_heads_are_refused_by_name_in_any_position(tables, tmp_path):
    good = saved(tmp_path / "good.msgpack", tables)
    foreign = saved(tmp_path / "foreign.msgpack", conformance.tabular_pair(*conformance.tables(5, seed=4)))
    Heads(tables).check([good])
    Heads(tables).check([Settings(method="stop_entropy", stop_threshold=1.0, **TRAINED_ON)])
    with pytest.raises(ValueError, match=r"foreign\.msgpack: the acceptance head belongs to the draft"):
        Heads(tables).check([good, foreign])
    with pytest.raises(FileNotFoundError, match=r"no acceptance head at .*gone\.msgpack"):
        Heads(tables).check([good, replace(good, head=str(tmp_path / "gone.msgpack"))])
    with pytest.raises(ValueError, match="has no acceptance head"):
        Heads(tables).check([good, replace(good, head=None)])


@pytest.mark.usefixtures("silent")
def test_a_head_with_its_training_settings_causes_no_warning(tables, tmp_path):
    numbers = {"alpha": 0.1, "temperature": 0.7, "top_p": 0.9, "top_k": 4}
    settings = replace(saved(tmp_path / "a.msgpack", tables, rule="opt", **numbers), rule="opt", **numbers)
    Heads(tables).check([replace(settings, draft_temperature=0.7, stop_threshold=h) for h in (0.1, 0.9)])


def test_one_warning_per_head_names_both_values_of_every_difference(tables, tmp_path):
    first = saved(tmp_path / "a.msgpack", tables)
    settings = [
        replace(first, temperature=t, top_p=0.9, rule="opt", alpha=alpha, stop_threshold=h)
        for t in (1.0, 0.5) for alpha in (0.1, 0.2) for h in (0.3, 0.6)
    ]  # fmt: skip
    with pytest.warns(UserWarning) as warned:
        Heads(tables).check([*settings, saved(tmp_path / "b.msgpack", tables, top_k=3)])
    first, second = (str(warning.message) for warning in warned)
    assert "a.msgpack was trained for rule spec_decode but is used with opt (alpha 0.1), opt (alpha 0.2);" in first
    assert "; for temperature 1 but is used with 0.5;" in first and "; for top_p 1 but is used with 0.9:" in first
    assert "top_k" not in first and "draft_temperature" not in first and "keep their distribution" in first
    assert "b.msgpack was trained for top_k 3 but is used with 0:" in second and ";" not in second


def test_a_separate_draft_temperature_counts_as_a_difference(tables, tmp_path):
    settings = saved(tmp_path / "a.msgpack", tables)
    with pytest.warns(UserWarning, match="for draft_temperature the target's but is used with 0.5:"):
        Heads(tables).check([replace(settings, draft_temperature=0.5)])


@pytest.fixture(scope="module")
def texts(pair):
    return replace(pair, head=head_for(pair))


def test_sweep_and_run_refuse_a_foreign_head_before_measuring(texts, tmp_path, monkeypatch):
    foreign = sc.Pair(texts.target, sc.TableLM(np.asarray(texts.draft.params) + 1), texts.vocabulary)
    bad = saved(tmp_path / "bad.msgpack", foreign)
    monkeypatch.setattr(session, "load_pair", lambda name, **_: texts)
    monkeypatch.setattr(experiment, "evaluate", lambda *_, **more: pytest.fail("measured"))
    shared = {"pair": SOURCE, "evaluation": SMALL, "output": str(tmp_path / "s.jsonl")}
    with pytest.raises(ValueError, match=r"bad\.msgpack: the acceptance head belongs to"):
        experiment.sweep(methods=["spec_decode", bad], temperatures=(1.0,), **shared)
    with pytest.raises(ValueError, match=r"bad\.msgpack: the acceptance head belongs to"):
        experiment.run(settings=bad, **shared)


def test_conversations_and_profiles_check_heads_too(texts, tmp_path, monkeypatch):
    settings = saved(tmp_path / "a.msgpack", texts, top_k=3)
    with pytest.warns(UserWarning, match="was trained for top_k 3 but is used with 0"):
        Speaker(texts, settings, conversation=get_conversation("plain"))
    monkeypatch.setattr(session, "load_pair", lambda name, **_: texts)
    monkeypatch.setattr(profiling, "measure", lambda *_: {})
    monkeypatch.setattr(profiling, "show", lambda *_: None)
    with pytest.warns(UserWarning, match="was trained for top_k 3 but is used with 0"):
        profiling.profile(pair=SOURCE, evaluation=SMALL, settings=settings)


def test_a_planned_sweep_refuses_a_missing_head_before_the_survey(texts, tmp_path, monkeypatch):
    gone = Settings(method="specdecpp", stop_threshold=0.5, head="gone.msgpack")
    monkeypatch.setattr(session, "load_pair", lambda name, **_: texts)
    monkeypatch.setattr("speccascade_jax.evaluation.studies.survey.surveying.plan", lambda *_: pytest.fail("surveyed"))
    with pytest.raises(FileNotFoundError, match="no acceptance head at gone.msgpack"):
        experiment.sweep(pair=SOURCE, evaluation=SMALL, methods=["opt", gone], plan=3)


def test_a_record_and_its_key_identify_the_head_that_was_used(texts, tmp_path, monkeypatch):
    loaded = session.Session(SOURCE, SMALL, texts)
    monkeypatch.setattr(measuring, "judge", lambda _, points: [{} for _ in points])
    chosen = saved(tmp_path / "a.msgpack", texts, seed=1, w_rej=3.0)
    file = head_files.load(chosen.head)
    heads = {chosen: file, replace(chosen, head=None): texts.head, Settings(method="spec_decode", **TRAINED_ON): None}
    for settings, head in heads.items():
        point = Point(pair=SOURCE, evaluation=SMALL.resolved(), settings=settings)
        (record,) = measuring.evaluate(loaded, [point])
        named = {} if head is None else {"head": head.fingerprint}
        assert record["fingerprints"] == loaded.loaded | named
        assert record.get("head") == (None if head is None else {"w_rej": 3.0 if settings is chosen else 1.0})
        assert record["key"] == loaded.key(point)
    saved(tmp_path / "a.msgpack", texts, seed=2)  # trained again during the sweep, which has already read it
    assert loaded.heads.of(chosen).fingerprint == loaded.heads.fingerprint(chosen)["head"] == file.fingerprint
    assert session.Session(SOURCE, SMALL, texts).heads.fingerprint(chosen)["head"] != file.fingerprint
