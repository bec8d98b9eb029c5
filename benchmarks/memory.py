"""Section `memory`: what the programs need while they run, and this process altogether."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.models.early_exit import depth_of, early_exit, shared_head
from speccascade_jax.models.products import held

PARTS = {"arguments": "argument", "temporaries": "temp", "outputs": "output"}
"""What we call a part of a program's memory -> what the compiler calls it."""


def run(bench: Bench) -> Rows:
    """`memory`: a row per program and batch size, by the compiler's account; `process`: the resident memory."""
    sizes = sorted({1, max(bench.settings.batches)})
    programs = [(*each, size) for each in _programs(bench) for size in sizes]
    return {"memory": [_row(*each) for each in bench.track(programs)], "process": [resident()]}


def _programs(bench: Bench) -> list[tuple[str, Bench, Settings]]:
    """What drafts, the bench with the pair that it is of, and the method: nothing, the pair's draft, the target itself.

    The last one by a third of its layers, without and with a head of its own, where it has layers.
    """
    target = bench.pair.target
    found = [("nothing", bench, recorded(Settings(method=TARGET))), ("the draft", bench, bench.lossless)]
    try:
        layer = max(1, depth_of(target.model) // 3)
    except ValueError:
        return found
    head = held("decoder/logits_dense/kernel", shared_head(target), target.model.config)
    for called, exits in (
        (f"exit:{layer}", early_exit(target, layer)),
        (f"exit:{layer}, own head", early_exit(target, layer, head)),
    ):
        pair = replace(bench.pair, draft=exits, head=None, others={}, policy=None)
        found.append((called, bench.with_pair(pair, bench.settings.examples), bench.lossless))
    return found


def _row(drafts: str, bench: Bench, method: Settings, size: int) -> dict[str, Any]:
    """Megabytes; arguments hold the weights, temporaries the caches, the laws and everything in between."""
    function, arguments = bench.program(method, size)
    found = measure.memory(function.lower(*arguments).compile())
    row: dict[str, Any] = {"method": method.method, "drafts": drafts, "block_size": method.block_size, "batch": size}
    return row | {f"{name}_megabytes": getattr(found, f"{field}_size_in_bytes") / 1e6 for name, field in PARTS.items()}


def resident() -> dict[str, float | None]:
    """Megabytes of this process in memory, now (`None` on systems without `/proc`) and at most so far."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else None
    now = None if pages is None else pages * resource.getpagesize() / 1e6
    return {"now_megabytes": now, "peak_megabytes": kilobytes * 1024 / 1e6}
