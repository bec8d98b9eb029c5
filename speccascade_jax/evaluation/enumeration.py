"""Which points a sweep has: methods × α × γ × temperature × top-p × seeds, in groups that share a compilation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.core.checks import several
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.evaluation.points import Evaluation, Method, ModelPair, Point, Sampling
from speccascade_jax.evaluation.validation import check_name, validate, validate_evaluation
from speccascade_jax.methods.recipes import METHODS
from speccascade_jax.rules import deferral, rule

# Most of token_v3's range lies where hardly anything is deferred (METHODS section 3).
DENSE_GRIDS: dict[str, tuple[float, ...]] = {"token_v3": (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)}


def default_alphas(rule: str | rule.Rule, count: int = 7, vocab_size: int = 8192) -> tuple[float, ...]:
    """A grid over the rule's sweep range (METHODS section 3), ends included; `ln V` is rounded up to a tenth."""
    rule = deferral.get(rule)
    if rule.name in DENSE_GRIDS:
        return DENSE_GRIDS[rule.name]
    return tuple(float(np.round(alpha, 3)) for alpha in deferral.even_grid(rule, count, vocab_size))


def enumerate_points(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    rule_names: Sequence[str],
    methods: Sequence[Method] = (),
    alphas: Mapping[str, Sequence[float]] | None = None,
    stop_thresholds: Mapping[str, Sequence[float]] | None = None,
    heads: Sequence[str] = (),
    block_sizes: Sequence[int] = (5,),
    samplings: Iterable[Sampling] = (Sampling(),),
    seeds: Sequence[int] = (0,),
    bonus: str | None = None,
) -> list[list[Point]]:
    """The points of a sweep, in groups that share a compilation and a batch (the α's of one rule).

    Target and draft alone come first for every sampling and seed: the two ends of every plot. A rule without α is one
    point; a rule that `alphas` does not name gets `default_alphas`.

    Args:
        pair, evaluation, samplings, seeds: what the points share.
        rule_names: names of rules or methods; methods: further ones with a rule or a stop threshold of their own.
        alphas: name of a rule, or `Method.curve()` -> its α's.
        stop_thresholds: name of a method that stops by one -> its thresholds; heads: files of acceptance heads that
            methods which ask one are each measured with, instead of the pair's own.
        block_sizes: of methods whose blocks end at γ; those that stop where the draft is unsure keep their own cap.
        bonus: of rules; `None`, and methods, take the method's own.

    Raises:
        ValueError: an unknown rule, an α outside a rule's domain, any other value without a meaning, a point named
            twice, two heads whose files are called alike; `alphas` for a rule that is not swept.
    """
    _check_shapes(rule_names, alphas or {}, block_sizes, seeds)
    templates, alphas = [*(Method(name=name) for name in rule_names), *methods], dict(alphas or {})
    for template in templates:
        check_name(template)
    templates = list(_in_heads(_in_thresholds(templates, dict(stop_thresholds or {})), heads))
    _check_heads(templates)
    _check_names(templates, alphas)
    validate_evaluation(evaluation)
    evaluation = evaluation.resolved()
    groups: list[list[Point]] = []
    for sampling, seed in itertools.product(samplings, seeds):

        def group(*methods: Method, sampling: Sampling = sampling, seed: int = seed) -> list[Point]:
            shared: dict[str, Any] = {"pair": pair, "evaluation": evaluation, "sampling": sampling, "seed": seed}
            return [Point(method=method, **shared) for method in methods]

        groups += [group(Method(name=TARGET)), group(Method(name=DRAFT))]
        for each in _in_blocks(templates, block_sizes, bonus):
            grid = _alphas(each.decides, alphas.get(each.curve()))
            groups.append(group(*(replace(each, alpha=alpha) for alpha in grid)))
    points = [point for each in groups for point in each]
    for point in points:
        validate(point)
    if len(set(points)) < len(points):
        twice = next(point for n, point in enumerate(points) if point in points[:n])
        raise ValueError(f"the sweep names a point twice: {twice.label()}")
    return groups


def _check_shapes(rule_names: Any, alphas: Mapping[str, Any], block_sizes: Sequence[int], seeds: Sequence[int]) -> None:
    for name, values in {"block_sizes": block_sizes, "seeds": seeds}.items():
        several(name, values, 1)
    for name, values in {"rules": rule_names, **{f"alphas[{rule!r}]": grid for rule, grid in alphas.items()}}.items():
        several(name, values)


def _check_heads(templates: Iterable[Method]) -> None:
    """Refuse two files of one name: curves, and `alphas`, are called after it."""
    files: dict[str, Path] = {}
    for file in (Path(template.head) for template in templates if template.head is not None):
        if (other := files.setdefault(file.stem, file)) != file:
            raise ValueError(
                f"the heads {other} and {file} would both be called {file.stem!r}: rename one of the files"
            )


def _check_names(templates: Sequence[Method], alphas: Mapping[str, Any]) -> None:
    names = [template.curve() for template in templates]
    if stray := [name for name in alphas if name not in names]:
        raise ValueError(f"alphas names {', '.join(stray)}, which is not among the rules {', '.join(names)}")


def _in_thresholds(templates: Sequence[Method], thresholds: Mapping[str, Sequence[float]]) -> Iterator[Method]:
    """Every template with every stop threshold that it is given, where it lacks one."""
    lacks = [each.recipe.stops and each.stop_threshold is None for each in templates]
    lacking = {each.name for each, lack in zip(templates, lacks, strict=True) if lack}
    if stray := [name for name in thresholds if name not in lacking]:
        raise ValueError(
            f"stop_thresholds names {', '.join(stray)}, which is not among the methods that lack one: "
            f"{', '.join(sorted(lacking)) or 'none does'}"
        )
    for name, values in thresholds.items():
        several(f"stop_thresholds[{name!r}]", values, 1)
    for each, lack in zip(templates, lacks, strict=True):
        for threshold in thresholds.get(each.name, (None,)) if lack else (each.stop_threshold,):
            yield replace(each, stop_threshold=threshold)


def _in_heads(templates: Iterable[Method], heads: Sequence[str]) -> Iterator[Method]:
    """Every template that asks an acceptance head with each of `heads`."""
    several("heads", heads)
    for each in templates:
        own = each.recipe.needs_head and each.head is None and heads
        yield from (replace(each, head=head) for head in heads) if own else (each,)


def _in_blocks(templates: Sequence[Method], block_sizes: Sequence[int], bonus: str | None) -> Iterator[Method]:
    """Every template with every block size that means something to it."""
    for number, block in enumerate(block_sizes):
        for template in templates:
            own = template.bonus if template.name in METHODS or bonus is None else bonus
            if template.recipe.swept_block:
                yield replace(template, block_size=block, bonus=own)
            elif number == 0:
                yield template


def _alphas(rule: rule.Rule, given: Sequence[float] | None) -> tuple[float | None, ...]:
    if rule.grid is None:
        if given:
            raise ValueError(f"rule {rule.name!r} has no alpha, but alphas gives it {tuple(given)}")
        return (None,)
    if given is not None and not len(given):
        raise ValueError(f"alphas gives rule {rule.name!r} no value; leave it out of alphas to sweep its usual range")
    return tuple(default_alphas(rule) if given is None else given)
