"""Import of moved modules under their old names, with a deprecation warning, until version `UNTIL`.

Python code, gin files and pickles with old names keep working. The names `results.store` and `engine.loop` now belong
to other modules than before. These two modules find attributes that have moved out of them with `attributes_of`.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "speccascade_jax."
UNTIL = "0.4"
"""First version in which the old names no longer work."""
MOVED = {
    "checkpoints.arrays": "checkpoints.array_plan",
    "checkpoints.checksums": "checkpoints.huggingface",
    "checkpoints.eight_bits": "checkpoints.native",
    "checkpoints.errors": "storage.errors",
    "checkpoints.names": "checkpoints.array_plan",
    "checkpoints.plan": "checkpoints.array_plan",
    "core.archives": "storage.archives",
    "core.checksums": "storage.checksums",
    "core.fetching": "core.transfers",
    "core.files": "storage.files",
    "core.flat": "core.transfers",
    "core.flat_params": "core.transfers",
    "core.locks": "storage.locks",
    "core.packed": "core.types",
    "core.readers": "storage.readers",
    "core.reports": "storage.files",
    "core.typed": "core.validate_types",
    "data.tasks.few_shot": "data.tasks.task",
    "data.tasks.few_shot_records": "data.tasks.table",
    "data.tasks.few_shot_table": "data.tasks.table",
    "drafters.appended": "drafters.nested",
    "drafters.branching": "drafters.model",
    "drafters.choosing": "drafters.chooser",
    "drafters.exits": "drafters.model",
    "drafters.none": "drafters.model",
    "drafters.planned": "drafters.model",
    "drafters.tail": "drafters.nested",
    "engine.measures": "engine.counters",
    "engine.reading": "engine.scoring",
    "engine.rounds": "engine.loop",
    "engine.straight": "engine.scoring",
    "engine.tree_scoring": "engine.scoring",
    "engine.verdicts": "engine.scoring",
    "engine.width_buckets": "engine.scoring",
    "engine.widths": "engine.scoring",
    "evaluation.again": "evaluation.experiment",
    "evaluation.calibration": "evaluation.studies.calibration",
    "evaluation.configurations": "evaluation.points",
    "evaluation.follower_store": "evaluation.experiment",
    "evaluation.following": "evaluation.experiment",
    "evaluation.keeping": "evaluation.measuring",
    "evaluation.loading": "evaluation.session",
    "evaluation.output_capture": "evaluation.measuring",
    "evaluation.policies": "evaluation.heads",
    "evaluation.profiling": "evaluation.studies.profiling",
    "evaluation.rerun": "evaluation.experiment",
    "evaluation.spec_bench": "evaluation.studies.spec_bench",
    "evaluation.studies.calibration.bench": "evaluation.studies.calibration.halving",
    "evaluation.studies.calibration.outcome": "evaluation.studies.calibration.calibrating",
    "evaluation.studies.calibration.tolerance": "evaluation.studies.calibration.halving",
    "evaluation.studies.profiling.report": "evaluation.studies.profiling.profiling",
    "evaluation.studies.profiling.scopes": "evaluation.studies.profiling.traces",
    "evaluation.studies.spec_bench.conversing": "evaluation.studies.spec_bench.answering",
    "evaluation.studies.spec_bench.questions": "evaluation.studies.spec_bench.answering",
    "evaluation.studies.survey.bounds": "evaluation.studies.survey.estimates",
    "evaluation.survey": "evaluation.studies.survey",
    "evaluation.validation": "evaluation.points",
    "hierarchy.walltime": "hierarchy.optimizing",
    "methods.alone": "methods.generations",
    "methods.autoregressive": "methods.generations",
    "methods.costs": "methods.block_costs",
    "methods.drafting": "methods.build_drafter",
    "methods.oracle": "methods.generations",
    "methods.recipe": "methods.method",
    "methods.round_timing": "methods.block_costs",
    "methods.selecting": "methods.build_selection",
    "methods.sequence": "methods.generations",
    "methods.trials": "methods.block_costs",
    "models.along": "models.teacher_forcing",
    "models.decoder_layers": "models.decoder",
    "models.needs": "models.memory_estimate",
    "models.sharing": "models.early_exit",
    "models.t5_layers": "models.t5",
    "models.t5_parameters": "models.t5_config",
    "models.table": "models.fake",
    "pairs.carded": "storage.array_file",
    "results.bootstrap": "results.analysis.bootstrap",
    "results.comparing": "results.analysis.example_diff",
    "results.comparisons": "results.analysis.significance",
    "results.distinctions": "results.analysis.panels",
    "results.families": "results.analysis.families",
    "results.figures": "results.report.figures",
    "results.figures.acceptance": "results.report.figures.studies",
    "results.figures.histogram": "results.report.figures.studies",
    "results.figures.pareto": "results.report.figures.fronts",
    "results.figures.selection": "results.report.figures.studies",
    "results.forward_times": "results.analysis.forward_times",
    "results.histograms": "results.analysis.histograms",
    "results.labels": "results.analysis.panels",
    "results.mixture": "results.analysis.significance",
    "results.origins": "results.analysis.provenance",
    "results.outputs": "results.store.outputs",
    "results.panels": "results.analysis.panels",
    "results.pareto": "results.analysis.families",
    "results.places": "results.analysis.significance",
    "results.printing": "results.report.printing",
    "results.report.rejections": "results.report.charts",
    "results.report.traces": "results.report.templates",
    "results.shards": "results.store.shards",
    "results.tables": "results.report.tables",
    "results.tables.best_arms": "results.report.tables.selection",
    "results.throughput": "results.analysis.forward_times",
    "results.trace": "results.store.trace",
    "rules.by_arm": "rules.verification",
    "runtime.gin_values": "runtime.gin_errors",
    "selection.comparing": "selection.train",
    "selection.making": "selection.make_data",
    "selection.objectives": "selection.train",
    "selection.outputs": "selection.make_data",
    "selection.posterior": "selection.learners",
    "selection.regret": "selection.serving",
    "stopping.lengths": "stopping.block_planner",
    "storage.reports": "storage.files",
    "training.heads.blocks": "training.heads.report",
    "training.heads.making": "training.heads.make_data",
    "training.scalars": "training.runs",
    "training.t5": "training.finetune",
    "training.t5.export": "training.finetune.trainer",
    "training.t5.loop": "training.finetune.trainer",
    "training.t5.outputs": "training.finetune.output_files",
}
"""New path by old path, both relative to the package, for modules and whole subpackages."""


def new_place(name: str) -> str:
    """Returns the current full name of a module, given its current name or an earlier one."""
    parts = name.removeprefix(PACKAGE).split(".")
    if not name.startswith(PACKAGE):
        return name
    for end in range(len(parts), 1, -1):
        if (place := MOVED.get(".".join(parts[:end]))) is not None:
            return new_place(PACKAGE + ".".join([place, *parts[end:]]))
    return name


class _Finder:
    """An import finder for old names; it precedes Python's finders, which would load moved packages' modules twice."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        place = new_place(name)
        if place == name:
            return None
        message = f"{name} is now {place}; the old name works until {UNTIL}"
        # level 2 is the line that imports, because warnings skip importlib's frames
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, _Loader(place))


class _Loader(Loader):
    """An import loader that returns the module at its new place, unchanged."""

    def __init__(self, place: str):
        self._place = place

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._place)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has replaced the module's spec by one for the old name


def attributes_of(place: str) -> Callable[[str], object]:
    """Returns a function `__getattr__` for a module, which looks up moved attributes in another module.

    Args:
        place: the full name of the other module.
    """

    def find(name: str) -> object:
        value = None if name.startswith("__") else getattr(importlib.import_module(place), name, None)
        # Python asks this function for submodules, too; they must not come from the other module
        if value is None or isinstance(value, ModuleType):
            raise AttributeError(f"no attribute {name!r} here or in {place}", name=name)
        warnings.warn(f"{name} is in {place} now; its old place works until {UNTIL}", DeprecationWarning, stacklevel=2)
        return value

    return find


def install() -> None:
    """Makes the old module names importable; called when the package is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
