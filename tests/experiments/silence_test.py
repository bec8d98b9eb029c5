"""A test of a whole command at a terminal: it is never silent for five seconds, and its first line helps."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speccascade_jax.runtime.paths import repository_root
from tests.support import tiny_pair

LONGEST = 5.0
RECIPE = """# One method on a random pair.
from __gin__ import dynamic_registration
import sleeper
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation import points
points.ModelPair.name = 'tiny'
points.Evaluation:
  task = 'tiny_translation'
  quality_examples = 4
  latency_examples = 1
  latency_trials = 1
  max_new_tokens = 6
  resamples = 10
  keep_outputs = False
  keep_traces = 0
experiment.sweep:
  pair = @points.ModelPair()
  evaluation = @points.Evaluation()
  methods = ('spec_decode',)
  output = 'results/tiny.jsonl'
"""


def _delay(pid):
    """Returns the seconds that a process's threads, taken alone, waited for a processor at most (Linux counts them)."""
    waits = [0]
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread may have ended
            waits.append(int(path.read_text().split()[1]))
    return max(waits) / 1e9


def _chunks(command, folder):
    """Yields the seconds since the last output and the output at a terminal, until the command ends.

    The time that a thread waits for a processor is left out: a busy machine may be silent for longer.
    """
    environment = os.environ | {"PYTHONPATH": f"{repository_root()}:{folder}", "JAX_PLATFORMS": "cpu"}
    environment |= {"SPECCASCADE_COMPILATION_CACHE": str(folder / "cache")}
    shown, terminal = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=terminal, stderr=terminal) as running:
        os.close(terminal)
        last, delay = time.monotonic(), 0.0
        while data := _read(shown):
            now, waited = time.monotonic(), _delay(running.pid)
            yield now - last - max(0.0, waited - delay), data.decode(errors="replace")
            last, delay = now, waited
    os.close(shown)
    yield 0.0, f"status {running.returncode}"


def _read(shown):
    """Returns what the terminal shows next; empty at the end, which Linux reports as an error."""
    with contextlib.suppress(OSError):
        return os.read(shown, 1 << 16)
    return b""


@pytest.mark.tools
def test_a_sweep_is_never_silent_for_long(tmp_path):
    """The recipe sleeps longer than a command may be silent."""
    (tmp_path / "tiny").mkdir()
    tiny_pair.write(tmp_path / "tiny")
    (tmp_path / "tiny.gin").write_text(RECIPE)
    (tmp_path / "sleeper.py").write_text(f"import time\ntime.sleep({LONGEST + 1})\n")
    command = [sys.executable, "-m", "experiments.sweep", "--gin_file=tiny.gin", "--quick"]
    silences, texts = zip(*_chunks(command, tmp_path), strict=True)
    said = "".join(texts)
    assert said.endswith("status 0"), said
    longest = max(range(len(silences)), key=silences.__getitem__)
    assert silences[longest] < LONGEST, f"{silences[longest]:.1f} s of silence before {texts[longest]!r}"
    lines = [line for line in re.split(r"[\r\n]+(?:\x1b\[K)?", said) if line and not line.startswith("… ")]
    assert lines[0] == "One method on a random pair. 3 points"
    assert "results go to results/tiny_quick.jsonl; --output=PATH names another place" in lines
    assert re.search(r"… \d+ s: working", said)
