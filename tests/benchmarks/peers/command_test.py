"""The command, with our own worker on a small planted pair, and what it says where something is missing."""

import json

import pytest

from benchmarks.peers import command, contenders, pairs
from speccascade_jax.models.t5 import T5Config

SIZE = 300


def _small(folder):
    return pairs.planted(
        folder, "small", T5Config(SIZE, SIZE, 64, 2, 16, 32, 1, 1), T5Config(SIZE, SIZE, 48, 1, 16, 32, 1, 1), 20
    )


def _absent(folder):
    raise FileNotFoundError("no data directory")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(command, "PAIRS", {"small": _small, "absent": _absent})
    monkeypatch.setattr(contenders, "BLOCKS", (3,))
    away = contenders.Library(module="huggingface", folder=".venv-that-is-not-there")
    monkeypatch.setitem(command.LIBRARIES, "transformers 4", away)


def test_a_run_is_stored_and_printed(small, tmp_path, capsys):
    output = tmp_path / "peers.json"
    arguments = ["--libraries=ours,transformers 4", "--batches=8", "--quick", f"--output={output}"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "transformers 4 left out: .venv-that-is-not-there is not there: make bench-peers makes it" in printed
    assert "absent left out: no data directory" in printed
    record = json.loads(output.read_text())
    rows = record["pairs"]["small"]["rows"]
    assert [(row["label"], row["batch"]) for row in rows] == [("plain", 8), ("spec_decode, γ 3", 8)]
    assert all(row["equal_outputs"] == 1.0 and row["ms_per_token"]["value"] > 0 for row in rows)
    assert record["versions"]["ours"]["jax"]
    page = output.with_suffix(".md").read_text()
    assert page in printed
    assert command.main(["--markdown", str(output)]) == 0
    assert capsys.readouterr().out == page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--libraries=vllm"], "no library 'vllm'; there are ours, transformers 4"),
        (["--pairs=t6"], "no pair 't6'; there are tatoeba_en_de, stories, planted_t5, planted_decoder"),
        (["--batches=2"], "no batch size '2'; there are 1, 8, 32"),
        (["--turns=0"], "turns"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said, capsys):
    assert command.main(arguments) == 1
    assert said in capsys.readouterr().err


def test_no_library_at_all_is_an_error(small, tmp_path, capsys):
    assert command.main(["--libraries=transformers 4", f"--output={tmp_path}/a.json"]) == 1
    assert "none of transformers 4 could be started: run make bench-peers" in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"format": 0}')
    assert command.main(["--markdown", str(tmp_path / "a.json")]) == 1
    assert "holds no run of make bench-peers (format 1)" in capsys.readouterr().err
