"""Tests that a program restarts itself with other allocator settings once, and only if this has an effect."""

import os
import subprocess
import sys

import pytest

from speccascade_jax.runtime import malloc

PROGRAM = """
import os, sys
from speccascade_jax.runtime import malloc
malloc.keep_freed_memory()
print(os.getpid(), os.environ.get("MALLOC_ARENA_MAX"), sys.argv[1:])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are those of Linux's C library")
def test_a_program_restarts_itself_once_with_the_same_arguments(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name not in malloc.SETTINGS}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(tmp_path / "program.py"), "--a", "b c"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=120)
    assert output.splitlines() == [f"{process.pid} 1 ['--a', 'b c']"]


def test_existing_allocator_settings_are_respected(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    malloc.keep_freed_memory()
    assert os.environ["MALLOC_ARENA_MAX"] == "4"
