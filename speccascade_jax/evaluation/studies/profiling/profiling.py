"""Profile of one configuration: tables of the time that each instruction and each part of a decoding round takes.

Tracing an instruction takes about as long as running a small one. `tracing_cost` measures the cost of tracing per
execution on a loop of small instructions, and the tables subtract this cost. As a check, they show the sum of all times
beside the time of the same program without the profiler.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from speccascade_jax.core.checks import whole
from speccascade_jax.engine.generate import Generation, raise_on_failure
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.profiling import traces
from speccascade_jax.evaluation.studies.profiling.traces import OTHER, PREFILL, HloText
from speccascade_jax.methods.method import run
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import Row
from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.progress import counted, stage
from speccascade_jax.storage.files import check_replaceable, expanded, write_atomically


def profile(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    settings: Settings,
    seed: int = 0,
    batch: int = 1,
    generations: int = 4,
    trials: int = 3,
    top: int = 10,
    output: str | None = None,
    keep: str | None = None,
) -> Row:
    """Traces generations of one configuration, and prints the time that the parts of a round take.

    Args:
        pair: the models, as in `experiment.run`.
        evaluation: as in `experiment.run`, but only its task, split and output length are used.
        settings: how tokens are generated, as in `experiment.run`.
        seed: the random seed, as in `experiment.run`.
        batch: number of rows decoded together.
        generations: number of batches; each batch has other examples.
        trials: number of times that all generations are timed, both without and with tracing; the shortest times are
            reported.
        top: number of most expensive single instructions to list.
        output: path of a JSON file for the numbers; `None`: no file.
        keep: folder for the traces, which XProf and Perfetto can show; `None`: the traces are not kept.

    Raises:
        ValueError: a value is invalid; raised before anything is loaded.
    """
    for name, value in {"batch": batch, "generations": generations, "trials": trials}.items():
        whole(name, value, 1)
    whole("top", top, 0)
    if output:
        check_replaceable(output, '"instructions":', '"generations":', '"rounds":')
    evaluation = replace(evaluation, quality_examples=batch * generations, latency_examples=0).resolved()
    point = Point(pair=pair, evaluation=evaluation, settings=settings, seed=seed)
    validate(point)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        recipe_header.announce("1 point")
        session = Session(pair, evaluation)
        session.check([point.settings])
        measured = measure(session, point, batch, generations, trials, expanded(str(folder)))
    show(measured, top)
    if output:
        write_atomically(output, json.dumps(measured, indent=1) + "\n")
        print(f"written: {output}")
    return measured


def measure(session: Session, point: Point, batch: int, generations: int, trials: int, folder: Path) -> Row:
    """Compiles the program, times it without the profiler, traces it into `folder`, and finds each instruction's place.

    The place of an instruction is the part of a decoding round, and the part of the model, that it belongs to.

    Returns:
        Values for JSON: the point, totals over all generations of one trial, and one entry per instruction with its
        totals over the same generations.
    """
    console = Console(stderr=True)
    console.print(f"{point.label()}, batch {batch}: compiling …")
    rows = np.arange(batch * generations).reshape(generations, batch)
    prepared = [session.prepare(point, batch_rows) for batch_rows in rows]
    with stage("tracing and compiling the program"):
        compiled, calls = _compiled(session.decoder(point.settings).program, prepared, point.seed)
    results = [jax.block_until_ready(compiled(**call)) for call in calls]  # warms the caches
    for result in results:
        raise_on_failure(result)
    console.print(f"timing and tracing {generations} generations, {trials} times each …")
    with tempfile.TemporaryDirectory() as scratch:
        cost = tracing_cost(Path(scratch))
    folders = [folder / f"trial_{n}" for n in range(trials)]
    passes = (_pass(compiled, calls, trial_folder) for trial_folder in counted(folders, "timing and tracing", "trials"))
    untraced, traced = zip(*passes, strict=True)
    best = int(np.argmin(traced))
    text = compiled.as_text()
    with stage("reading the trace"):
        runs = traces.read_runs(folders[best], text.split(None, 2)[1].rstrip(","), generations)
    rounds = sum(int(result.num_rounds) for result in results)
    tokens = int(sum(np.sum(np.asarray(result.lengths)) for result in results))
    return {
        "point": point.coordinates(),
        "label": point.label(),
        "batch": batch,
        "generations": generations,
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_round": tokens / (rounds * batch),
        "untraced_ms": min(untraced) * 1e3,
        "traced_ms": traced[best] * 1e3,
        "tracing_us": cost,
        "instructions": _instructions(runs, HloText.parse(text), cost),
    }


def _compiled(program: Any, prepared: Sequence[partial[Generation]], seed: int) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the compiled program, and the arguments of each call of it."""
    longest = prepared[0].keywords["max_new_tokens"]
    calls = [{**call.keywords, "prompt": call.args[0], "seed": np.uint32(seed)} for call in prepared]
    for arguments in calls:
        del arguments["max_new_tokens"]

    def generation(**arguments: Any) -> Generation:
        return run(program, **arguments, max_new_tokens=longest)

    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)  # else the compilation cache may return a program with names of older code
    try:
        return jax.jit(generation).lower(**calls[0]).compile(), calls
    finally:
        jax.config.update(name, before)


def _pass(compiled: Any, calls: Sequence[Mapping[str, Any]], folder: Path) -> tuple[float, float]:
    """Returns the seconds that all calls take, first without and then with the profiler, which writes to `folder`."""
    untraced = _seconds(compiled, calls)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python's calls would only slow the run down
    with jax.profiler.trace(str(folder), profiler_options=options):
        return untraced, _seconds(compiled, calls)


def _seconds(compiled: Any, calls: Sequence[Mapping[str, Any]]) -> float:
    begin = time.perf_counter()
    for call in calls:
        jax.block_until_ready(compiled(**call))
    return time.perf_counter() - begin


def tracing_cost(folder: Path, calls: int = 10, passes: int = 4) -> float:
    """Measures the µs that tracing adds to one execution of an instruction, on a loop of small instructions.

    Several passes are timed, and the fastest is used.
    """

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 1000, lambda _, y: jnp.tanh(y @ x), x)

    arguments = [{"x": jnp.eye(8)}] * calls
    compiled = jax.jit(loop).lower(**arguments[0]).compile()
    _seconds(compiled, arguments)  # warms the caches; the first pass below warms the profiler's memory
    timed = np.asarray([_pass(compiled, arguments, folder / str(n)) for n in range(passes)])
    runs = traces.read_runs(folder / str(passes - 1), "jit_loop", calls)
    untraced, traced = timed.min(axis=0)
    return max(float(traced - untraced), 0.0) * 1e6 / sum(len(run) for run in runs)


def _instructions(runs: Sequence[Sequence[traces.Event]], program: HloText, cost: float) -> list[Row]:
    """Returns one entry per instruction: its place, its opcode and shape, and its µs, summed over all calls."""
    entries = []
    for name, spent in traces.own_times(runs, program.is_control).items():
        place, instruction = program.place(name), program.instructions.get(name)
        entry: Row = {"name": name, "phase": list(place.phase), "module": place.module}
        entry |= {field: getattr(instruction, field) if instruction else "" for field in ("opcode", "shape", "op_name")}
        entry |= {"us": without_profiler(spent, cost), "traced_us": spent.total / 1e3}
        entries.append(entry | {"waiting_us": spent.waiting / 1e3, "count": spent.count})
    return entries


def without_profiler(spent: traces.Spent, cost: float, least: float = 0.25) -> float:
    """Returns an instruction's traced µs minus `cost` µs per execution, but at least `least` times the traced µs."""
    traced = spent.total / 1e3
    return max(traced - cost * spent.count, least * traced)


_ORDER = ("draft", "score", "sampling", "verify", "commit", OTHER)


def show(measured: Row, top: int) -> None:
    """Prints the tables of phases and modules, and the `top` most expensive instructions unless `top` is 0."""
    printing.print_grids([phases(measured), modules(measured), *([dearest(measured, top)] if top else [])])


def phases(measured: Row) -> Grid:
    """Tabulates the parts of a round, and the prefill: µs, share of the round, traced µs, waiting µs and executions."""
    sums = _sums(measured, lambda entry: tuple(entry["phase"]))
    once = sum((cost for phase, cost in sums.items() if phase[0] == PREFILL), np.zeros(4)) / measured["generations"]
    inside = {phase: cost / measured["rounds"] for phase, cost in sums.items() if phase[0] != PREFILL}
    total = sum(inside.values(), np.zeros(4))
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for first in sorted({phase[0] for phase in inside}, key=_ORDER.index):
        parts = {phase: cost for phase, cost in inside.items() if phase[0] == first}
        bold |= {(len(rows), column) for column in range(6)}
        rows.append(_row(first, sum(parts.values(), np.zeros(4)), total))
        for phase in sorted(parts, key=lambda phase: -parts[phase][0]) if len(parts) > 1 else ():
            rows.append(_row(f"{first} / " + " / ".join(phase[1:] or ("rest",)), parts[phase], total))
    rows += [_row("a round", total, total), _row(f"{PREFILL}, per generation", once, None)]
    header = ["part", "µs / round", "share", "µs traced", "µs waiting", "executions"]
    title = f"Where a round's time goes: {measured['label']}, batch {measured['batch']}"
    return Grid(title=title, header=header, rows=rows, bold=bold, notes=_notes(measured))


def _row(name: str, cost: np.ndarray, total: np.ndarray | None) -> list[str]:
    share = NONE if total is None else f"{cost[0] / total[0]:.1%}"
    return [name, f"{cost[0]:.1f}", share, *(f"{value:.1f}" for value in cost[1:])]


def _sums(measured: Row, key: Callable[[Mapping[str, Any]], Any]) -> dict[Any, np.ndarray]:
    """Sums µs, traced µs, waiting µs and executions over all instructions with the same `key`."""
    sums: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for entry in measured["instructions"]:
        sums[key(entry)] += [entry["us"], entry["traced_us"], entry["waiting_us"], entry["count"]]
    return sums


def _notes(measured: Row) -> list[str]:
    count, rounds = measured["generations"], measured["rounds"]
    traced, untraced = measured["traced_ms"] / count, measured["untraced_ms"] / count
    shown, placed = (sum(row[name] for row in measured["instructions"]) / 1e3 / count for name in ("us", "traced_us"))
    per_round = untraced * 1e3 * count / rounds
    notes = [
        f"{count} generations, {rounds / count:.1f} rounds each, "
        f"{measured['tokens_per_round']:.2f} tokens per round and row.",
        f"µs: traced time minus {measured['tracing_us']:.2f} per execution, the overhead for a small instruction.",
        f"One generation: {shown:.2f} ms by this table; {untraced:.2f} ms timed without the profiler ({per_round:.0f} "
        f"µs per round, prefill included); {traced:.2f} ms traced, {placed / traced:.1%} of it in the table.",
        "Waiting: time before an instruction in which no instruction ran, tracing overhead included.",
    ]
    starting = traced - placed  # starting a call takes time outside all instructions
    if not 0.8 < (shown + starting) / untraced < 1.25:
        notes.append("The table and the clock disagree: was the machine busy with something else? Run this again.")
    return notes


def modules(measured: Row) -> Grid:
    """Tabulates the time of each part of the models in each phase: µs per round, and for the prefill per generation."""
    sums = _sums(measured, lambda entry: (" / ".join(entry["phase"]), entry["module"]))
    columns = sorted({phase for phase, module in sums if module})
    per = {phase: measured["generations" if phase.startswith(PREFILL) else "rounds"] for phase in columns}
    names = _sums(measured, lambda entry: entry["module"])
    rows = []
    for name in sorted(names.keys() - {""}, key=lambda name: -names[name][0]):
        cells = [sums[phase, name][0] / per[phase] if (phase, name) in sums else None for phase in columns]
        rows.append([name, *(NONE if cell is None else f"{cell:.1f}" for cell in cells)])
    title = "Inside the models, µs per round (prefill: per generation)"
    return Grid(title=title, header=["module", *columns], rows=rows, notes=[])


def dearest(measured: Row, top: int) -> Grid:
    """Tabulates the most expensive instructions of a round; `source` is the end of an instruction's name, if known."""
    inside = [entry for entry in measured["instructions"] if entry["phase"][0] != PREFILL]
    rounds = measured["rounds"]
    rows = []
    for entry in sorted(inside, key=lambda entry: -entry["us"])[:top]:
        name = f"{entry['name']}: {entry['opcode']} {entry['shape'].partition('{')[0]}"
        part = " / ".join(entry["phase"]) + (f": {entry['module']}" if entry["module"] else "")
        source = entry["op_name"].partition(";")[0].rpartition("while/body/")[2] or NONE
        rows.append([name, f"{entry['us'] / rounds:.1f}", f"{entry['count'] / rounds:.1f}", part, source])
    header = ["instruction", "µs / round", "executions", "part", "source"]
    return Grid(title=f"The {len(rows)} most expensive instructions of a round", header=header, rows=rows, notes=[])
