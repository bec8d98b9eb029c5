"""Tests of the notes in tables that mix records of several versions of the code."""

import copy

import pytest

from speccascade_jax.results.analysis import families, panels, provenance
from speccascade_jax.results.report.tables import stopping, table2
from tests.support import made_records as hand
from tests.support import measured_records

FIRST = {"version": "0.1.0", "revision": "a" * 40, "dirty": False}
SECOND = {"version": "0.1.0", "revision": "b" * 40, "dirty": True}
METHODS = (panels.TARGET, panels.DRAFT, "chow", "opt")


def _records(*packages, records=None):
    """Returns records, measured by these packages in turn; `None`: the record does not name its package."""
    records_copy = copy.deepcopy(records or [hand.point(name) for name in METHODS])
    for number, record in enumerate(records_copy):
        package = packages[number % len(packages)]
        record["versions"] = {"python": f"3.{number}", "jax": "0.10"}
        if package is not None:
            record["package"] = package
    return records_copy


SAID = (
    "Measured by several versions of the code, whose numbers may not be comparable: speccascade_jax 0.1.0 (aaaaaaaaaa) "
    "and 0.1.0 (bbbbbbbbbb, files changed)."
)


def test_one_version_has_no_note():
    for packages in ((FIRST,), (SECOND,), (None,)):
        assert provenance.notes(panels.panels(_records(*packages))) == []


def test_several_revisions_are_named_in_one_line_of_every_table():
    all_panels = panels.panels(_records(FIRST, SECOND))
    assert provenance.notes(all_panels) == [SAID]
    beside_grid = table2.beside_grid(all_panels[0], "chow", "rejection_rate")
    for grid in (*table2.table2_grids(all_panels), table2.points_grid(all_panels[0]), beside_grid):
        assert grid.notes.count(SAID) == 1


@pytest.mark.parametrize("name", ["forward_times", "throughput", "dominance"])
def test_several_revisions_are_named_in_the_tables_of_specdecpp(name):
    notes = []
    for packages in ((FIRST,), (FIRST, SECOND)):
        (every,) = families.of_records(_records(*packages, records=measured_records.sweep()))
        notes.append([note for grid in stopping.GRIDS[name](every) for note in grid.notes if note == SAID])
    assert list(map(len, notes)) == [0, 1]


def test_revisions_of_several_panels_in_one_table_are_named():
    records = _records(FIRST)
    for record in _records(SECOND):
        record["point"]["pair"] = "another"
        records.append(record)
    all_panels = panels.panels(records)
    assert [provenance.notes([panel]) for panel in all_panels] == [[], []]
    (grid,) = table2.table2_grids(all_panels)
    assert SAID in grid.notes


def test_other_libraries_and_unknown_versions_are_named():
    records = _records(FIRST, None)
    records[2]["versions"]["jax"] = "0.9"
    (note,) = provenance.notes(panels.panels(records))
    assert "speccascade_jax 0.1.0 (aaaaaaaaaa) and an unknown version; jax 0.10 and 0.9." in note


def test_curves_whose_rule_changed_between_points_are_named():
    records = _records(FIRST)
    for alpha, code in ((0.1, "x"), (0.2, "y"), (0.3, "x")):
        record = hand.point("token_v3") | {"package": FIRST, "versions": {"jax": "0.10"}}
        record["point"] |= {"alpha": alpha}
        record["provenance"] = {"code": code, "toolchain": {"jax": "0.10"}}
        records.append(copy.deepcopy(record))
    (note,) = provenance.notes(panels.panels(records))
    assert note == "The rule, stop policy or drafter changed between points of SpecCascade [Token]: measure them again."
