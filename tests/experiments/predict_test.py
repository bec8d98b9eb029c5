"""Tests of the flag --predict of tables, plots, report and sweep: labels, the file of costs, and errors of one line."""

import csv
import importlib.util
import io
import shutil
import subprocess
import sys

import pytest

from speccascade_jax.results.report import predicting
from speccascade_jax.results.store import program_costs
from speccascade_jax.results.store.program_costs import Hardware
from tests.support import program_costs as made
from tests.support.program_costs import H100, V5E

SAID = "predicted from the compiled program for v5e (jax 0.10.2, libtpu 0.0.42.1), not measured"


@pytest.fixture
def quickstart(tmp_path):
    """Returns a copy of the quickstart's store, with costs for two kinds of hardware beside it."""
    path = shutil.copy(made.STORE, tmp_path / "quick.jsonl")
    program_costs.write(program_costs.path_of(path), made.of(made.records(), V5E, H100))
    return path


def test_tables_show_table_2_for_every_hardware(script, quickstart, capsys):
    flags = [str(quickstart), "--predict=v5e,h100", "--predict_prompt_length=32"]
    assert script("tables").main([*flags, "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    titles = [line for line in said.splitlines() if line.startswith("**")]
    assert [title.partition("bonus rule")[2] for title in titles] == [
        "**", ", predicted for v5e**", ", predicted for h100**", ", predicted for v5e**", ", predicted for h100**",
    ]  # fmt: skip
    assert SAID in said and "Device: v5e (predicted from the compiled program, not measured)." in said
    assert "0 to 1 µs" in said and "counts of calls are measured on other hardware, in float32" in said
    assert "| Target alone | – |" in said and "memory or ops" in said
    assert script("tables").main([str(quickstart), "--format", "markdown"]) == 0
    assert said.startswith(capsys.readouterr().out.rstrip()), "measured tables are the same without the flag"


def test_the_list_of_points_and_csv_name_predictions(script, quickstart, capsys):
    flags = [str(quickstart), "--predict=v5e", "--predict_prompt_length=32", "--points", "--format"]
    assert script("tables").main([*flags, "markdown"]) == 0
    assert capsys.readouterr().out.count(SAID) == 2
    assert script("tables").main([*flags, "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["predicted.topology"] for line in lines] == [""] * 14 + ["v5e"] * 14
    assert "predicted.parts.memory" in lines[0] and not any("ends" in name for name in lines[0])


def test_plots_draw_a_figure_of_its_own(script, quickstart, capsys):
    assert script("plots").main([str(quickstart), "--predict=v5e", "--predict_prompt_length=32", "--format=svg"]) == 0
    assert [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()] == [
        "quick.svg", "quick-predicted-v5e.svg",
    ]  # fmt: skip
    drawn = [(quickstart.parent / name).read_text() for name in ("quick.svg", "quick-predicted-v5e.svg")]
    words = "predicted from the compiled program, not measured:", "predicted for v5e", "and bands"
    assert [[word in text for word in words] for text in drawn] == [[False] * 3, [True] * 3]


def test_the_report_shows_predictions_beside_measurements(script, quickstart, capsys):
    assert script("report").main([str(quickstart), "--predict=v5e", "--predict_prompt_length=32"]) == 0
    page = (quickstart.parent / "quick.html").read_text()
    assert SAID in page and "Predicted for v5e, not measured: " in page and page.count("<h2>tiny_translation") == 1
    assert "not measured" not in page.partition("</h1>")[0] and page.count('type="radio"') == 2
    assert page.count(" checked>") == 1 and page.index(" checked>") < page.index("predicted for v5e</label>")
    assert "14 points of" in page and page.count('id="point-') == 14, "outputs are listed once"


def test_nothing_is_compiled_if_all_costs_are_known(script, quickstart, monkeypatch):
    def refuse(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(script("tables"), "_complete", refuse)
    flags = [str(quickstart), "--predict=h100", "--output", str(quickstart.parent / "a.md"), "--format=markdown"]
    assert script("tables").main([*flags, "--predict_prompt_length=32"]) == 0
    with pytest.raises(AssertionError, match="compiled"):
        script("tables").main([*flags, "--predict_prompt_length=48"])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the compiler is installed")
@pytest.mark.parametrize("command", ["tables", "plots", "report"])
def test_without_the_compiler_one_line_names_the_command(script, quickstart, capsys, command):
    assert script(command).main([str(quickstart), "--predict=v5p"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install 'speccascade_jax[libtpu]'" in line


def test_flags_become_descriptions_of_hardware():
    assert predicting.hardware("v5e:2x4, h100", "1,8", None, "64", "a,b") == [
        Hardware(topology=name, mesh=(1, 8), prompt_length=64, models=("a", "b")) for name in ("v5e:2x4", "h100")
    ]
    assert predicting.hardware(None) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--predict_mesh=1,8"], "--predict_mesh needs --predict"),
        (["--predict=v5e", "--predict_mesh=8"], "give DATA,MODEL, such as 1,8"),
        (["--predict=v5e", "--predict_dtype=int8"], "is not one of bfloat16, float32"),
        (["--predict=v5e", "--predict_models=a"], "give two models"),
        (["--predict=v5e", "--predict_prompt_length=none"], "predict_prompt_length"),
        (["--predict=v5e", "--measures", "throughput"], "leave one out"),
        (["--predict=v9"], "the chips are"),
    ],
)
def test_invalid_flags_are_refused(script, quickstart, capsys, flags, message):
    assert script("tables").main([str(quickstart), *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_sweep_refuses_unknown_hardware_before_it_measures():
    command = [sys.executable, "-m", "experiments.sweep", "--gin_file=configs/quickstart.gin", "--predict=v9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and "the chips are v4" in done.stderr + done.stdout
