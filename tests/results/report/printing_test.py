"""Tests of what commands print in a terminal: the width of tables, and the command that prints all notes."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from speccascade_jax.results.report import printing


@pytest.mark.parametrize(("terminal", "columns", "width"), [
    (False, None, printing.WIDTH), (False, "80", 80), (True, None, 97), (True, "80", 80),
])  # fmt: skip
def test_tables_are_as_wide_as_the_terminal_or_as_columns_says(monkeypatch, terminal, columns, width):
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((97, 30)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert printing.console().width == width


def test_the_command_for_all_notes_names_the_store_and_the_tables():
    *_, store, shown, notes = shlex.split(printing.notes_command(Path("my results/a.jsonl"), "--points"))
    assert (store, shown, notes) == ("my results/a.jsonl", "--points", "--notes")
