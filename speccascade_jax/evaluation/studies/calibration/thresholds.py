"""Threshold procedure for fuzzy decoding from Appendix D of Holsman et al. (2025).

The procedure starts at the threshold that keeps as many drafted tokens as speculative decoding, and raises the
threshold while quality is high enough (docs/methods.md, section 5).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from speccascade_jax.core.checks import whole
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.evaluation.points import Point, Settings, validate
from speccascade_jax.evaluation.studies.calibration.halving import Bench, Window, mean
from speccascade_jax.methods.settings import sampling_of
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.grid import Grid
from speccascade_jax.rules import deferral

STEP = 0.1
THRESHOLDS = tuple(round(STEP * n, 3) for n in range(1, 11))
NEARLY_ALL = 0.9
BASELINES = ("spec_decode", "sd_reference")
_NUMBERS = {
    "quality": ("quality", "value"), "latency": ("relative_latency", "value"),
    "acceptance": ("measures", "acceptance_rate"), "utilisation": ("measures", "draft_utilisation"),
}  # fmt: skip
"""Map from a field of `Step` to the part and the entry of a record that hold the value."""


@dataclass(frozen=True, kw_only=True)
class AppendixD:
    """Settings of the threshold procedure of Appendix D.

    Attributes:
        rule: a fuzzy rule; the thresholds of Holsman et al. (2025) belong to `fuzzy_js_reference`.
        baseline: the speculative decoding method whose fastest block size is used, and whose share of kept tokens
            determines the first threshold: the lossless `spec_decode`, or the authors' `sd_reference`.
        lengths: block sizes L, in increasing order.
        lost: the fraction of the quality difference between target and draft that may be lost.
    """

    rule: str = "fuzzy_js_reference"
    baseline: str = "spec_decode"
    lengths: tuple[int, ...] = (5, 10, 15, 20)
    lost: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measured threshold, with means over seeds; `held` says whether quality reached the lowest accepted value."""

    threshold: float
    block_size: int
    quality: float
    latency: float
    acceptance: float
    utilisation: float
    held: bool


@dataclass(frozen=True, kw_only=True)
class Trail:
    """Result of the threshold procedure: its steps, the reason why it stopped, and the settings Low, Med and High.

    Attributes:
        block_size, baseline_acceptance: the fastest block size of the baseline, and the share of drafted tokens that
            the baseline keeps at this size.
        threshold: the first threshold, whose share of kept tokens is closest to the baseline's.
        target, draft, floor: quality of the target and of the draft, and the lowest accepted quality.
        steps: every threshold tried, in increasing order; stopped: the reason why no higher threshold was tried.
        levels: maps Low, Med and High to points, in the order of their thresholds; empty if quality was too low at the
            first threshold already.
    """

    block_size: int
    baseline_acceptance: float
    threshold: float
    target: float
    draft: float
    floor: float
    steps: list[Step]
    stopped: str
    levels: dict[str, Point]

    def check(self) -> None:
        """Raises ValueError if quality was too low at the first threshold already, so that there are no levels."""
        if not self.levels:
            first = self.steps[0]
            raise ValueError(
                f"quality at the first threshold, {first.threshold:g}, is {first.quality:.2f}, below the floor "
                f"of {self.floor:.2f}: give more search_examples or seeds, or a larger AppendixD.lost"
            )

    def plain(self) -> dict[str, Any]:
        """Returns this result for a report in JSON, without `levels`, which the report lists elsewhere."""
        return asdict(replace(self, levels={}))


def show(trail: Trail, settings: AppendixD) -> None:
    """Prints the steps of the procedure as a table."""
    title = f"{settings.rule}: target quality {trail.target:.2f}, draft quality {trail.draft:.2f}"
    note = (
        f"{settings.baseline} is fastest with block size {trail.block_size}, and keeps {trail.baseline_acceptance:.1%} "
        f"of the drafted tokens. Floor: {trail.floor:.2f}. Stopped because {trail.stopped}."
    )
    rows = []
    for step in trail.steps:
        quality = f"{step.quality:.2f}" + ("" if step.held else " (too low)")
        numbers = [f"{step.latency:.2f}", f"{step.acceptance:.1%}", f"{step.utilisation:.1%}"]
        rows.append([f"{step.threshold:g}", str(step.block_size), quality, *numbers])
    header = ["τ", "L", "quality", "latency / target's", "kept / examined", "kept / drafted"]
    printing.print_grids([Grid(title=title, header=header, rows=rows, notes=[note])])


def point_of(base: Point, settings: Settings) -> Point:
    """Returns `base` with other settings; the draft is greedy unless `base` sets its temperature.

    Holsman et al. (2025) also use a greedy draft.
    """
    sampling = sampling_of(base.settings)
    sampling["draft_temperature"] = sampling["draft_temperature"] or 0.0
    return replace(base, settings=replace(settings, **sampling))


def baseline(base: Point, settings: AppendixD, length: int) -> Point:
    """Returns the point of the baseline with blocks of `length`.

    After a block whose tokens are all kept, the target gives a bonus token.
    """
    return point_of(base, Settings(method=settings.baseline, block_size=length, bonus="target"))


def fuzzy(base: Point, settings: AppendixD, length: int, threshold: float) -> Point:
    """Returns the point of fuzzy decoding with blocks of `length` and the given threshold."""
    chosen = Settings(method="fuzzy", rule=settings.rule, alpha=threshold, block_size=length, bonus="target")
    return point_of(base, chosen)


def check(base: Point, settings: AppendixD) -> None:
    """Refuses invalid settings before anything is loaded, with a ValueError that names the value and the remedy."""
    rule, lengths = settings.rule, settings.lengths
    if not deferral.get(rule).name.startswith("fuzzy_"):
        raise ValueError(f"rule={rule!r} has no divergence to bound: choose fuzzy_js_reference or another fuzzy_ rule")
    if settings.baseline not in BASELINES:
        raise ValueError(f"baseline={settings.baseline!r} is not one of {', '.join(BASELINES)}")
    several = isinstance(lengths, Sequence) and len(lengths) > 0
    if not several or list(lengths) != sorted({whole("lengths", n, 1) for n in lengths}):
        raise ValueError(f"lengths={lengths!r} must be a tuple of increasing block sizes, such as (5, 10, 15, 20)")
    if not 0 < settings.lost < 1:
        raise ValueError(f"lost={settings.lost} is not between 0 and 1: Holsman et al. use 0.2")
    for length in lengths:
        for point in (baseline(base, settings, length), fuzzy(base, settings, length, STEP)):
            validate(point)


def run(bench: Bench, base: Point, settings: AppendixD, window: Window, subset: Window) -> Trail:
    """Runs the procedure: finds block size and first threshold on `subset`, and measures qualities on `window`.

    Holsman et al. (2025) take the next block size when "close to all" candidates are kept; this code does so when at
    least the share `NEARLY_ALL` of the drafted tokens is kept. They do not say what happens if quality never falls;
    this code then stops when every drafted token is kept or the range of the rule ends.

    Raises:
        ValueError: the target is not better than the draft.
    """
    print(f"measuring the target and the draft alone on {window.judged} examples")
    ends = [point_of(base, Settings(method=name)) for name in (TARGET, DRAFT)]
    measured = bench.measure(ends, window)
    target, draft = (mean(measured[end], "quality", "value") for end in ends)
    if not target > draft:
        raise ValueError(
            f"the target's quality, {target:.2f}, is not above the draft's, {draft:.2f}, on {window.judged} examples, "
            "but losses are shares of the difference: give more search_examples, or mode='halving' with max_loss"
        )
    floor = target - settings.lost * (target - draft)
    length, acceptance = _fastest(bench, base, settings, subset)
    print(f"step 2: searching the threshold that keeps {acceptance:.1%} of drafted tokens in blocks of {length}")
    points = {threshold: fuzzy(base, settings, length, threshold) for threshold in THRESHOLDS}
    measured = bench.measure(list(points.values()), subset)
    kept = {threshold: mean(measured[point], "measures", "draft_utilisation") for threshold, point in points.items()}
    first = min(kept, key=lambda threshold: abs(kept[threshold] - acceptance))
    steps, stopped = _climb(bench, base, settings, window, (length, first, floor))
    return Trail(
        block_size=length, baseline_acceptance=acceptance, threshold=first, target=target, draft=draft, floor=floor,
        steps=steps, stopped=stopped, levels=_levels(base, settings, steps),
    )  # fmt: skip


def _fastest(bench: Bench, base: Point, settings: AppendixD, subset: Window) -> tuple[int, float]:
    """Returns the baseline's fastest block size, and the share of drafted tokens that are kept at this size."""
    print(f"step 1: searching the fastest block size of {settings.baseline} on {subset.judged} examples")
    points = {length: baseline(base, settings, length) for length in settings.lengths}
    measured = bench.measure(list(points.values()), subset)
    fastest = min(points, key=lambda length: mean(measured[points[length]], "relative_latency", "value"))
    return fastest, mean(measured[points[fastest]], "measures", "draft_utilisation")


def _climb(
    bench: Bench, base: Point, settings: AppendixD, window: Window, start: tuple[int, float, float]
) -> tuple[list[Step], str]:
    """Raises the threshold until quality is too low; returns all steps, and the reason for stopping."""
    (length, threshold, floor), steps = start, list[Step]()
    print(f"step 3: raising the threshold on {window.judged} examples, while quality is at least {floor:.2f}")
    trade_off = deferral.get(settings.rule).alpha
    largest = math.inf if trade_off is None else trade_off.bounds(1)[1]
    while threshold <= largest:
        point = fuzzy(base, settings, length, threshold)
        records = bench.measure([point], window)[point]
        numbers = {name: mean(records, *place) for name, place in _NUMBERS.items()}
        is_held = numbers["quality"] >= floor
        step = Step(threshold=threshold, block_size=length, held=is_held, **numbers)
        steps.append(step)
        if not step.held:
            return steps, "quality fell below the floor"
        if step.acceptance == 1 and length == settings.lengths[-1]:
            return steps, "every drafted token is kept"
        if step.utilisation >= NEARLY_ALL:
            length = next((longer for longer in settings.lengths if longer > length), length)
        threshold = round(threshold + STEP, 3)
    return steps, f"the range of {settings.rule} ends at {largest:g}"


def _levels(base: Point, settings: AppendixD, steps: Sequence[Step]) -> dict[str, Point]:
    """Returns the levels Low, Med and High as points.

    Their thresholds are one third, two thirds and all of the way from the first threshold to the last threshold with
    sufficient quality.
    """
    held_steps = [step for step in steps if step.held]
    if not held_steps:
        return {}
    low, high = held_steps[0].threshold, held_steps[-1].threshold
    levels = {}
    for share, name in enumerate(("Low", "Med", "High"), start=1):
        threshold = round(low + share / 3 * (high - low), 3)
        length = next(step.block_size for step in held_steps if step.threshold >= threshold)
        levels[name] = fuzzy(base, settings, length, threshold)
    return levels
