"""Section `batches`: tokens per second by batch size."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.rounds import one_by_one
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.points import Settings, recorded


def run(bench: Bench) -> Rows:
    """Measures one row per method and batch size; all batch sizes decode the same examples at temperature 0."""
    rows: list[dict[str, Any]] = []
    for method in bench.track((recorded(Settings(method=TARGET)), bench.lossless)):
        rows += _rows(bench, method)
    return {"batches": rows}


def _rows(bench: Bench, method: Settings) -> list[dict[str, Any]]:
    sizes = bench.settings.batches
    examples = max(sizes)
    calls, tokens = {}, {}
    for size in sizes:
        starts = range(0, examples - size + 1, size)
        runs = [bench.generator(method, range(start, start + size)) for start in starts]
        tokens[size] = sum(int(np.sum(jax.device_get(run(0)).lengths)) for run in runs)
        calls[size] = one_by_one([partial(run, 0) for run in runs])
    seconds = measure.interleave({str(size): call for size, call in calls.items()}, bench.settings.repeats)
    speeds = {size: tokens[size] / seconds[str(size)] for size in sizes}
    return [
        {
            "method": method.method,
            "block_size": method.block_size,
            "batch": size,
            "tokens_per_second": measure.spread(speeds[size]),
            "ratio": measure.spread(speeds[size] / speeds[sizes[0]]),
        }
        for size in sizes
    ]
