"""Tests that commands in suggestions are written as the user can type them."""

import os
import sys

from speccascade_jax.runtime import paths


def test_suggested_commands_use_the_running_python(tmp_path, monkeypatch):
    interpreter = tmp_path / "my env" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setenv("PATH", str(interpreter.parent), prepend=os.pathsep)
    assert paths.interpreter() == "python"
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert paths.interpreter() == "'./my env/bin/python'"
    assert paths.command("run", paths.interpreter()) == "'./my env/bin/python' -m experiments.run"
    monkeypatch.chdir(interpreter.parent)
    assert paths.interpreter() == "./python"
    monkeypatch.setattr(sys, "executable", "")
    assert paths.interpreter() == "python"
    assert paths.command("run") == "python -m experiments.run"
