"""Compilation of experiments' programs for TPUs and GPUs that this machine does not have, and reports of their costs.

XLA's compilers run on any machine. A compiled program shows whether it fits the device's memory, and how much it reads,
computes and sends to other devices. Nothing runs, so no figure is a measurement.

    >>> from speccascade_jax import preflight
    >>> sorted(preflight.CHIPS)[:3]
    ['a100', 'b200', 'h100']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from speccascade_jax.methods.settings import Settings
from speccascade_jax.preflight import compiling
from speccascade_jax.preflight.chips import CHIPS, Chip
from speccascade_jax.preflight.compiling import DoesNotFitError
from speccascade_jax.preflight.executables import load, save
from speccascade_jax.preflight.programs import DTYPES, PARTS, Job, Traced
from speccascade_jax.preflight.report import Band, Costs, Memory, Report

__all__ = ["CHIPS", "DTYPES", "PARTS", "Band", "Chip", "Costs", "DoesNotFitError", "Job", "Memory", "Report"]
__all__ += ["compiled", "load", "report", "save"]

_JOB = frozenset(Job.__dataclass_fields__) - {"settings"}


def compiled(
    target: str, draft: str | None = None, *, topology: str, mesh: Sequence[int] = (1, 1), **arguments: Any
) -> jax.stages.Compiled:
    """Compiles one part of decoding, or a training step, for devices that this machine does not have.

    Args:
        target: a preset (`models.families.PRESETS`) or the path of a checkpoint, whose arrays are not read.
        draft: like `target`, or the name of a derived draft, such as "exit:2" (the target's first two layers).
        topology: "CHIP:SIZES", such as "v5e:2x4".
        mesh: (data, model), as for `sc.Pair.load`.
        arguments: fields of `Job` (`part`, `batch`, `prompt_length`, `max_new_tokens`, `dtype`, `draft_dtype`,
            `draft_whole`, `others`), and settings of `sc.decode` by name.

    Returns:
        The compiled program. Its `memory_analysis` and `as_text` can be read; it cannot run here. For example, this
        gives the bytes of all arguments of a round in which T5 1.1 small drafts for base, with 8 rows in bfloat16:
        `compiled("t5_1_1_base", "t5_1_1_small", topology="v5e", batch=8).memory_analysis().argument_size_in_bytes`.

    Raises:
        ValueError: an argument is invalid, or the mesh does not fit the models.
        DoesNotFitError: the program needs more memory than a device has.
        ImportError: the compiler of the devices is not installed.
    """
    job = job_of(target, draft, topology=topology, mesh=mesh, **arguments)
    return compiling.compile_job(Traced.of(job))


def report(
    target: str,
    draft: str | None = None,
    *,
    topology: str,
    mesh: Sequence[int] = (1, 1),
    drafted: float | None = None,
    catching_up: float | None = None,
    rounds: float | None = None,
    loops: Mapping[str, float] | None = None,
    dump: bool = True,
    **arguments: Any,
) -> Report:
    """Compiles a program as `compiled` does, but in a separate process, and returns a report on it.

    Args:
        target: as for `compiled`.
        draft: as for `compiled`.
        topology: as for `compiled`.
        mesh: as for `compiled`.
        drafted: number of passes of the draft model in a round; `None`: as many as a full block needs.
        catching_up: number of calls in a round that bring the draft model's cache up to date; `None`: one, as after a
            block that was accepted in full, or none if the cache is complete after every round.
        rounds: number of rounds of a whole generation; `None`: the smallest possible, as if every draft is accepted.
        loops: iterations of further loops that depend on data: a regular expression that matches the loop's scope in
            the compiled program -> the number. Loops that match none run once.
        dump: whether the compiler also writes its final schedules, from which cycles are counted; compiling then takes
            longer.
        arguments: as for `compiled`.

    Raises:
        ValueError, DoesNotFitError, ImportError: as for `compiled`.
    """
    job = job_of(target, draft, topology=topology, mesh=mesh, **arguments)
    return compiling.in_child(
        job, dump, drafted=drafted, catching_up=catching_up, rounds=rounds, loops=dict(loops or {})
    )


def job_of(target: str, draft: str | None, **arguments: Any) -> Job:
    """Returns a job from the arguments of `compiled`: fields of `Job`, and settings of `sc.decode` by name."""
    fields = {name: value for name, value in arguments.items() if name in _JOB}
    fields["others"] = tuple(dict(fields.get("others", {})).items())
    settings = {name: value for name, value in arguments.items() if name not in _JOB}
    return Job(target=target, draft=draft, settings=Settings.of("preflight", settings), **fields)
