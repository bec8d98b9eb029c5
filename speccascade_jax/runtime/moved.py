"""Modules that moved: the old names are imported from their new places, with a warning, for one version.

Python, gin files and pickles that name the old places keep working. `results.store` and `engine.loop` name other
modules today than they did: those two look up with `attributes_of` what moved out of them.
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
"""The version that knows the new names only."""
MOVED = {
    "checkpoints.errors": "storage.errors",
    "checkpoints.plan": "checkpoints.array_plan",
    "core.archives": "storage.archives",
    "core.checksums": "storage.checksums",
    "core.files": "storage.files",
    "core.flat": "core.flat_params",
    "core.locks": "storage.locks",
    "core.readers": "storage.readers",
    "core.reports": "storage.reports",
    "core.typed": "core.validate_types",
    "drafters.appended": "drafters.tail",
    "drafters.choosing": "drafters.chooser",
    "engine.rounds": "engine.loop",
    "engine.straight": "engine.tree_scoring",
    "engine.verdicts": "engine.width_buckets",
    "engine.widths": "engine.width_buckets",
    "evaluation.again": "evaluation.rerun",
    "evaluation.calibration": "evaluation.studies.calibration",
    "evaluation.following": "evaluation.follower_store",
    "evaluation.keeping": "evaluation.output_capture",
    "evaluation.profiling": "evaluation.studies.profiling",
    "evaluation.spec_bench": "evaluation.studies.spec_bench",
    "evaluation.survey": "evaluation.studies.survey",
    "methods.alone": "methods.autoregressive",
    "methods.costs": "methods.block_costs",
    "methods.drafting": "methods.build_drafter",
    "methods.recipe": "methods.method",
    "methods.selecting": "methods.build_selection",
    "methods.trials": "methods.round_timing",
    "models.along": "models.teacher_forcing",
    "models.needs": "models.memory_estimate",
    "models.sharing": "models.early_exit",
    "pairs.carded": "storage.array_file",
    "results.bootstrap": "results.analysis.bootstrap",
    "results.comparing": "results.analysis.example_diff",
    "results.comparisons": "results.analysis.significance",
    "results.distinctions": "results.analysis.curve_labels",
    "results.families": "results.analysis.families",
    "results.figures": "results.report.figures",
    "results.forward_times": "results.analysis.forward_times",
    "results.histograms": "results.analysis.histograms",
    "results.labels": "results.analysis.curve_labels",
    "results.mixture": "results.analysis.baselines",
    "results.origins": "results.analysis.provenance",
    "results.outputs": "results.store.outputs",
    "results.panels": "results.analysis.panels",
    "results.pareto": "results.analysis.pareto",
    "results.places": "results.analysis.relative_to_target",
    "results.printing": "results.report.printing",
    "results.shards": "results.store.shards",
    "results.tables": "results.report.tables",
    "results.throughput": "results.analysis.throughput",
    "results.trace": "results.store.trace",
    "selection.making": "selection.make_data",
    "stopping.lengths": "stopping.block_planner",
    "training.heads.making": "training.heads.make_data",
}
"""Old -> new place in the package, of modules and of whole packages."""


def new_place(name: str) -> str:
    """Returns the full name of a module today, from the one that it has now or had before."""
    parts = name.removeprefix(PACKAGE).split(".")
    if not name.startswith(PACKAGE):
        return name
    for end in range(len(parts), 1, -1):
        if (place := MOVED.get(".".join(parts[:end]))) is not None:
            return PACKAGE + ".".join([place, *parts[end:]])
    return name


class _Finder:
    """Finds old names; Python asks it before its own finders, which would load a moved package's parts twice."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        place = new_place(name)
        if place == name:
            return None
        message = f"{name} is now {place}; the old name works until {UNTIL}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)  # Python leaves its own import machinery out
        return ModuleSpec(name, _Loader(place))


class _Loader(Loader):
    """Loads the module in its new place, which stays what it is there."""

    def __init__(self, place: str):
        self._place = place

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._place)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put the old name's in its place


def attributes_of(place: str) -> Callable[[str], object]:
    """Returns a module's `__getattr__` that looks up in another module what moved there.

    Args:
        place: the other module's full name.
    """

    def find(name: str) -> object:
        value = None if name.startswith("__") else getattr(importlib.import_module(place), name, None)
        if value is None or isinstance(value, ModuleType):  # Python asks for submodules too
            raise AttributeError(f"no attribute {name!r} here or in {place}", name=name)
        warnings.warn(f"{name} is in {place} now; its old place works until {UNTIL}", DeprecationWarning, stacklevel=2)
        return value

    return find


def install() -> None:
    """Makes the old names importable; the package does so when it is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
