"""Traces of one point: which point a sweep traces, when, and what the trace holds."""

from __future__ import annotations

import contextlib

import jax
import pytest

from speccascade_jax.evaluation import experiment, latency, point_trace
from speccascade_jax.evaluation.session import Session
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import text_pair


@pytest.fixture(scope="module")
def session(pair):
    return Session(text_pair.SOURCE, text_pair.evaluation(latency_examples=2, latency_trials=1), pair)


def points(session):
    return [[text_pair.point(method, session.evaluation)] for method in ("autoregressive", "spec_decode")]


def test_a_sweep_traces_its_first_missing_point_once_and_only_after_its_measurement(session, tmp_path, monkeypatch):
    log, interleave = [], latency.interleave

    @contextlib.contextmanager
    def traced(folder):
        log.append(str(folder.relative_to(tmp_path)))
        yield
        log.append("traced")

    monkeypatch.setattr(point_trace, "traced", traced)
    monkeypatch.setattr(latency, "interleave", lambda *a, **more: log.append("timed") or interleave(*a, **more))
    groups = points(session)
    keys = [session.key(group[0])[:8] for group in groups]
    with ResultStore(tmp_path / "a.jsonl") as store:
        experiment.measure(groups[:1], store, session, progress=False)
        log.clear()
        experiment.measure(groups * 2, store, session, progress=False, profile_at=str(tmp_path))
        assert log == ["timed", f"host-0/{keys[1]}", "traced"]
        log.clear()
        experiment.measure(groups, store, session, progress=False, profile_at=str(tmp_path))
        assert log == [f"host-0/{keys[0]}", "traced"]  # all are stored
        assert len(store.records) == 2


def test_a_trace_holds_a_batch_and_a_single_example_that_ran_before(session, tmp_path, monkeypatch, capsys):
    ((point,), _), ran, plain = points(session), [], point_trace.traced
    prepare = session.prepare

    def noted(point, rows):
        run = prepare(point, rows)
        return lambda seed: ran.append(len(rows)) or run(seed)

    monkeypatch.setattr(session, "prepare", noted)
    monkeypatch.setattr(point_trace, "traced", lambda folder: ran.append("trace") or plain(folder))
    folder = point_trace.trace(session, point, tmp_path)
    assert ran == [2, 1, "trace", 2, 1]
    assert capsys.readouterr().out == f"trace of {point.label()}: {folder}\n"
    (file,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    names = [event.name for plane in profile.planes for line in plane.lines for event in line.events]
    assert names.count("batch") == names.count("single") == 1
