r"""Compile every program of a sweep for TPUs or GPUs, on a machine without them: what fits, and what a round costs.

    python -m experiments.preflight --gin_file=configs/quickstart.gin --topology=v5e
    python -m experiments.preflight --gin_file=configs/paper1_table2.gin --gin_file=configs/sizes/published.gin \
        --gin_file=gin/tasks/xsum.gin --gin_file=gin/models/two_checkpoints.gin --gin.PAIR="'t5'" \
        --gin.TARGET="'t5_1_1_xl'" --gin.DRAFT="'t5_1_1_small'" --gin.DTYPE="'bfloat16'" --topology=v5e:2x2 --mesh=1,4
    python -m experiments.preflight --gin_file=gin/finetune/t5_xl.gin --gin_file=gin/finetune/wmt14_en_de.gin \
        --gin.MODEL="'t5_1_1_xl'" --gin.RUN_DIR="''" --part=train --topology=v5e:4x4      a step of fine-tuning
    python -m experiments.preflight … --topology=v5p:2x2x1 --output=results/preflight.json     keeps the reports
    python -m experiments.preflight … --save=programs      keeps the compiled programs

The gin files are those of the sweep, or of `experiments.finetune` with --part=train. A model may be a preset's name
(t5_1_1_small … t5_1_1_xxl, gemma2_2b …) or a checkpoint, of which only names and shapes are read. Nothing runs: the
figures are compiled for the devices. The command ends with status 3 if a program does not fit. A small program takes
10 s to compile, a large one several minutes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gin
from absl import flags

from speccascade_jax import checkpoints
from speccascade_jax.core.checks import whole
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.environment import package
from speccascade_jax.pairs.derived import is_derived
from speccascade_jax.preflight import compiling, sweeps, training
from speccascade_jax.preflight.programs import Job
from speccascade_jax.preflight.report import Report
from speccascade_jax.preflight.topologies import mesh_of
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.grid import Grid
from speccascade_jax.runtime import gin_flags, interrupts, own_files, short_flags
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.storage.files import check_replaceable, expanded, rewrite
from speccascade_jax.training.finetune import trainer

EXAMPLE = "python -m experiments.preflight --gin_file=configs/quickstart.gin --topology=v5e"
DOES_NOT_FIT = 3
SHORT = short_flags.Offered(function=experiment.sweep, without=("output",), sizes=short_flags.SIZES)
_BEGIN = r'\{\n "preflight": '


def main() -> None:
    """Reads the command line and compiles."""
    gin_flags.define_flags(SHORT)
    flags.DEFINE_string("topology", "v5e", "devices: CHIP or CHIP:SIZES, such as v5e:2x4", module_name=sys.argv[0])
    flags.DEFINE_list("mesh", None, "devices for rows and for the model: 1,4 (the gin files' mesh)",
                      module_name=sys.argv[0])  # fmt: skip
    flags.DEFINE_enum("part", "sweep", ["sweep", "train"], "sweep: the programs of the gin files' sweep; train: one "
                      "step of their trainer.Trainer, of its widest batch", module_name=sys.argv[0])  # fmt: skip
    flags.DEFINE_integer("prompt_length", None, "tokens of a prompt (the task's longest)", module_name=sys.argv[0])
    flags.DEFINE_bool("schedules", True, "read compute from final schedules; without, compiling is faster, compute is "
                      "unknown, and small instructions count as ops", module_name=sys.argv[0])  # fmt: skip
    flags.DEFINE_string("save", None, "folder for the compiled programs (preflight.load runs them on such devices)",
                        module_name=sys.argv[0])  # fmt: skip
    flags.DEFINE_string("output", None, "JSON file of the reports; kept reports are not compiled again",
                        module_name=sys.argv[0])  # fmt: skip
    kept = any(argument.startswith("--output") for argument in sys.argv)
    gin_flags.run_app(_run, interrupts.SAME if kept else interrupts.ANEW)


def _run(argv: list[str]) -> None:
    with gin_flags.one_line_errors():
        gin_flags.read_alone(EXAMPLE, SHORT)
        entry = preflight_training if flags.FLAGS.part == "train" else preflight
        status = entry(flags.FLAGS.topology, _mesh(flags.FLAGS.mesh), flags.FLAGS.prompt_length, flags.FLAGS.output)
    sys.exit(status)


def _mesh(sizes: Sequence[str] | None) -> tuple[int, int] | None:
    """Returns the mesh that the flag names; `None` without the flag."""
    if sizes is None:
        return None
    if not all(size.strip().isdigit() for size in sizes):
        raise ValueError(f"--mesh={','.join(sizes)}: give two whole numbers, such as --mesh=1,4")
    return meshes.checked([int(size) for size in sizes])


def preflight(topology: str, mesh: tuple[int, int] | None, prompt_length: int | None, output: str | None) -> int:
    """Compiles the programs of the sweep that gin configured, prints their table, and returns the exit status."""
    points = experiment.points_of(gin.get_bindings(experiment.sweep))
    shape = points[0].pair.mesh if mesh is None else mesh
    mesh_of(topology, shape)  # refuses unknown devices, or too few, before anything is compiled
    if prompt_length is not None:
        whole("--prompt_length", prompt_length, 1)
    programs = sweeps.planned(points, topology, shape, prompt_length)
    results = sweeps.run(programs, _reporter(output), _progress)
    table = sweeps.grid(results, topology, shape, sweeps.left_out(points))
    return _shown(results, table)


def preflight_training(
    topology: str, mesh: tuple[int, int] | None, prompt_length: int | None, output: str | None
) -> int:
    """Compiles a step of the training that gin configured, prints its table, and returns the exit status."""
    fields = training.fields_of(gin.get_configurable(trainer.Trainer)())
    changes = {"mesh": mesh, "prompt_length": prompt_length}
    fields |= {name: value for name, value in changes.items() if value is not None}
    job = Job(topology=topology, **fields)
    mesh_of(topology, job.mesh)
    results = sweeps.run([sweeps.Planned("training", job, 1)], _reporter(output), _progress)
    return _shown(results, training.grid(results[0]))


def _reporter(output: str | None) -> Callable[[Job], Report]:
    """Returns the function that reports on a job, as the flags say, and keeps its reports in the file `output`."""
    folder = None if flags.FLAGS.save is None else expanded(flags.FLAGS.save)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--save={folder} is a file: name a folder")
    kept = Kept(None if output is None else expanded(output))
    return partial(kept.report, dump=flags.FLAGS.schedules, folder=folder)


def _shown(results: Sequence[sweeps.Result], table: Grid) -> int:
    """Prints the table and what does not fit; returns the exit status."""
    printing.print_grids([table])
    for line in sweeps.refusals(results):
        print(f"error: {line}", file=sys.stderr)
    outcomes = {result.fits for result in results}
    return 1 if "error" in outcomes else DOES_NOT_FIT if "no" in outcomes else 0


def _progress(programs: Sequence[sweeps.Planned]) -> Iterator[sweeps.Planned]:
    """Yields the programs, and says on stderr which one is being compiled and how much time is left."""
    begin = time.monotonic()
    for number, program in enumerate(programs):
        spent = time.monotonic() - begin
        remaining = f", about {spent / number * (len(programs) - number) / 60:.0f} min left" if number else ""
        job = program.job
        print(
            f"compiling {number + 1} of {len(programs)}: {program.method}, {job.part}, batch {job.batch}{remaining}",
            file=sys.stderr,
        )
        yield program


class Kept:
    """The reports of earlier runs in a JSON file, which is written again after every new report.

    Args:
        path: the file; `None`: nothing is kept.
    """

    def __init__(self, path: Path | None):
        self.path, self.reports = path, dict[str, Any]()
        if path is not None:
            check_replaceable(path, start=_BEGIN)
            if path.exists():
                self.reports = json.loads(path.read_text())["preflight"]

    def report(self, job: Job, dump: bool = True, folder: Path | None = None) -> Report:
        """Returns the report on a job: the stored one if the same compilers made it, otherwise a new one.

        Args:
            job: the program.
            dump: as for `preflight.report`.
            folder: where to write the compiled program; programs with stored reports are then compiled again.
        """
        key = self._key(job, dump)
        if key in self.reports and folder is None:
            return Report.from_json(self.reports[key])
        name = f"{job.part}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.program"
        report = compiling.in_child(job, dump, None if folder is None else folder / name)
        self.reports[key] = report.as_json()
        if self.path is not None:
            rewrite(self.path, json.dumps({"preflight": self.reports}, indent=1), start=_BEGIN)
        return report

    def _key(self, job: Job, dump: bool) -> str:
        """Returns a key from all that a report depends on: program, models' shapes, the package's and user's code."""
        trained = job.part == "train"  # the values of a training step hold its configuration
        sources = () if trained else (job.target, job.draft, *dict(job.others).values())
        models = [str(checkpoints.named(s).config) for s in sources if s is not None and not is_derived(s)]
        files = {name: Path(path).read_text() for name, path in own_files.loaded().items()}
        values = sweeps.kind_of(job).as_values()
        return json.dumps([values, dump, models, files, package(), compiling.versions()], sort_keys=True)


if __name__ == "__main__":
    main()
