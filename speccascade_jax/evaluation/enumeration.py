"""Enumeration of the points (configurations) of a sweep, in groups that share one compiled program."""

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from speccascade_jax import checkpoints
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
from speccascade_jax.pairs.derived import is_derived
from speccascade_jax.runtime.gin_flags import on_command_line
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
    """Returns the points of a sweep in groups; the points of a group differ only in α.

    α is the number that sets a rule's trade-off between quality and speed, and γ is the block size. A group shares one
    compiled program, and its points are decoded in the same batches. For every sampling and seed, the first points are
    the target alone and the draft alone, because they are the two ends of every plot. A method without α gives one
    point. A method with an α that `alphas` does not name is measured at the usual α's of its rule (`Alpha.usual`).

    Args:
        pair: the models of all points.
        evaluation: the examples of all points.
        methods: names of methods and rules, or `Settings` with their own rule, stop threshold or drafters; `samplings`
            replaces the sampling in such `Settings`.
        alphas: maps the name of a curve (`curves.curve`), or a name that several curves share, such as the method's, to
            its α's. Known methods that are not in the sweep are ignored here, so that the `methods` of a gin file can
            be replaced without its `alphas`. Ignored names cause a warning, unless the command line replaces only
            `methods`.
        stop_thresholds: maps the name of a method with a stop threshold to the thresholds to measure.
        heads: files of acceptance heads; each method that needs a head is measured with each of these files instead of
            the pair's own head.
        block_sizes: values of γ for methods with a fixed block size; methods that end a block when the draft is unsure
            keep their own limit.
        samplings: sampling settings by name, one dictionary for each combination (names: `methods.settings.SAMPLING`);
            every method is measured with each combination.
        seeds: random seeds; every method is measured with each seed.
        bonus: the distribution of the bonus token, which follows a block whose tokens were all accepted ("rule",
            "target" or "none"). It applies to methods that are named by a rule alone; all other methods keep their own
            setting. `None`: the default of each method.
        verify: verification algorithms ("token", "block"). Every method that accepts a drafted token with probability
            `min(1, π/q̃)` is measured with each algorithm, unless its settings name one.
        cooler: fractions of each temperature above 0; the quality of the target alone is also measured at these lower
            temperatures, without timing.

    Raises:
        ValueError: an unknown method; an α outside a rule's domain; any other invalid value; a point that is named
            twice; two heads whose files have the same name; a name in `alphas` that is neither in the sweep nor the
            name of a method.
    """
    validate_types.check(enumerate_points, locals())
    alphas = dict(alphas or {})
    for name, values in {"block_sizes": block_sizes, "seeds": seeds, "verify": verify}.items():
        several(name, values, 1)
    templates = [recorded(Settings(method=method) if isinstance(method, str) else method) for method in methods]
    templates = list(_in_ways(_in_heads(_in_thresholds(templates, dict(stop_thresholds or {})), heads), verify))
    _check_heads(templates)
    swept = dict.fromkeys(name for template in templates for name in _names(template))
    _check_alphas(alphas, swept, {template.rule for template in templates})
    make_point = partial(Point, pair=pair, evaluation=evaluation.resolved())
    groups_of_settings = [[Settings(method=name)] for name in _alone(pair)]
    for template in _in_blocks(templates, block_sizes, bonus):
        chosen = next((alphas[name] for name in _names(template) if name in alphas), None)
        groups_of_settings.append([replace(template, alpha=alpha) for alpha in _alphas(template, chosen)])
    groups = [
        [make_point(settings=replace(settings, **sampling), seed=seed) for settings in group]
        for sampling, seed in itertools.product(samplings, seeds)
        for group in groups_of_settings
    ]
    groups += [[point] for point in _cooler(groups, cooler)]
    points = list(itertools.chain(*groups))
    for point in points:
        validate(point)
    if len(set(points)) < len(points):
        twice = next(point for n, point in enumerate(points) if point in points[:n])
        raise ValueError(f"the sweep names a point twice: {twice.label()}: remove the repeated method, value or seed")
    return groups


def beside(mine: Sequence[str | Settings], known: Sequence[str | Settings]) -> tuple[str | Settings, ...]:
    """Returns your own methods, followed by known methods to compare them with, each once, as `methods` of a sweep."""
    validate_types.check(beside, locals())
    return (*mine, *(method for method in known if method not in mine))


def _alone(pair: ModelPair) -> tuple[str, ...]:
    """Returns the target alone and the draft alone; leaves the draft out if it cannot generate without its target."""
    if pair.draft is None or is_derived(pair.draft):
        return TARGET, DRAFT
    try:
        attached = checkpoints.belongs_to_target(pair.draft)
    except (OSError, ValueError):  # loading the pair reports what is wrong
        attached = False
    return (TARGET,) if attached else (TARGET, DRAFT)


def _cooler(groups: Sequence[Sequence[Point]], shares: Sequence[float]) -> list[Point]:
    """Returns untimed points of the target alone at the given fractions of each temperature above 0.

    They are not timed, because the target is equally fast at every temperature.
    """
    several("cooler", shares)
    if strange := [share for share in shares if not 0 <= share < 1]:
        raise ValueError(f"cooler={tuple(shares)!r} holds {strange[0]!r}: give shares of the temperature, in [0, 1)")
    targets = [point for group in groups for point in group if point.settings.method == TARGET]
    known = {(_sampled(point.settings), point.seed) for point in targets}
    cooler_points = dict[tuple, Point]()
    for point, share in itertools.product(targets, shares):
        heat = point.settings.temperature
        colder = replace(point.settings, temperature=share * heat, draft_temperature=None)
        identity = _sampled(colder), point.seed
        # greedy outputs do not depend on the seed, so one greedy point serves all seeds
        same = colder.temperature == 0 and any(law == identity[0] for law, _ in (known | set(cooler_points)))
        if heat > 0 and identity not in known and not same:
            untimed = replace(point.evaluation, latency_examples=0)
            cooler_points[identity] = replace(point, settings=colder, evaluation=untimed)
    return list(cooler_points.values())


def _sampled(settings: Settings) -> tuple[float, float, int]:
    """Returns the temperature, top-p and top-k that the target alone samples with."""
    return settings.temperature, settings.top_p, settings.top_k


def _check_alphas(alphas: Iterable[str], swept: Collection[str], rules: Collection[str | None]) -> None:
    """Refuses names in `alphas` that are neither in the sweep nor methods; warns of methods outside the sweep.

    The name of a rule does not count as a method if a method in the sweep uses this rule.
    """
    stray = [name for name in alphas if name not in swept]
    if unheard := [name for name in stray if name not in METHODS or name in rules]:
        raise ValueError(
            f"alphas names {', '.join(unheard)}, which is not among the methods: {unknown(unheard[0], swept)}"
        )
    # no warning if the command line replaces only `methods`: the gin file then still lists the α's of its own methods
    if stray and (on_command_line("alphas") or not on_command_line("methods")):
        warnings.warn(f"the alphas of {', '.join(stray)} are not used: these are not among the methods", stacklevel=3)


def _check_heads(templates: Iterable[Settings]) -> None:
    """Refuses two head files with the same name, because curves and `alphas` name a head by its file name."""
    files: dict[str, Path] = {}
    for file in (expanded(template.head) for template in templates if template.head is not None):
        if (former := files.setdefault(file.stem, file)) != file:
            raise ValueError(
                f"the heads {former} and {file} would both be called {file.stem!r}: rename one of the files"
            )


def _names(settings: Settings) -> tuple[str, str, str]:
    """Returns the names under which `alphas` may list settings, the most specific name first."""
    return curve(settings), family(settings), settings.method


def _in_thresholds(templates: Sequence[Settings], thresholds: Mapping[str, Sequence[float]]) -> Iterator[Settings]:
    """Yields settings that lack a stop threshold once for each threshold of their method, and all others unchanged."""

    def lacks(settings: Settings) -> bool:
        return settings.stop_threshold is None and bool(table.get(settings.method).threshold(settings))

    lacking = {template.method for template in templates if lacks(template)}
    if stray := [name for name in thresholds if name not in lacking]:
        raise ValueError(
            f"stop_thresholds names {', '.join(stray)}, which is not among the methods that lack a stop threshold: "
            f"{', '.join(sorted(lacking)) or 'none'}"
        )
    for name, values in thresholds.items():
        several(f"stop_thresholds[{name!r}]", values, 1)
    for template in templates:
        for threshold in thresholds.get(template.method, (None,)) if lacks(template) else (template.stop_threshold,):
            yield replace(template, stop_threshold=threshold)


def _in_heads(templates: Iterable[Settings], heads: Sequence[str]) -> Iterator[Settings]:
    """Yields settings that need an acceptance head once for each file in `heads`, and all others unchanged."""
    for template in templates:
        open_to_choice = asks_head(template) and template.head is None and heads
        yield from (replace(template, head=head) for head in heads) if open_to_choice else (template,)


def _in_ways(templates: Iterable[Settings], verify: Sequence[str]) -> Iterator[Settings]:
    """Yields settings once for each verification algorithm that they support, or unchanged if they name their own."""
    for template in templates:
        method = table.get(template.method)
        if template.verify != TOKEN or not isinstance(method, Speculation):
            yield template
            continue
        fits = (template.accept or method.accept) == "speculative" and template.tree is None
        # `verify` without "token" may fit no method; `recorded` then raises the error
        ways = [way for way in verify if fits or way == TOKEN or TOKEN not in verify]
        yield from (recorded(replace(template, verify=way)) for way in ways)


def _in_blocks(templates: Sequence[Settings], block_sizes: Sequence[int], bonus: str | None) -> Iterator[Settings]:
    """Yields settings once for each block size if their method has a fixed block size, and otherwise once."""
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
            raise ValueError(
                f"method {curve(settings)!r} has no alpha, but alphas gives it {tuple(chosen)}: remove it from alphas"
            )
        return (None,)
    if chosen is None and settings.alpha is not None:
        return (settings.alpha,)
    if chosen is not None and not len(chosen):
        raise ValueError(
            f"alphas gives method {curve(settings)!r} no value; leave it out of alphas to sweep its usual range"
        )
    return trade_off.usual() if chosen is None else tuple(chosen)
