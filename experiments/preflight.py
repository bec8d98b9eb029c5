r"""Compile every program of a sweep for TPUs or GPUs that are not there: what fits, and what a round costs.

    python -m experiments.preflight --gin_file=configs/quickstart.gin --topology=v5e
    python -m experiments.preflight --gin_file=configs/paper1_table2.gin --gin_file=configs/sizes/published.gin \
        --gin_file=gin/tasks/xsum.gin --gin_file=gin/models/two_checkpoints.gin --gin.PAIR="'t5'" \
        --gin.TARGET="'t5_1_1_xl'" --gin.DRAFT="'t5_1_1_small'" --gin.DTYPE="'bfloat16'" --topology=v5e:2x2 --mesh=1,4
    python -m experiments.preflight … --topology=v5p:2x2x1 --output=results/preflight.json     keeps the reports
    python -m experiments.preflight … --save=programs      keeps the compiled programs

The gin files are those of the sweep. A model may be a preset's name (t5_1_1_small … t5_1_1_xxl, gemma2_2b …) or a
checkpoint, of which only names and shapes are read. Nothing runs: the figures are compiled for the devices. The command
ends with status 3 if a program does not fit.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gin
from absl import flags
from rich.console import Console
from rich.progress import track

from speccascade_jax.evaluation import experiment
from speccascade_jax.preflight import compiling, sweeps
from speccascade_jax.preflight.programs import Job
from speccascade_jax.preflight.report import Report
from speccascade_jax.preflight.topologies import mesh_of
from speccascade_jax.runtime import gin_flags, interrupts
from speccascade_jax.storage.files import expanded, rewrite

EXAMPLE = "python -m experiments.preflight --gin_file=configs/quickstart.gin --topology=v5e"
DOES_NOT_FIT = 3
_BEGIN = r'\{\n "preflight": '


def main() -> None:
    """Reads the command line and compiles."""
    gin_flags.define_flags()
    flags.DEFINE_string("topology", "v5e", "devices: CHIP or CHIP:SIZES, such as v5e:2x4", module_name=sys.argv[0])
    flags.DEFINE_list("mesh", ["1", "1"], "devices for rows and for the model: 1,4", module_name=sys.argv[0])
    flags.DEFINE_integer("prompt_length", None, "tokens of a prompt (the task's longest)", module_name=sys.argv[0])
    flags.DEFINE_bool("schedules", True, "read compute from final schedules; without, compiling is faster",
                      module_name=sys.argv[0])  # fmt: skip
    flags.DEFINE_string("save", None, "folder for the compiled programs (preflight.load runs them on such devices)",
                        module_name=sys.argv[0])  # fmt: skip
    flags.DEFINE_string("output", None, "JSON file of the reports; kept reports are not compiled again",
                        module_name=sys.argv[0])  # fmt: skip
    gin_flags.run_app(_run, interrupts.SAME)


def _run(argv: list[str]) -> None:
    with gin_flags.one_line_errors():
        gin_flags.read_alone(EXAMPLE)
        shape = tuple(int(size) for size in flags.FLAGS.mesh)
        status = preflight(flags.FLAGS.topology, shape, flags.FLAGS.prompt_length, flags.FLAGS.output)
    sys.exit(status)


def preflight(topology: str, mesh: Sequence[int], prompt_length: int | None, output: str | None) -> int:
    """Compiles the programs of the sweep that gin configured, prints their table, and returns the exit status."""
    mesh_of(topology, mesh)  # refuses unknown devices, or too few, before anything else
    points = experiment.points_of(gin.get_bindings(experiment.sweep))
    data, model = mesh
    programs = sweeps.planned(points, topology, (data, model), prompt_length)
    kept = Kept(None if output is None else expanded(output))
    report = partial(kept.report, dump=flags.FLAGS.schedules, folder=flags.FLAGS.save)
    results = sweeps.run(programs, report, _progress)
    Console(width=None if sys.stdout.isatty() else 140).print(sweeps.grid(results, topology, (data, model)).rich())
    refused = sweeps.refusals(results)
    for line in refused:
        print(f"error: {line}", file=sys.stderr)
    return DOES_NOT_FIT if refused else 0


def _progress(programs: Sequence[sweeps.Planned]) -> Iterable[sweeps.Planned]:
    return track(programs, description="compiling", console=Console(stderr=True))


class Kept:
    """The reports of earlier runs in a JSON file, which is written after every new one.

    Args:
        path: the file; `None`: nothing is kept.
    """

    def __init__(self, path: Path | None):
        self.path, self.reports = path, dict[str, Any]()
        if path is not None and path.exists():
            self.reports = json.loads(path.read_text())["preflight"]

    def report(self, job: Job, dump: bool = True, folder: str | None = None) -> Report:
        """Returns the report on a job: a kept one of the same compilers, or else a new one.

        Args:
            job: the program.
            dump: as for `preflight.report`.
            folder: where to write the compiled program; every program is then compiled anew.
        """
        key = json.dumps([job.as_values(), dump, compiling.versions()], sort_keys=True)
        if key in self.reports and folder is None:
            return Report.from_json(self.reports[key])
        name = f"{job.part}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.program"
        report = compiling.in_child(job, dump, None if folder is None else expanded(folder) / name)
        self.reports[key] = report.as_json()
        if self.path is not None:
            rewrite(self.path, json.dumps({"preflight": self.reports}, indent=1), start=_BEGIN)
        return report


if __name__ == "__main__":
    main()
