"""Section `memory`: memory of the compiled programs while they run, and of the whole process."""

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
"""The compiler's names of the parts of a program's memory, by their names in the table."""


def run(bench: Bench) -> Rows:
    """Returns the table `memory`, with a row per program and batch size, and the table `process` (resident memory)."""
    sizes = sorted({1, max(bench.settings.batches)})
    programs = [(*program, size) for program in _programs(bench) for size in sizes]
    return {"memory": [_row(*program) for program in bench.track(programs)], "process": [resident()]}


def _programs(bench: Bench) -> list[tuple[str, Bench, Settings]]:
    """Returns, for each program, the drafter's name, a bench with the drafter's pair, and the method.

    The programs draft with nothing, with the pair's draft, and with early exits of the target if the model supports
    them. An early exit uses a third of the target's layers, once with the target's output head and once with a separate
    output head.
    """
    target = bench.pair.target
    programs = [("nothing", bench, recorded(Settings(method=TARGET))), ("the draft", bench, bench.lossless)]
    try:
        layer = max(1, depth_of(target.model) // 3)
    except ValueError:
        return programs
    head = held("decoder/logits_dense/kernel", shared_head(target), target.model.config)
    for called, exits in (
        (f"exit:{layer}", early_exit(target, layer)),
        (f"exit:{layer}, own head", early_exit(target, layer, head)),
    ):
        pair = replace(bench.pair, draft=exits, head=None, others={}, policy=None)
        programs.append((called, bench.with_pair(pair, bench.settings.examples), bench.lossless))
    return programs


def _row(drafts: str, bench: Bench, method: Settings, size: int) -> dict[str, Any]:
    """Returns megabytes by part: arguments include the weights, temporaries the caches and distributions."""
    function, arguments = bench.program(method, size)
    usage = measure.memory(function.lower(*arguments).compile())
    row: dict[str, Any] = {"method": method.method, "drafts": drafts, "block_size": method.block_size, "batch": size}
    return row | {f"{name}_megabytes": getattr(usage, f"{field}_size_in_bytes") / 1e6 for name, field in PARTS.items()}


def resident() -> dict[str, float | None]:
    """Returns this process's resident memory in MB: now (`None` on systems without `/proc`), and at its peak."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else None
    now = None if pages is None else pages * resource.getpagesize() / 1e6
    return {"now_megabytes": now, "peak_megabytes": kilobytes * 1024 / 1e6}
