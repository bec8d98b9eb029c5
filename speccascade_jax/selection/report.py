"""Comparison of drafter selection with each fixed drafter, on several domains (`experiments/compare_drafters.py`).

Every way of choosing is a method, every domain a task, and each combination a record as in any sweep: a killed run
resumes, and `experiments.tables --measures selection` prints its tables again.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from speccascade_jax.core import validate_types
from speccascade_jax.core.checks import several
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.enumeration import enumerate_points
from speccascade_jax.evaluation.experiment import measure, open_session, rehearse, tell_without_outputs
from speccascade_jax.evaluation.measuring import evaluate_together
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Arm, Level, sampling_of
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.selection import selection_grids
from speccascade_jax.results.store.result_store import ResultStore, check_format, check_name
from speccascade_jax.storage.files import expanded


@dataclass(frozen=True, kw_only=True)
class Among:
    """Set of drafters to choose from, and the policies that were trained for them.

    Attributes:
        drafters: as in `Settings.drafters`; policies: files; `None` is the pair's own.
    """

    drafters: tuple[str | Level | Arm, ...]
    policies: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        validate_types.check(Among, vars(self))
        for name in ("drafters", "policies"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


def compare(
    *,
    pair: ModelPair,
    domains: Sequence[Evaluation],
    drafters: Sequence[str | Level | Arm],
    ways: Sequence[str] = ("greedy", "dynamic"),
    policies: Sequence[str | None] = (None,),
    further: Sequence[Among] = (),
    alone: bool = True,
    block_sizes: Sequence[int] = (7,),
    temperatures: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    output: str = "results/selection.jsonl",
    dry_run: bool = False,
) -> Path | None:
    """Measures each fixed drafter, a random one, and a policy's choice, and the target alone, on every domain.

    Methods of one domain, temperature, block size and seed are timed together, and each query runs with every method in
    turn: a killed run measures an unfinished group again.

    Args:
        pair: the models.
        domains: tasks, each with its numbers of examples and trials.
        drafters: the drafters to choose from.
        ways: how a trained policy chooses (`Settings.choose`).
        policies: files; `None` is the pair's own.
        further: other sets of drafters and their policies, in the same table: they show the effect of another drafter.
        alone: also time each drafter without selection if it follows `block_sizes`, so that the table shows the cost of
            choosing; this adds a program and a run for each.
        block_sizes: for drafters without a block size of their own.
        temperatures: as in a sweep.
        seeds: as in a sweep.
        output: the store's path.
        dry_run: whether to list the points only.

    Returns:
        The store's path; `None` after a dry run.

    Raises:
        ValueError: a value is invalid, before any model is loaded; a policy belongs to other drafters or to another
            target, before any program is compiled.
    """
    check_name(output)
    several("domains", domains, 1)
    sets = [Among(drafters=tuple(drafters), policies=tuple(policies)), *further]
    methods = list(dict.fromkeys(itertools.chain(*(methods_of(among, ways, alone) for among in sets))))
    samplings = [{"temperature": temperature} for temperature in temperatures]
    swept: dict[str, Any] = {"block_sizes": block_sizes, "samplings": samplings, "seeds": seeds}
    of_domains = [
        together(enumerate_points(pair=pair, evaluation=domain, methods=methods, **swept)) for domain in domains
    ]
    if dry_run:
        points = itertools.chain(*itertools.chain(*of_domains))
        printing.print_points([f"{point.coordinates()['task']}: {point.label()}" for point in points])
        for domain in domains:
            rehearse(pair, domain)
        return None
    with ResultStore(output) as store:
        check_format(store.records, output)
        # check all domains before the first one runs
        sessions = [open_session(list(itertools.chain(*groups))) for groups in of_domains]
        for groups, session in zip(of_domains, sessions, strict=True):
            tell_without_outputs(store, session.evaluation, measure(groups, store, session, evaluate_together))
        for grid in selection_grids(panels.panels(store.records)):
            Console().print(grid.rich())
        print(f"results: {store.path}")
    return expanded(output)


def methods_of(among: Among, ways: Sequence[str], alone: bool = False) -> list[Settings]:
    """Returns the lossless methods over the drafters: each one always, a random one, and every policy in every way.

    Args:
        among: the drafters, and the files of their policies.
        ways: how a trained policy chooses (`Settings.choose`).
        alone: also add each drafter as a method's only one, except those with a block size or a rule of their own.
    """
    chosen = partial(Settings, method="spec_decode", drafters=among.drafters)
    arms = build_selection.arms_of(chosen(choose=build_selection.RANDOM))
    single = [arm.drafter for arm in arms if arm.drafter != TARGET and arm.block_size is None and arm.rule is None]
    methods = [Settings(method="spec_decode", drafters=(drafter,)) for drafter in single if alone]
    methods += [chosen(choose=way) for way in [*(arm.called for arm in arms), build_selection.RANDOM]]
    return methods + [chosen(choose=way, policy=file) for file, way in itertools.product(among.policies, ways)]


def together(groups: Iterable[Iterable[Point]]) -> list[list[Point]]:
    """Returns a sweep's points in groups that are timed together: by sampling, seed and block size.

    Points without a block size, the target's among them, join the first point's block size.
    """
    points_by_group: dict[tuple[object, ...], list[Point]] = {}
    points = list(itertools.chain(*groups))
    swept = [point for point in points if point.method.sweeps_block(point.settings)]
    first = swept[0].settings.block_size if swept else None
    for point in points:
        block = point.settings.block_size if point in swept else first
        points_by_group.setdefault((*sampling_of(point.settings).values(), point.seed, block), []).append(point)
    return list(points_by_group.values())
