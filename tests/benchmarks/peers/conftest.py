"""A library that is none: a worker process that counts upwards, and can be told to be wrong, late or dead."""

import sys
import textwrap

import pytest

from benchmarks.peers.protocol import Worker
from speccascade_jax.runtime.paths import repository_root

FAKE = """
import os, sys
from benchmarks.peers import protocol

assert "jax" not in sys.modules  # what workers import must run where only their own library is


class Counting:
    def versions(self):
        print("a library greets on stdout")
        return {"counting": "1.0"}

    def load(self, pair):
        self.first = pair["first"]

    def write(self, options, prompts, pair):
        if options.get("fails"):
            raise ValueError("it can't\\nand says so at length")
        if options.get("dies"):
            print("killed by itself", file=sys.stderr, flush=True)
            os._exit(3)
        return [list(range(prompt[-1] + 1, prompt[-1] + 1 + pair["new_tokens"])) for prompt in prompts]


protocol.serve(Counting(), {"double": lambda number: 2 * number})
"""


@pytest.fixture
def worker(tmp_path):
    """The worker, told of a pair that stops at 7."""
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE))
    environment = {"PYTHONPATH": str(repository_root()), "PYTHONUNBUFFERED": ""}  # as a user's shell has it
    started = Worker([sys.executable, str(tmp_path / "fake.py")], tmp_path / "log", environment)
    started.ask("load", pair={"first": 1, "new_tokens": 4, "stop": [7]})
    yield started
    started.close()
