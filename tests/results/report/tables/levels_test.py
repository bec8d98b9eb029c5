"""Calls of every model of a stack: each once, tails apart."""

import pytest

from speccascade_jax.results.analysis import panels
from speccascade_jax.results.report.tables.levels import level_grids
from tests.support import made_records

RATES = {"block_efficiency": 2.0, "acceptance_rate": 0.5, "draft_utilisation": 0.4}


def stack(**own):
    """100 tokens by 20 calls of the target and 36 of a level, of which 30 were its own rounds."""
    record = made_records.point("spec_decode")
    record["counts"] |= {"committed": 100, "target_calls": 20, "draft_steps": 36} | own
    record["measures"] |= RATES
    record["levels"] = [{"model": "middle", "target_calls": 30, "draft_steps": 50, **RATES}]
    return record


def rows_of(record):
    (panel,) = panels.panels([record])
    (grid,) = level_grids(panel)
    return {row[2]: row[3] for row in grid.rows}


def test_a_levels_calls_are_those_that_the_level_above_counts():
    assert rows_of(stack()) == {"target": "0.200", "middle": "0.360", "lowest draft": "0.500"}


def test_a_tails_calls_stand_apart():
    found = rows_of(stack(draft_steps=46, tail_steps=10))
    assert found == {"target": "0.200", "middle": "0.360", "lowest draft": "0.500", "tails": "0.100"}


def test_without_levels_there_is_nothing_to_show():
    (panel,) = panels.panels([made_records.point("spec_decode")])
    with pytest.raises(ValueError, match="only stacks have any"):
        level_grids(panel)
