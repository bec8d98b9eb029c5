"""Section `weights`: effect of 16- and 8-bit weights on the greedy outputs, the quality and the speed of a pair."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks.acceptance import Written, best_task, prompts_of, texts_of, write
from benchmarks.rounds import one_by_one
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.names import TARGET
from speccascade_jax.core.types import DTYPES
from speccascade_jax.data.tasks.table import Task, get_task
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import Pair, load_pair, shipped_pairs

MADE_IN = "float32"


class Outputs(NamedTuple):
    """The target's greedy outputs for a task's examples, and their quality."""

    written: Written
    quality: float


def run(bench: Bench) -> Rows:
    """Measures one row per dtype, see `_row`; the generations of all dtypes are timed in turns."""
    settings = bench.settings
    task = best_task() if settings.acceptance_task is None else get_task(settings.acceptance_task)
    benches = {dtype: Bench(settings, loaded(bench.pair, dtype)) for dtype in DTYPES}
    methods = {"alone": recorded(Settings(method=TARGET)), "lossless": bench.lossless}
    calls: dict[str, measure.Call] = {}
    for dtype, dtype_bench in benches.items():
        for name, method in methods.items():
            runs = [dtype_bench.generator(method, [row]) for row in range(settings.examples)]
            calls[f"{dtype} {name}"] = one_by_one([partial(run, 0) for run in runs])
            calls[f"{dtype} {name}"]()
    seconds = measure.interleave(calls, 2 * settings.repeats)
    outputs = {dtype: outputs_of(benches[dtype], task) for dtype in bench.track(DTYPES)}
    return {"weights": [_row(dtype, outputs, seconds, task) for dtype in DTYPES]}


def loaded(pair: Pair, dtype: str) -> Pair:
    """Returns a shipped pair with both models in `dtype`; any other pair is returned unchanged."""
    return load_pair(pair.name, dtype=dtype, draft_dtype=None) if pair.name in shipped_pairs() else pair


def outputs_of(bench: Bench, task: Task) -> Outputs:
    """Returns the target's greedy outputs for the examples of the section `acceptance`, with their quality."""
    examples = task.load(limit=bench.settings.acceptance_examples)
    prompts = prompts_of(bench, task, [task.build_prompt(example) for example in examples])
    written = write(bench, recorded(Settings(method=TARGET)), 0.0, prompts, task)
    references = [example.reference for example in examples]
    score = quality.score([task.main_metric], texts_of(bench, task, written), references)[task.main_metric]
    return Outputs(written, score)


def same_outputs(one: Written, other: Written) -> np.ndarray:
    """Returns bool `[N]`: whether both methods wrote the same tokens for an example."""
    return np.all(one.tokens == other.tokens, axis=1) & (one.lengths == other.lengths)


def _row(dtype: str, outputs: dict[str, Outputs], seconds: dict[str, np.ndarray], task: Task) -> dict[str, Any]:
    """Returns a dtype's quality, its share of outputs equal to float32's, and its speed relative to float32."""
    result = outputs[dtype]
    row: dict[str, Any] = {"dtype": dtype, "task": task.name, "metric": task.main_metric, "quality": result.quality}
    same = same_outputs(result.written, outputs[MADE_IN].written)
    row |= {"examples": len(same), "same_output": float(same.mean())}
    for name in ("alone", "lossless"):
        ratio = seconds[f"{MADE_IN} {name}"] / seconds[f"{dtype} {name}"]
        row |= {f"{name}_speed_up": measure.spread(ratio)}
        row |= {f"{name}_ms": measure.spread(seconds[f"{dtype} {name}"] * 1e3)}
    own_gain = seconds[f"{dtype} alone"] / seconds[f"{dtype} lossless"]
    return row | {"gain": measure.spread(own_gain)}
