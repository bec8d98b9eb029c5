"""Search for the fastest stack of a pair's models, which is then measured (Globerson et al., 2025, Tables 3, 5)."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
from speccascade_jax.results.report import printing
from speccascade_jax.results.store.record import Record, Row, Timed
from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.progress import counted
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically

TARGET_MODEL = "target"
"""The name of the target model in every pair."""


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
    """Finds the best stack of the pair's models and compares its predicted latency with a timed run.

    The candidate models are the pair's draft and its further drafts (`ModelPair.others`: checkpoints, or models derived
    by `pairs.derived`). Acceptance rates are measured along the target's outputs for the evaluation's examples. The
    cost of a model is the time of a one-token call at batch size 1. Four stacks are run and timed: the best single
    draft, the best stack by the paper's latency, the best stack by the latency with overshoot, and the target alone for
    comparison.

    Args:
        pair: the models, as for a run.
        evaluation: the examples, as for a run.
        settings: the sampling settings of all models.
        max_budget: T̄, the largest budget.
        costs: cost of a call of each model, in any unit, for the solution and all predictions; `None`: seconds are
            measured.
        tail: a model that appends tokens to the drafts at every level, except where it is itself the draft (the paper's
            horizontal heuristic, appendix D). The paper's optimum is run once more with these tails; this run has no
            prediction. `None`: no such run.
        seed: the random seed, as for a run.
        output: a JSON file for the rows, the matrix and the costs; `experiments.plots --acceptance` draws the matrix.

    Returns:
        The rows of the printed table.

    Raises:
        ValueError: a value is invalid, or `output` is a file of another kind (found before any model is loaded);
            `costs` or `tail` name models that the pair lacks (found before any program is compiled); the tail costs as
            much as the target (found after the costs are measured).
    """
    max_budget = whole("max_budget", max_budget, 1)
    sampling = sampling_of(check_sampling_alone(settings, "optimize"))
    alone = Settings(method=TARGET, **sampling)
    point = Point(pair=pair, evaluation=evaluation.resolved(), settings=alone, seed=seed)
    validate(point)
    if costs is None and pair.mesh[0] > 1:
        remedy = f"give costs, or a mesh of (1, {pair.mesh[1]})"
        raise ValueError(f"calls of one row are timed, and mesh={pair.mesh} splits rows over devices: {remedy}")
    check_replaceable(output, '"acceptance":', '"costs":')
    recipe_header.announce(f"{len(pair.others) + 2} models")
    session = Session(point.pair, point.evaluation)
    _check_names(session.pair.models, costs, tail)
    recipe_header.announce_places()
    measured = _measured(session, point, costs)
    if tail is not None and tail not in measured.names:
        raise ValueError(f"a call of the tail {tail!r} takes as long as a call of the target: choose a cheaper tail")
    chosen = {"best single draft": best_single(measured, max_budget)}
    for objective in counted(OBJECTIVES, "searching for the best stacks", "objectives"):
        chosen[f"{objective} optimum"] = solve(measured.costs, measured.acceptance, max_budget, objective)
    runs: dict[Settings, Row] = {}
    stacks = counted(chosen.items(), "measuring the stacks", "stacks", len(chosen))
    rows = [_row(session, point, measured, name, stack, runs) for name, stack in stacks]
    optimum = chosen[f"{OBJECTIVES[0]} optimum"]
    if tail is not None and optimum.budgets:
        rows.append(_row(session, point, measured, f"with tails of {tail}", optimum, runs, tail))
    unit = "ms" if costs is None else "as given"
    dear = [name for name in session.pair.models if name not in measured.names]
    show(measured, rows, point, unit, dear)
    kept = {"pair": pair.name, "task": point.coordinates()["task"], **sampling, "seed": seed}
    kept |= {"max_budget": max_budget, "unit": unit, "left_out": dear, **dataclasses.asdict(measured), "rows": rows}
    write_atomically(output, json.dumps(plain(kept), indent=1).encode())
    return rows


def _check_names(models: Mapping[str, Any], costs: Mapping[str, float] | None, tail: str | None) -> None:
    """Raises a ValueError if `costs` or `tail` name models that the pair lacks."""
    drafts = sorted(set(models) - {TARGET_MODEL})
    if tail is not None and tail not in drafts:
        raise ValueError(f"the pair has no draft {tail!r} to use as a tail: {unknown(tail, drafts)}")
    if costs is not None and (set(costs) != set(models) or not all(cost > 0 for cost in costs.values())):
        raise ValueError(f"costs={dict(costs)} must be positive numbers, one for each of {', '.join(sorted(models))}")


def _measured(session: Session, point: Point, costs: Mapping[str, float] | None) -> Measured:
    """Writes the target's outputs and measures acceptance rates and costs; rows with non-finite logits are left out."""
    written = surveying.write(session, point)
    tokens = [np.asarray(batch.generation.tokens) for batch in written]
    lengths = [np.where(batch.counts, np.asarray(batch.generation.lengths), 0) for batch in written]
    outputs, prompts = list(zip(tokens, lengths, strict=True)), [batch.prompt for batch in written]
    asked, models = point.settings, session.pair.models
    drawn = asked.temperature if asked.draft_temperature is None else asked.draft_temperature
    heat = dict.fromkeys(models, drawn) | {TARGET_MODEL: asked.temperature}
    return measure(models, prompts, outputs, temperature=heat, top_p=asked.top_p, top_k=asked.top_k, costs=costs)


def best_single(measured: Measured, max_budget: int) -> Hierarchy:
    """Returns the stack with the least predicted latency among those of the target and at most one draft."""
    last = len(measured.names) - 1
    stacks = []
    for models in [(last,), *((i, last) for i in range(last))]:
        stack = solve([measured.costs[i] for i in models], measured.acceptance[np.ix_(models, models)], max_budget)
        stacks.append(dataclasses.replace(stack, models=models[-len(stack.models) :]))
    return min(stacks, key=lambda stack: stack.latency)


def settings_of(
    hierarchy: Hierarchy, names: Sequence[str], tail: str | None = None, coins: np.ndarray | None = None
) -> Settings:
    """Returns the settings that run a stack; for a stack without a draft, those of the target alone.

    Args:
        hierarchy: the stack.
        names: names of the models, at the indices that the hierarchy uses.
        tail: a model that appends tokens to all drafts, except to its own drafts.
        coins: `[N, N]`, acceptance rates that replace the rules: each token is accepted at random, as the latencies
            assume. The output is meaningless text (Globerson et al., 2025, appendix B.2).
    """
    models, budgets = hierarchy.models, hierarchy.budgets
    if len(models) == 1:
        return Settings(method=TARGET)
    lowest = names[models[0]]
    drafter: str | Level = lowest
    # settings of the level right above the lowest model; replaced for each level further up
    level_settings: dict[str, Any] = {"block_size": budgets[0], "tail": None if tail == lowest else tail}
    for below, budget in enumerate(budgets[1:]):
        level_settings |= _by_coin(coins, models[below], models[below + 1])
        drafter = Level(model=names[models[below + 1]], budget=budget, drafters=(drafter,), **level_settings)
        level_settings = {"tail": tail}
    name = "spec_decode" if coins is None else "speculative"
    return Settings(method=name, drafters=(drafter,), **level_settings, **_by_coin(coins, *models[-2:]))


def _by_coin(coins: np.ndarray | None, below: int, above: int) -> dict[str, Any]:
    """Returns settings of a rule that accepts tokens of model `below` at random, at the measured rate of model `above`.

    The token after a block is sampled from the distribution of model `above`, as under the rule that is replaced. So
    the number of calls is the same.
    """
    if coins is None:
        return {}
    return {"rule": "random_accept", "accept": "deferral", "alpha": float(coins[below, above]), "bonus": "target"}


def _row(
    session: Session, point: Point, measured: Measured, name: str, chosen: Hierarchy, runs: dict[Settings, Row],
    tail: str | None = None,
) -> Row:  # fmt: skip
    """Returns a stack's prediction and the results of its timed run, which is stored in `runs` by its settings."""
    settings = settings_of(chosen, measured.names, tail)
    if settings not in runs and chosen.budgets:
        # With a tail, no run uses random acceptance, because the tail's acceptance rate would need another α.
        coins = None if tail is not None else settings_of(chosen, measured.names, coins=measured.acceptance)
        runs[settings] = _run(session, point, measured, settings, coins)
    row: Row = {"name": name, "models": [measured.names[i] for i in chosen.models], "budgets": list(chosen.budgets)}
    if tail is None:
        known = (measured.costs, measured.acceptance, chosen.models, chosen.budgets)
        row["predicted"] = {objective: latency(*known, objective) for objective in OBJECTIVES}
    return row | runs.get(settings, {})


def _run(session: Session, point: Point, measured: Measured, settings: Settings, coins: Settings | None) -> Row:
    """Runs a stack and measures its time per token under the conditions of Globerson et al. (2025), Table 5.

    A condition combines two choices: tokens are accepted by the rule or at random, and a call takes its real time or
    its constant cost. Random acceptance with constant costs is left out, because it is the prediction.
    """
    costs = dict(zip(measured.names, measured.costs, strict=True))
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
    """Returns the number of calls of each model, by name, over all examples of a record.

    Args:
        record: a record with the counts of its levels (`evaluation.measuring`).
        settings: the settings that the record was measured with.

    Raises:
        ValueError: the method has tails, and the record has no counts for them.
    """
    counts, levels = record["counts"], iter(record.get("levels", ()))
    totals: Counter[str] = Counter({TARGET_MODEL: counts["target_calls"]})
    above: Settings | Level = settings
    while True:
        below = the_one(above.drafters, "a method whose calls are counted")
        steps = counts["draft_steps"]  # includes calls in which the draft only reads committed tokens
        if above.tail is not None:
            if "tail_steps" not in counts:
                raise ValueError(f"the record does not say how often the tail {above.tail!r} was called: measure again")
            totals[above.tail] += counts["tail_steps"]
            steps -= counts["tail_steps"]
        totals[below if isinstance(below, str) else below.model] += steps
        if isinstance(below, str):
            return dict(totals)
        above, counts = below, next(levels)


def seconds_per_token(record: Mapping[str, Any], settings: Settings, costs: Mapping[str, float]) -> float:
    """Returns the cost per token of a record, as the number of calls of each model times the model's cost.

    The unit is that of the costs. The number of calls comes from a real run, but the time of a call is assumed.

    Args:
        record: a record with the counts of its levels, as in `calls`.
        settings: the settings that the record was measured with.
        costs: cost of one call of each model, by name.
    """
    total = sum(costs[name] * count for name, count in calls(record, settings).items())
    return float(total / record["counts"]["committed"])


def improvement(record: Mapping[str, Any], settings: Settings, costs: Mapping[str, float]) -> float:
    """Returns the speedup over the target alone at constant cost per call: standardised walltime improvement (SWI).

    This is the measure of Tables 4 and 10 of Globerson et al. (2025), from cascade speculative drafting (Chen et al.,
    2023). The cost model ignores prefill, and assumes that a call over a block costs no more than a call over one
    token. The number of calls comes from real runs. So the difference between SWI and a prediction is the error of
    assuming independent acceptance, and the difference between SWI and measured time is the error of assuming constant
    costs (Globerson et al., 2025, Table 5).
    """
    return costs[TARGET_MODEL] / seconds_per_token(record, settings, costs)


def _timed(record: Record) -> Row:
    """Returns the seconds per token and the speedup per token over the target; both times are of whole generations.

    The confidence interval is that of the time per output, over examples and trials, rescaled to the time per token. It
    is `None` if there are too few examples for an interval.
    """
    if not record.get("latency"):
        return {}
    ratio = record["relative_latency"]
    times: dict[str, Timed] = {"seconds_per_token": "latency", "target_seconds_per_token": "target_latency"}
    row: Row = {name: record[part]["ms_per_token"]["value"] / 1e3 for name, part in times.items()}
    row |= {"speed_up": 1 / ratio["per_token"], "interval": None}
    if record["latency"]["examples"] >= LEAST_EXAMPLES:
        ratio_interval = Bootstrap().latency_ratio([record])
        longer = ratio["value"] / ratio["per_token"]
        row["interval"] = [longer / ratio_interval.high, longer / ratio_interval.low]
    return row


def show(measured: Measured, rows: Sequence[Row], point: Point, unit: str, dear: Sequence[str] = ()) -> None:
    """Prints acceptance rates and costs, the models that cost as much as the target (`dear`), then the stacks."""
    console = printing.console()
    console.print(_matrix(measured, point, unit))
    if dear:
        console.print(f"Left out, because a call costs at least as much as a call of the target: {', '.join(dear)}")
    note = (
        "Predicted: prefill is ignored, every call costs as much as a one-token call, and every token is accepted "
        "independently. SWI: the same costs with the measured acceptance. By coin: measured time with independent "
        "acceptance. Realised: measured time with the measured acceptance. By coin and Realised are times of whole "
        "generations per token, relative to the target. 95%: confidence interval over examples and trials. The "
        "overshoot optimum comes from a search; the paper optimum is exact (hierarchy.solve)."
    )
    heads = ("", "models", "budgets", "predicted", "with overshoot", "SWI", "by coin", "realised", "95%")
    stacks = _table("Stacks: speed relative to the target alone", note, heads, left_columns=3)
    for row in rows:
        stacks.add_row(
            row["name"], " → ".join(row["models"]), ", ".join(map(str, row["budgets"])), *_cells(measured, row)
        )
    console.print(stacks)


def _matrix(measured: Measured, point: Point, unit: str) -> Table:
    heat = point.settings.temperature
    note = f"E [1 − TV] along {measured.positions:,} positions of the target's outputs, T = {heat:g}; "
    note += f"the triangle inequality is violated by at most {measured.breach:.1g}."
    scale, head = (1e3, "ms per call") if unit == "ms" else (1.0, "cost of a call")
    heads = ("tokens of", head, *(f"accepted by {name}" for name in measured.names[1:]))
    matrix = _table("Acceptance", note, heads, left_columns=1)
    for i, (name, cost) in enumerate(zip(measured.names, measured.costs, strict=True)):
        cells = [f"{measured.acceptance[i, j]:.3f}" if j > i else "" for j in range(1, len(measured.names))]
        matrix.add_row(name, f"{scale * cost:.3f}", *cells)
    return matrix


def _table(title: str, note: str, heads: Sequence[str], left_columns: int) -> Table:
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left_columns else "right")
    return table


def _cells(measured: Measured, row: Row) -> list[str]:
    predicted = row.get("predicted", {})
    times = [measured.costs[-1] / predicted[value] if predicted else None for value in OBJECTIVES]
    times += [row.get(name) for name in ("swi", "speed_up_by_coin", "speed_up")]
    interval = row.get("interval")
    between = f"{interval[0]:.2f} – {interval[1]:.2f}" if interval else ""
    return [*("–" if value is None else f"{value:.2f}×" for value in times), between]
