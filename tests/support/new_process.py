"""Runner of programs in new processes, which print JSON in their last line."""

import json
import os
import subprocess
import sys
from typing import Any

from speccascade_jax.runtime.paths import repository_root


def answer(program: str, *arguments: object, **environment: str) -> Any:
    """Returns a program's last output line; it runs on a CPU, from the repository's root."""
    root = repository_root()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)} | environment
    command = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])
