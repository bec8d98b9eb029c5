"""Tests of the commands compare, score and report: their output and files for a store with outputs."""

from __future__ import annotations

import csv
import re

import pytest

from speccascade_jax.metrics import quality
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import fake_records

RECORDS = [fake_records.run(point) for point in fake_records.coordinates()][:6]


def kept(number):
    return [
        Output(id=n, prompt=f"say\n{n}", reference=f"this is number {n}", output=f"this is number {n - number % 2}",
               tokens=(1,), pieces=("x",))
        for n in range(9)
    ]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "a.jsonl"
    with ResultStore(path) as opened:
        for number, record in enumerate(RECORDS):
            opened.append(record | {outputs.ENTRY: kept(number)})
    return str(path)


@pytest.fixture
def run(script):
    """Returns a function that calls a script's `main` and returns its exit status."""
    return lambda name, *arguments: script(name).main([str(argument) for argument in arguments])


def test_compare_shows_where_the_second_is_worse(run, store, capsys):
    run("compare", store, "autoregressive", "autoregressive_draft", "--most=2")
    said = capsys.readouterr().out
    assert (
        "9 examples, 0 with equal outputs" in said
        and "where 2 is worse:" in said
        and "2 is better on no example" in said
    )
    assert said.count("reference") == 2


def test_invalid_numbers_are_refused(run, store, capsys):
    assert run("compare", store, "autoregressive", "autoregressive_draft", "--most=0") == 1
    assert run("report", store, "--most=-3") == 1
    assert capsys.readouterr().err.count("error: most=") == 2


def test_scores_match_the_metric_and_are_written_beside_the_store(run, store, capsys, tmp_path):
    run("score", store, "--metrics=chrf,bleu")
    assert "scores.csv" in capsys.readouterr().out
    header, *rows = csv.reader((tmp_path / "a.scores.csv").open())
    assert header == ["key", "point", "chrf", "bleu"] and len(rows) == len(RECORDS)
    saved = kept(1)
    expected = quality.score(["chrf"], [out.output for out in saved], [out.reference for out in saved])["chrf"]
    assert float(rows[1][2]) == pytest.approx(expected, abs=0.005)


def test_texts_are_exported_with_one_line_per_example(run, store, tmp_path):
    run("score", store, f"--hand_over={tmp_path / 'comet'}")
    sources = (tmp_path / "comet" / "sources.txt").read_text().splitlines()
    assert sources[:2] == ["say 0", "say 1"] and len(sources) == 9
    assert len([*(tmp_path / "comet").glob("*.out.txt")]) == len(RECORDS)
    assert (tmp_path / "comet" / "points.tsv").read_text().count("\n") == len(RECORDS)


def test_metrics_that_run_code_are_refused(run, store, capsys):
    assert run("score", store, "--metrics=pass_at_1") == 1
    assert "error: pass_at_1 executes generated code" in capsys.readouterr().err


def test_a_report_is_written_to_the_named_file(run, store, tmp_path, capsys):
    run("report", store, "--output", tmp_path / "b.html")
    assert capsys.readouterr().out.strip() == str(tmp_path / "b.html")
    assert "<!DOCTYPE html>" in (tmp_path / "b.html").read_text()


@pytest.mark.parametrize(("command", "file"), [
    ("report {store}", "a.html"), ("report {store} --output {file}", "page.html"),
    ("plots {store}", "a.png"), ("plots {store} --format svg", "a.svg"),
    ("score {store}", "a.scores.csv"), ("score {store} --hand_over {folder}/mine", "mine/points.tsv"),
    ("tables {store} --format csv --points --output {file}", "t.csv"),
    *((f"tables {{store}} --format {form} --output {{file}}", "t") for form in ("markdown", "latex", "terminal")),
])  # fmt: skip
def test_commands_replace_their_own_outputs_and_nothing_else(run, store, tmp_path, command, file, capsys):
    records, target = (tmp_path / "a.jsonl").read_bytes(), tmp_path / file
    arguments = command.format(store=store, file=target, folder=tmp_path).split()
    target.parent.mkdir(exist_ok=True)
    target.write_text("my thesis")
    assert run(*arguments) == 1
    assert target.read_text() == "my thesis" and "was not made by this command" in capsys.readouterr().err
    target.unlink()
    assert run(*arguments) == 0 and target.stat().st_size
    target.touch()
    assert run(*arguments) == 0, "its own output is replaced"
    if "{file}" in command:
        assert run(*command.format(store=store, file=store).split()) == 1
    assert (tmp_path / "a.jsonl").read_bytes() == records


def test_texts_are_not_exported_among_files_of_others(run, store, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sources.txt").write_text("mine")
    assert run("score", store, f"--hand_over={tmp_path / 'mine'}") == 1
    assert "mine holds files that this command did not make" in capsys.readouterr().err
    assert (tmp_path / "mine" / "sources.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["report", "tables", "plots", "score"])
def test_foreign_and_empty_files_are_refused(run, tmp_path, name, capsys):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    (tmp_path / "c.jsonl").write_text('{"key":"abcd","other":1}\n')
    for file, said in (
        ("a.jsonl", "no record of a point"),
        ("b.csv", "not a store of results"),
        ("c.jsonl", "of a point"),
    ):
        assert run(name, tmp_path / file) == 1
        assert said in capsys.readouterr().err


def broken(store, text):
    """Rewrites the lines of the first record's outputs: `text` is a function of the lines without the seal."""
    file = outputs.folder(store) / f"{RECORDS[0]['key']}.jsonl"
    *lines, seal = file.read_text().splitlines(keepends=True)
    file.write_text("".join(text(lines, seal)))
    return file


@pytest.mark.parametrize(("text", "said"), [
    (lambda lines, seal: [*lines[:4], seal], r"incomplete, or another record's \(4 lines\): delete the file"),
    (lambda lines, seal: [*lines[:-1], lines[-1].replace("number", "word"), seal], "is damaged, incomplete, or"),
    (lambda lines, seal: [*lines, '{"id":77,"output":"","tokens":[],"pieces":[],"sources":"","rounds":[]}\n'],
     "holds example 77, which examples-.* lacks"),
    (lambda lines, seal: [line.replace('"output"', '"text"') for line in lines], ":1 is damaged .* no valid 'output'"),
    (lambda lines, seal: [line.replace('"tokens":[1]', '"tokens":1') for line in lines], "no valid 'tokens'"),
    (lambda lines, seal: [lines[0][:30]], "is damaged .not JSON"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["score", "compare"])
def test_damaged_outputs_are_refused_in_one_line(run, store, text, said, name, capsys):
    broken(store, text)
    more = ["autoregressive", "autoregressive_draft"] if name == "compare" else []
    assert run(name, store, *more) == 1
    error = capsys.readouterr().err
    assert re.search(f"error: .*{said}", error) and error.count("\n") == 1


def test_outputs_of_another_record_are_refused(run, store, capsys):
    first, second = (outputs.folder(store) / f"{record['key']}.jsonl" for record in RECORDS[:2])
    first.write_bytes(second.read_bytes())
    assert run("score", store) == 1 and "another record's" in capsys.readouterr().err


def test_outputs_of_earlier_versions_have_no_seal_and_are_complete(run, store, capsys):
    ids = {"per_example": {"ids": [*range(9)]}}
    record = RECORDS[0] | {"quality": RECORDS[0]["quality"] | ids}
    broken(store, lambda lines, seal: lines)
    assert outputs.read(store, record) == kept(0)
    broken(store, lambda lines, seal: [*lines, seal][:5])
    with pytest.raises(ValueError, match="holds 5 outputs, not those of its record's 9 examples"):
        outputs.read(store, record)
