"""Tests of the command tables: Table 2 in all formats from fake records, and tables of measures (--measures)."""

import csv
import io
import re
import shlex

import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.results.report import printing
from speccascade_jax.results.store.result_store import ResultStore, read_records
from tests.support import measured_records as made


def test_the_terminal_table_has_every_method_and_describes_its_data(script, store, capsys):
    assert script("tables").main([str(store)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    methods = ("SpecDecode [Lossy]", "SpecCascade [Token]", "Target alone", "Draft alone")
    assert all(word in said for word in (*methods, "tiny_translation, tatoeba_en_de, T = 1, γ = 5"))
    assert "64 examples for quality, 16 examples × 2 trials for latency, 1 seed" in said
    assert "Speed-up, no loss" in said and "(exactly compared)" not in said


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("points", [[], ["--points"]])
def test_four_lines_at_most_follow_a_table_and_the_last_says_how_to_see_the_rest(
    script, store, capsys, monkeypatch, columns, points
):
    monkeypatch.setenv("COLUMNS", columns)
    assert script("tables").main([str(store), *points]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    below = lines[next(n for n, line in enumerate(lines) if line.startswith("[ ]: ")) :]
    assert len(below) <= 4 and below[-1].endswith(" notes: add --notes")
    assert script("tables").main([str(store), *points, "--notes"]) == 0
    notes = " ".join(capsys.readouterr().out.split())
    assert "95% paired bootstrap over examples" in notes and "add --notes" not in notes
    assert ("A wider terminal shows" in notes) == ("A wider terminal shows" in below[-1])


def test_a_sweep_ends_with_the_command_that_prints_all_notes(script, store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with ResultStore(store) as opened:
        experiment.present(opened, ("block_size",))
        (line,) = (line for line in capsys.readouterr().out.splitlines() if " notes: " in line)
        assert script("tables").main(shlex.split(line.partition("experiments.tables ")[2])) == 0
        tables = capsys.readouterr().out
        experiment.present(opened, ("block_size",), notes=True)
    assert "95% paired bootstrap" in tables and tables in capsys.readouterr().out


@pytest.mark.parametrize("points", [[], ["--points"]])
def test_every_line_has_its_temperature(script, write, records, capsys, points):
    hot = [
        record | {"key": f"hot{record['key']}", "point": record["point"] | {"temperature": 0.5}} for record in records
    ]
    assert script("tables").main([str(write([*records, *hot], "both")), *points]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [n for n, line in enumerate(lines) if line.startswith("tiny_translation")]
    for title, later, temperature in zip(titles, [*titles[1:], None], ("1", "0.5"), strict=True):
        assert f"T = {temperature}" in lines[title]
        begin = re.compile(r"(Spec\w+|Target|Draft) (\S+) +(\S+)")
        rows = [row for line in lines[title:later] if (row := begin.match(line))]
        assert len(rows) > 3 and {row[3] for row in rows} == {temperature}


def test_tasks_that_are_too_wide_side_by_side_have_tables_of_their_own(script, two_tasks, capsys, monkeypatch):
    tables = {}
    for columns in ("120", "260"):
        monkeypatch.setenv("COLUMNS", columns)
        assert script("tables").main([str(two_tasks)]) == 0
        tables[columns] = capsys.readouterr().out
        assert max(map(len, tables[columns].splitlines())) <= int(columns)
    assert tables["120"].count("Target alone") == 2 and tables["260"].count("Target alone") == 1
    assert "\ntatoeba_joined, tatoeba_en_de, T = 1" in tables["120"]


def test_several_tasks_are_side_by_side(script, two_tasks, capsys):
    assert script("tables").main([str(two_tasks), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    header = next(line for line in said.splitlines() if line.startswith("| Method"))
    assert header.count("|") == 9 and header.count("Speed-up") == 4
    assert "no loss: tatoeba_joined |" in header and "**tatoeba_en_de, T = 1" in said  # the pair is the same
    assert "2 seeds" in said and "**" in said


def test_csv_has_one_line_per_method_with_both_summaries(script, store, records, tmp_path, fake):
    out = tmp_path / "table.csv"
    assert script("tables").main([str(store), "--format", "csv", "--output", str(out), "--tolerance", "0.5"]) == 0
    lines = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [line["method"] for line in lines] == list(fake.RULES)
    target = records[0]["quality"]["value"]
    token = [r for r in records if r["point"]["method"] == "token_v3"]
    good = [r for r in token if r["quality"]["value"] >= target - 0.5]
    fastest = min(good, key=lambda r: r["relative_latency"]["value"])
    assert float(lines[-1]["speed_up"]) == pytest.approx(1 / fastest["relative_latency"]["value"])
    assert float(lines[-1]["speed_up_alpha"]) == fastest["point"]["alpha"]
    quick = [r["quality"]["value"] for r in token if r["relative_latency"]["value"] <= 1]
    assert float(lines[-1]["best_quality"]) == pytest.approx(max(quick))


def test_all_points_are_printed_as_a_table_or_as_records(script, store, capsys):
    assert script("tables").main([str(store), "--points"]) == 0
    said = capsys.readouterr().out
    assert "eff." in said and "Δ BLEU" in said
    assert script("tables").main([str(store), "--points", "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 28 and "relative_latency.value" in lines[0]
    assert not any(name.endswith((".ids", ".bleu", ".per_example_ms")) and "all" not in name for name in lines[0])


def test_latex_and_markdown_have_the_same_cells(script, store, tmp_path, capsys):
    out = tmp_path / "table.tex"
    assert script("tables").main([str(store), "--format", "latex", "--output", str(out)]) == 0
    text = out.read_text()
    assert text.count("\\begin{table}") == text.count("\\toprule") == text.count("\\bottomrule") == 1
    assert capsys.readouterr().out == f"written: {out}\n"
    assert script("tables").main([str(store), "--format", "markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " (α " in line and line[0] == "|"]
    cells = [line.split(" | ")[-1].strip(" |*\\") for line in lines]
    written = text.replace("{[}", "[").replace("{]}", "]").replace("$\\alpha$", "α").replace("$-$", "-")
    assert len(cells) == 5 and all(cell in written for cell in cells)


def test_the_terminal_table_can_be_written_to_a_file(script, store, tmp_path):
    assert script("tables").main([str(store), "--output", str(tmp_path / "table.txt")]) == 0
    text = (tmp_path / "table.txt").read_text()
    assert "SpecCascade [OPT]" in text and "(exactly compared)" in text  # a file has all notes
    former = "Speed-up and quality, T = 1, γ = 5\n┏━━━━┓\n"
    for content, status in ((text, 0), (former, 0), ("My notes\non this table\n", 1)):
        (tmp_path / "table.txt").write_text(content)
        assert script("tables").main([str(store), "--output", str(tmp_path / "table.txt")]) == status


def test_a_missing_store_is_one_line_of_error(script, tmp_path, capsys):
    assert script("tables").main([str(tmp_path / "none.jsonl")]) == 1
    assert "error: no results at" in capsys.readouterr().err


def test_tables_of_measures_are_printed_in_all_formats(script, write, capsys, tmp_path):
    store = str(write(made.sweep()))
    tables = script("tables")
    assert tables.main([store, "--measures", "forward_times", "throughput", "dominance"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("Forward times: ", "Throughput: ", "Theorem 3.1's", "dominates", "h = 0.5"))
    assert tables.main([store, "--measures", "dominance", "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["verdict"] for line in lines] == ["dominates"] * 4
    latex = ["--format", "latex", "--output", str(tmp_path / "t.tex")]
    assert tables.main([store, "--measures", "throughput", *latex]) == 0
    assert (tmp_path / "t.tex").read_text().count("\\begin{table}") == 3


def test_a_failed_table_does_not_hide_the_others(script, write, capsys):
    tables, flags = script("tables"), ["--measures", "throughput", "dominance"]
    store = str(write([*made.untimed(made.sweep()), *made.of_task("xsum", made.sweep()[:6])]))
    assert tables.main([store, *flags]) == 0
    said = capsys.readouterr()
    titles = [line for line in said.out.splitlines() if "tatoeba_en_de, T = 1" in line]
    assert [title.split(":")[0] for title in titles] == [
        "Verification against discard rate", "Throughput", "Predicted and measured throughput",
    ]  # fmt: skip
    first, second = said.err.splitlines()
    assert first.startswith("left out: throughput, tiny_translation, ") and "0 timed generations" in first
    assert second.startswith("left out: dominance, xsum, ") and "no stop thresholds and fixed blocks of" in second
    store = str(write(made.untimed(made.sweep()[:6])))
    assert tables.main([store, *flags]) == 1
    said = capsys.readouterr()
    assert not said.out and [line.split(",")[0] for line in said.err.splitlines()] == [
        "error: throughput", "error: dominance",
    ]  # fmt: skip


def test_everything_is_shown_for_records_of_an_accelerator(script, write, records, tmp_path, capsys):
    """Records of a TPU name no processor and no cores, unlike those of a CPU."""
    device = {"platform": "tpu", "kind": "TPU v5 lite", "count": 4, "system": "Linux"}
    store = write([record | {"device": device} for record in records], "tpu")
    for command in (["tables"], ["tables", "--points"], ["plots"], ["report"]):
        assert script(command[0]).main([str(store), *command[1:]]) == 0
    assert "Device: TPU v5 lite" in capsys.readouterr().out
    assert "TPU v5 lite × 4" in (tmp_path / "tpu.html").read_text()
    printing.print_record(read_records(store)[0] | {"peak_memory": {"bytes": 5_100_000_000, "limit": 16_000_000_000}})
    said = capsys.readouterr().out
    assert "TPU v5 lite × 4" in said and "5.1 of 16.0 GB" in said


def test_speeds_are_in_a_table_of_their_own_and_in_reports(script, write, records, store, tmp_path, capsys):
    """Records of older versions have no speeds; a device without a known peak gives no utilisation."""
    assert script("tables").main([str(store), "--measures", "speed"]) == 1
    assert "no record holds tokens per second" in capsys.readouterr().err
    fast, slow = {"tokens_per_second": 1234.56, "mfu": 0.0123}, {"tokens_per_second": 617.28}

    def timed(record):
        entries = {"latency": record["latency"] | fast, "target_latency": record["target_latency"] | slow}
        return record | entries | {"peak_memory": {"bytes": 5_100_000_000, "limit": None}}

    new = [timed(record) if n == 1 else record for n, record in enumerate(records)]
    stores = [str(write(some, name)) for some, name in ((records, "old"), (new, "new"))]
    assert script("tables").main([stores[1], "--measures", "speed", "--format", "markdown"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" 5.10 |")]
    assert row.endswith("| 1234.6 | 617.3 | 1.23% | – | 5.10 |")
    for more in ([], ["--points"]):  # the default tables are the same with and without speeds
        printed = [script("tables").main([path, *more]) or capsys.readouterr().out for path in stores]
        assert printed[0] == printed[1]
    assert script("report").main([stores[1]]) == 0
    assert (tmp_path / "new.html").read_text().count("1234.6, MFU 1.23% tokens per second") == 1
    printing.print_record(read_records(stores[1])[1])
    said = capsys.readouterr().out
    assert "1234.6, MFU 1.23%" in said and "617.3" in said
