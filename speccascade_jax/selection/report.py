"""Comparison of drafter selection with each fixed drafter, on several domains (`experiments/compare_drafters.py`).

Every way of choosing a drafter is a method, and every domain is a task. Each combination of method and task gives a
record, as in any sweep. So a killed run resumes, and `experiments.tables --measures selection` prints the tables again.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from speccascade_jax.results.store.bucket_store import open_store
from speccascade_jax.results.store.result_store import check_format, check_name
from speccascade_jax.runtime import recipe_header
from speccascade_jax.storage.files import expanded


@dataclass(frozen=True, kw_only=True)
class Among:
    """A set of drafters to choose from, and the policies that were trained for it.

    Attributes:
        drafters: the drafters, as in `Settings.drafters`.
        policies: files of policies; `None` is the pair's own policy.
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
    """Measures the target alone and each way of choosing a drafter (fixed, random, by a policy) on every domain.

    Methods with the same domain, temperature, block size and seed form a group that is timed together: each query runs
    with every method in turn. A restarted run measures an unfinished group again.

    Args:
        pair: the models.
        domains: the tasks, each with its numbers of examples and trials.
        drafters: the drafters to choose from.
        ways: how a trained policy chooses (`Settings.choose`).
        policies: files of policies; `None` is the pair's own policy.
        further: other sets of drafters with their policies, for the same table; they show the effect of another
            drafter.
        alone: whether to time each drafter also without selection, so that the table shows the cost of choosing. This
            adds a program and a run for each drafter that has no block size or rule of its own.
        block_sizes: block sizes of the drafters without a block size of their own.
        temperatures: the sampling temperatures, as in a sweep.
        seeds: the random seeds, as in a sweep.
        output: path of the result store.
        dry_run: whether to list the measurements without running them.

    Returns:
        The path of the result store; `None` after a dry run.

    Raises:
        ValueError: a value is invalid (found before any model is loaded), or a policy belongs to other drafters or to
            another target (found before any program is compiled).
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
    recipe_header.announce(f"{sum(len(group) for groups in of_domains for group in groups)} points")
    if dry_run:
        recipe_header.announce_places()
        points = itertools.chain(*itertools.chain(*of_domains))
        printing.print_points([f"{point.coordinates()['task']}: {point.label()}" for point in points])
        for domain in domains:
            rehearse(pair, domain)
        return None
    with open_store(output) as store:
        check_format(store.records, output)
        # Opening a session checks its domain, so all sessions are opened before the first domain runs.
        sessions = [open_session(list(itertools.chain(*groups))) for groups in of_domains]
        recipe_header.announce_places()
        for groups, session in zip(of_domains, sessions, strict=True):
            tell_without_outputs(store, session.evaluation, measure(groups, store, session, evaluate_together))
        more = printing.notes_command(store.path, "--measures", "selection")
        printing.print_grids(selection_grids(panels.panels(store.records)), more)
        print(f"results: {store.path}")
    return expanded(output)


def methods_of(among: Among, ways: Sequence[str], alone: bool = False) -> list[Settings]:
    """Returns the lossless methods that choose a drafter: a fixed one, a random one, or the choice of a policy.

    There is a method for each drafter, and for each combination of a policy and a value in `ways`.

    Args:
        among: the drafters, and the files of their policies.
        ways: how a trained policy chooses (`Settings.choose`).
        alone: whether to add, for each drafter, a method with this drafter only; drafters with a block size or a rule
            of their own are left out.
    """
    chosen = partial(Settings, method="spec_decode", drafters=among.drafters)
    arms = build_selection.arms_of(chosen(choose=build_selection.RANDOM))
    single = [arm.drafter for arm in arms if arm.drafter != TARGET and arm.block_size is None and arm.rule is None]
    methods = [Settings(method="spec_decode", drafters=(drafter,)) for drafter in single if alone]
    methods += [chosen(choose=way) for way in [*(arm.called for arm in arms), build_selection.RANDOM]]
    return methods + [chosen(choose=way, policy=file) for file, way in itertools.product(among.policies, ways)]


def together(groups: Iterable[Iterable[Point]]) -> list[list[Point]]:
    """Returns a sweep's points in groups that are timed together: by sampling, seed and block size.

    A point is one combination of settings. Points without a block size, such as that of the target alone, join the
    group of the first block size.
    """
    points_by_group: dict[tuple[object, ...], list[Point]] = {}
    points = list(itertools.chain(*groups))
    swept = [point for point in points if point.method.sweeps_block(point.settings)]
    first = swept[0].settings.block_size if swept else None
    for point in points:
        block = point.settings.block_size if point in swept else first
        points_by_group.setdefault((*sampling_of(point.settings).values(), point.seed, block), []).append(point)
    return list(points_by_group.values())
