"""Test of readers on a thousand damaged files: errors name the file; no silent change, delay or large allocation."""

import json
import os
import subprocess
import sys

import pytest

from speccascade_jax.runtime.paths import repository_root
from tests.support.fuzzing import FORMATS, MEMORY

pytestmark = pytest.mark.laws
CASES = 1000


def test_no_damaged_file_breaks_a_reader(tmp_path):
    command = [sys.executable, "-m", "tests.support.fuzzing", str(tmp_path / "fuzz"), str(CASES), "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository_root())}
    done = subprocess.run(command, cwd=repository_root(), env=environment, capture_output=True, text=True, check=False)
    last = tmp_path / "fuzz" / "last"
    assert done.returncode == 0, (last.read_text() if last.exists() else "", done.stderr[-2000:])
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["failures"], "\n".join(report["failures"])
    assert sum(report["said"].values()) == CASES and report["seconds"] < 90 and report["peak"] < MEMORY
    for name in FORMATS:  # a fuzz that is refused by nobody has mutated nothing
        assert report["said"].get(f"{name}: refused", 0) > 5, name
