"""Surveys of a task: estimates of all rules' rates, printed as tables and compared with real runs.

`experiments/survey.py` calls this module.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from speccascade_jax.core.checks import several
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.counters import summarise
from speccascade_jax.engine.generate import Generation, failures, model_names
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.survey import estimates
from speccascade_jax.evaluation.studies.survey.estimates import Survey
from speccascade_jax.methods.settings import check_sampling_alone, sampling_of
from speccascade_jax.models.sharding import on_devices
from speccascade_jax.results.analysis import histograms
from speccascade_jax.results.report import printing
from speccascade_jax.rules import deferral
from speccascade_jax.runtime import progress, recipe_header
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically


class Written(NamedTuple):
    """Batch of generated outputs: the prompts, their generation, and the mask of valid rows, bool `[B]`."""

    prompt: Prompt
    generation: Generation
    counts: np.ndarray


WRITERS = {
    "target": Settings(method=TARGET),
    "draft": Settings(method=DRAFT),
    "mixed": Settings(rule="random_accept", alpha=0.5),
}
"""Methods that generate the outputs to survey; "mixed" takes each token from draft or target with equal probability."""


def survey(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    settings: Settings,
    rules: Sequence[str],
    along: str = "mixed",
    alphas: int = 33,
    check: Sequence[float] = (),
    bounds: Sequence[float] = (),
    histogram: str = "js",
    block_size: int = 5,
    seed: int = 0,
    output: str = "",
) -> list[dict[str, Any]]:
    """Estimates every rule's rejection and deferral rate from one pass over generated outputs, and prints the rates.

    Args:
        pair: the models, as in `experiment.run`.
        evaluation: as in `experiment.run`; its examples for quality are surveyed.
        settings: sampling settings of both models.
        rules: names in `rules.deferral.RULES`, or `module.NAME` of your own.
        along: the method that generates the surveyed outputs, a name in `WRITERS`.
        alphas: number of α's in each rule's grid, which covers the usual range of α.
        check: positions in the range of α, as fractions in [0, 1], at which each rule is also run, to report the error
            of the estimate.
        bounds: thresholds τ at which the fuzzy rules among `rules` are also run, to compare their divergence with the
            bound `N · share · τ`. Their draft is sampled unless `settings` give it temperature 0.
        histogram: the divergence whose histogram over positions is printed, a name in `histograms.LAST_EDGES`.
        block_size: γ of the runs for `check` and `bounds`.
        seed: the random seed, as in `experiment.run`.
        output: path of a JSON file for the printed rows, the bounds and the histogram; empty: no file.

    Raises:
        ValueError: a value is invalid, or `output` is a file of another kind; raised before anything is loaded.
    """
    if along not in WRITERS:
        raise ValueError(f"along={along!r} is not one of {', '.join(WRITERS)}")
    for name, values in {"check": check, "bounds": bounds}.items():
        several(name, values)
    if any(not 0 <= share <= 1 for share in check):
        raise ValueError(f"check={tuple(check)} must be shares of a rule's range, between 0 and 1")
    several("rules", rules, 1)
    sampling = sampling_of(check_sampling_alone(settings, "survey"))
    writer = replace(WRITERS[along], **sampling)
    point = Point(pair=pair, evaluation=evaluation.resolved(), settings=writer, seed=seed)
    validate(point, timed=False)
    histograms.check(histogram)
    if output:
        check_replaceable(output, '"along":', '"histogram":')
    grids = {name: grid(name, alphas) for name in rules}
    runs = _fuzzy_points(point, rules, bounds, block_size)

    recipe_header.announce(f"{sum(map(len, grids.values()))} points of {len(grids)} rules")
    session = Session(point.pair, point.evaluation)
    surveyed = take(session, point, grids)
    rows = [_row(surveyed, name, alpha) for name in rules for alpha in _shown(grids[name], check)]
    if check:
        rows = [row | _checked(session, point, row, block_size) for row in rows]
    show(rows, along, len(surveyed.rows))
    counted = histograms.count(histogram, surveyed.positions[histogram])
    print(histograms.line(counted))
    bounded = [_bounded(session, run) for run in runs]
    if bounded:
        show_bounds(bounded, point.evaluation.quality_examples)
    if output:
        coordinates = point.coordinates()
        kept = {name: coordinates[name] for name in ("pair", "task", *sampling)}
        kept |= {"along": along, "positions": len(surveyed.rows), "rows": rows, "bounds": bounded, "histogram": counted}
        write_atomically(output, json.dumps(plain(kept), indent=1))
    return rows


def grid(rule: str, count: int, vocab_size: int = 8192) -> tuple[float, ...]:
    """Returns `count` α's over a rule's usual range, with ends inside its domain; `(0.0,)` for a rule without α."""
    alpha = deferral.get(rule).alpha
    return (0.0,) if alpha is None else tuple(alpha.even(count, vocab_size).tolist())


def plan(session: Session, point: Point, names: Sequence[str], count: int) -> dict[str, tuple[float, ...]]:
    """Returns `count` α's for every rule of `names` that has an α, evenly spaced in the estimated rejection rate.

    The rate is estimated by a survey of "mixed" outputs (`WRITERS`).

    Args:
        session: provides the pair and its examples.
        point: provides the evaluation, the sampling and the seed of the survey.
        names: names of rules; those without an α are left out.
        count: number of α's for each rule.
    """
    swept = [name for name in names if deferral.get(name).alpha is not None]
    surveyed = take(session, written_by("mixed", point), {name: grid(name, 65) for name in swept})
    return {name: surveyed.plan(name, count) for name in swept}


def take(session: Session, point: Point, grids: Mapping[str, Sequence[float]]) -> Survey:
    """Generates outputs for the evaluation's examples with the point's method, in batches, and surveys them."""
    return read(session, point, write(session, point), grids)


def write(session: Session, point: Point) -> list[Written]:
    """Generates outputs for the evaluation's examples with the point's method, in batches of equal size.

    The mask of valid rows excludes rows in which a model gave NaN or infinite logits, and rows that only fill a batch
    up.
    """
    out = []
    for rows, counted in progress.counted(session.batches(point.evaluation), f"outputs of {point.title()}", "batches"):
        generation = session.prepare(point, rows)(point.seed)
        prompt = jax.tree.map(lambda x, rows=rows: x[rows], session.prompts)
        prompt = on_devices(prompt, session.pair.mesh)
        failed = failures(generation.failed_at, model_names(point.method.draft_alone))
        if failed:
            print(f"{len(failed)} outputs are left out: {failed[0]}")
        well = ~np.isin(np.arange(len(rows)), [failure.row for failure in failed])
        out.append(Written(prompt, generation, well & (np.arange(len(rows)) < counted)))
    return out


def rates(written: Sequence[Written]) -> dict[str, Any]:
    """Computes the summary measures of generated outputs (docs/methods.md, section 9)."""
    stats = jax.tree.map(lambda *parts: np.concatenate(parts), *(batch.generation.stats for batch in written))
    return summarise(stats, rows=np.concatenate([batch.counts for batch in written]))


def read(session: Session, point: Point, written: Sequence[Written], grids: Mapping[str, Sequence[float]]) -> Survey:
    """Surveys generated outputs under the point's sampling settings.

    Raises:
        FloatingPointError: every output met NaN or infinite logits, so that there is nothing to survey.
    """
    parts = []
    # the survey needs the controls of both models, but the settings of a model that decodes alone have only its own
    compared = written_by("mixed", point)
    for batch in progress.counted(written, "surveying the outputs", "batches"):
        tokens, lengths = np.asarray(batch.generation.tokens), np.asarray(batch.generation.lengths)
        controls = session.controls(compared, [0.0] * len(lengths))
        counted = np.where(batch.counts, lengths, 0)
        parts.append(estimates.survey(session.pair, batch.prompt, tokens, counted, controls, grids))
    surveyed = estimates.join(parts)
    if not len(surveyed.rows):
        raise FloatingPointError(
            "no output is left to survey: draft or target gives NaN or infinite logits along every one; check their "
            "weights"
        )
    return surveyed


def _shown(alphas: Sequence[float], check: Sequence[float]) -> list[float]:
    """Returns the α's to print: those given by `check`, or else five over the range."""
    if len(alphas) == 1:
        return list(alphas)
    shares = check or (0.1, 0.3, 0.5, 0.7, 0.9)
    return [float(f"{alphas[0] + share * (alphas[-1] - alphas[0]):.4g}") for share in shares]


def _row(surveyed: Survey, rule: str, alpha: float) -> dict[str, Any]:
    estimate = surveyed.estimate(rule, alpha)
    alpha_or_none = None if deferral.get(rule).alpha is None else alpha
    return {"rule": rule, "alpha": alpha_or_none, "rejection": estimate.rejection, "deferral": estimate.deferral}


def _checked(session: Session, point: Point, row: dict[str, Any], block_size: int) -> dict[str, Any]:
    """Runs a rule, and returns the errors of two estimates of its rate.

    The first estimate is computed along the surveyed outputs, the second along the outputs of the run itself. The
    second one sees the same prefixes as the run, so its error has another cause than different prefixes.
    """
    real = _under(point, Settings(method=row["rule"], alpha=row["alpha"], block_size=block_size))
    validate(real, timed=False)
    written = write(session, real)
    own_estimate = read(session, real, written, {row["rule"]: (row["alpha"] or 0.0,)}).estimate(row["rule"])
    measured = rates(written)
    return {
        "real_rejection": measured["rejection_rate"],
        "real_deferral": measured["deferral_rate"],
        "error": row["rejection"] - measured["rejection_rate"],
        "error_along_its_own_outputs": own_estimate.rejection - measured["rejection_rate"],
    }


def _fuzzy_points(point: Point, names: Sequence[str], taus: Sequence[float], block_size: int) -> list[Point]:
    """Returns validated points of the fuzzy method for every τ and fuzzy rule, with a sampled draft by default."""
    if any(not 0 < tau < math.inf for tau in taus):
        raise ValueError(f"bounds={tuple(taus)} must be thresholds above 0: at 0 every draft is rejected")
    fuzzy = [name for name in names if estimates.is_fuzzy(name)]
    if len(taus) and not fuzzy:
        raise ValueError(f"bounds={tuple(taus)} need a fuzzy rule: add one to rules, such as 'fuzzy_tv_scaled'")
    # set the draft's temperature, because the default of the fuzzy method is a greedy draft
    chosen = point.settings
    drafted = chosen.temperature if chosen.draft_temperature is None else chosen.draft_temperature
    points = []
    for name, tau in itertools.product(fuzzy, taus):
        settings = Settings(method="fuzzy", rule=name, alpha=tau, block_size=block_size, bonus="rule")
        points.append(_under(point, settings).with_settings(draft_temperature=drafted))
        validate(points[-1], timed=False)
    return points


def _under(point: Point, settings: Settings) -> Point:
    """Returns the point with other settings, but with the sampling of the point."""
    return replace(point, settings=replace(settings, **sampling_of(point.settings)))


def written_by(along: str, point: Point) -> Point:
    """Returns the point with the settings of `WRITERS[along]`, but with the sampling of the point."""
    return _under(point, WRITERS[along])


def _bounded(session: Session, run: Point) -> dict[str, Any]:
    """Runs the method (the target for `kl`), surveys its outputs, and returns one row of the table of bounds."""
    rule, tau = run.method.rule(run.settings).name, run.settings.alpha
    assert tau is not None
    along = estimates.outputs_of(estimates.threshold(rule))
    writer = run if along == "rule" else written_by("target", run)
    surveyed = take(session, writer, {rule: (tau,)})
    greedy = run.settings.draft_temperature == 0
    return {"rule": rule, "tau": tau, "along": along} | estimates.bound(surveyed, rule, tau, along, greedy)._asdict()


RATES = {
    "rule": "rule", "alpha": "α", "rejection": "rejected", "deferral": "deferred",
    "real_rejection": "rejected in a run", "real_deferral": "deferred in a run", "error": "error",
    "error_along_its_own_outputs": "error on its own outputs",
}  # fmt: skip
BOUNDS = {
    "rule": "rule", "tau": "τ", "along": "along", "tokens": "tokens per\noutput", "share": "share",
    "incurred": "divergence\nincurred", "bound": "N · share\n· τ", "standing": "status",
}  # fmt: skip


def show(rows: Sequence[Mapping[str, Any]], along: str, positions: int) -> None:
    """Prints the estimated rates as a table."""
    note = (
        f"Estimated along {positions:,} positions of the {along} outputs. A rule that decodes generates other outputs, "
        "so its real rates differ."
    )
    _print("Rejection and deferral rates", note, RATES, rows)


def show_bounds(rows: Sequence[Mapping[str, Any]], outputs: int) -> None:
    """Prints the table of bounds; each row holds the fields of `Bound`, and `rule`, `tau` and `along`."""
    note = (
        f"Means over {outputs:,} outputs. Share: share of tokens with Div < τ. Incurred: sum of Div(p̃, q̃) over these "
        "tokens; its mean is the divergence of whole outputs for the KLs, and at least that divergence for tv. tv and "
        "js of outputs are at most 1, so a larger bound says nothing."
    )
    rounded = [
        {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in row.items()} for row in rows
    ]
    _print("Divergence from the target", note, BOUNDS, rounded, unbroken="rule")


def _print(
    title: str, note: str, heads: Mapping[str, str], rows: Sequence[Mapping[str, Any]], unbroken: str = ""
) -> None:
    """Prints a table of the entries that have a header; `unbroken` names a column whose cells are not wrapped."""
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    names = [name for name in heads if name in rows[0]]
    for name in names:
        is_text = name in ("rule", "along", "standing")
        table.add_column(heads[name], justify="left" if is_text else "right", no_wrap=name == unbroken)
    for row in rows:
        table.add_row(*(_cell(row[name], signed=name.startswith("error")) for name in names))
    printing.console().print(table)


def _cell(value: Any, signed: bool) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:+.3f}" if signed else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"
