"""experiments/tables.py: Table 2 in all its forms from fake records."""

import csv
import io

import pytest


def test_the_terminal_table_has_every_method_and_says_on_what_it_rests(script, store, capsys):
    assert script("tables").main([str(store)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in (
        "SpecDecode [Lossy]",
        "SpecCascade [Token]",
        "Target alone",
        "Draft alone",
        "Speed-up and quality, T = 1, γ = 5",
    ):
        assert word in said
    assert "64 examples for quality, 16 examples × 2 trials for latency, 1 seed" in said
    assert "(exactly compared)" in said


def test_several_tasks_stand_side_by_side(script, two_tasks, capsys):
    assert script("tables").main([str(two_tasks), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    header = next(line for line in said.splitlines() if line.startswith("| Method"))
    assert header.count("|") == 8 and header.count("Speed-up") == 4 and "tatoeba_joined, tatoeba_en_de" in header
    assert "2 seeds" in said and "**" in said


def test_csv_has_one_line_per_method_with_both_summaries(script, store, tmp_path, fake):
    out = tmp_path / "table.csv"
    assert script("tables").main([str(store), "--format", "csv", "--output", str(out), "--tolerance", "0.5"]) == 0
    lines = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [line["method"] for line in lines] == list(fake.RULES)
    records = [fake.run(point) for point in fake.coordinates()]
    target = records[0]["quality"]["value"]
    token = [r for r in records if r["point"]["method"] == "token_v3"]
    good = [r for r in token if r["quality"]["value"] >= target - 0.5]
    fastest = min(good, key=lambda r: r["relative_latency"]["value"])
    assert float(lines[-1]["speed_up"]) == pytest.approx(1 / fastest["relative_latency"]["value"])
    assert float(lines[-1]["speed_up_alpha"]) == fastest["point"]["alpha"]
    quick = [r["quality"]["value"] for r in token if r["relative_latency"]["value"] <= 1]
    assert float(lines[-1]["best_quality"]) == pytest.approx(max(quick))


def test_all_points_as_table_and_as_records(script, store, capsys):
    assert script("tables").main([str(store), "--points"]) == 0
    said = capsys.readouterr().out
    assert "efficiency" in said and "bleu − target's" in said
    assert script("tables").main([str(store), "--points", "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 28 and "relative_latency.value" in lines[0]
    assert not any(name.endswith((".ids", ".bleu", ".per_example_ms")) and "all" not in name for name in lines[0])


def test_latex_holds_the_cells_of_the_markdown(script, store, tmp_path, capsys):
    out = tmp_path / "table.tex"
    assert script("tables").main([str(store), "--format", "latex", "--output", str(out)]) == 0
    text = out.read_text()
    assert text.count("\\begin{table}") == text.count("\\toprule") == text.count("\\bottomrule") == 1
    assert capsys.readouterr().out == f"written: {out}\n"
    assert script("tables").main([str(store), "--format", "markdown"]) == 0
    cells = [
        line.split(" | ")[-1].strip(" |*\\")
        for line in capsys.readouterr().out.splitlines()
        if " (α " in line and line[0] == "|"
    ]
    written = text.replace("{[}", "[").replace("{]}", "]").replace("$\\alpha$", "α").replace("$-$", "-")
    assert len(cells) == 5 and all(cell in written for cell in cells)


def test_the_terminal_table_can_be_written_to_a_file(script, store, tmp_path):
    assert script("tables").main([str(store), "--output", str(tmp_path / "table.txt")]) == 0
    assert "SpecCascade [OPT]" in (tmp_path / "table.txt").read_text()


def test_a_missing_store_is_one_line_of_error(script, tmp_path, capsys):
    assert script("tables").main([str(tmp_path / "none.jsonl")]) == 1
    assert "error: no results at" in capsys.readouterr().err
