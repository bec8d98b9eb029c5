"""Tables of stop policies (Huang et al., 2024 (SpecDec++)), and of block-wise against token-wise verification.

They are forward times (the paper's Table 2), throughputs (Table 1), the threshold of theorem 3.1, dominance over fixed
blocks (Figure 4), and tokens per target call with both kinds of verification (docs/methods.md, section 10). This module
formats cells and notes; `forward_times` and `families` of `results.analysis` compute the numbers. Brackets contain 95%
bootstrap intervals over examples.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from speccascade_jax.results.analysis import families as comparing
from speccascade_jax.results.analysis import forward_times, panels, provenance
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.families import GAMMA, Families, Family
from speccascade_jax.results.analysis.forward_times import Fit, Throughputs
from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import Record, get_entry

_RESAMPLES = (
    f"[low, high]: 95% bootstrap interval over examples, {Bootstrap().samples:,} resamples, the same for every entry; "
    "seeds are averaged, not resampled."
)
_CHOSEN = "No interval accounts for the choice of γ and h on the same examples, or for the number of comparisons."
_PREDICTED = (
    "Predicted: from the counts on the {} examples for quality, and from t_draft = {:.3g} ms, t_target = {:.3g} "
    "ms, {:.3g} ms per generation (R² {:.3f}); the target alone has its own fit. Intervals include the errors of "
    "both fits, clustered by record."
)
_WEIGHED = "by a factor other than 1 (w_rej), so that h is compared with a value other than that probability"
_MEASURED = (
    "Measured: from the timed runs, at batch 1; a speed-up is relative to the target's runs timed with them, and "
    "intervals resample trials too."
)


def forward_time_grids(families: Families) -> list[Grid]:
    """Returns SpecDec++'s Table 2: fitted forward times of both models together and of each model alone."""
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
        "Least-squares fit of a generation's seconds to its draft steps, its target calls, and a constant for its "
        "prefill and its call. Equation 2.1 of Huang et al., 2024 (SpecDec++) has no constant: the columns on the "
        "right show that fit. ±: standard error, clustered by record. R²: explained share of the variance about the "
        "mean.",
        f"{families.panel.sizes()}. Device: {families.panel.setting['device']}.",
        *provenance.notes([families.panel]),
    ]
    return [Grid(title=f"Forward times: {families.panel.title()}", header=header, rows=rows, notes=notes)]


def _fit_cells(fit: Fit, plain: Fit) -> list[str]:
    cells = [str(fit.generations)]
    for table_fit, names in ((fit, forward_times.COEFFICIENTS), (plain, forward_times.NAMES)):
        values, errors = dict(zip(forward_times.COEFFICIENTS, table_fit.times, strict=True)), table_fit.errors
        cells += [f"{values[n] * 1e3:.3f} ± {errors[n] * 1e3:.3f}" if n in errors else NONE for n in names]
        cells.append(f"{table_fit.r_squared:.3f}")
    return cells


def throughput_grids(families: Families) -> list[Grid]:
    """Returns SpecDec++'s Table 1, a table of predicted and measured throughputs, and theorem 3.1's threshold.

    The last table is left out if no token-wise family has an acceptance head or a threshold on the probability of a
    rejection.

    Raises:
        ValueError: records without counts or without timings, no target alone, or forward times that cannot be fitted.
    """
    throughputs = Throughputs(families, Bootstrap())
    grids = [_best_grid(throughputs), _prediction_grid(throughputs)]
    heads = any(family.on_rejection or family.w_rej is not None for family in _token_wise(families))
    return [*grids, _threshold_grid(throughputs)] if heads else grids


def _best_grid(throughputs: Throughputs) -> Grid:
    families, rows, bold = throughputs.families, list[list[str]](), set[tuple[int, int]]()
    for family in (*families.fixed, *families.adaptive):
        rival = None if family.symbol == GAMMA else families.rival(family)
        row = [_family_name(family)]
        for best in (throughputs.best_predicted, throughputs.best_measured):
            best_setting = best(family)
            over = throughputs.bootstrap.interval(best_setting.speed_up / best(rival).speed_up - 1) if rival else None
            row += [
                f"{family.symbol} = {best_setting.number:g}",
                _rate(throughputs, best_setting.tokens),
                _rate(throughputs, best_setting.speed_up, ".2f", "×"),
            ]
            row.append(_percent(over) if over else NONE)
            if over and over.low > 0:
                bold.add((len(rows), len(row) - 1))
        rows.append(row)
    ways = (
        (throughputs.predicted, throughputs.speed_up_predicted),
        (throughputs.measured, throughputs.speed_up_measured),
    )
    for name, spot in {families.target.label: families.target, **families.oracles}.items():
        row = [name]  # the target and the oracles have no γ or h to choose, and an oracle may not have been timed
        for tokens, speed_up in ways[: 1 + _timed(spot)]:
            faster = "1.00×" if spot is families.target else _rate(throughputs, speed_up(spot), ".2f", "×")
            row += [NONE, _rate(throughputs, tokens(spot)), faster, NONE]
        rows.append(row if len(row) > 5 else [*row, *[NONE] * 4])
    columns = ("best at", "tokens/s", "speed-up", "gain over best fixed γ")
    header = ["Method", *(f"{how}: {column}" for how in ("predicted", "measured") for column in columns)]
    notes = [
        _resting(throughputs),
        _MEASURED,
        _RESAMPLES,
        "Bold: significantly faster than the best fixed γ.",
        _CHOSEN,
    ]
    notes += provenance.notes([families.panel])
    title, spare = f"Throughput: {families.panel.title()}", ("predicted: tokens/s", "measured: tokens/s")
    return Grid(title=title, header=header, rows=rows, notes=notes, bold=bold, spare=spare)


def _prediction_grid(throughputs: Throughputs) -> Grid:
    rows, errors = list[list[str]](), list[float]()
    for name, setting, spot in _places(throughputs.families):
        discard, verification = (
            _rate(throughputs, scores, ".3f") for scores in comparing.rates(spot, throughputs.bootstrap)
        )
        row = [name, setting, verification, discard, _rate(throughputs, throughputs.predicted(spot))]
        if _timed(spot):
            errors.append(throughputs.error(spot))
            row += [_rate(throughputs, throughputs.measured(spot)), f"{errors[-1]:+.1%}"]
        rows.append(row if len(row) > 5 else [*row, NONE, NONE])
    header = [
        "Method",
        "setting",
        "verification rate",
        "discard rate",
        "predicted tokens/s",
        "measured tokens/s",
        "error",
    ]
    notes = [
        _resting(throughputs),
        _MEASURED,
        f"Error: predicted / measured − 1, both for the timed runs; at most {max(map(abs, errors)):.1%}.",
        _RESAMPLES,
    ]
    title = f"Predicted and measured throughput: {throughputs.families.panel.title()}"
    spare = ("discard rate", "verification rate")
    return Grid(title=title, header=header, rows=rows, notes=notes, spare=spare)


def _threshold_grid(throughputs: Throughputs) -> Grid:
    rows, notes = list[list[str]](), list[str]()
    token_wise = _token_wise(throughputs.families)
    for family in (member for member in token_wise if member.on_rejection):
        try:
            suggestion = throughputs.suggestion(family)
        except ValueError as error:
            notes.append(f"{family.name}: {error}.")
            rows.append([family.name, *[NONE] * 6])
            continue
        near = [f"{h:g}" for h in suggestion.between]
        how = f"interpolated between {near[0]} and {near[1]}" if len(near) == 2 else f"measured at {near[0]}"
        if len(near) == 1 and not np.isclose(suggestion.threshold, suggestion.between[0]):
            how = f"measured at {near[0]}, the nearest"
        best, lost = f"{suggestion.best.number:g}", throughputs.bootstrap.interval(suggestion.lost)
        row = [family.name, f"{suggestion.threshold:.3f}", _rate(throughputs, suggestion.tokens), how, best]
        rows.append([*row, _rate(throughputs, suggestion.best.tokens), _percent(lost)])
    weighted = [f"{member.name} ({member.w_rej:g})" for member in token_wise if member.w_rej not in (None, 1.0)]
    jointly = [member.name for member in throughputs.families.adaptive if member not in token_wise]
    header = ["Method", "suggested h", "tokens/s at suggested h", "source", "best h", "tokens/s at best h", "loss"]
    notes += [
        "Theorem 3.1 with Δ = 0: h = 1 − t_draft / t_target, as a threshold on P(some token is rejected). Methods that "
        "compare h with another quantity (max q, entropy) are left out.",
        *_left_out(f"the loss of their heads weighted rejections {_WEIGHED}", weighted),
        *_left_out("their blocks do not end at the first rejected token", jointly),
        "Tokens/s are predicted, and interpolated linearly in h between measured thresholds.",
        _resting(throughputs),
        _RESAMPLES,
    ]
    title = f"Theorem 3.1's threshold: {throughputs.families.panel.title()}"
    return Grid(title=title, header=header, rows=rows, notes=notes)


def _left_out(why: str, names: list[str]) -> list[str]:
    return [f"Left out, because {why}: {', '.join(names)}."] * bool(names)


def _token_wise(families: Families) -> list[Family]:
    """Returns the families of stop thresholds with token-wise verification.

    Theorem 3.1 covers only these, because it assumes that a block ends at the first rejected token.
    """
    return [family for family in families.adaptive if family.verify == "token"]


def dominance_grids(families: Families) -> list[Grid]:
    """Returns SpecDec++'s Figure 4 as a table: Pareto fronts of stop thresholds against fixed block sizes γ.

    A front is compared with each γ that has the same output distribution.

    Raises:
        ValueError: records have no counts, or no stop thresholds and fixed blocks have the same output distribution.
    """
    compared = list(comparing.compare(families, Bootstrap()))
    if not compared:
        raise ValueError(
            "no stop thresholds and fixed blocks of the same output distribution to compare; sweep both: thresholds, "
            "and the rule without a stop policy (spec_decode) over several block_sizes"
        )
    bold = {(n, 6) for n, comparison in enumerate(compared) if comparison.verdict == comparing.DOMINATES}
    alone = [family.name for family in families.adaptive if not families.rival(family)]
    header = ["Front of", "against", "discard rate", "verification rate", "front's rate", "difference", "verdict"]
    notes = [
        "Front's rate: the front's verification rate at the fixed blocks' discard rate, on straight lines between the "
        "thresholds that no other threshold beats in both rates. Above its highest discard rate the front is extended "
        "as a constant (level), where larger thresholds may do better; below its lowest it is not reached.",
        "Dominates: the paired interval of the difference lies below 0; loses: above 0; ties: it includes 0.",
        _RESAMPLES,
        _CHOSEN,
        *(f"{name}: no fixed blocks of the same output distribution." for name in alone),
        f"{families.panel.setting['quality_examples']} examples.",
        *provenance.notes([families.panel]),
    ]
    rows = []
    for comparison in compared:
        front = (
            NONE if np.isnan(comparison.front) else f"{comparison.front:.4f}" + (" (level)" if comparison.level else "")
        )
        row = [
            comparison.family.name,
            f"{comparison.fixed.name}, γ = {comparison.block}",
            *(f"{rate:.4f}" for rate in comparison.rates),
        ]
        rows.append(
            [*row, front, comparison.difference.text("+.4f") if comparison.difference else NONE, comparison.verdict]
        )
    title = f"Verification against discard rate: {families.panel.title()}"
    return [Grid(title=title, header=header, rows=rows, notes=notes, bold=bold)]


def _places(families: Families) -> Iterator[tuple[str, str, Spot]]:
    """Yields, for every point of a panel: the method's name, the value of γ or h as text, and the point."""
    for family in (*families.fixed, *families.adaptive):
        for number, spot in family.spots.items():
            yield _family_name(family), f"{family.symbol} = {number:g}", spot
    for name, spot in {**families.oracles, families.target.label: families.target}.items():
        yield name, NONE, spot


def _resting(throughputs: Throughputs) -> str:
    times, examples = throughputs.times, throughputs.families.panel.setting["quality_examples"]
    values = (1e3 * times.draft, 1e3 * times.target, 1e3 * times.constant, times.r_squared)
    return _PREDICTED.format(examples, *values)


def _family_name(family: Family) -> str:
    return f"{family.name} (fixed γ)" if family.symbol == GAMMA else family.name


def _timed(spot: Spot) -> bool:
    return all(record.get("latency") for record in spot.records)


def _rate(throughputs: Throughputs, scores: np.ndarray, form: str = ".1f", unit: str = "") -> str:
    """Returns a rate with its interval as text; `scores` `[1 + samples]` are the rate itself, then its resamples."""
    return throughputs.bootstrap.interval(scores).text(form, unit)


def _percent(interval: Interval) -> str:
    return Interval(*(100 * end for end in interval)).text("+.1f") + " %"


_TOKEN_WISE = "token"
_NO_PART = ("verify", "curve", "family", "details")
"""Fields of a point that may differ between token-wise and block-wise verification of the same method."""


class _Both(NamedTuple):
    """A point that was measured with token-wise and with block-wise verification.

    Attributes:
        name: name of the method, with α; symbol: "γ", or the symbol of the stop threshold.
        number: the value of γ or of the stop threshold.
        token_wise, jointly: the points with token-wise and with block-wise verification.
    """

    name: str
    symbol: str
    number: float
    token_wise: Spot
    jointly: Spot


def verification_grids(families: Families) -> list[Grid]:
    """Returns tables of tokens per target call, token-wise and block-wise: by block size, and by stop threshold.

    Raises:
        ValueError: no method was verified both ways, or records have no counts of single examples.
    """
    if not (rows := _both_ways(families.panel.spots)):
        raise ValueError("no method was verified both ways: sweep it with verify = ('token', 'block')")
    by_symbol = defaultdict[str, list[list[_Both]]](list)
    for row in rows:
        by_symbol[row[0].symbol].append(row)
    return [_verification_grid(families, symbol, same) for symbol, same in by_symbol.items()]


def _verification_grid(families: Families, symbol: str, rows: list[list[_Both]]) -> Grid:
    """Returns the table of the methods with values of γ, or of one kind of stop threshold, as columns."""
    panel, bootstrap = families.panel, Bootstrap()
    columns, lower, cells = sorted({point.number for row in rows for point in row}), 0, list[list[str]]()
    for row in rows:
        by_number = dict.fromkeys(columns, NONE)
        for point in row:
            counts = [bootstrap.counts(spot.records) for spot in (point.token_wise, point.jointly)]
            before, after = (count["committed"] / count["target_calls"] for count in counts)
            gain = bootstrap.interval(after / before - 1)
            by_number[point.number] = f"{before[0]:.2f} → {after[0]:.2f} {gain.text('+.1%')}"
            lower += gain.high < 0
        cells.append([row[0].name, *by_number.values()])
    notes = [
        "Committed tokens per call of the target, token-wise → block-wise, and the gain [95% bootstrap interval over "
        f"examples, {bootstrap.samples:,} resamples, the same for both]; seeds are averaged, not resampled.",
        f"Block-wise significantly lower: {lower} of {sum(map(len, rows))}.",
        f"{panel.sizes()}.",
        *provenance.notes([panel]),
    ]
    header = ["Method", *(f"{symbol} = {number:g}" for number in columns)]
    return Grid(title=f"Verification: {panel.title()}", header=header, rows=cells, notes=notes)


def _both_ways(spots: list[Spot]) -> list[list[_Both]]:
    """Returns points that were verified token-wise and block-wise, in groups whose points differ in γ or h only."""
    alike = defaultdict[str, dict[str, Spot]](dict)
    for spot in spots:
        record = spot.records[0]
        weights = [panels.setting(record, name) for name in (panels.HEAD, panels.POLICY)]
        alike[f"{_same(record)} {weights}"][record["point"].get("verify", _TOKEN_WISE)] = spot
    rows = defaultdict[str, list[_Both]](list)
    for ways in alike.values():
        if _TOKEN_WISE in ways and len(ways) > 1:
            pair = ways.pop(_TOKEN_WISE), next(iter(ways.values()))
            record = pair[0].records[0]
            point, swept = record["point"], panels.is_swept(record)
            number, symbol = ("block_size", "γ") if swept else ("stop_threshold", str(point["symbol"]))
            name = panels.label(record, threshold=False) + ("" if point["alpha"] is None else f" α {point['alpha']:g}")
            if (at_value := get_entry(point, number)) is not None:  # a point with neither γ nor h belongs to no column
                rows[_same(record, number)].append(_Both(name, symbol, at_value, *pair))
    return sorted(rows.values(), key=lambda row: panels.place(row[0].token_wise.records[0], row[0].name))


def _same(record: Record, *but: str) -> str:
    apart = (*_NO_PART, "seed", *but)
    return repr({name: value for name, value in sorted(record["point"].items()) if name not in apart})


GRIDS: dict[str, Callable[[Families], list[Grid]]] = {
    "forward_times": forward_time_grids,
    "throughput": throughput_grids,
    "dominance": dominance_grids,
    "verification": verification_grids,
}
"""Functions that return the tables of one panel, by the name of the table in `experiments/tables.py`."""
