"""Tables of families: paper 3's, and block-wise verification beside token-wise.

Forward times (paper 3, Table 2), throughputs (Table 1), theorem 3.1's threshold, dominance (Figure 4), and tokens per
call of the target both ways (METHODS section 10). What stands in the cells and what must be said below; the numbers
come from `results.analysis`: `forward_times` and `families`. Brackets hold 95% bootstrap intervals over examples.
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
    f"[low, high]: 95% bootstrap over examples, {Bootstrap().samples:,} resamples, the same for every entry; seeds are "
    "averaged, not resampled."
)
_CHOSEN = "No interval allows for γ and h having been chosen on the same examples, nor for how many are compared."
_PREDICTED = (
    "Predicted: from the counts of the {} examples that quality is taken on and t_draft = {:.3g} ms, t_target = {:.3g} "
    "ms, {:.3g} ms per generation (R² {:.3f}); the target alone from its own fit. Intervals hold the errors of "
    "both fits, records taken as a whole."
)
_WEIGHED = "other than once (w_rej), which moves all that h is compared with away from that probability"
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
    for one, names in ((fit, forward_times.COEFFICIENTS), (plain, forward_times.NAMES)):
        values, errors = dict(zip(forward_times.COEFFICIENTS, one.times, strict=True)), one.errors
        cells += [f"{values[n] * 1e3:.3f} ± {errors[n] * 1e3:.3f}" if n in errors else NONE for n in names]
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
    ways = ((found.predicted, found.speed_up_predicted), (found.measured, found.speed_up_measured))
    for name, spot in {families.target.label: families.target, **families.oracles}.items():
        row = [name]  # nothing with a number to choose, and an oracle need not have been timed
        for tokens, speed_up in ways[: 1 + _timed(spot)]:
            faster = "1.00×" if spot is families.target else _rate(found, speed_up(spot), ".2f", "×")
            row += [NONE, _rate(found, tokens(spot)), faster, NONE]
        rows.append(row if len(row) > 5 else [*row, *[NONE] * 4])
    columns = ("best at", "tokens/s", "speed-up", "over best fixed γ")
    header = ["Method", *(f"{how}: {what}" for how in ("predicted", "measured") for what in columns)]
    notes = [_resting(found), _MEASURED, _RESAMPLES, "Bold: faster than the best fixed γ beyond the interval.", _CHOSEN]
    notes += provenance.notes([families.panel])
    return Grid(title=f"Throughput: {families.panel.title()}", header=header, rows=rows, notes=notes, bold=bold)


def _prediction_grid(found: Throughputs) -> Grid:
    rows, errors = list[list[str]](), list[float]()
    for name, at, spot in _places(found.families):
        discard, verification = (_rate(found, each, ".3f") for each in comparing.rates(spot, found.bootstrap))
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
    own = _token_wise(found.families)
    for family in (each for each in own if each.on_rejection):
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
    weighted = [f"{each.name} ({each.w_rej:g})" for each in own if each.w_rej not in (None, 1.0)]
    jointly = [each.name for each in found.families.adaptive if each not in own]
    header = ["Method", "suggested h", "tokens/s there", "read off", "best h", "tokens/s there", "left on the table"]
    notes += [
        "Theorem 3.1 with Δ = 0: h = 1 − t_draft / t_target, of P(some token is rejected): methods that compare h with "
        "anything else (max q, entropy) are left out.",
        *_left_out(f"the loss of their heads weighed rejections {_WEIGHED}", weighted),
        *_left_out("blocks do not end at the first token that is rejected", jointly),
        "Tokens/s are predicted; between two measured thresholds they are taken as linear in h.",
        _resting(found),
        _RESAMPLES,
    ]
    title = f"Theorem 3.1's threshold: {found.families.panel.title()}"
    return Grid(title=title, header=header, rows=rows, notes=notes)


def _left_out(why: str, names: list[str]) -> list[str]:
    return [f"Left out, for {why}: {', '.join(names)}."] * bool(names)


def _token_wise(families: Families) -> list[Family]:
    """Those of which the theorem speaks: a rejected token ends the block there."""
    return [each for each in families.adaptive if each.verify == "token"]


def dominance_grids(families: Families) -> list[Grid]:
    """Figure 4 in numbers: the adaptive fronts against every fixed γ of their law.

    Raises:
        ValueError: records without counts, or with no fixed blocks and stop thresholds of one law.
    """
    compared = list(comparing.compare(families, Bootstrap()))
    if not compared:
        raise ValueError(
            "no stop thresholds and fixed blocks of the same law to compare; sweep both, the blocks by their rule "
            "(spec_decode) over several block_sizes"
        )
    bold = {(n, 6) for n, each in enumerate(compared) if each.verdict == comparing.DOMINATES}
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
    rows = []
    for each in compared:
        front = NONE if np.isnan(each.front) else f"{each.front:.4f}" + (" (level)" if each.level else "")
        row = [each.family.name, f"{each.fixed.name}, γ = {each.block}", *(f"{rate:.4f}" for rate in each.rates)]
        rows.append([*row, front, each.difference.text("+.4f") if each.difference else NONE, each.verdict])
    title = f"Verification against discard rate: {families.panel.title()}"
    return [Grid(title=title, header=header, rows=rows, notes=notes, bold=bold)]


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
    return found.bootstrap.interval(scores).text(form, unit)


def _percent(interval: Interval) -> str:
    return Interval(*(100 * each for each in interval)).text("+.1f") + " %"


_TOKEN_WISE = "token"
_NO_PART = ("verify", "curve", "family", "details")
"""What of a point says no more than how it is verified."""


class _Both(NamedTuple):
    """A point verified token by token, and jointly; `name` and `symbol` (of γ or h, which is `at`) are its row's."""

    name: str
    symbol: str
    at: float
    token_wise: Spot
    jointly: Spot


def verification_grids(families: Families) -> list[Grid]:
    """Block efficiency both ways: a column per block size, and per stop threshold in a table of its own.

    Raises:
        ValueError: no method was verified both ways; records without counts of single examples.
    """
    if not (rows := _both_ways(families.panel.spots)):
        raise ValueError("no method was verified both ways: sweep it with verify = ('token', 'block')")
    by_symbol = defaultdict[str, list[list[_Both]]](list)
    for row in rows:
        by_symbol[row[0].symbol].append(row)
    return [_verification_grid(families, symbol, same) for symbol, same in by_symbol.items()]


def _verification_grid(families: Families, symbol: str, rows: list[list[_Both]]) -> Grid:
    """Makes the table of rows that run along γ, or along one stop threshold."""
    panel, bootstrap = families.panel, Bootstrap()
    columns, lower, cells = sorted({each.at for row in rows for each in row}), 0, list[list[str]]()
    for row in rows:
        found = dict.fromkeys(columns, NONE)
        for each in row:
            counts = [bootstrap.counts(spot.records) for spot in (each.token_wise, each.jointly)]
            before, after = (count["committed"] / count["target_calls"] for count in counts)
            gain = bootstrap.interval(after / before - 1)
            found[each.at] = f"{before[0]:.2f} → {after[0]:.2f} {gain.text('+.1%')}"
            lower += gain.high < 0
        cells.append([row[0].name, *found.values()])
    notes = [
        "Committed tokens per call of the target, token-wise → block-wise, and the gain [95% bootstrap over examples, "
        f"{bootstrap.samples:,} resamples, both ways on the same ones]; seeds are averaged, not resampled.",
        f"Block-wise lower, beyond the interval: {lower} of {sum(map(len, rows))}.",
        f"{panel.sizes()}.",
        *provenance.notes([panel]),
    ]
    header = ["Method", *(f"{symbol} = {at:g}" for at in columns)]
    return Grid(title=f"Verification: {panel.title()}", header=header, rows=cells, notes=notes)


def _both_ways(spots: list[Spot]) -> list[list[_Both]]:
    """Returns points that were verified both ways, those together that differ in γ or h alone."""
    alike = defaultdict[str, dict[str, Spot]](dict)
    for spot in spots:
        record = spot.records[0]
        weights = [panels.setting(record, name) for name in (panels.HEAD, panels.POLICY)]
        alike[f"{_same(record)} {weights}"][record["point"].get("verify", _TOKEN_WISE)] = spot
    rows = defaultdict[str, list[_Both]](list)
    for ways in alike.values():
        if _TOKEN_WISE in ways and len(ways) > 1:
            both = ways.pop(_TOKEN_WISE), next(iter(ways.values()))
            record = both[0].records[0]
            point, swept = record["point"], panels.is_swept(record)
            number, symbol = ("block_size", "γ") if swept else ("stop_threshold", str(point["symbol"]))
            name = panels.label(record, threshold=False) + ("" if point["alpha"] is None else f" α {point['alpha']:g}")
            if (at := get_entry(point, number)) is not None:  # neither γ nor h: no column
                rows[_same(record, number)].append(_Both(name, symbol, at, *both))
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
"""What `experiments/tables.py` is asked for -> the tables of one panel."""
