"""Identity of records in sweeps: what is found again, what is stale, what is judged once for all hardware."""

import json
from dataclasses import replace

import gin
import pytest

from speccascade_jax.evaluation import experiment, measuring, session
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.results.store import migration, outputs
from speccascade_jax.results.store.record_key import judged_key
from speccascade_jax.results.store.result_store import ResultStore, read_records
from speccascade_jax.runtime import gin_flags
from tests.support import golden_points, text_pair

SOURCE = ModelPair(name="text")
SMALL = Evaluation(
    task="tiny_translation", quality_examples=4, quality_batch=4, latency_examples=1, latency_trials=1,
    max_new_tokens=6, resamples=5, keep_traces=0,
)  # fmt: skip
OPT = Settings(method="opt", alpha=0.4, block_size=2)
IN_PYTHON = "%gin.REQUIRED"
OLD = [record for record in golden_points.old_records() if IN_PYTHON not in record["configuration"]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return text_pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def _pair(pair, monkeypatch):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("record", OLD, ids=[record["point"]["curve"] for record in OLD])
def test_a_configuration_of_format_2_is_the_point_of_todays_key(record):
    gin.clear_config()
    gin_flags.parse_gin([], text=record["configuration"])
    parts = {name: value() if callable(value) else value for name, value in gin.get_bindings("experiment.run").items()}
    gin.clear_config()
    point = Point(**parts | {"evaluation": parts["evaluation"].resolved()})
    fingerprints = {name: digest for name, digest in record["fingerprints"].items() if name != "code"}
    identity = {name: getattr(point, name) for name in ("pair", "evaluation", "settings", "seed")}
    assert judged_key(identity, fingerprints) == migration.migrated(record)["judged_key"]


def run(path, evaluation=SMALL, settings=OPT):
    return experiment.run(pair=SOURCE, evaluation=evaluation, settings=settings, output=str(path))


def test_other_code_under_the_same_toolchain_is_measured_anew_and_said(tmp_path, monkeypatch, capsys):
    path = tmp_path / "s.jsonl"
    first = run(path)
    assert run(path) == first and "measured anew" not in capsys.readouterr().out
    monkeypatch.setattr(session.Session, "code", lambda *_: "changed")
    second = run(path)
    assert "1 of 1 points were measured by other code: they are measured anew" in capsys.readouterr().out
    assert second["key"] == first["key"] and second["supersedes"] == first["provenance"]["code"]
    assert second["started"] != first["started"] and [r["provenance"]["code"] for r in read_records(path)] == [
        "changed"
    ]
    assert run(path) == second


def test_another_toolchain_keeps_the_record(tmp_path, monkeypatch, capsys):
    path = tmp_path / "s.jsonl"
    first = run(path)
    monkeypatch.setattr(session.Session, "code", lambda *_: "changed")
    monkeypatch.setattr(session, "toolchain", lambda: {"python": "3.99"})
    assert run(path) == first and "measured anew" not in capsys.readouterr().out


def test_quality_is_judged_once_for_all_hardware_and_with_or_without_latency(tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    untimed = run(path, replace(SMALL, latency_examples=0))
    assert untimed["key"] == untimed["judged_key"] and "latency" not in untimed
    monkeypatch.setattr(measuring, "judge", lambda *_: pytest.fail("judged again"))
    timed = run(path)
    monkeypatch.setattr(session, "hardware", lambda mesh=None: {"platform": "other"})
    elsewhere = run(path)
    assert len({untimed["key"], timed["key"], elsewhere["key"]}) == 3
    assert {record["judged_key"] for record in (timed, elsewhere)} == {untimed["key"]}
    for record in (timed, elsewhere):
        assert record["latency"] and record["quality"] == untimed["quality"]
        assert outputs.read(path, record) == outputs.read(path, untimed)


def test_what_stale_code_judged_is_judged_again(tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    run(path, replace(SMALL, latency_examples=0))
    monkeypatch.setattr(session.Session, "code", lambda *_: "changed")
    monkeypatch.setattr(measuring, "judge", lambda *_: pytest.fail("judged"))
    with pytest.raises(pytest.fail.Exception, match="judged"):
        run(path)


def test_a_record_names_its_keys_and_its_code(tmp_path):
    record = run(tmp_path / "s.jsonl")
    with ResultStore(tmp_path / "s.jsonl") as store:
        assert store.judged(record["judged_key"])["key"] == record["key"]
    assert set(record["provenance"]) == {"code", "toolchain"} and "code" not in record["fingerprints"]
    assert set(record["provenance"]["toolchain"]) == {"digest", "python", "jax", "platform"}
    assert json.loads(json.dumps(record["provenance"])) == record["provenance"]
