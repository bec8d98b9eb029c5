"""Compiles the programs of any experiment for TPUs and GPUs that are not there, and reports what they need and cost.

XLA's compilers run on any machine. They say whether a program fits the device's memory, and what it reads, computes and
exchanges. Nothing runs, so these figures are compiled for a device, never measured on it.

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
    """Compiles one part of decoding, or a training step, for devices that are not there.

    Args:
        target: a preset (`models.families.PRESETS`) or the path of a checkpoint, whose arrays are not read.
        draft: like `target`, or a word such as "exit:2".
        topology: "CHIP:SIZES", such as "v5e:2x4".
        mesh: (data, model), as for `sc.Pair.load`.
        arguments: fields of `Job` (`part`, `batch`, `prompt_length`, `max_new_tokens`, `dtype`, `draft_dtype`,
            `draft_whole`, `others`), and settings of `sc.decode` by name.

    Returns:
        The compiled program. Its `memory_analysis` and `as_text` can be read; it cannot run here. For example, the
        bytes of arguments of a round of T5 1.1 small under base at 8 rows, bfloat16:
        `compiled("t5_1_1_base", "t5_1_1_small", topology="v5e", batch=8).memory_analysis().argument_size_in_bytes`.

    Raises:
        ValueError: a value without meaning, or a mesh that does not fit the models.
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
    """Compiles a program as `compiled` does, in a process of its own, and reports on it.

    Args:
        target: as for `compiled`.
        draft: as for `compiled`.
        topology: as for `compiled`.
        mesh: as for `compiled`.
        drafted: passes of the draft model in a round; `None`: those of a whole block.
        catching_up: calls that bring the draft's cache up to date; `None`: one, which a round needs after a block that
            was kept whole, or none if the rule keeps the cache complete.
        rounds: rounds of a whole generation; `None`: as few as there can be, each draft kept.
        loops: pattern of another loop's scope -> its iterations, where the program does not hold them; otherwise once.
        dump: whether the compiler also writes its final schedules, from which cycles are read; compiling takes longer.
        arguments: as for `compiled`.

    Raises:
        ValueError, DoesNotFitError, ImportError: as for `compiled`.
    """
    job = job_of(target, draft, topology=topology, mesh=mesh, **arguments)
    return compiling.in_child(
        job, dump, drafted=drafted, catching_up=catching_up, rounds=rounds, loops=dict(loops or {})
    )


def job_of(target: str, draft: str | None, **arguments: Any) -> Job:
    """Returns a job from arguments; those that are not fields of `Job` are settings of `sc.decode`."""
    fields = {name: value for name, value in arguments.items() if name in _JOB}
    fields["others"] = tuple(dict(fields.get("others", {})).items())
    settings = {name: value for name, value in arguments.items() if name not in _JOB}
    return Job(target=target, draft=draft, settings=Settings.of("preflight", settings), **fields)
