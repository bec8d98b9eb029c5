"""Section `memory`: what the programs need while they run, and this process altogether."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.setting import Bench, Rows
from speccascade_jax.evaluation.points import TARGET, Method

PARTS = {"arguments": "argument", "temporaries": "temp", "outputs": "output"}
"""What we call a part of a program's memory -> what the compiler calls it."""


def run(bench: Bench) -> Rows:
    """`memory`: a row per program and batch size, by the compiler's account; `process`: the resident memory."""
    sizes = (1, max(bench.settings.batches))
    programs = [(method, size) for method in (Method(name=TARGET), bench.lossless) for size in sizes]
    rows = [_row(bench, method, size) for method, size in bench.track(programs)]
    return {"memory": rows, "process": [resident()]}


def _row(bench: Bench, method: Method, size: int) -> dict[str, Any]:
    """Megabytes; arguments hold the weights, temporaries the caches, the laws and everything in between."""
    function, arguments = bench.program(method, size)
    found = measure.memory(function.lower(*arguments).compile())
    sizes = {f"{name}_megabytes": getattr(found, f"{field}_size_in_bytes") / 1e6 for name, field in PARTS.items()}
    row: dict[str, Any] = {"method": method.name, "block_size": method.block_size, "batch": size}
    return row | sizes


def resident() -> dict[str, float | None]:
    """Megabytes of this process in memory, now (`None` on systems without `/proc`) and at most so far."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else None
    now = None if pages is None else pages * resource.getpagesize() / 1e6
    return {"now_megabytes": now, "peak_megabytes": kilobytes * 1024 / 1e6}
