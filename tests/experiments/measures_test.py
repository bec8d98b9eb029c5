"""tables.py --measures and plots.py --pareto, from records made by hand."""

import csv
import io
import json

import pytest
from matplotlib import pyplot as plt

from tests.support import measured_records as made


@pytest.fixture
def sweep(tmp_path):
    def write(records):
        path = tmp_path / "sweep.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def test_tables_in_all_forms(script, sweep, capsys, tmp_path):
    store = str(sweep(made.sweep()))
    tables = script("tables")
    assert tables.main([store, "--measures", "forward_times", "throughput", "dominance"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("Forward times: ", "Throughput: ", "Theorem 3.1's", "dominates", "h = 0.5"))
    assert tables.main([store, "--measures", "dominance", "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["verdict"] for line in lines] == ["dominates"] * 4
    assert (
        tables.main([store, "--measures", "throughput", "--format", "latex", "--output", str(tmp_path / "t.tex")]) == 0
    )
    assert (tmp_path / "t.tex").read_text().count("\\begin{table}") == 3


def of_task(task, records):
    return [{**r, "point": r["point"] | {"task": task}, "key": r["key"] + task} for r in records]


def untimed(records):
    kept = ("latency", "target_latency", "relative_latency")
    return [{name: part for name, part in record.items() if name not in kept} for record in records]


def test_tables_that_cannot_be_made_do_not_hide_the_others(script, sweep, capsys):
    tables, flags = script("tables"), ["--measures", "throughput", "dominance"]
    store = str(sweep([*untimed(made.sweep()), *of_task("xsum", made.sweep()[:6])]))
    assert tables.main([store, *flags]) == 0
    said = capsys.readouterr()
    titles = [line for line in said.out.splitlines() if "tatoeba_en_de, T = 1" in line]
    assert [title.split(":")[0] for title in titles] == [
        "Verification against discard rate", "Throughput", "Predicted and measured throughput",
    ]  # fmt: skip
    first, second = said.err.splitlines()
    assert first.startswith("left out: throughput, tiny_translation, ") and "0 timed generations" in first
    assert second.startswith("left out: dominance, xsum, ") and "no stop thresholds and fixed blocks of" in second
    store = str(sweep(untimed(made.sweep()[:6])))
    assert tables.main([store, *flags]) == 1
    said = capsys.readouterr()
    assert not said.out and [line.split(",")[0] for line in said.err.splitlines()] == [
        "error: throughput", "error: dominance",
    ]  # fmt: skip


def test_a_figure_per_task(script, sweep, capsys):
    store = sweep([*made.sweep(), *of_task("xsum", made.sweep())])
    assert script("plots").main([str(store), "--pareto", "--format", "svg"]) == 0
    names = sorted(path.name for path in store.parent.glob("*.svg"))
    assert len(names) == 2 and all(name.startswith("sweep-pareto-") for name in names)
    assert capsys.readouterr().out.count("plot: ") == 2


def figure(script, store, monkeypatch):
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    assert script("plots").main([str(store), "--pareto"]) == 0
    monkeypatch.undo()
    assert (store.parent / "sweep-pareto.png").read_bytes().startswith(b"\x89PNG")
    return kept[-1].axes[0]


def test_the_figure_has_curves_stars_and_lines_of_equal_time(script, sweep, monkeypatch):
    axes = figure(script, sweep([*made.sweep(), made.record("stop_oracle", 0.2, 0.0)]), monkeypatch)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["SpecDecode, γ 2 … 8", "SpecDec++, h 0.1 … 0.9", "SpecDecode [oracle]"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    fixed, star = lines[names[0]], lines["SpecDecode [oracle]"]
    assert fixed.get_xdata()[0] == pytest.approx(0.3, abs=0.02) and fixed.get_ydata()[0] == pytest.approx(
        0.45, abs=0.02
    )
    assert star.get_xdata() == [0] and star.get_ydata()[0] == pytest.approx(0.2, abs=0.01)
    grey = [line for line in axes.get_lines() if line.get_color() == "0.85"]
    (x0, x1), (y0, y1) = grey[0].get_xdata(), grey[0].get_ydata()
    assert len(grey) == 7 and (y1 - y0) / (x1 - x0) == pytest.approx(-0.002 / 0.009)
    assert {"2", "8", "0.1", "0.9"} <= {text.get_text() for text in axes.texts}
    plt.close(axes.figure)


def test_without_times_there_are_no_lines_of_equal_time(script, sweep, monkeypatch):
    records = made.sweep()
    for record in records:
        del record["latency"], record["target_latency"], record["relative_latency"]
    axes = figure(script, sweep(records), monkeypatch)
    assert not [line for line in axes.get_lines() if line.get_color() == "0.85"]
    assert not any("equal time" in text.get_text() for text in axes.texts)
    plt.close(axes.figure)
