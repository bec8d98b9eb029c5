"""Tests of the command that compares libraries, with our own worker on a small planted pair, and of its errors."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.peers import command, contenders, pairs
from speccascade_jax.models.t5 import T5Config

SIZE = 300


def _small(folder):
    configs = T5Config(SIZE, SIZE, 64, 2, 16, 32, 1, 1), T5Config(SIZE, SIZE, 48, 1, 16, 32, 1, 1)
    return pairs.planted(folder, "small", *configs, 20)


def _absent(folder):
    raise FileNotFoundError("no data directory")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(command, "PAIRS", {"small": _small, "absent": _absent})
    monkeypatch.setattr(contenders, "BLOCKS", (3,))
    monkeypatch.setattr(contenders, "HELD", {"float16": (3,)})
    away = contenders.Library(module="huggingface", folder=".venv-that-is-not-there")
    monkeypatch.setitem(command.LIBRARIES, "transformers 4", away)


@pytest.mark.tools
def test_a_run_is_stored_and_printed(small, tmp_path, capsys):
    output = tmp_path / "peers.json"
    arguments = ["--libraries=ours,transformers 4", "--batches=8", "--quick", f"--output={output}"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "transformers 4 left out: .venv-that-is-not-there does not exist: create it with make bench-peers" in printed
    assert "absent left out: no data directory" in printed
    record = json.loads(output.read_text())
    rows = record["pairs"]["small"]["rows"]
    named = [(row["weights"], row["label"], row["batch"]) for row in rows]
    assert named == [("float32", "plain", 8), ("float32", "spec_decode, γ 3", 8), ("float16", "plain", 8)]
    assert all(row["equal_outputs"] == 1.0 and row["ms_per_token"]["value"] > 0 for row in rows)
    assert record["versions"]["ours"]["jax"]
    page = output.with_suffix(".md").read_text()
    assert page in printed
    assert command.main(["--markdown", str(output)]) == 0
    assert capsys.readouterr().out == page


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """Returns a function that runs the command with fast pairs; it returns status, measured names and the record."""
    measured = []

    def _measure(workers, prepared, settings, say):
        measured.append(prepared.name)
        if prepared.name == "dies":
            raise RuntimeError("killed")
        return {"rows": [], "left_out": [], "quality": []}

    def _started(names, record, stack, logs):
        record["versions"]["ours"] = {"jax": version}
        return {}

    monkeypatch.setattr(command, "PAIRS", {name: _named(name) for name in ("first", "dies", "last")})
    monkeypatch.setattr(command, "started", _started)
    monkeypatch.setattr(command.measuring, "measure", _measure)
    version = "1.0"

    def run(*arguments, jax="1.0"):
        nonlocal version
        version = jax
        measured.clear()
        status = command.main([*arguments, f"--output={tmp_path}/peers.json"])
        return status, list(measured), json.loads((tmp_path / "peers.json").read_text())

    return run


def _named(name):
    return lambda folder: SimpleNamespace(name=name, parameters=(1, 1))


def test_resume_measures_only_the_missing_pairs(stored):
    status, measured, record = stored()
    assert (status, measured, list(record["pairs"])) == (1, ["first", "dies"], ["first"])
    status, measured, record = stored("--resume", "--pairs=last")
    assert (status, measured, list(record["pairs"])) == (0, ["last"], ["first", "last"])
    status, measured, record = stored("--resume", "--pairs=first,last")
    assert (status, measured, list(record["pairs"])) == (0, [], ["first", "last"])
    status, measured, record = stored("--pairs=last")
    assert (status, measured, list(record["pairs"])) == (0, ["last"], ["last"])
    status, measured, record = stored("--resume", "--pairs=first")
    # pairs are stored in the order of the tables
    assert (status, measured, list(record["pairs"])) == (0, ["first"], ["first", "last"])


@pytest.mark.parametrize(("arguments", "jax", "said"), [
    (["--quick"], "1.0", "was measured with turns 5, but this run has 1: measure again without --resume"),
    (["--batches=8"], "1.0", r"was measured with batches [1, 8, 32], but this run has [8]"),
    ([], "1.1", "was measured with versions {'ours': {'jax': '1.0'}}, but this run has {'ours': {'jax': '1.1'}}"),
])  # fmt: skip
def test_a_run_with_other_settings_is_not_resumed(stored, arguments, jax, said, capsys):
    _, _, before = stored("--pairs=first")
    status, measured, after = stored("--resume", "--pairs=last", *arguments, jax=jax)
    assert (status, measured, after) == (1, [], before)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["--libraries=vllm"], "no library 'vllm'; there are ours, transformers 4"),
    (["--pairs=t6"], "no pair 't6'; there are tatoeba_en_de, stories, planted_t5, planted_decoder"),
    (["--batches=2"], "no batch size '2'; there are 1, 8, 32"),
    (["--turns=0"], "turns"),
    (["--markdown=a.json"], "does not hold a run of make bench-peers (format 1)"),
])  # fmt: skip
def test_the_error_names_a_wrong_argument(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('{"format": 0}')
    assert command.main(arguments) == 1
    assert said in capsys.readouterr().err


def test_no_library_at_all_is_an_error(small, tmp_path, capsys):
    assert command.main(["--libraries=transformers 4", f"--output={tmp_path}/a.json"]) == 1
    assert "none of transformers 4 could be started: run make bench-peers" in capsys.readouterr().err
