"""Tests of the tables that are built from stored rows."""

import pytest

from benchmarks import layouts, report


def _spread(value):
    return {"value": value, "low": value / 2, "high": value * 2}


def test_a_table_shows_medians_and_spreads():
    grid = report.grid("scoring", [{"model": "target", "width": 6, "ms": _spread(1.5), "ratio": _spread(2.0)}])
    assert grid.header == ["model", "T", "ms", "/ T = 1"]
    assert grid.rows == [["target", "6", "1.500 (0.750 to 3.000)", "2.00 (1.00 to 4.00)"]]


def test_values_of_the_across_key_become_columns():
    def row(rule, size, microseconds):
        entry = {"microseconds": _spread(microseconds), "ratio": _spread(1.0), "temporary_ratio": 0.5}
        return {"rule": rule, "vocab_size": size} | entry

    rows = [row("chow", 8192, 10.0), row("opt", 8192, 20.0), row("chow", 262144, 300.0)]
    grid = report.grid("verification", rows)
    assert grid.header[:2] == ["rule", "µs, 8k"] and grid.header[4] == "µs, 256k"
    assert grid.rows == [
        ["chow", "10", "1.00", "0.50", "300", "1.00", "0.50"],
        ["opt", "20", "1.00", "0.50", report.NONE, report.NONE, report.NONE],
    ]


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_missing_values_are_shown_as_dashes(name):
    layout = layouts.LAYOUTS[name]
    row = {} if layout.across is None else {layout.across: 1024}
    assert set(report.grid(name, [row]).rows[0]) == {report.NONE}


def test_markdown_names_machine_and_versions():
    record = {
        "pair": "some_pair", "date": "2026-01-02", "versions": {"jax": "0.1"},
        "device": {"processor": "P", "cpus": 2, "kind": "cpu", "count": 1, "system": "Linux"},
        "settings": {"task": "some_task", "repeats": 5},
        "sections": {"memory": {"tables": {"process": [{"now_megabytes": 1234.0, "peak_megabytes": None}]}}},
    }  # fmt: skip
    text = report.markdown(record)
    assert "Pair some_pair, task some_task, 2026-01-02; P, 2 CPUs" in text and "jax 0.1" in text
    assert "| 1,234 | – |" in text
