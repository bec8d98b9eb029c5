"""Paper 3's tables: forward times (Table 2), throughputs (Table 1), theorem 3.1's threshold, and dominance (Figure 4).

What stands in the cells and what must be said below; the numbers come from `results.analysis`: `forward_times`,
`throughput` and `pareto`. Brackets hold 95% bootstrap intervals over examples. Needs no JAX.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from speccascade_jax.results.analysis import forward_times, pareto, provenance
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.families import GAMMA, Families, Family
from speccascade_jax.results.analysis.forward_times import Fit
from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.analysis.throughput import Throughputs
from speccascade_jax.results.report.tables.grid import NONE, Grid

_RESAMPLES = (
    f"[low, high]: 95% bootstrap over examples, {Bootstrap().samples:,} resamples, the same for every entry; seeds are "
    "averaged, not resampled."
)
_CHOSEN = "No interval allows for γ and h having been chosen on the same examples, nor for how many are compared."
_PREDICTED = (
    "Predicted: from the counts of the {} examples that quality is taken on and t_draft = {:.3g} ms, t_target = {:.3g} "
    "ms, {:.3g} ms per generation (R² {:.3f}); the target alone from its own fit. Intervals hold the errors of "
    "both fits, records taken as a whole."
)
_MEASURED = (
    "Measured: of the timed runs, at batch 1; a speed-up is over the target's runs beside, and intervals resample "
    "trials too."
)


def forward_time_grids(families: Families) -> list[Grid]:
    """Paper 3's Table 2: where both models take part (all, and family by family), and each of them alone."""
    records, notes, rows = families.records, list[str](), list[list[str]]()
    fits = {"Both models, all": partial(forward_times.speculative, records)}
    for family in (*families.fixed, *families.adaptive):
        members = [record for spot in family.spots.values() for record in spot.records]
        fits[_family_name(family)] = partial(forward_times.speculative, members)
    for end in (families.target, families.panel.draft):
        if end:
            fits[end.label] = partial(forward_times.alone, records, end.records[0]["point"]["method"])
    for name, fitted in fits.items():
        try:
            rows.append([name, *_fit_cells(fitted(), fitted(intercept=False))])
        except ValueError as error:
            rows.append([name, *[NONE] * 8])
            notes.append(f"{name}: {error}.")
    header = ["Runs", "generations", "t_draft ms", "t_target ms", "per generation ms", "R²"]
    header += [f"without constant: {name}" for name in ("t_draft ms", "t_target ms", "R²")]
    notes += [
        "Least squares of a generation's seconds on its draft steps and target calls, and a constant for its prefill "
        "and its call, which paper 3's equation 2.1 lacks: on the right the fit without. ± standard error, records "
        "taken as a whole. R²: explained share of the variance about the mean.",
        f"{families.panel.sizes()}. Device: {families.panel.setting['device']}.",
        *provenance.notes([families.panel]),
    ]
    return [Grid(title=f"Forward times: {families.panel.title()}", header=header, rows=rows, notes=notes)]


def _fit_cells(fit: Fit, plain: Fit) -> list[str]:
    cells = [str(fit.generations)]
    for one, names in ((fit, ("draft_steps", "target_calls", "generation")), (plain, ("draft_steps", "target_calls"))):
        value = {"draft_steps": one.draft, "target_calls": one.target, "generation": one.constant}
        for name in names:
            error = one.errors.get(name)
            cells.append(NONE if error is None else f"{value[name] * 1e3:.3f} ± {error * 1e3:.3f}")
        cells.append(f"{one.r_squared:.3f}")
    return cells


def throughput_grids(families: Families) -> list[Grid]:
    """Paper 3's Table 1, every point's prediction beside what was measured, and theorem 3.1's threshold.

    Raises:
        ValueError: records without counts or without timings, no target alone, or forward times that cannot be fitted.
    """
    found = Throughputs(families, Bootstrap())
    grids = [_best_grid(found), _prediction_grid(found)]
    heads = any(family.on_rejection or family.w_rej is not None for family in _token_wise(families))
    return [*grids, _threshold_grid(found)] if heads else grids


def _best_grid(found: Throughputs) -> Grid:
    families, rows, bold = found.families, list[list[str]](), set[tuple[int, int]]()
    for family in (*families.fixed, *families.adaptive):
        rival = None if family.symbol == GAMMA else families.rival(family)
        row = [_family_name(family)]
        for best in (found.best_predicted, found.best_measured):
            own = best(family)
            over = found.bootstrap.interval(own.speed_up / best(rival).speed_up - 1) if rival else None
            row += [f"{family.symbol} = {own.at:g}", _rate(found, own.tokens), _rate(found, own.speed_up, ".2f", "×")]
            row.append(_percent(over) if over else NONE)
            if over and over.low > 0:
                bold.add((len(rows), len(row) - 1))
        rows.append(row)
    for name, spot in {families.target.label: families.target, **families.oracles}.items():
        rows.append([name, *_single_cells(found, spot)])
    columns = ("best at", "tokens/s", "speed-up", "over best fixed γ")
    header = ["Method", *(f"{how}: {what}" for how in ("predicted", "measured") for what in columns)]
    notes = [_resting(found), _MEASURED, _RESAMPLES, "Bold: faster than the best fixed γ beyond the interval.", _CHOSEN]
    notes += provenance.notes([families.panel])
    return Grid(title=f"Throughput: {families.panel.title()}", header=header, rows=rows, notes=notes, bold=bold)


def _single_cells(found: Throughputs, spot: Spot) -> list[str]:
    """The cells of what has no number to choose; an oracle need not have been timed."""
    cells, target = list[str](), spot is found.families.target
    kinds = [(found.predicted, found.speed_up_predicted, True), (found.measured, found.speed_up_measured, _timed(spot))]
    for tokens, speed_up, known in kinds:
        if known:
            faster = "1.00×" if target else _rate(found, speed_up(spot), ".2f", "×")
            cells += [NONE, _rate(found, tokens(spot)), faster, NONE]
        else:
            cells += [NONE] * 4
    return cells


def _prediction_grid(found: Throughputs) -> Grid:
    rows, errors = list[list[str]](), list[float]()
    for name, at, spot in _places(found.families):
        discard, verification = (_rate(found, each, ".3f") for each in pareto.rates(spot, found.bootstrap))
        row = [name, at, verification, discard, _rate(found, found.predicted(spot))]
        if _timed(spot):
            errors.append(found.error(spot))
            row += [_rate(found, found.measured(spot)), f"{errors[-1]:+.1%}"]
        rows.append(row if len(row) > 5 else [*row, NONE, NONE])
    header = ["Method", "at", "verification rate", "discard rate", "predicted tokens/s", "measured tokens/s", "error"]
    notes = [
        _resting(found),
        _MEASURED,
        f"Error: predicted over measured, less 1, both of the timed runs; at most {max(map(abs, errors)):.1%}.",
        _RESAMPLES,
    ]
    title = f"Predicted and measured throughput: {found.families.panel.title()}"
    return Grid(title=title, header=header, rows=rows, notes=notes)


def _threshold_grid(found: Throughputs) -> Grid:
    rows, notes = list[list[str]](), list[str]()
    for family in (each for each in _token_wise(found.families) if each.on_rejection):
        try:
            given = found.suggestion(family)
        except ValueError as error:
            notes.append(f"{family.name}: {error}.")
            rows.append([family.name, *[NONE] * 6])
            continue
        near = [f"{h:g}" for h in given.between]
        how = f"between {near[0]} and {near[1]}" if len(near) == 2 else f"measured at {near[0]}"
        if len(near) == 1 and not np.isclose(given.at, given.between[0]):
            how = f"that of {near[0]}, the nearest"
        best, lost = f"{given.best.at:g}", found.bootstrap.interval(given.lost)
        row = [family.name, f"{given.at:.3f}", _rate(found, given.tokens), how, best]
        rows.append([*row, _rate(found, given.best.tokens), _percent(lost)])
    own = _token_wise(found.families)
    weighted = [f"{each.name} ({each.w_rej:g})" for each in own if each.w_rej not in (None, 1.0)]
    jointly = [each.name for each in found.families.adaptive if each not in own]
    why = "Left out, for the loss of their heads weighed rejections other than once (w_rej), which moves all that h is"
    header = ["Method", "suggested h", "tokens/s there", "read off", "best h", "tokens/s there", "left on the table"]
    notes += [
        "Theorem 3.1 with Δ = 0: h = 1 − t_draft / t_target, of P(some token is rejected): methods that compare h with "
        "anything else (max q, entropy) are left out.",
        *([f"{why} compared with away from that probability: {', '.join(weighted)}."] if weighted else []),
        *(
            [f"Left out, for blocks do not end at the first token that is rejected: {', '.join(jointly)}."]
            * bool(jointly)
        ),
        "Tokens/s are predicted; between two measured thresholds they are taken as linear in h.",
        _resting(found),
        _RESAMPLES,
    ]
    title = f"Theorem 3.1's threshold: {found.families.panel.title()}"
    return Grid(title=title, header=header, rows=rows, notes=notes)


def _token_wise(families: Families) -> list[Family]:
    """Those of which the theorem speaks: a rejected token ends the block there."""
    return [each for each in families.adaptive if each.verify == "token"]


def dominance_grids(families: Families) -> list[Grid]:
    """Figure 4 in numbers: the adaptive fronts against every fixed γ of their law.

    Raises:
        ValueError: records without counts, or with no fixed blocks and stop thresholds of one law.
    """
    compared = list(pareto.compare(families, Bootstrap()))
    if not compared:
        raise ValueError(
            "no stop thresholds and fixed blocks of the same law to compare; sweep both, the blocks by their rule "
            "(spec_decode) over several block_sizes"
        )
    bold = {(n, 6) for n, each in enumerate(compared) if each.verdict == pareto.DOMINATES}
    alone = [family.name for family in families.adaptive if not families.rival(family)]
    header = ["Front of", "against", "discard rate", "verification rate", "front's there", "difference", "verdict"]
    notes = [
        "The front's verification rate at the fixed blocks' discard rate, by straight lines between thresholds that "
        "no other beats in both rates; beyond its highest discard rate it goes on (level): larger thresholds may "
        "do better there; below its lowest it is not reached.",
        "Dominates, loses: the paired interval of the difference lies below, above 0; ties: it includes 0.",
        _RESAMPLES,
        _CHOSEN,
        *(f"{name}: no fixed blocks of the same law." for name in alone),
        f"{families.panel.setting['quality_examples']} examples.",
        *provenance.notes([families.panel]),
    ]
    title, rows = f"Verification against discard rate: {families.panel.title()}", list(map(_dominance_row, compared))
    return [Grid(title=title, header=header, rows=rows, notes=notes, bold=bold)]


def _dominance_row(each: pareto.Comparison) -> list[str]:
    front = NONE if np.isnan(each.front) else f"{each.front:.4f}" + (" (level)" if each.level else "")
    row = [each.family.name, f"{each.fixed.name}, γ = {each.block}", *(f"{rate:.4f}" for rate in each.rates), front]
    return [*row, _cell(each.difference, "+.4f") if each.difference else NONE, each.verdict]


def _places(families: Families) -> Iterator[tuple[str, str, Spot]]:
    """Every point of a panel: method, γ or h, and what was measured."""
    for family in (*families.fixed, *families.adaptive):
        for at, spot in family.spots.items():
            yield _family_name(family), f"{family.symbol} = {at:g}", spot
    for name, spot in {**families.oracles, families.target.label: families.target}.items():
        yield name, NONE, spot


def _resting(found: Throughputs) -> str:
    times, examples = found.times, found.families.panel.setting["quality_examples"]
    values = (1e3 * times.draft, 1e3 * times.target, 1e3 * times.constant, times.r_squared)
    return _PREDICTED.format(examples, *values)


def _family_name(family: Family) -> str:
    return f"{family.name} (fixed γ)" if family.symbol == GAMMA else family.name


def _timed(spot: Spot) -> bool:
    return all(record.get("latency") for record in spot.records)


def _rate(found: Throughputs, scores: np.ndarray, form: str = ".1f", unit: str = "") -> str:
    """`scores` `[1 + samples]` with their interval."""
    return _cell(found.bootstrap.interval(scores), form, unit)


def _cell(interval: Interval, form: str, unit: str = "") -> str:
    return f"{interval.value:{form}}{unit} [{interval.low:{form}}, {interval.high:{form}}]"


def _percent(interval: Interval) -> str:
    return _cell(Interval(*(100 * each for each in interval)), "+.1f") + " %"


GRIDS: dict[str, Callable[[Families], list[Grid]]] = {
    "forward_times": forward_time_grids,
    "throughput": throughput_grids,
    "dominance": dominance_grids,
}
"""What `experiments/tables.py` is asked for -> the tables of one panel."""
