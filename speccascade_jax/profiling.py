"""Where a generation's time goes: one configuration, traced, and its parts as tables.

`profile` is what `experiments/profile.py` calls. The program that is traced is the one that is timed and used
everywhere else; only the profiler differs, and what it costs is measured and shown.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from speccascade_jax import traces
from speccascade_jax.controls import whole
from speccascade_jax.generation import Generation, generate, raise_on_failure
from speccascade_jax.points import Evaluation, Method, ModelPair, Point, Sampling, validate
from speccascade_jax.report import Grid
from speccascade_jax.results import Record, write_atomically
from speccascade_jax.scopes import PREFILL, Program

_TRIALS = 3


def profile(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    method: Method,
    sampling: Sampling,
    seed: int = 0,
    batch: int = 1,
    generations: int = 4,
    top: int = 10,
    output: str | None = None,
    keep: str | None = None,
) -> Record:
    """Trace some generations and print where their time went.

    Args:
        pair, evaluation, method, sampling, seed: the point, as `experiment.run` takes it; of the evaluation only task,
            split and output length matter.
        batch: rows decoded together; generations: how many batches, each of other examples.
        top: how many of the dearest single instructions to list.
        output: a JSON file for the numbers; keep: a folder for the trace itself, which XProf and Perfetto read.

    Raises:
        ValueError: a value without meaning, before anything is loaded.
    """
    batch, generations, top = whole("batch", batch, 1), whole("generations", generations, 1), whole("top", top, 0)
    evaluation = replace(evaluation, quality_examples=batch * generations, latency_examples=0).resolved()
    point = Point(pair=pair, evaluation=evaluation, method=method, sampling=sampling, seed=seed)
    validate(point)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        measured = measure(point, batch, generations, Path(str(folder)))
    console = Console()
    for grid in (phases(measured), modules(measured), *([instructions(measured, top)] if top else [])):
        console.print(grid.rich())
    if output:
        write_atomically(output, json.dumps(measured, indent=1) + "\n")
        console.print(f"written: {output}")
    return measured


def measure(point: Point, batch: int, generations: int, folder: Path) -> Record:
    """Compile, time without the profiler, trace into `folder`, and attribute; the record is plain JSON."""
    from speccascade_jax.evaluation import Evaluator

    # The persistent cache's keys ignore names: a program from it may carry those of an older source.
    jax.config.update("jax_enable_compilation_cache", False)
    console = Console(stderr=True)
    evaluator = Evaluator(point.pair, point.evaluation)
    alphas = [point.method.alpha or 0.0] * batch
    given = [evaluator.arguments(point, np.arange(n * batch, (n + 1) * batch), alphas) for n in range(generations)]
    console.print(f"compiling {point.label()}, batch {batch} …")
    compiled = _compiled(given[0], point.seed)
    text = compiled.as_text()
    calls = [{name: each[name] for name in _TRACED} | {"seed": np.uint32(point.seed)} for each in given]
    results = [jax.block_until_ready(compiled(**call)) for call in calls]
    for result in results:
        raise_on_failure(result)
    untraced = np.median([_seconds(compiled, calls) for _ in range(_TRIALS)])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        _seconds(compiled, calls)
    program = Program.parse(text)
    events = traces.read_events(folder, text.split(None, 2)[1].rstrip(","))
    spent = traces.own_times(events, program.is_control)
    return _totals(point, batch, results) | {
        "untraced_ms": float(untraced) * 1e3 / generations,
        "traced_ms": traces.traced_seconds(events) * 1e3 / generations,
        "instructions": [_describe(program, name, each) for name, each in spent.items()],
    }


_TRACED = ("params", "prompt", "controls", "example_ids")


def _compiled(given: Mapping[str, Any], seed: int) -> Any:
    fixed = {name: given[name] for name in ("engine", "max_new_tokens")}

    def generation(params: Any, prompt: Any, seed: Any, controls: Any, example_ids: Any) -> Generation:
        return generate(params=params, prompt=prompt, seed=seed, controls=controls, example_ids=example_ids, **fixed)

    traced = {name: given[name] for name in _TRACED} | {"seed": np.uint32(seed)}
    return jax.jit(generation).lower(**traced).compile()


def _seconds(compiled: Any, calls: Sequence[Mapping[str, Any]]) -> float:
    begin = time.perf_counter()
    for call in calls:
        jax.block_until_ready(compiled(**call))
    return time.perf_counter() - begin


def _totals(point: Point, batch: int, results: Sequence[Generation]) -> Record:
    rounds = int(sum(int(result.num_rounds) for result in results))
    tokens = int(sum(np.sum(np.asarray(result.lengths)) for result in results))
    return {
        "point": point.coordinates(),
        "label": point.label(),
        "batch": batch,
        "generations": len(results),
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_round": tokens / (rounds * batch),
    }


def _describe(program: Program, name: str, spent: traces.Spent) -> Record:
    place, one = program.place(name), program.instructions.get(name)
    return {
        "name": name,
        "phase": list(place.phase),
        "module": place.module,
        "opcode": one.opcode if one else "",
        "shape": one.shape if one else "",
        "op_name": one.op_name if one else "",
        "us": spent.total / 1e3,
        "waiting_us": spent.waiting / 1e3,
        "count": spent.count,
    }


def _sums(measured: Record, key: Any) -> dict[Any, np.ndarray]:
    """µs, µs of it waiting and executions, over all generations, by `key(instruction)`."""
    sums: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for one in measured["instructions"]:
        sums[key(one)] += [one["us"], one["waiting_us"], one["count"]]
    return sums


def phases(measured: Record) -> Grid:
    """The parts of a round: µs, share, time waited, instructions; the prefill below, per generation."""
    rounds, generations = measured["rounds"], measured["generations"]
    sums = _sums(measured, lambda one: tuple(one["phase"]))
    once = sum((each for phase, each in sums.items() if phase[0] == PREFILL), np.zeros(3)) / generations
    inside = {phase: each / rounds for phase, each in sums.items() if phase[0] != PREFILL}
    whole_round = sum(inside.values(), np.zeros(3))
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    order = ("draft", "score", "sampling", "verify", "commit")
    firsts = sorted({phase[0] for phase in inside}, key=lambda x: order.index(x) if x in order else len(order))
    for first in firsts:
        mine = {phase: each for phase, each in inside.items() if phase[0] == first}
        bold |= {(len(rows), column) for column in range(5)}
        rows.append(_row(first, sum(mine.values(), np.zeros(3)), whole_round))
        for phase in sorted(mine) if len(mine) > 1 else ():
            rows.append(_row("  " + " / ".join(phase[1:] or ("rest",)), mine[phase], whole_round))
    rows.append(_row("a round", whole_round, whole_round))
    rows.append([f"{PREFILL}, once per generation", *_row("", once, whole_round)[1:2], "", *_row("", once, once)[3:]])
    return Grid(
        title=f"Where a round's time goes: {measured['label']}, batch {measured['batch']}",
        header=["part", "µs / round", "share", "µs of it waiting", "instructions"],
        rows=rows,
        bold=bold,
        notes=_notes(measured),
    )


def _row(name: str, each: np.ndarray, total: np.ndarray) -> list[str]:
    return [name, f"{each[0]:.1f}", f"{each[0] / total[0]:.1%}", f"{each[1]:.1f}", f"{each[2]:.1f}"]


def _notes(measured: Record) -> list[str]:
    traced, untraced = measured["traced_ms"], measured["untraced_ms"]
    rounds = measured["rounds"] / measured["generations"]
    return [
        f"{measured['generations']} generations, {rounds:.1f} rounds each, "
        f"{measured['tokens_per_round']:.2f} tokens per round and row.",
        f"Wall clock per generation: {traced:.2f} ms traced (what the table shows), {untraced:.2f} ms without the "
        f"profiler ({untraced * 1e3 / rounds:.0f} µs per round, prefill included).",
        "Waiting: time before an instruction in which none ran. Tracing lengthens it most: many small instructions "
        "look dearer than they are.",
    ]


def modules(measured: Record) -> Grid:
    """The parts of the models inside the phases that run them, µs per round (prefill: per generation)."""
    sums = _sums(measured, lambda one: (" / ".join(one["phase"]), one["module"]))
    columns = sorted({phase for phase, module in sums if module})
    per = {c: measured["generations"] if c.startswith(PREFILL) else measured["rounds"] for c in columns}
    sizes: dict[str, float] = defaultdict(float)
    for (_, module), each in sums.items():
        if module:
            sizes[module] += each[0]
    rows = []
    for module in sorted(sizes, key=lambda name: -sizes[name]):
        cells = [sums[(c, module)][0] / per[c] if (c, module) in sums else 0.0 for c in columns]
        rows.append([module, *(f"{cell:.1f}" if cell else "–" for cell in cells)])
    return Grid(
        title="Inside the models",
        header=["module", *columns],
        rows=rows,
        notes=["µs per round; prefill: per generation."],
    )


def instructions(measured: Record, top: int) -> Grid:
    """The dearest single instructions of a round."""
    inside = [one for one in measured["instructions"] if one["phase"][0] != PREFILL]
    dearest = sorted(inside, key=lambda one: -one["us"])[:top]
    rounds = measured["rounds"]
    rows = [
        [
            one["name"],
            f"{one['us'] / rounds:.1f}",
            f"{one['count'] / rounds:.1f}",
            " / ".join(one["phase"]) + (f": {one['module']}" if one["module"] else ""),
            f"{one['opcode']} {one['shape']}",
            one["op_name"].rpartition("while/body/")[2],
        ]
        for one in dearest
    ]
    header = ["instruction", "µs / round", "times", "part", "what", "written as"]
    return Grid(title=f"The {len(rows)} dearest instructions of a round", header=header, rows=rows, notes=[])
