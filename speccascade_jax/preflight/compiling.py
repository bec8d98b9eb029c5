"""Compilation of a `Job` and analysis of the compiled program, in a child process where the compiler writes a dump.

A job is one part of decoding, or a training step, with the devices to compile it for.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from speccascade_jax.models import memory_estimate
from speccascade_jax.models.experts import BLOCK
from speccascade_jax.preflight import bundles, gpu, hlo, report, training
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.execution import Assumptions, Execution, execute
from speccascade_jax.preflight.programs import Job, Traced
from speccascade_jax.preflight.report import Costs, Memory, Report
from speccascade_jax.runtime import own_files

ROUNDS = r"^[^/]*(/jit\([^)]*\))?/while"
"""Pattern of the scope of the loop over rounds, in a program's text."""
BISECTIONS = 31
"""Number of halvings in the search for the threshold of top-k and top-p (`core.sampling`)."""
CATCH_UP, DRAFT = r"/catch_up/while", r"/draft/while"
"""Patterns of the scopes of two loops: one brings the draft model's cache up to date, the other one drafts."""
_CALLBACKS = ("callback", "xla_python", "SendToHost", "RecvFromHost")
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton")
"""Targets of custom calls that are hand-written kernels (Pallas)."""
_LEFT_OUT = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
"""Environment variables that the child process does not get: with them, it would compile another program, or none."""
_TOO_LARGE = ("RESOURCE_EXHAUSTED", "Ran out of memory", "exceeds the limit", "out of memory")


class DoesNotFitError(ValueError):
    """Error for a program that its compiler refused, because it needs more memory than a device has."""


def compile_job(traced: Traced) -> jax.stages.Compiled:
    """Compiles a job's part.

    Raises:
        DoesNotFitError: the program needs more memory than a device has; the message says how much.
        ValueError: as in `programs.Traced`.
    """
    with traced.on_platform():
        lowered = traced.lower()
    try:
        with warnings.catch_warnings():
            # JAX looks for every program in its cache, but it cannot read programs for devices that this machine does
            # not have
            warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")
            return lowered.compile()
    except Exception as error:
        if any(sign in str(error) for sign in _TOO_LARGE):
            raise DoesNotFitError(_too_large(str(error))) from error
        raise


def _too_large(message: str) -> str:
    """Returns a line that says how many bytes a program lacks; the first line of XLA's error if it names no sizes."""
    sizes = _SIZES.search(message)
    if sizes is None:
        return message.splitlines()[0]
    needed, available = (float(sizes[n]) * _UNITS[sizes[n + 1]] for n in (1, 3))
    return (
        f"the program needs {needed:,.0f} bytes on each device, which has {available:,.0f}: {needed - available:,.0f} "
        f"are missing; use more devices along the model axis (mesh), a smaller batch, or fewer bits (dtype)"
    )


_SIZES = re.compile(r"([\d.]+)([KMG])\W*(?:exceeds|of)\D*?([\d.]+)([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def assumptions(
    traced: Traced,
    drafted: float | None = None,
    catching_up: float | None = None,
    rounds: float | None = None,
    loops: Mapping[str, float] | None = None,
) -> Assumptions:
    """Returns what a program's text does not contain: how often loops run, and which branches are taken.

    The target scores each block at the program's largest width, and sampling takes the branches that the settings
    imply.

    Args:
        traced: the job.
        drafted: number of passes of the draft model in a round; `None`: as many as a full block needs.
        catching_up: number of calls in a round that bring the draft model's cache up to date; `None`: one, as after a
            block that was accepted in full, or none if the cache is complete after every round.
        rounds: number of rounds of a whole generation; `None`: the smallest possible, as if every draft is accepted.
        loops: pattern of a loop's scope -> iterations, instead of the default; each pattern must match a loop.

    Raises:
        ValueError: a number is negative.
    """
    engine = traced.one_engine
    block = 0 if engine is None else engine.block
    steps = (traced.drafted if block else 1) if drafted is None else drafted
    complete = engine is not None and block > 0 and engine.complete
    # Some drafters run their first pass before the loop that drafts. It also feeds a missed token, so that no call has
    # to catch up.
    opened = block > 0 and traced.first_pass_feeds_two
    missing_calls = float(not complete and not opened) if catching_up is None else catching_up
    fewest = -(-traced.job.max_new_tokens // (block + 1)) if rounds is None else rounds
    counts = {"drafted": steps, "catching_up": missing_calls, "rounds": fewest, **(loops or {})}
    for name, count in counts.items():
        if not count >= 0:
            raise ValueError(f"{name}={count} is not a count: give how often the loop runs, 0 or more")
    usual = _expert_loops(traced, block) | {
        CATCH_UP: missing_calls,
        r"/sampling/.*/while": BISECTIONS,
        rf"/width_{block + 1}/while": 1,
        r"/width_\d+/while": 0,
        DRAFT: max(steps - int(opened), 0),
        ROUNDS: fewest,
    }
    return Assumptions(loops=dict(loops or {}) | usual, branches=_branches(traced), needed=tuple(loops or ()))


def _expert_loops(traced: Traced, block: int) -> dict[str, float]:
    """Returns the iterations of the target's and the draft's loops over experts; a training step has none."""
    job = traced.job
    if job.part == "train":
        return {}
    configs = [getattr(bound.model, "config", None) for bound in (traced.pair.target, traced.pair.draft)]
    return expert_loops(*configs, rows=job.batch // job.mesh[0], block=block, prompt=job.prompt_length)


def expert_loops(target: Any, draft: Any, *, rows: int, block: int, prompt: int) -> dict[str, float]:
    """Returns the iterations of loops over experts, by pattern of their scopes, if choices are even and independent.

    Args:
        target: the target's configuration.
        draft: the draft's configuration.
        rows: number of rows on each device.
        block: number of drafted tokens that the target scores.
        prompt: number of tokens of a prompt.
    """
    loops: dict[str, float] = {}
    # The first pattern that matches a loop counts, so patterns of inner loops come first. Every prefill counts as one
    # of the target, which is the larger model.
    calls = ((r"\.states/", target, prompt - 1), (r"/(draft|catch_up)/", draft, 1), ("", target, block + 1))
    for scope, config, tokens in calls:
        if not getattr(config, "num_experts", 0):
            continue
        used = memory_estimate.experts_used(config, rows * tokens)
        choices = rows * tokens * config.experts_per_token
        loops[rf"{scope}.*_mix_by_expert/while$"] = used
        loops[rf"{scope}.*_mix_by_block/while$"] = used * math.ceil(choices / max(used, 1) / BLOCK)
    return loops


def _branches(traced: Traced) -> dict[str, int]:
    """Returns the index of the branch that each conditional of `core.sampling` takes, by pattern of its scope.

    The first matching pattern counts, so the patterns of the draft come before the general ones.
    """
    settings = traced.settings
    heat = settings.temperature if settings.draft_temperature is None else settings.draft_temperature
    table = dict[str, int]()
    for scope, temperature in ((r"/draft/.*", heat), (r"", settings.temperature)):
        greedy = temperature <= 0
        identity = temperature == 1 and settings.top_p >= 1 and settings.top_k <= 0
        table |= {
            rf"{scope}/identity_greedy_or_scaled/cond:3": 1 if greedy else 0 if identity else 2,
            rf"{scope}/is_identity/cond:2": int(identity),
            rf"{scope}/is_greedy/cond:2": int(greedy),
            rf"{scope}/in_one_kernel/cond:2": int(settings.top_p >= 1 and settings.top_k <= 0),
            rf"{scope}/truncates/cond:2": int(not greedy and (settings.top_p < 1 or settings.top_k > 0)),
        }
    return table


def analyse(
    traced: Traced,
    compiled: jax.stages.Compiled,
    cycles: Mapping[str, int] | None,
    chosen: Assumptions,
    command_buffers: Sequence[frozenset[str]] | None = None,
) -> tuple[Execution, Report]:
    """Returns what a compiled program executes, and the report on it without its compile time.

    Args:
        traced: the job.
        compiled: its compiled program.
        cycles: cycles of every instruction that has its own schedule (`bundles.read`); `None` if they were not read.
        chosen: assumptions about numbers that the program's text does not contain.
        command_buffers: instructions in each command buffer of a GPU (`gpu.read`); `None` if they were not read.
    """
    on_gpu = chip_of(traced.job.topology).is_gpu
    text = compiled.as_text() or ""
    text = gpu.without_spaces(text) if on_gpu else text
    start = "prefill" if traced.job.part in ("prefill", "generation") else "unnamed"
    module, engine = hlo.parse(text), traced.one_engine
    execution = execute(module, chosen, start, host_counts=on_gpu)
    kernels = [s.instruction.name for s in execution.steps if s.instruction.target in _KERNELS]
    shapes = traced.cache_shapes if engine is not None and traced.job.part != "prefill" else frozenset()
    return execution, Report(
        job=traced.job.as_values(),
        chip=chip_of(traced.job.topology).name,
        memory=_memory(compiled),
        stages=report.account(execution, cycles),
        more=_more(module, cycles, chosen) if traced.job.part == "round" else {},
        complete=engine is not None and engine.complete,
        cache_copies=report.cache_copies(execution, shapes),
        kernels=kernels,
        f64=text.count("f64["),
        callbacks=sum(any(sign in s.instruction.target for sign in _CALLBACKS) for s in execution.steps),
        dumped=(command_buffers if on_gpu else cycles) is not None,
        launches=gpu.launches(execution, command_buffers or ()) if on_gpu else None,
        messages=report.messages(execution),
        work=training.work_of(traced.job) if traced.job.part == "train" else None,
        assumed=execution.assumed,
        versions=versions(),
    )


def _more(module: hlo.Module, cycles: Mapping[str, int] | None, chosen: Assumptions) -> dict[str, Costs]:
    """Returns the costs that one more iteration adds, for each of the two loops of a round."""

    def total(loops: Mapping[str, float]) -> Costs:
        execution = execute(module, replace(chosen, loops=loops))
        return report.summed(report.account(execution, cycles).values())

    before = total(chosen.loops)
    loops = {"draft": DRAFT, "catch-up": CATCH_UP}
    after = {name: total({**chosen.loops, scope: chosen.loops[scope] + 1}) for name, scope in loops.items()}
    return {name: costs.plus(before, -1) for name, costs in after.items()}


def _memory(compiled: jax.stages.Compiled) -> Memory:
    stats: Any = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliases=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def versions() -> dict[str, str]:
    """Returns the versions of jax and of the installed compilers, by package."""
    installed = {"jax": jax.__version__}
    for package in ("libtpu", "jax-cuda12-plugin"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def in_child(job: Job, dump: bool, save: Path | None = None, **assumed: Any) -> Report:
    """Compiles and analyses a job in a child process.

    A new process is needed, because the compiler reads the flags for its dump only once, when it is loaded.

    Args:
        job: the program to compile.
        dump: whether to read cycles from the compiler's final schedules.
        save: a file for the compiled program (`executables`); `None`: the program is not kept.
        assumed: arguments of `assumptions`.

    Raises:
        DoesNotFitError, ValueError, ImportError: as in `compile_job` and `programs.Traced`; raised by the child
            process.
        RuntimeError: the child process ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        environment["JAX_PLATFORMS"] = "cpu"
        if dump:
            environment |= _dump_flags(job, folder)
        request = {"job": job, "assumed": assumed, "folder": folder if dump else None, "save": save}
        # The paths of files that the user loaded come first. The request may hold objects that these files define, such
        # as rules, and they can be unpickled only after the files are loaded.
        asked = pickle.dumps(list(own_files.loaded().values())) + pickle.dumps(request)
        command = [sys.executable, "-m", "speccascade_jax.preflight.child"]
        done = subprocess.run(command, input=asked, capture_output=True, env=environment, check=False)
    return _answer(done)


def _dump_flags(job: Job, folder: str) -> dict[str, str]:
    """Returns environment variables that make a job's compiler write the files that `answer` reads."""
    on_gpu = chip_of(job.topology).is_gpu
    name, flags = ("XLA_FLAGS", gpu.DUMP_FLAGS) if on_gpu else ("LIBTPU_INIT_ARGS", bundles.DUMP_FLAGS)
    return {name: f"{os.environ.get(name, '')} {' '.join(flags).format(folder=folder)}".strip()}


def _answer(done: subprocess.CompletedProcess[bytes]) -> Report:
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["nothing was printed"])[-1]
        raise RuntimeError(f"the compiling process ended with status {done.returncode}: {last_line}") from None
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (DoesNotFitError, ValueError, ImportError, FileNotFoundError)}
        raise kinds.get(answer["error"], RuntimeError)(answer["message"])
    return Report.from_json(answer["report"])


def answer(
    request: Mapping[str, Any], keep: Callable[[Path, jax.stages.Compiled], Path] | None = None
) -> dict[str, Any]:
    """Compiles and analyses the job of a request, in the child process; returns the answer as JSON values.

    Args:
        request: the request that `in_child` sends.
        keep: function that writes the compiled program to the file that the request names.
    """
    try:
        traced = Traced.of(request["job"])
        chosen = assumptions(traced, **request["assumed"])
        begin = time.monotonic()
        compiled = compile_job(traced)
        seconds = time.monotonic() - begin
        if keep is not None and request.get("save") is not None:
            keep(request["save"], compiled)
        folder = None if request["folder"] is None else Path(request["folder"])
        on_gpu = chip_of(request["job"].topology).is_gpu
        cycles = None if folder is None or on_gpu else bundles.read(folder)
        command_buffers = None if folder is None or not on_gpu else gpu.read(folder)
        _, account = analyse(traced, compiled, cycles, chosen, command_buffers)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        kind = "DoesNotFitError" if isinstance(error, DoesNotFitError) else type(error).__name__
        return {"error": kind, "message": str(error)}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"report": account.as_json() | {"compile_seconds": seconds, "compile_memory": memory}}
