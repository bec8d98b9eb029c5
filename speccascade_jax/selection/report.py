"""Ways of choosing a drafter beside each drafter always, on several domains (`experiments/compare_drafters.py`).

Every way is a method, every domain a task, and each pair of them a record as of any sweep: a run that was killed goes
on where it stopped, and `experiments.tables --measures selection` prints its tables again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from speccascade_jax.core.checks import several
from speccascade_jax.core.files import expanded
from speccascade_jax.evaluation.enumeration import enumerate_points
from speccascade_jax.evaluation.experiment import measure, open_session
from speccascade_jax.evaluation.points import Evaluation, Method, ModelPair, Sampling
from speccascade_jax.methods import selecting
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.results import panels, printing
from speccascade_jax.results.store import ResultStore, check_format
from speccascade_jax.results.tables.selection import selection_grids


def compare(
    *,
    pair: ModelPair,
    domains: Sequence[Evaluation],
    drafters: Sequence[str | Level | Arm],
    ways: Sequence[str] = ("greedy", "dynamic"),
    policies: Sequence[str | None] = (None,),
    block_sizes: Sequence[int] = (7,),
    temperatures: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    output: str = "results/selection.jsonl",
    dry_run: bool = False,
) -> Path | None:
    """Measure each drafter always, one at random, and a policy's choice, beside the target alone, on every domain.

    Args:
        pair, domains: the models; tasks, each with how many examples and trials.
        drafters: among which is chosen; ways: how a trained policy chooses (`Settings.choose`).
        policies: files; `None` is the pair's own.
        block_sizes: of drafters that have none of their own; temperatures, seeds: as in a sweep.
        output: the store; dry_run: only list the points.

    Returns:
        The store's path; `None` after a dry run.

    Raises:
        ValueError: a value without meaning, before anything is loaded; a policy of other drafters or of another target,
            before anything is compiled.
    """
    several("domains", domains, 1)
    methods = methods_of(drafters, ways, policies)
    samplings = [Sampling(temperature=temperature) for temperature in temperatures]
    of_domains = [
        enumerate_points(
            pair=pair, evaluation=domain, methods=methods, block_sizes=block_sizes, samplings=samplings, seeds=seeds
        )
        for domain in domains
    ]
    if dry_run:
        points = itertools.chain(*itertools.chain(*of_domains))
        printing.print_points([f"{point.coordinates()['task']}: {point.label()}" for point in points])
        return None
    with ResultStore(output) as store:
        check_format(store.records, output)
        # all are checked before one runs
        sessions = [open_session(list(itertools.chain(*groups))) for groups in of_domains]
        for groups, session in zip(of_domains, sessions, strict=True):
            measure(groups, store, session)
        for grid in selection_grids(panels.panels(store.records)):
            Console().print(grid.rich())
        print(f"results: {store.path}")
    return expanded(output)


def methods_of(
    drafters: Sequence[str | Level | Arm], ways: Sequence[str], policies: Sequence[str | None]
) -> list[Method]:
    """The lossless methods that choose among drafters: each always, at random, and by every policy in every way."""
    arms = selecting.arms_of(Method(name="spec_decode", drafters=tuple(drafters), choose=selecting.RANDOM).settings())
    plain = [*(arm.called for arm in arms), selecting.RANDOM]
    made = [Method(name="spec_decode", drafters=tuple(drafters), choose=way) for way in plain]
    return made + [
        Method(name="spec_decode", drafters=tuple(drafters), choose=way, policy=policy)
        for policy, way in itertools.product(policies, ways)
    ]
