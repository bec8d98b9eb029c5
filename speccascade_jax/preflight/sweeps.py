"""Programs of a sweep (measurements over many settings): a job for each program, and a table of the reports on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from speccascade_jax.core.arrays import bucket
from speccascade_jax.core.types import STORED
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation.points import ModelPair, Point
from speccascade_jax.methods.generations import Alone, OracleMethod
from speccascade_jax.methods.settings import AUTO, Settings
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.pairs.derived import is_derived
from speccascade_jax.pairs.pair import DATA_PAIRS, find_data_pair, find_pair
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.compiling import DoesNotFitError
from speccascade_jax.preflight.programs import Job
from speccascade_jax.preflight.report import Report
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.program_costs import same_branch
from speccascade_jax.storage.files import expanded

GB = 1e9


class Planned(NamedTuple):
    """Program that a sweep would compile.

    Attributes:
        method: the method's name in tables.
        job: the program.
        points: the number of the sweep's points (measurements) that run it.
    """

    method: str
    job: Job
    points: int


class Result(NamedTuple):
    """Report on a program, or the reason why there is none.

    Attributes:
        planned: the program.
        report: the report; `None` if the program was not compiled.
        error: the reason why it was not compiled.
        too_large: whether this reason is that the program needs more memory than a device has.
    """

    planned: Planned
    report: Report | None
    error: str = ""
    too_large: bool = False

    @property
    def fits(self) -> str:
        """Whether the program fits into memory: "yes", "no", or "error" if this is unknown."""
        if self.report is not None:
            return "yes" if self.report.fits else "no"
        return "no" if self.too_large else "error"


def models_of(source: ModelPair) -> tuple[str, str, dict[str, str]]:
    """Returns the paths or names of the target, the draft and the further drafts of a pair; no weights are read.

    Raises:
        ValueError, FileNotFoundError: the models are not on this machine.
    """
    others = {name: path if is_derived(path) else str(expanded(path)) for name, path in source.others.items()}
    if source.target is not None and source.draft is not None:
        return source.target, source.draft, others
    if source.name in DATA_PAIRS:
        target, draft, _ = find_data_pair(source.name)
        return str(target), str(draft), others
    folder, _ = find_pair(source.name)
    others = {path.name: str(path) for path in sorted(folder.glob("drafts/*")) if path.is_dir()} | others
    return str(folder / "target"), str(folder / "draft"), others


def planned(
    points: Iterable[Point], topology: str, mesh: tuple[int, int], prompt_length: int | None = None
) -> list[Planned]:
    """Returns the programs of a sweep: for each method, rounds at the two batch sizes that it measures, and prefills.

    Latency is measured at batch 1, quality at a larger batch. Measurements that differ only in α or in the values of
    sampling settings share a program. Methods that run several generations are left out, because each of these
    generations is decoding with the target or the draft alone, which every sweep contains.

    Args:
        points: the sweep's points; each has the settings of one measurement.
        topology: the devices.
        mesh: (data, model), which replaces the mesh of the points.
        prompt_length: tokens of a prompt; `None`: the longest that the task allows.
    """
    programs: dict[Job, Planned] = {}
    for point in points:
        if _has_a_program(point):
            for job in _jobs(point, topology, mesh, prompt_length):
                kind = kind_of(job)
                name = "models" if job.part == "prefill" else _title(point)
                before = programs.get(kind, Planned(name, job, 0))
                programs[kind] = before._replace(points=before.points + 1)
    return list(programs.values())


def left_out(points: Iterable[Point]) -> list[str]:
    """Returns the titles of the methods for which `planned` returns no program."""
    return list(dict.fromkeys(_title(point) for point in points if not _has_a_program(point)))


def _has_a_program(point: Point) -> bool:
    """Returns whether the point's method runs one generation, in a program that does not depend on measured costs."""
    single = isinstance(point.method, Speculation | Alone) and not isinstance(point.method, OracleMethod)
    return single and point.settings.block_size != AUTO


def kind_of(job: Job) -> Job:
    """Returns the job without the settings that do not change the program, so that jobs with one program are equal."""
    return replace(job, settings=_kind(job.settings))


def _title(point: Point) -> str:
    details = ", ".join(point.method.details(point.settings))
    heading = point.method.heading(point.settings)
    return f"{heading} [{details}]" if details else heading


def _jobs(point: Point, topology: str, mesh: tuple[int, int], prompt_length: int | None) -> Iterator[Job]:
    evaluation, task = point.evaluation.resolved(), get_task(point.evaluation.task)
    target, draft, others = models_of(point.pair)
    drafts = point.pair.draft_dtype
    rounds = Job(
        target=target,
        draft=draft,
        others=tuple(sorted(others.items())),
        topology=topology,
        mesh=mesh,
        draft_whole=point.pair.draft_whole,
        prompt_length=bucket(task.max_input_length if prompt_length is None else prompt_length),
        max_new_tokens=int(evaluation.max_new_tokens or 1),
        dtype=_on_accelerators(point.pair.dtype),
        draft_dtype=None if drafts in (None, STORED) else _on_accelerators(str(drafts)),
        settings=point.settings,
    )
    if evaluation.latency_examples and mesh[0] == 1:
        yield replace(rounds, batch=1)
    batch = -(-min(evaluation.quality_batch, evaluation.quality_examples) // mesh[0]) * mesh[0]
    yield replace(rounds, batch=batch)
    if isinstance(point.method, Speculation):
        yield replace(rounds, batch=batch, part="prefill", settings=_of_prefill(point.settings))


def _on_accelerators(dtype: str) -> str:
    """Returns the dtype in which accelerators compute: for any 16-bit dtype this is bfloat16."""
    return "bfloat16" if dtype == "float16" else dtype


def _kind(settings: Settings) -> Settings:
    """Returns settings that are equal if the programs and the branches that sampling takes are equal."""
    return replace(settings, alpha=None, stop_threshold=None, temperature=same_branch(settings.temperature))


def _of_prefill(settings: Settings) -> Settings:
    """Returns the settings on which a prefill depends: which models read the prompts, and the longest rollback."""
    if settings.drafters == Settings().drafters and settings.tree is None:
        size = settings.block_size if isinstance(settings.block_size, int) else None
        return Settings(method="spec_decode", block_size=size)
    return settings


def run(
    programs: Sequence[Planned],
    report: Callable[[Job], Report],
    track: Callable[[Sequence[Planned]], Iterable[Planned]],
) -> list[Result]:
    """Compiles every program once, including a prefill that several methods share; returns the results in order.

    Args:
        programs: the programs.
        report: function that compiles a job and returns the report on it.
        track: wraps the programs in a progress bar.
    """
    results = list[Result]()
    for program in track(programs):
        try:
            results.append(Result(program, report(program.job)))
        except (ValueError, RuntimeError) as error:
            too_large = isinstance(error, DoesNotFitError)
            results.append(Result(program, None, str(error).splitlines()[0], too_large))
    return results


def grid(results: Sequence[Result], topology: str, mesh: tuple[int, int], missing: Sequence[str] = ()) -> Grid:
    """Returns the table of a sweep's programs on the devices of a topology.

    Args:
        results: the programs with their reports.
        topology: the devices.
        mesh: (data, model).
        missing: titles of the methods that have no program here (`left_out`).
    """
    header = ["program", "batch", "fits", "GB a device", "HBM MB", "compute ms", "ops", "collectives", "ms", "bound by"]
    rows = [_row(result) for result in results]
    reports = [result.report for result in results if result.report is not None]
    chip = chip_of(topology)
    notes = [
        f"Compiled for {topology}, mesh {mesh}, by {_versions(reports)}; nothing ran. Each device has "
        f"{chip.memory / GB:.1f} GB.",
        f"ms: the larger of HBM traffic ({chip.bandwidth / GB:,.0f} GB/s) and compute, plus collectives "
        f"({chip.latency * 1e6:g} µs each), up to that plus {chip.launch * 1e6:g} µs for each op.",
    ]
    if not all(report.dumped for report in reports):
        notes.append("Without final schedules compute is unknown, and small scalar instructions count as ops.")
    if missing:
        notes.append(f"Left out, without a program of their own: {', '.join(missing)}.")
    if assumed := sorted({line for report in reports for line in report.assumed if " × " in line}):
        notes.append(f"Assumed: {'; '.join(assumed)}.")
    return Grid(title=f"Programs compiled for {topology}", header=header, rows=rows, notes=notes)


def _row(result: Result) -> list[str]:
    job, report = result.planned.job, result.report
    name = result.planned.method if job.part == "round" else f"{result.planned.method}, {job.part}"
    if report is None:
        return [name, str(job.batch), result.fits, *[NONE] * 7]
    total, band = report.total, report.band
    return [
        name,
        str(job.batch),
        result.fits,
        f"{report.memory.peak / GB:.2f}",
        f"{total.hbm_bytes / 1e6:,.0f}",
        f"{band.compute * 1e3:.2f}" if total.cycles else NONE,
        f"{total.ops:,.0f}",
        f"{total.collectives:,.0f}",
        f"{band.low * 1e3:.3g} to {band.high * 1e3:.3g}",
        band.bound,
    ]


def _versions(reports: Sequence[Report]) -> str:
    versions = dict(item for report in reports for item in report.versions.items())
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "no compiler"


def refusals(results: Sequence[Result]) -> list[str]:
    """Returns a line for every program that does not fit its devices: the missing bytes, and what to change."""
    lines = []
    for result in results:
        job = result.planned.job
        smaller = "a smaller batch, or dtype bfloat16 or int8"
        if job.part == "train":
            smaller = "a higher Trainer.accumulate, or Trainer.remat = True"
        place = f"{result.planned.method} ({job.part}, batch {job.batch})"
        if result.report is None:
            lines.append(f"{place}: {result.error}")
        elif not result.report.fits:
            lines.append(
                f"{place} needs {result.report.memory.peak:,} bytes on each device of {job.topology}, "
                f"{result.report.missing:,} more than it has: use more devices along the model axis (--mesh), "
                f"{smaller}"
            )
    return lines
