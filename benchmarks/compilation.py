"""Section `compilation`: time from a new process to the first result, with an empty and with a full compilation cache.

The section runs this module as a program in a new process, which prints its measurements as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from benchmarks.setting import Bench, Rows, Sizes
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.pairs.pair import load_pair
from speccascade_jax.runtime.paths import repository_root

STEPS = ("trace", "lower", "compile", "first_run")


def run(bench: Bench) -> Rows:
    """Returns two tables: `compilation` has the seconds of each step, and `startup` the seconds before these steps."""
    programs, startup = [], []
    with tempfile.TemporaryDirectory() as folder:
        for cache in bench.track(("empty", "full")):
            measured = _in_new_process(bench.settings, folder)
            programs += [{"cache": cache} | row for row in measured["programs"]]
            startup.append({"cache": cache} | measured["startup"])
    return {"compilation": programs, "startup": startup}


def _in_new_process(settings: Sizes, folder: str) -> dict[str, Any]:
    """Returns the JSON that `main` prints in a process whose compilation cache is `folder`."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(repository_root()), os.environ.get("PYTHONPATH", "")]),
    }
    settings_text = json.dumps(
        {name: getattr(settings, name) for name in ("pair", "task", "max_new_tokens", "examples", "block_size")}
    )
    command = [sys.executable, "-m", "benchmarks.compilation", settings_text, str(time.time())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(given: str, started: float) -> dict[str, Any]:
    """Times the imports, the loading of the pair, and each step of two programs from tracing to the first result.

    Args:
        given: settings as JSON; started: time at which the process was started, in seconds since 1970.
    """
    imported = time.time()
    settings = dataclasses.replace(Sizes(batches=(1,)), **json.loads(given))
    bench = Bench(settings, load_pair(settings.pair))
    loaded = time.time()
    programs = [_program(bench, method) for method in (recorded(Settings(method=TARGET)), bench.lossless)]
    return {"startup": {"import_seconds": imported - started, "load_seconds": loaded - imported}, "programs": programs}


def _program(bench: Bench, method: Settings) -> dict[str, Any]:
    """Times the tracing, lowering, compilation and first execution of one program, in seconds."""
    function, arguments = bench.program(method, 1)
    marks = [time.perf_counter()]
    traced = function.trace(*arguments)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    jax.block_until_ready(compiled(*arguments))
    marks.append(time.perf_counter())
    spans = (after - before for before, after in zip(marks, marks[1:], strict=False))
    row = {f"{name}_seconds": seconds for name, seconds in zip(STEPS, spans, strict=True)}
    return {"method": method.method, "block_size": method.block_size} | row


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]))))
