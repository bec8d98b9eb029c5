"""Measure, solve, run: the best stack of a pair's models, predicted and realised (paper 4, Tables 3 and 5)."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.core.checks import whole
from speccascade_jax.core.names import TARGET, unknown
from speccascade_jax.evaluation.measuring import evaluate
from speccascade_jax.evaluation.points import Evaluation, Level, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.hierarchy.latency import OBJECTIVES, Hierarchy, latency
from speccascade_jax.hierarchy.measure import Measured, measure
from speccascade_jax.hierarchy.solve import solve
from speccascade_jax.methods.build_drafter import the_one
from speccascade_jax.methods.settings import check_sampling_alone, sampling_of
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap
from speccascade_jax.results.store.record import Record, Row, Timed
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically

TARGET_MODEL = "target"
"""What a pair calls the model that all others draft for."""


def optimize(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    settings: Settings,
    max_budget: int = 15,
    costs: Mapping[str, float] | None = None,
    tail: str | None = None,
    seed: int = 0,
    output: str = "results/hierarchy.json",
) -> list[Row]:
    """Find the best stack of the pair's models and hold its predicted latency against a timed run.

    The candidates are the pair's draft and its further drafts (`ModelPair.others`: checkpoints, or words of
    `pairs.derived`). Acceptance is measured along what the target writes for the evaluation's examples; each model's
    cost is that of a call of one token at batch 1. The best single draft, the best stack by the paper's latency and
    the best by the one that counts overshoot are run beside the target alone.

    Args:
        pair, evaluation, seed: as for a run; settings: how all models sample.
        max_budget: T̄, the largest budget.
        costs: of a call of each model, in any unit, for the solution and for all that is predicted; `None`: seconds as
            measured.
        tail: the model whose tokens are appended at every level of a further run of the paper's optimum (its
            horizontal heuristic, appendix D), but where it drafts itself; `None`: no such run. Nothing is predicted of
            that one.
        output: a JSON file for the rows, the matrix and the costs; `experiments.plots --acceptance` draws the matrix.

    Returns:
        The printed rows.

    Raises:
        ValueError: a value without meaning, or an output that is another file, before anything is loaded; costs or a
            tail of models that the pair has not, before anything is compiled; a tail as dear as the target.
    """
    max_budget = whole("max_budget", max_budget, 1)
    sampling = sampling_of(check_sampling_alone(settings, "optimize"))
    alone = Settings(method=TARGET, **sampling)
    point = Point(pair=pair, evaluation=evaluation.resolved(), settings=alone, seed=seed)
    validate(point)
    check_replaceable(output, '"acceptance":', '"costs":')
    session = Session(point.pair, point.evaluation)
    _check_names(session.pair.models, costs, tail)
    found = _measured(session, point, costs)
    if tail is not None and tail not in found.names:
        raise ValueError(f"a call of the tail {tail!r} takes as long as one of the target: choose a cheaper one")
    chosen = {"best single draft": best_single(found, max_budget)}
    for objective in OBJECTIVES:
        chosen[f"{objective} optimum"] = solve(found.costs, found.acceptance, max_budget, objective)
    runs: dict[Settings, Row] = {}
    rows = [_row(session, point, found, name, each, runs) for name, each in chosen.items()]
    optimum = chosen[f"{OBJECTIVES[0]} optimum"]
    if tail is not None and optimum.budgets:
        rows.append(_row(session, point, found, f"with tails of {tail}", optimum, runs, tail))
    unit = "ms" if costs is None else "as given"
    dear = [name for name in session.pair.models if name not in found.names]
    show(found, rows, point, unit, dear)
    kept = {"pair": pair.name, "task": point.coordinates()["task"], **sampling, "seed": seed}
    kept |= {"max_budget": max_budget, "unit": unit, "left_out": dear, **dataclasses.asdict(found), "rows": rows}
    write_atomically(output, json.dumps(plain(kept), indent=1).encode())
    return rows


def _check_names(models: Mapping[str, Any], costs: Mapping[str, float] | None, tail: str | None) -> None:
    """Refuse costs and a tail of models that the pair has not."""
    drafts = sorted(set(models) - {TARGET_MODEL})
    if tail is not None and tail not in drafts:
        raise ValueError(f"there is no draft {tail!r} for tails: {unknown(tail, drafts)}")
    if costs is not None and (set(costs) != set(models) or not all(cost > 0 for cost in costs.values())):
        raise ValueError(f"costs={dict(costs)} must be positive numbers, one for each of {', '.join(sorted(models))}")


def _measured(session: Session, point: Point, costs: Mapping[str, float] | None) -> Measured:
    """Acceptance and costs along what the target wrote, rows that failed left out."""
    written = surveying.write(session, point)
    tokens = [np.asarray(batch.generation.tokens) for batch in written]
    lengths = [np.where(batch.counts, np.asarray(batch.generation.lengths), 0) for batch in written]
    outputs, prompts = list(zip(tokens, lengths, strict=True)), [batch.prompt for batch in written]
    asked, models = point.settings, session.pair.models
    drawn = asked.temperature if asked.draft_temperature is None else asked.draft_temperature
    heat = dict.fromkeys(models, drawn) | {TARGET_MODEL: asked.temperature}
    return measure(models, prompts, outputs, temperature=heat, top_p=asked.top_p, top_k=asked.top_k, costs=costs)


def best_single(found: Measured, max_budget: int) -> Hierarchy:
    """Returns the best stack with one draft at most."""
    last = len(found.names) - 1
    stacks = []
    for models in [(last,), *((i, last) for i in range(last))]:
        stack = solve([found.costs[i] for i in models], found.acceptance[np.ix_(models, models)], max_budget)
        stacks.append(dataclasses.replace(stack, models=models[-len(stack.models) :]))
    return min(stacks, key=lambda stack: stack.latency)


def settings_of(
    hierarchy: Hierarchy, names: Sequence[str], tail: str | None = None, coins: np.ndarray | None = None
) -> Settings:
    """Returns the stack as settings; the target alone where nothing drafts.

    Args:
        tail: what goes on behind all that is drafted for the target and for levels, but by the tail itself.
        coins: `[N, N]`, acceptance rates in place of rules: every token is kept by the toss of a coin, which is what
            the latencies suppose, and decodes to nothing that anyone would read (paper 4, appendix B.2).
    """
    models, budgets = hierarchy.models, hierarchy.budgets
    if len(models) == 1:
        return Settings(method=TARGET)
    lowest = names[models[0]]
    drafter: str | Level = lowest
    # what stands right above the lowest model, and what stands further up
    own: dict[str, Any] = {"block_size": budgets[0], "tail": None if tail == lowest else tail}
    for below, budget in enumerate(budgets[1:]):
        own |= _by_coin(coins, models[below], models[below + 1])
        drafter = Level(model=names[models[below + 1]], budget=budget, drafters=(drafter,), **own)
        own = {"tail": tail}
    name = "spec_decode" if coins is None else "speculative"
    return Settings(method=name, drafters=(drafter,), **own, **_by_coin(coins, *models[-2:]))


def _by_coin(coins: np.ndarray | None, below: int, above: int) -> dict[str, Any]:
    """The rule that keeps a token of `below` as often as `above` accepts one, whatever it is.

    The token behind a block comes from the law above, as under the rule that it stands for: the calls are the same.
    """
    if coins is None:
        return {}
    return {"rule": "random_accept", "accept": "deferral", "alpha": float(coins[below, above]), "bonus": "target"}


def _row(
    session: Session, point: Point, found: Measured, name: str, chosen: Hierarchy, runs: dict[Settings, Row],
    tail: str | None = None,
) -> Row:  # fmt: skip
    """What was predicted of a stack, and what a timed run of it gave; `runs` are those made before, and this one."""
    settings = settings_of(chosen, found.names, tail)
    if settings not in runs and chosen.budgets:
        # a tail has a rate of its own, which a rule's one α cannot say
        coins = None if tail is not None else settings_of(chosen, found.names, coins=found.acceptance)
        runs[settings] = _run(session, point, found, settings, coins)
    row: Row = {"name": name, "models": [found.names[i] for i in chosen.models], "budgets": list(chosen.budgets)}
    if tail is None:
        known = (found.costs, found.acceptance, chosen.models, chosen.budgets)
        row["predicted"] = {objective: latency(*known, objective) for objective in OBJECTIVES}
    return row | runs.get(settings, {})


def _run(session: Session, point: Point, found: Measured, settings: Settings, coins: Settings | None) -> Row:
    """Measures, and the time of a token under the four conditions of paper 4's Table 5, but for the fully simplified
    one, which is the prediction: accepted by the rule or by coins, at the calls' real time or at their cost."""
    costs = dict(zip(found.names, found.costs, strict=True))
    sampling = sampling_of(point.settings)

    def under(settings: Settings) -> Point:
        return dataclasses.replace(point, settings=dataclasses.replace(settings, **sampling))

    record = next(iter(evaluate(session, [under(settings)])))
    row: Row = {"measures": record["measures"], "levels": record.get("levels", [])}
    tokens = record["counts"]["committed"]
    row["calls_per_token"] = {name: count / tokens for name, count in calls(record, settings).items()}
    row["swi"] = improvement(record, settings, costs)
    row["at_artificial_cost"] = seconds_per_token(record, settings, costs)
    row |= _timed(record)
    if coins is not None and record.get("latency"):
        tossed = next(iter(evaluate(session, [under(coins)])))
        row |= {f"{name}_by_coin": value for name, value in _timed(tossed).items() if not name.startswith("target")}
    return row


def calls(record: Mapping[str, Any], settings: Settings) -> dict[str, int]:
    """Returns how often each model was called, by name, over all examples of a record.

    Args:
        record: of `settings`, with the counts of its levels (`evaluation.measuring`).

    Raises:
        ValueError: a record without counts of the tails that the method has.
    """
    counts, levels = record["counts"], iter(record.get("levels", ()))
    found: Counter[str] = Counter({TARGET_MODEL: counts["target_calls"]})
    above: Settings | Level = settings
    while True:
        below = the_one(above.drafters, "a method whose calls are counted")
        steps = counts["draft_steps"]  # catching up included
        if above.tail is not None:
            if "tail_steps" not in counts:
                raise ValueError(f"the record does not say how often the tail {above.tail!r} was called: measure again")
            found[above.tail] += counts["tail_steps"]
            steps -= counts["tail_steps"]
        found[below if isinstance(below, str) else below.model] += steps
        if isinstance(below, str):
            return dict(found)
        above, counts = below, next(levels)


def seconds_per_token(record: Mapping[str, Any], settings: Settings, costs: Mapping[str, float]) -> float:
    """Returns real acceptance at artificial cost: what the calls of a record would have taken, in the costs' unit.

    Args:
        costs: of a call, by model.
    """
    total = sum(costs[name] * count for name, count in calls(record, settings).items())
    return float(total / record["counts"]["committed"])


def improvement(record: Mapping[str, Any], settings: Settings, costs: Mapping[str, float]) -> float:
    """Returns how many times as fast as the target alone calls of constant cost are: standardised walltime (SWI).

    The measure of paper 4's Tables 4 and 10, from cascade speculative drafting (Chen et al., 2023): the cost model
    leaves out prefill, and that a call over a block costs more than one over a token. What is counted is counted in
    real runs, so against a prediction it shows what independent acceptance gets wrong, and against the clock what
    constant costs do (paper 4, Table 5).
    """
    return costs[TARGET_MODEL] / seconds_per_token(record, settings, costs)


def _timed(record: Record) -> Row:
    """Seconds per token, and how many times the target's speed that is, per token; both of whole generations.

    The interval is that of whole outputs, over examples and trials, moved to outputs of the target's length; `None`
    with fewer examples than intervals take.
    """
    if not record.get("latency"):
        return {}
    ratio = record["relative_latency"]
    times: dict[str, Timed] = {"seconds_per_token": "latency", "target_seconds_per_token": "target_latency"}
    row: Row = {name: record[part]["ms_per_token"]["value"] / 1e3 for name, part in times.items()}
    row |= {"speed_up": 1 / ratio["per_token"], "interval": None}
    if record["latency"]["examples"] >= LEAST_EXAMPLES:
        found = Bootstrap().latency_ratio([record])
        longer = ratio["value"] / ratio["per_token"]
        row["interval"] = [longer / found.high, longer / found.low]
    return row


def show(found: Measured, rows: Sequence[Row], point: Point, unit: str, dear: Sequence[str] = ()) -> None:
    """Print acceptance and costs, which models were left out as too `dear`, then the stacks."""
    console = Console(width=120)
    console.print(_matrix(found, point, unit))
    if dear:
        console.print(f"Left out, as a call of theirs costs no less than one of the target: {', '.join(dear)}")
    note = (
        "Predicted: without prefill, calls at the cost of one token, acceptance independent at every token. SWI: the "
        "same cost of a call, acceptance as it was. By coin: independent again, at the time that calls took. Realised: "
        "both as they were. The last two are whole generations, per token, beside the target's; 95%: over examples and "
        "trials. The overshoot optimum is searched, the paper's exact (hierarchy.solve)."
    )
    heads = ("", "models", "budgets", "predicted", "with overshoot", "SWI", "by coin", "realised", "95%")
    stacks = _table("Stacks: times the target's speed", note, heads, left=3)
    for row in rows:
        stacks.add_row(row["name"], " → ".join(row["models"]), ", ".join(map(str, row["budgets"])), *_cells(found, row))
    console.print(stacks)


def _matrix(found: Measured, point: Point, unit: str) -> Table:
    heat = point.settings.temperature
    note = f"E [1 − TV] along {found.positions:,} positions of the target's outputs, T = {heat:g}; "
    note += f"the triangle inequality is broken by {found.breach:.1g} at most."
    scale, head = (1e3, "ms a call") if unit == "ms" else (1.0, "cost of a call")
    matrix = _table("Acceptance", note, ("of", head, *(f"by {name}" for name in found.names[1:])), left=1)
    for i, (name, cost) in enumerate(zip(found.names, found.costs, strict=True)):
        cells = [f"{found.acceptance[i, j]:.3f}" if j > i else "" for j in range(1, len(found.names))]
        matrix.add_row(name, f"{scale * cost:.3f}", *cells)
    return matrix


def _table(title: str, note: str, heads: Sequence[str], left: int) -> Table:
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right")
    return table


def _cells(found: Measured, row: Row) -> list[str]:
    predicted = row.get("predicted", {})
    times = [found.costs[-1] / predicted[each] if predicted else None for each in OBJECTIVES]
    times += [row.get(name) for name in ("swi", "speed_up_by_coin", "speed_up")]
    interval = row.get("interval")
    between = f"{interval[0]:.2f} – {interval[1]:.2f}" if interval else ""
    return [*("–" if each is None else f"{each:.2f}×" for each in times), between]
