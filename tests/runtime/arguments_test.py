"""Tests of the version that every command prints; `tests/experiments/command_line_test.py` runs the commands."""

import runpy
import sys

import pytest
from absl import flags

import speccascade_jax
from speccascade_jax.runtime import arguments, cli, gin_flags
from speccascade_jax.runtime.paths import repository_root

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


@pytest.mark.parametrize(("flag", "message"), [
    ("--gin_fill=a.gin", "error: Unknown command line flag 'gin_fill'. Did you mean: gin_file?;"),
    ("--process_count=two", "error: flag --process_count=two: invalid literal for int()"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(flag, message, monkeypatch):
    parsed = flags.FlagValues()  # apart from those of the process, which other tests read
    for define, name, default, text in gin_flags._FLAGS:
        define(name, default, text, flag_values=parsed)
    monkeypatch.setattr(flags, "FLAGS", parsed)
    with pytest.raises(SystemExit) as ended:
        gin_flags._parse_flags(["sweep", flag])
    said = str(ended.value)
    assert said.startswith(message) and said.endswith("; --help lists all flags") and "\n" not in said


PARTS = ("compilation", "workers")
"""Programs that other benchmarks start."""


def _benchmarks():
    paths = (repository_root() / "benchmarks").rglob("*.py")
    started = [path for path in paths if '__name__ == "__main__"' in path.read_text("utf-8")]
    names = [".".join(path.relative_to(repository_root()).with_suffix("").parts) for path in started]
    return sorted(name.removesuffix(".__main__") for name in names if not {*PARTS} & {*name.split(".")})


@pytest.mark.tools
@pytest.mark.parametrize("name", _benchmarks())
def test_a_benchmark_prints_it_too(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(name, run_name="__main__")
    assert capsys.readouterr().out == LINE
