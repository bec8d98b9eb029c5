"""Tests of the version that every command prints; `tests/experiments/command_line_test.py` runs the commands."""

import pytest

import speccascade_jax
from speccascade_jax.runtime import arguments, cli, gin_flags

LINE = f"speccascade_jax {speccascade_jax.__version__}\n"


def test_a_parser_prints_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        arguments.parser("A command.").parse_args(["--version"])
    assert capsys.readouterr().out == LINE


def test_the_program_and_commands_with_gin_files_print_it_before_anything_else(capsys):
    for ask in (lambda: cli.main(["--version"]), lambda: gin_flags._parse_flags(["sweep", "--wrong=1", "--version"])):
        with pytest.raises(SystemExit, match="0"):
            ask()
        assert capsys.readouterr().out == LINE
