"""Which points a sweep has: methods × α × γ × temperature × top-p × seeds, in groups that share a compilation."""

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from speccascade_jax.core import validate_types
from speccascade_jax.core.checks import several
from speccascade_jax.core.names import DRAFT, TARGET, unknown
from speccascade_jax.evaluation.curves import curve, family
from speccascade_jax.evaluation.heads import asks_head
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, recorded, validate
from speccascade_jax.methods import table
from speccascade_jax.methods.settings import TOKEN
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.methods.table import METHODS
from speccascade_jax.storage.files import expanded


def enumerate_points(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    methods: Sequence[str | Settings],
    alphas: Mapping[str, Sequence[float]] | None = None,
    stop_thresholds: Mapping[str, Sequence[float]] | None = None,
    heads: Sequence[str] = (),
    block_sizes: Sequence[int] = (5,),
    samplings: Iterable[Mapping[str, Any]] = ({},),
    seeds: Sequence[int] = (0,),
    bonus: str | None = None,
    verify: Sequence[str] = (TOKEN,),
    cooler: Sequence[float] = (),
) -> list[list[Point]]:
    """The points of a sweep, in groups that share a compilation and a batch (the α's of one rule).

    Target and draft alone come first for every sampling and seed: the two ends of every plot. A method without α is one
    point; one that `alphas` does not name gets `Alpha.usual`.

    Args:
        pair, evaluation, seeds: what the points share; samplings: the settings of `SAMPLING` by name.
        methods: names of methods and rules, or settings with a rule, a stop threshold, drafters of their own, whose
            sampling is not read.
        alphas: `curves.curve` or, for all that share it, the name -> its α's; a method's that is not swept are passed
            over with a warning, so that a file's `methods` can be replaced alone.
        stop_thresholds: name of a method that stops by one -> its thresholds; heads: files of acceptance heads that
            methods which ask one are each measured with, instead of the pair's own.
        block_sizes: of methods whose blocks end at γ; those that stop where the draft is unsure keep their own cap.
        bonus: of rules; `None`, and methods, take the method's own.
        verify: ways to verify, each of which every method that keeps all the law allows is measured with, where it has
            none of its own.
        cooler: the target alone is judged, not timed, at these shares of every temperature above 0 too.

    Raises:
        ValueError: an unknown method, an α outside a rule's domain, any other value without a meaning, a point named
            twice, two heads whose files are called alike; `alphas` for what is neither swept nor a method.
    """
    validate_types.check(enumerate_points, locals())
    alphas = dict(alphas or {})
    for name, values in {"block_sizes": block_sizes, "seeds": seeds, "verify": verify}.items():
        several(name, values, 1)
    templates = [recorded(Settings(method=each) if isinstance(each, str) else each) for each in methods]
    templates = list(_in_ways(_in_heads(_in_thresholds(templates, dict(stop_thresholds or {})), heads), verify))
    _check_heads(templates)
    swept = dict.fromkeys(name for template in templates for name in _names(template))
    _check_alphas(alphas, swept, {template.rule for template in templates})
    at = partial(Point, pair=pair, evaluation=evaluation.resolved())
    groups_of_settings = [[Settings(method=TARGET)], [Settings(method=DRAFT)]]
    for template in _in_blocks(templates, block_sizes, bonus):
        chosen = next((alphas[name] for name in _names(template) if name in alphas), None)
        groups_of_settings.append([replace(template, alpha=alpha) for alpha in _alphas(template, chosen)])
    groups = [
        [at(settings=replace(settings, **sampling), seed=seed) for settings in group]
        for sampling, seed in itertools.product(samplings, seeds)
        for group in groups_of_settings
    ]
    groups += [[point] for point in _cooler(groups, cooler)]
    points = list(itertools.chain(*groups))
    for point in points:
        validate(point)
    if len(set(points)) < len(points):
        twice = next(point for n, point in enumerate(points) if point in points[:n])
        raise ValueError(f"the sweep names a point twice: {twice.label()}")
    return groups


def _cooler(groups: Sequence[Sequence[Point]], shares: Sequence[float]) -> list[Point]:
    """The target alone at shares of each temperature, where it is not among the points; not timed: it is no faster."""
    several("cooler", shares)
    if strange := [share for share in shares if not 0 <= share < 1]:
        raise ValueError(
            f"cooler={tuple(shares)!r} holds {strange[0]!r}: these are shares of a temperature, 0 to below 1"
        )
    targets = [point for group in groups for point in group if point.settings.method == TARGET]
    known = {(_sampled(point.settings), point.seed) for point in targets}
    found = dict[tuple, Point]()
    for point, share in itertools.product(targets, shares):
        heat = point.settings.temperature
        colder = replace(point.settings, temperature=share * heat, draft_temperature=None)
        at = _sampled(colder), point.seed
        same = colder.temperature == 0 and any(law == at[0] for law, _ in (known | set(found)))  # for every seed
        if heat > 0 and at not in known and not same:
            untimed = replace(point.evaluation, latency_examples=0)
            found[at] = replace(point, settings=colder, evaluation=untimed)
    return list(found.values())


def _sampled(settings: Settings) -> tuple[float, float, int]:
    """Returns the numbers that the target alone samples by."""
    return settings.temperature, settings.top_p, settings.top_k


def _check_alphas(alphas: Iterable[str], swept: Collection[str], rules: Collection[str | None]) -> None:
    """Refuse names that nothing has, or the rule of a swept method alone; methods that are not swept may stay."""
    stray = [name for name in alphas if name not in swept]
    if unheard := [name for name in stray if name not in METHODS or name in rules]:
        raise ValueError(
            f"alphas names {', '.join(unheard)}, which is not among the methods: {unknown(unheard[0], swept)}"
        )
    if stray:
        warnings.warn(f"alphas names {', '.join(stray)}, which this sweep has not: passed over", stacklevel=3)


def _check_heads(templates: Iterable[Settings]) -> None:
    """Refuse two files of one name: curves, and `alphas`, are called after it."""
    files: dict[str, Path] = {}
    for file in (expanded(template.head) for template in templates if template.head is not None):
        if (other := files.setdefault(file.stem, file)) != file:
            raise ValueError(
                f"the heads {other} and {file} would both be called {file.stem!r}: rename one of the files"
            )


def _names(settings: Settings) -> tuple[str, str, str]:
    """Returns what `alphas` may call them, the most special name first."""
    return curve(settings), family(settings), settings.method


def _in_thresholds(templates: Sequence[Settings], thresholds: Mapping[str, Sequence[float]]) -> Iterator[Settings]:
    """Every template with every stop threshold that it is given, where it lacks one."""

    def lacks(settings: Settings) -> bool:
        return settings.stop_threshold is None and bool(table.get(settings.method).threshold(settings))

    lacking = {template.method for template in templates if lacks(template)}
    if stray := [name for name in thresholds if name not in lacking]:
        raise ValueError(
            f"stop_thresholds names {', '.join(stray)}, which is not among the methods that lack one: "
            f"{', '.join(sorted(lacking)) or 'none does'}"
        )
    for name, values in thresholds.items():
        several(f"stop_thresholds[{name!r}]", values, 1)
    for template in templates:
        for threshold in thresholds.get(template.method, (None,)) if lacks(template) else (template.stop_threshold,):
            yield replace(template, stop_threshold=threshold)


def _in_heads(templates: Iterable[Settings], heads: Sequence[str]) -> Iterator[Settings]:
    """Every template that asks an acceptance head with each of `heads`."""
    for template in templates:
        open_to_choice = asks_head(template) and template.head is None and heads
        yield from (replace(template, head=head) for head in heads) if open_to_choice else (template,)


def _in_ways(templates: Iterable[Settings], verify: Sequence[str]) -> Iterator[Settings]:
    """Every template with every way to verify that goes with it; those with one of their own as they are."""
    for template in templates:
        method = table.get(template.method)
        if template.verify != TOKEN or not isinstance(method, Speculation):
            yield template
            continue
        fits = (template.accept or method.accept) == "speculative" and template.tree is None
        # one that goes with none of them is refused here
        ways = [way for way in verify if fits or way == TOKEN or TOKEN not in verify]
        yield from (recorded(replace(template, verify=way)) for way in ways)


def _in_blocks(templates: Sequence[Settings], block_sizes: Sequence[int], bonus: str | None) -> Iterator[Settings]:
    """Every template with every block size that means something to it."""
    for number, block in enumerate(block_sizes):
        for template in templates:
            method = table.get(template.method)
            free = bonus is not None and isinstance(method, Speculation) and method.bare
            if method.sweeps_block(template):
                yield replace(template, block_size=block, bonus=bonus if free else template.bonus)
            elif number == 0:
                yield replace(template, bonus=bonus) if free and template.tree else template


def _alphas(settings: Settings, chosen: Sequence[float] | None) -> tuple[float | None, ...]:
    trade_off = table.get(settings.method).alpha(settings)
    if trade_off is None:
        if chosen:
            raise ValueError(f"method {curve(settings)!r} has no alpha, but alphas gives it {tuple(chosen)}")
        return (None,)
    if chosen is None and settings.alpha is not None:
        return (settings.alpha,)
    if chosen is not None and not len(chosen):
        raise ValueError(
            f"alphas gives method {curve(settings)!r} no value; leave it out of alphas to sweep its usual range"
        )
    return trade_off.usual() if chosen is None else tuple(chosen)
