"""Costs of the programs behind stored measurements (records), compiled for other hardware and kept in a file.

Every distinct program is compiled once. The file is written after each program, so a command that was killed can
continue where it stopped.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speccascade_jax import preflight
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.report import Costs, Report, band
from speccascade_jax.preflight.sweeps import models_of
from speccascade_jax.results.store import program_costs
from speccascade_jax.results.store.program_costs import Hardware
from speccascade_jax.results.store.record import Record, Row

Compile = Callable[..., Report]
"""A function with the arguments and results of `preflight.report`."""


def complete(
    path: Path,
    records: Sequence[Record],
    hardware: Iterable[Hardware],
    compile_report: Compile = preflight.report,
    say: Callable[[str], None] | None = None,
) -> dict[str, Row]:
    """Returns the costs of the records' programs; compiles those that the file at `path` lacks, and adds their costs.

    Costs in the file are kept, whichever compiler versions they come from; remove the file to compile all programs
    again.

    Args:
        path: the file of costs, which need not exist (`program_costs.path_of`).
        records: records of measurements.
        hardware: the kinds of devices to compile for.
        compile_report: function that compiles a program; tests pass one that compiles nothing.
        say: function that receives a line for each compiled program; by default, the line is printed on stderr.

    Raises:
        ImportError: the compiler of the hardware is not installed.
        ValueError: the hardware is unknown, or the models of a record are not on this machine.
    """
    costs = program_costs.read(path)
    lacking, say = program_costs.missing(records, hardware, costs), say or partial(print, file=sys.stderr)
    for topology in {program["topology"] for program in lacking}:
        chip_of(topology)  # raises an error for an unknown chip before anything is compiled
    for number, program in enumerate(lacking, 1):
        begin = time.monotonic()
        costs[program_costs.key(program)] = entry(program, compile_report)
        program_costs.write(path, costs)
        spent = f"{time.monotonic() - begin:.0f} s"
        say(f"[{number}/{len(lacking)}] compiled for {program['topology']}: {_name(program)}, {spent}")
    return costs


def _name(program: Mapping[str, Any]) -> str:
    """Returns the name of a program in progress lines: its part and its method."""
    method = program["settings"].get("method")
    return f"{program['part']} of {method}" if method else f"{program['part']} of both models"


def entry(program: Row, compile_report: Compile) -> Row:
    """Returns a program's entry in a file of costs, or an entry with the reason if it cannot be compiled.

    Raises:
        ImportError, FileNotFoundError, ValueError: as in `complete`.
    """
    arguments = job(program)
    try:
        compiled = compile_report(**arguments)
    except preflight.DoesNotFitError as error:
        return {"program": program, "refused": f"it does not fit {program['topology']}: {error}"}
    except (ValueError, TypeError, NotImplementedError) as error:
        if program["settings"].get("method") in (TARGET, DRAFT):
            raise  # Decoding with one model has no unusual settings, so the hardware, mesh or models must be wrong.
        return {"program": program, "refused": str(error)}
    if not compiled.fits:
        return {
            "program": program,
            "refused": f"it needs {compiled.missing:,} bytes more than {program['topology']} has",
        }
    chip = chip_of(compiled.chip)

    def seconds(costs: Mapping[str, Costs]) -> Row:
        bands = {name: dataclasses.asdict(band(stage, chip)) for name, stage in costs.items()}
        return {name: {"ops": parts.pop("starts"), **parts} for name, parts in bands.items()}

    return {
        "program": program,
        "stages": seconds(compiled.stages),
        "more": seconds(compiled.more),
        "complete": compiled.complete,
        "launch": chip.launch,
        "versions": dict(compiled.versions),
        "peak_bytes": compiled.memory.peak,
    }


def job(program: Mapping[str, Any]) -> Row:
    """Returns the arguments of `preflight.report` for a program's description.

    The loop that drafts and the loop that catches up count 0 iterations, because `Report.more` contains the costs of
    one iteration.

    Raises:
        ValueError, FileNotFoundError: the models are not on this machine.
    """
    settings = {name: tuple(x) if isinstance(x, list) else x for name, x in program["settings"].items()}
    shared = {name: program[name] for name in ("topology", "dtype", "part", "prompt_length", "max_new_tokens")}
    shared |= {"mesh": tuple(program["mesh"]), "draft_whole": program.get("draft_whole", False), "batch": 1}
    return {**_models(program), **shared, **settings, "drafted": 0, "catching_up": 0}


def per_call(
    *,
    pair: ModelPair,
    topology: str,
    dtype: str = "bfloat16",
    prompt_length: int = 128,
    max_new_tokens: int = 128,
    start: float = 0.5,
    compile_report: Compile = preflight.report,
) -> dict[str, float]:
    """Returns, for each model of a pair, the microseconds of a call with one token, computed from compiled programs.

    `hierarchy.optimizing.optimize` takes them as costs, and finds the best stack of models for that hardware.

    Args:
        pair: the target and its draft models.
        topology: as for `preflight.report`.
        dtype: dtype of all models.
        prompt_length: number of tokens of a prompt.
        max_new_tokens: number of tokens of an output.
        start: the time to start an op, as a share (0 to 1) of the largest time, `Chip.launch`.
        compile_report: function that compiles a program; tests pass one that compiles nothing.

    Raises:
        ImportError, FileNotFoundError, ValueError: as in `complete`.
    """
    target, draft, others = models_of(pair)
    sources = {"target": None, "draft": draft, **others}
    shared = {"topology": topology, "mesh": pair.mesh, "draft_whole": pair.draft_whole, "dtype": dtype}
    shared |= {"prompt_length": prompt_length, "max_new_tokens": max_new_tokens}
    costs = dict[str, float]()
    for name, source in sources.items():
        part = "target" if source is None else "draft"
        seconds = compile_report(target, source, part=part, **shared).band
        costs[name] = 1e6 * (seconds.low + start * seconds.starts)
        print(f"compiled for {topology}: a call of {name} takes {costs[name]:.3g} µs", file=sys.stderr)
    return costs


def _models(program: Mapping[str, Any]) -> Row:
    """Returns the paths or presets of a program's models."""
    if "target" in program and "draft" not in program:  # decoding with the target alone
        return {"target": program["target"], "draft": None, "others": {}}
    others = dict(text.split("=", 1) for text in program.get("others", ()))
    named = {name: program[name] for name in ("target", "draft") if name in program}
    target, draft, others = models_of(ModelPair(name=program.get("pair", "custom"), others=others, **named))
    return {"target": target, "draft": draft, "others": others}
