"""Which points a sweep has: methods × α × γ × temperature × top-p × seeds, in groups that share a compilation."""

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from speccascade_jax.core import validate_types
from speccascade_jax.core.checks import several
from speccascade_jax.core.names import DRAFT, TARGET, unknown
from speccascade_jax.evaluation.points import Evaluation, Method, ModelPair, Point, Sampling
from speccascade_jax.evaluation.validation import validate, validate_evaluation
from speccascade_jax.methods.settings import TOKEN
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.methods.table import METHODS
from speccascade_jax.storage.files import expanded


def enumerate_points(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    methods: Sequence[str | Method],
    alphas: Mapping[str, Sequence[float]] | None = None,
    stop_thresholds: Mapping[str, Sequence[float]] | None = None,
    heads: Sequence[str] = (),
    block_sizes: Sequence[int] = (5,),
    samplings: Iterable[Sampling] = (Sampling(),),
    seeds: Sequence[int] = (0,),
    bonus: str | None = None,
    verify: Sequence[str] = (TOKEN,),
    cooler: Sequence[float] = (),
) -> list[list[Point]]:
    """The points of a sweep, in groups that share a compilation and a batch (the α's of one rule).

    Target and draft alone come first for every sampling and seed: the two ends of every plot. A method without α is one
    point; one that `alphas` does not name gets `Alpha.usual`.

    Args:
        pair, evaluation, samplings, seeds: what the points share.
        methods: names of methods and rules, or methods with a rule, a stop threshold, drafters of their own.
        alphas: `Method.curve()` or, for all that share it, the name -> its α's; a method's that is not swept are passed
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
    templates = [Method(name=each) if isinstance(each, str) else each for each in methods]
    templates = list(_in_ways(_in_heads(_in_thresholds(templates, dict(stop_thresholds or {})), heads), verify))
    _check_heads(templates)
    swept = dict.fromkeys(name for template in templates for name in _names(template))
    _check_alphas(alphas, swept, {template.rule for template in templates})
    validate_evaluation(evaluation)
    evaluation = evaluation.resolved()
    curves = [[Method(name=TARGET)], [Method(name=DRAFT)]]
    for each in _in_blocks(templates, block_sizes, bonus):
        given = next((alphas[name] for name in _names(each) if name in alphas), None)
        curves.append([replace(each, alpha=alpha) for alpha in _alphas(each, given)])
    groups = [
        [Point(pair=pair, evaluation=evaluation, method=each, sampling=sampling, seed=seed) for each in curve]
        for sampling, seed in itertools.product(samplings, seeds)
        for curve in curves
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
    targets = [point for group in groups for point in group if point.method.name == TARGET]
    known = {(_law(point.sampling), point.seed) for point in targets}
    found = dict[tuple, Point]()
    for point, share in itertools.product(targets, shares):
        colder = replace(point.sampling, temperature=share * point.sampling.temperature, draft_temperature=None)
        at = _law(colder), point.seed
        same = colder.temperature == 0 and any(law == at[0] for law, _ in (known | set(found)))  # for every seed
        if point.sampling.temperature > 0 and at not in known and not same:
            untimed = replace(point.evaluation, latency_examples=0)
            found[at] = replace(point, sampling=colder, evaluation=untimed)
    return list(found.values())


def _law(sampling: Sampling) -> tuple[float, float, int]:
    """What of a sampling the target alone heeds."""
    return sampling.temperature, sampling.top_p, sampling.top_k


def _check_alphas(alphas: Iterable[str], swept: Collection[str], rules: Collection[str | None]) -> None:
    """Refuse names that nothing has, or the rule of a swept method alone; methods that are not swept may stay."""
    stray = [name for name in alphas if name not in swept]
    if unheard := [name for name in stray if name not in METHODS or name in rules]:
        raise ValueError(
            f"alphas names {', '.join(unheard)}, which is not among the methods: {unknown(unheard[0], swept)}"
        )
    if stray:
        warnings.warn(f"alphas names {', '.join(stray)}, which this sweep has not: passed over", stacklevel=3)


def _check_heads(templates: Iterable[Method]) -> None:
    """Refuse two files of one name: curves, and `alphas`, are called after it."""
    files: dict[str, Path] = {}
    for file in (expanded(template.head) for template in templates if template.head is not None):
        if (other := files.setdefault(file.stem, file)) != file:
            raise ValueError(
                f"the heads {other} and {file} would both be called {file.stem!r}: rename one of the files"
            )


def _names(method: Method) -> tuple[str, str, str]:
    """What `alphas` may call a method, the most special first."""
    return method.curve(), method.family(), method.name


def _in_thresholds(templates: Sequence[Method], thresholds: Mapping[str, Sequence[float]]) -> Iterator[Method]:
    """Every template with every stop threshold that it is given, where it lacks one."""

    def lacks(method: Method) -> bool:
        return method.stop_threshold is None and bool(method.recipe.threshold(method.settings()))

    lacking = {each.name for each in templates if lacks(each)}
    if stray := [name for name in thresholds if name not in lacking]:
        raise ValueError(
            f"stop_thresholds names {', '.join(stray)}, which is not among the methods that lack one: "
            f"{', '.join(sorted(lacking)) or 'none does'}"
        )
    for name, values in thresholds.items():
        several(f"stop_thresholds[{name!r}]", values, 1)
    for each in templates:
        for threshold in thresholds.get(each.name, (None,)) if lacks(each) else (each.stop_threshold,):
            yield replace(each, stop_threshold=threshold)


def _in_heads(templates: Iterable[Method], heads: Sequence[str]) -> Iterator[Method]:
    """Every template that asks an acceptance head with each of `heads`."""
    for each in templates:
        own = each.needs_head and each.head is None and heads
        yield from (replace(each, head=head) for head in heads) if own else (each,)


def _in_ways(templates: Iterable[Method], verify: Sequence[str]) -> Iterator[Method]:
    """Every template with every way to verify that goes with it; those with one of their own as they are."""
    for each in templates:
        recipe = each.recipe
        if each.verify != TOKEN or not isinstance(recipe, Speculation):
            yield each
            continue
        fits = (each.accept or recipe.accept) == "speculative" and each.tree is None
        # one that goes with none of them is refused when it is made
        yield from (replace(each, verify=way) for way in verify if fits or way == TOKEN or TOKEN not in verify)


def _in_blocks(templates: Sequence[Method], block_sizes: Sequence[int], bonus: str | None) -> Iterator[Method]:
    """Every template with every block size that means something to it."""
    for number, block in enumerate(block_sizes):
        for template in templates:
            recipe = template.recipe
            free = bonus is not None and isinstance(recipe, Speculation) and recipe.bare
            if template.swept_block:
                yield replace(template, block_size=block, bonus=bonus if free else template.bonus)
            elif number == 0:
                yield replace(template, bonus=bonus) if free and template.tree else template


def _alphas(method: Method, given: Sequence[float] | None) -> tuple[float | None, ...]:
    trade_off = method.trade_off
    if trade_off is None:
        if given:
            raise ValueError(f"method {method.curve()!r} has no alpha, but alphas gives it {tuple(given)}")
        return (None,)
    if given is None and method.alpha is not None:
        return (method.alpha,)
    if given is not None and not len(given):
        raise ValueError(
            f"alphas gives method {method.curve()!r} no value; leave it out of alphas to sweep its usual range"
        )
    return trade_off.usual() if given is None else tuple(given)
