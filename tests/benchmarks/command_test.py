"""Tests of the benchmark command from end to end with random models, and of its errors; no measured time is checked."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from benchmarks import command, compilation, layouts, runs
from benchmarks.random_models import SIZES
from benchmarks.setting import Bench
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.pairs.pair import load_pair

# the two sections that are left out have their own tests
SECTIONS = [name for name in command.SECTIONS if name not in ("compilation", "acceptance")]


@pytest.fixture(scope="module")
def record(tabular, tmp_path_factory):
    """Returns the record that a quick run writes."""
    output = tmp_path_factory.mktemp("results") / "quick.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "load_pair", lambda name: tabular)
        # a small model, because every layer takes long to compile
        patch.setitem(SIZES, next(iter(SIZES)), T5Config(4096, 4096, 64, 2, 16, 64, 1, 1))
        arguments = ["--quick", f"--output={output}", f"--sections={','.join(SECTIONS)}", "--draft_dtype=stored,int8"]
        assert command.main(arguments) == 0
    return json.loads(output.read_text())


def rows(record, table):
    return next(s["tables"][table] for s in record["sections"].values() if table in s["tables"])


@pytest.mark.sample(0)
@pytest.mark.tools
def test_every_section_writes_its_tables(record):
    assert list(record["sections"]) == SECTIONS
    tables = {name for section in record["sections"].values() for name in section["tables"]}
    assert tables == set(layouts.LAYOUTS) - {"compilation", "startup", "acceptance", "agreement"}
    assert record["device"]["platform"] == "cpu" and record["versions"]["jax"] and record["settings"]["repeats"] == 2


@pytest.mark.tools
def test_all_columns_except_optional_ones_have_values(record):
    optional = {"alpha", "block_size", "same_output", "over_first", "same_as_first"}
    for section in record["sections"].values():
        for name, table in section["tables"].items():
            assert table, name
            for column in layouts.LAYOUTS[name].columns:
                assert column.key in optional or all(row[column.key] is not None for row in table), (name, column.key)


@pytest.mark.tools
def test_stored_tables_can_be_printed(record, tmp_path, capsys):
    path = tmp_path / "stored.json"
    path.write_text(json.dumps(record))
    assert command.main(["--markdown", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("| --- |") >= 10 and "**Time of the engine against the time of its calls, per example**" in text


@pytest.mark.tools
def test_the_engines_rounds_are_timed(record):
    for row in rows(record, "rounds"):
        assert all(row[name]["value"] > 0 for name in ("draft_step_ms", "target_call_ms", "calls_ms"))
        # a difference of two times, which is unreliable on a busy machine
        assert np.isfinite(row["engine_ms"]["value"])
        assert row["tokens"] <= row["target_calls"] * (row["block_size"] + 1)


@pytest.mark.tools
def test_greedy_speculation_is_compared_with_the_target(record):
    for row in rows(record, "speedup"):
        must = row["rule"] == "spec_decode" and row["temperature"] == 0
        assert row["same_output"] == (1.0 if must else None)
        assert 1 <= row["tokens_per_round"] <= row["block_size"] + 1
        assert row["of_predicted"] == pytest.approx(row["speed_up"]["value"] / row["predicted"])


@pytest.mark.tools
def test_dtypes_of_the_draft_are_timed_in_turns_and_compared_with_the_first(record):
    (first, second, *_) = rows(record, "decode")
    assert (first["draft_dtype"], second["draft_dtype"]) == ("stored", "int8")
    assert first["over_first"]["value"] == pytest.approx(1) and second["over_first"]["value"] > 0
    assert second["same_as_first"] == 1.0  # the pair is in memory, so both dtypes use the same weights


@pytest.mark.tools
def test_scoring_times_are_relative_to_a_width_of_one(record):
    assert [row["ratio"]["value"] for row in rows(record, "scoring") if row["width"] == 1] == [1.0, 1.0]


@pytest.mark.tools
def test_compilation_is_timed_with_an_empty_and_a_full_cache(folder):
    """The second process reads the compiled programs from the cache that the first one filled."""
    settings = command.Sizes(pair=str(folder), max_new_tokens=4, examples=1, batches=(1,))
    tables = compilation.run(Bench(settings, load_pair(folder)))
    assert [row["cache"] for row in tables["compilation"]] == ["empty", "empty", "full", "full"]
    assert all(row[f"{name}_seconds"] >= 0 for row in tables["compilation"] for name in compilation.STEPS)
    assert all(row["import_seconds"] > 0 for row in tables["startup"])


def test_sections_run_in_a_fixed_order_and_partial_runs_have_separate_files():
    assert runs.picked("section", "steps, bandwidth", command.SECTIONS) == ["bandwidth", "steps"]
    assert command.default_output(list(command.SECTIONS), False) == "results/bench.json"
    assert command.default_output(["steps"], False) == "results/bench_steps.json"
    assert command.default_output(list(command.SECTIONS), True) == "results/bench_quick.json"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--sections=stepps"], "no section 'stepps'; there are bandwidth, steps"),
    (["--pair=no_such_pair"], "no pair 'no_such_pair'"),
    (["--task=no_such_task"], "unknown task 'no_such_task'"),
    (["--examples=0"], "examples=0 is not a whole number >= 1"),
    (["--markdown=no/such/file.json"], "no/such/file.json"),
    (["--markdown=other.json"], "does not hold a run of the benchmarks (format 1): measure again"),
])  # fmt: skip
def test_errors_for_invalid_values_are_one_line(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"key": 1}')
    assert command.main(arguments) == 1
    assert said in capsys.readouterr().err


def test_the_remaining_time_is_estimated_from_finished_sections(monkeypatch):
    now, said = [0.0], io.StringIO()
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(command, "SECTIONS", {"a": command.Section(None, 10), "b": command.Section(None, 30)})
    with command._Steps(Console(file=said), ["a", "b"]) as steps:
        steps.begin("a")
        assert list(steps.track([1, 2])) == [1, 2]
        now[0] = 20.0  # the section took twice as long as guessed
        steps.end()
    assert "a done, 0:20 elapsed, about 1:00 left" in said.getvalue()


def test_help_lists_the_sections(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"    {name}" in said for name in command.SECTIONS) and "python -m benchmarks --sections=" in said
