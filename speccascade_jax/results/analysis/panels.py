"""Panels, which group records into comparable curves, and Table 2 of Narasimhan et al. (2024).

A record holds the measurements for one combination of model pair, task, settings and random seed. A `Spot` is a point
of a curve, averaged over the records of several seeds. A curve consists of one method's points, along α or along the
stop threshold. Needs no JAX.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.core.names import DRAFT, TARGET, natural
from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.store.record import Bounds, Record, curve_title, get_entry, hardware_name
from speccascade_jax.results.store.result_store import check_format, read_records

_SHARED = (
    "pair", "task", "split", "max_new_tokens", "first_example", "quality_examples", "latency_examples",
    "latency_trials", "temperature", "top_p", "top_k", "draft_temperature",
)  # fmt: skip

TOGETHER = "settings that may differ within one panel; the names of the curves show their values"

SHARES = {
    "rejection_rate": "rejected share of examined draft tokens",
    "rejections_per_token": "rejected draft tokens per generated token",
    "deferral_rate": "share of tokens deferred to the target",
    "target_share": "share of tokens that the target wrote",
    "draft_share": "share of tokens that the draft wrote",
}
"""Axis labels of the measures that plots of quality may have on the horizontal axis."""

_METRICS = {
    "bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum", "chrf": "chrF",
    "exact_match": "exact match",
}  # fmt: skip


def metric_name(metric: str) -> str:
    """Returns the name of a metric for figures and tables."""
    name, _, tokeniser = metric.partition(":")
    return f"BLEU ({tokeniser})" if tokeniser else _METRICS.get(name, name)


def label(record: Record, apart: str = "", *, threshold: bool = True) -> str:
    """Returns a curve's name for figures and tables: the method's title, then distinguishing settings in brackets.

    Args:
        record: a record of the curve.
        apart: text that distinguishes the curve from others of its panel (`suffixes`).
        threshold: whether the name includes the stop threshold; it does not if the threshold varies along the curve.
    """
    return curve_title(record["point"], threshold=threshold) + apart


def place(record: Record, curve: str) -> tuple[int, tuple[tuple[float, str], ...]]:
    """Returns the sort key of a curve: the order of Narasimhan et al. (2024), Table 2, then other methods by name."""
    return record["point"]["rank"], natural(curve)


MIXABLE = {"block_size": "γ = {}", "bonus": "bonus {}", "draft_temperature": "draft T = {}"}
"""Settings that separate panels by default, with their text in the name of a curve. A table may join panels that differ
in these settings; the names of its curves then show the settings."""

HEAD, POLICY = "head", "policy"
"""Names of fingerprints that never separate panels. Acceptance heads or selection policies with different weights are
different curves of one panel, even if their files have the same name."""


def suffixes(records: Sequence[Record], kinds: Sequence[Hashable], names: Sequence[str]) -> list[str]:
    """Returns texts that distinguish each record from others of its kind, such as " (γ = 3, head 73861f)" or "".

    Args:
        records: the records to distinguish.
        kinds: the curve or family of each record; only records of equal kind are distinguished.
        names: the settings that may distinguish records, from `MIXABLE`, `HEAD` and `POLICY`.
    """
    values: dict[tuple[Hashable, str], set[Any]] = defaultdict(set)
    for kind, record in zip(kinds, records, strict=True):
        for name in names:
            values[kind, name].add(setting(record, name))
    record_suffixes = []
    for kind, record in zip(kinds, records, strict=True):
        words = [_told(record, name) for name in names if len(values[kind, name]) > 1]
        record_suffixes.append(f" ({', '.join(words)})" if words else "")
    return record_suffixes


def setting(record: Record, name: str) -> Any:
    """Returns a setting of a record's point; for `HEAD` and `POLICY` the fingerprint, or `None` without one."""
    return record["fingerprints"].get(name) if name in (HEAD, POLICY) else get_entry(record["point"], name)


def _told(record: Record, name: str) -> str:
    """Returns the value of a setting as text for a curve's name.

    A draft temperature of `None` appears as "own": it is the method's own temperature or the target's.
    """
    value = setting(record, name)
    if name in (HEAD, POLICY):
        return f"{name} {value[:6]}" if value else f"no {name}"
    return MIXABLE[name].format(f"{value:g}" if isinstance(value, int | float) else "own" if value is None else value)


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A point of a curve, averaged over random seeds; a field is `None` if it was not measured or is undefined.

    With one seed, intervals are those of the record: a bootstrap over examples for quality, the extremes over trials
    for latency. With several seeds, an interval extends one standard deviation over seeds to either side.

    Attributes:
        method: the curve's key in its panel; label: the curve's name for figures and tables.
        alpha: the number that varies along the curve: α, or the stop threshold if the rule has no α (`axis` names it).
        quality: score by the main metric; latency: time relative to the target's; measures: the records' ratios.
        seeds: number of seeds; records: the averaged records, one per seed.
        inconclusive: whether nothing was drafted.
    """

    method: str
    label: str
    alpha: float | None
    quality: Interval
    latency: Interval | None
    ms_per_example: float | None
    measures: dict[str, Interval]
    seeds: int
    inconclusive: bool
    records: tuple[Record, ...]

    def name(self) -> str:
        """Returns the label with α or the stop threshold, for lists of points."""
        return self.label + ("" if self.alpha is None else f" ({self.axis} {self.alpha:g})")

    def order(self) -> tuple[int, tuple[tuple[float, str], ...]]:
        """Returns the sort key that puts points into the order of their curves in tables and legends."""
        return place(self.records[0], self.method)

    @property
    def axis(self) -> str:
        """Name of `alpha`: "α", or "h" for the stop threshold of a method whose rule has no α."""
        point = self.records[0]["point"]
        return "h" if _along(self.records[0])[0] == point["family"] != point["curve"] else "α"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A group of comparable curves: the same model pair, task, sampling, block size and bonus.

    Methods whose blocks end when the draft is uncertain, and methods without blocks, are in the panels of every block
    size.

    Attributes:
        setting: the settings that all curves share, including `block_size` and `bonus`, the fingerprint of the weights,
            and the device; `None` for a setting in which the curves of joined panels differ.
        metric: name of the quality metric.
        target, draft: points of the target alone and of the draft alone; `None` if the records contain none.
        curves: the points of each curve, by the curve's key in the order of `place`; points have ascending α.
        cooler: the target alone at temperatures below this panel's, by ascending temperature.
    """

    setting: dict[str, Any]
    metric: str
    target: Spot | None
    draft: Spot | None
    curves: dict[str, list[Spot]]
    cooler: dict[float, Spot] = field(default_factory=dict)

    @property
    def ends(self) -> list[Spot]:
        """The points of the target alone and of the draft alone, if the records contain them."""
        return [end for end in (self.target, self.draft) if end]

    @property
    def spots(self) -> list[Spot]:
        """The points of all curves, without the target alone and the draft alone."""
        return [spot for curve in self.curves.values() for spot in curve]

    @property
    def records(self) -> list[Record]:
        """The records of all points: target alone, draft alone, and all curves."""
        return [record for spot in (*self.ends, *self.spots) for record in spot.records]

    @property
    def predicted(self) -> str:
        """The hardware that latencies are predicted for (`results.analysis.prediction`); empty if they are measured."""
        return next((str(record["predicted"]["topology"]) for record in self.records if "predicted" in record), "")

    def required_target(self) -> Spot:
        """Returns the point of the target alone, which the records must contain.

        Raises:
            ValueError: the records contain none.
        """
        if self.target is None:
            raise ValueError(f"no record of the target alone ({TARGET}) for {self.title()}: measure it by a sweep")
        return self.target

    def title(self) -> str:
        """Returns the settings that the panel's curves share, in one line."""
        s = self.setting
        parts = [f"{s['task']}, {short_name(s['pair'])}", f"T = {s['temperature']:g}"]
        if s["draft_temperature"] is not None:
            parts.append(f"draft T = {s['draft_temperature']:g}")
        if s["top_p"] < 1:
            parts.append(f"top-p = {s['top_p']:g}")
        if s["top_k"]:
            parts.append(f"top-k = {s['top_k']}")
        parts += [MIXABLE[name].format(s[name]) for name in ("block_size", "bonus") if s[name] is not None]
        return ", ".join(parts + [f"predicted for {self.predicted}"] * bool(self.predicted))

    def asides(self) -> list[str]:
        """Returns notes with the block size or bonus of curves for which neither title nor curve name shows them."""
        sentences = []
        for curve, spots in self.curves.items():
            point = spots[0].records[0]["point"]
            names = ("block_size", "bonus")
            differing = [name for name in names if get_entry(point, name) not in (None, self.setting[name])]
            words = [MIXABLE[name].format(get_entry(point, name)) for name in differing]
            if unnamed := [word for word in words if word not in curve]:
                sentences.append(f"{spots[0].label}: {', '.join(unnamed)}.")
        return sentences

    def sizes(self) -> str:
        """Returns a line with the numbers of examples, trials and seeds."""
        seeds, s = sorted({spot.seeds for spot in (*self.spots, *self.ends)}), self.setting
        chat = any(record["point"].get("chat") for record in self.records[:1])
        text = f"{s['quality_examples']} examples for quality{' in the chat template' if chat else ''}"
        if self.predicted:
            text += " and predicted latency"
        elif s["latency_examples"]:
            text += f", {s['latency_examples']} examples × {s['latency_trials']} trials for latency"
        return f"{text}, {'–'.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"


def read_points(*paths: str | Path) -> list[Record]:
    """Returns the records of points in one or more stores; records of other kinds are skipped.

    Raises:
        ValueError: there is no record of a point.
        FileNotFoundError, NotAStoreError: `read_records` raises it.
    """
    points = [record for record in read_records(*paths) if "point" in record]
    if not points:
        files = ", ".join(map(str, paths))
        raise ValueError(f"{files} contains no record of a point: write some with experiments.sweep or run")
    return points


def short_name(pair: str) -> str:
    """Returns the name of a model pair, or the last part of the pair's path."""
    return pair.rstrip("/").rsplit("/", 1)[-1]


def panels(records: Iterable[Record], together: Sequence[str] = ()) -> list[Panel]:
    """Groups records into panels of comparable curves.

    The target alone, the draft alone and methods without a choice of γ are in the panels of every block size and bonus
    of their sampling.

    Args:
        records: records of points, from one store or several.
        together: names in `MIXABLE` of settings that do not separate panels; the names of the curves show these
            settings.

    Raises:
        ValueError: `together` contains another name, or a record has another format.
    """
    records = list(records)
    check_format(records, "the store")
    if strange := [name for name in together if name not in MIXABLE]:
        raise ValueError(f"together={strange[0]!r} is not one of {', '.join(MIXABLE)}")
    shared: dict[tuple, list[Record]] = defaultdict(list)
    for record in records:
        values = {name: get_entry(record["point"], name) for name in _SHARED if name not in together}
        values |= {name: record["fingerprints"][name] for name in ("weights", "examples")}
        values["device"] = hardware_name(record["device"])
        shared[tuple(values.items())].append(record)
    all_panels = [panel for values, members in shared.items() for panel in _of_blocks(dict(values), members, together)]
    return [replace(panel, cooler=_cooler(panel, all_panels)) for panel in all_panels]


def _cooler(panel: Panel, others: Sequence[Panel]) -> dict[float, Spot]:
    """Returns points of the target alone, by temperature, below the panel's temperature and on the same examples."""
    if panel.setting["temperature"] is None:
        return {}
    free = ("temperature", "draft_temperature", "block_size", "bonus", "latency_examples", "latency_trials")
    same = {name: value for name, value in panel.setting.items() if name not in free}
    alone = {
        candidate.setting["temperature"]: candidate.target
        for candidate in others
        if candidate.target and same.items() <= candidate.setting.items()
    }
    return {
        temperature: alone[temperature]
        for temperature in sorted(filter(None.__ne__, alone))
        if temperature < panel.setting["temperature"]
    }


def _of_blocks(setting: dict[str, Any], records: Sequence[Record], together: Sequence[str]) -> Iterator[Panel]:
    """Yields one panel for each combination of block size and bonus in the records."""
    apart = [name for name in ("block_size", "bonus") if name not in together]

    def chosen_for(record: Record) -> tuple:
        return tuple(get_entry(record["point"], name) for name in apart)

    swept = [r for r in records if is_swept(r)]
    choices = sorted(set(map(chosen_for, swept)), key=lambda choice: natural(str(choice)))
    for choice in choices or [(None,) * len(apart)]:
        mixed = {name: {get_entry(r["point"], name) for r in swept if chosen_for(r) == choice} for name in together}
        chosen = dict.fromkeys(MIXABLE) | setting | dict(zip(apart, choice, strict=True))
        chosen |= {name: next(iter(values)) for name, values in mixed.items() if len(values) == 1}
        yield _panel(chosen, [r for r in records if not is_swept(r) or chosen_for(r) == choice])


def is_swept(record: Record) -> bool:
    """Returns whether the block size γ is a setting that sweeps vary for the record's method."""
    return record["point"]["swept_block"]


def _panel(setting: dict[str, Any], records: Sequence[Record]) -> Panel:
    by_point: dict[tuple[str, float | None], dict[int, Record]] = defaultdict(dict)
    apart = suffixes(records, [_along(record)[0] for record in records], (*MIXABLE, HEAD, POLICY))
    words = dict[str, str]()
    for record, word in zip(records, apart, strict=True):
        name, coordinate = _along(record)
        word = "" if name == TARGET else word
        words[name + word] = word
        # a point may be measured again with the same seed, for example with larger batches: then its latest record
        # counts
        by_point[name + word, coordinate][record["point"]["seed"]] = record
    curves: dict[str, list[Spot]] = defaultdict(list)
    for (curve, alpha), members in by_point.items():
        curves[curve].append(_spot(curve, words[curve], alpha, list(members.values())))
    first = {spots[0].records[0]["point"]["method"]: curve for curve, spots in reversed(curves.items())}
    target, draft = (curves.pop(first[end])[0] if end in first else None for end in (TARGET, DRAFT))
    names = sorted(curves, key=lambda name: curves[name][0].order())
    ordered = {name: sorted(curves[name], key=lambda spot: spot.alpha or 0.0) for name in names}
    metric = records[0]["quality"]["metric"]
    return Panel(setting=setting, metric=metric, target=target, draft=draft, curves=ordered)


def _along(record: Record) -> tuple[str, float | None]:
    """Returns the name of a record's curve and its position there: α or, for a method without α, the stop threshold."""
    point = record["point"]
    if point["alpha"] is None and point["stop_threshold"] is not None:
        return point["family"], point["stop_threshold"]
    return point["curve"], point["alpha"]


def _spot(curve: str, apart: str, alpha: float | None, records: Sequence[Record]) -> Spot:
    point = records[0]["point"]
    relative = [r["relative_latency"] for r in records if r.get("relative_latency")]
    absolute = [r["latency"]["ms_per_example"]["value"] for r in records if r.get("latency")]
    measured: dict[str, list[Any]] = {
        name: [r["measures"].get(name) for r in records] for record in records for name in record["measures"]
    }
    return Spot(
        method=curve,
        label=label(records[0], apart, threshold=_along(records[0])[0] == point["curve"]),
        alpha=alpha,
        quality=_pool([value_of(r["quality"]) for r in records]),
        latency=_pool([value_of(entry) for entry in relative]) if relative else None,
        ms_per_example=statistics.fmean(absolute) if absolute else None,
        measures={
            name: _pool([Interval(x, x, x) for x in values])
            for name, values in measured.items()
            if all(isinstance(x, int | float) for x in values)
        },
        seeds=len(records),
        inconclusive=point["method"] not in (TARGET, DRAFT) and any(r.get("inconclusive") for r in records),
        records=tuple(records),
    )


def share_of(spot: Spot, name: str) -> Interval | None:
    """Returns a point's measure of `SHARES`, or `None`; `target_share` is 1 minus `draft_share`."""
    if name != "target_share":
        return spot.measures.get(name)
    drafted = spot.measures.get("draft_share")
    return drafted and Interval(1 - drafted.value, 1 - drafted.high, 1 - drafted.low)


def value_of(entry: Bounds) -> Interval:
    """Returns `value`, `low` and `high` of a record's entry as an interval."""
    return Interval(entry["value"], entry["low"], entry["high"])


def _pool(values: Sequence[Interval]) -> Interval:
    if len(values) == 1:
        return values[0]
    mean, spread = statistics.fmean(v.value for v in values), statistics.stdev(v.value for v in values)
    return Interval(mean, mean - spread, mean + spread)


LOSS = 1.0
"""Default of the accepted loss of quality, in units of the metric. Different seeds also differ by about one point of
BLEU, ROUGE or accuracy."""


class Row(NamedTuple):
    """A method's row of Table 2; a field is `None` if no point qualifies.

    Attributes:
        fastest: the fastest point that reaches the target's quality.
        near: the fastest point that is worse than the target by at most a stated loss.
        best: the point with the best quality among those that are no slower than the target.
    """

    method: str
    fastest: Spot | None
    near: Spot | None
    best: Spot | None


def table2(panel: Panel, tolerance: float = 0.0, margin: float = 0.0, loss: float = LOSS) -> list[Row]:
    """Returns the rows of Table 2 (Narasimhan et al., 2024) for one panel.

    Inconclusive points (nothing was drafted) qualify for no column.

    Args:
        panel: a panel with the target alone.
        tolerance: a quality of at least `target − tolerance` counts as the target's; 0 compares exactly.
        margin: a relative latency of at most `1 + margin` counts as no slower than the target.
        loss: the largest difference of the quality of `Row.near` below the target's, in units of the metric.

    Raises:
        ValueError: the records contain no target to compare with.
    """
    full, rows = panel.required_target().quality.value, list[Row]()
    for method, spots in panel.curves.items():
        valid = [spot for spot in spots if spot.latency is not None and not spot.inconclusive]
        good, near = ([spot for spot in valid if spot.quality.value >= full - less] for less in (tolerance, loss))
        quick = [spot for spot in valid if latency_of(spot) <= 1 + margin]
        best = max(quick, key=lambda spot: spot.quality.value, default=None)
        fastest, nearly = (min(spots, key=latency_of, default=None) for spots in (good, near))
        rows.append(Row(method, fastest, nearly, best))
    return rows


def latency_of(spot: Spot) -> float:
    """Returns a point's latency relative to the target's; infinite if it was not measured."""
    return spot.latency.value if spot.latency else math.inf
