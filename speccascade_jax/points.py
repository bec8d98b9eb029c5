"""What one measured point is, and which points a sweep has: pure values, checked before anything is loaded.

The classes are what gin files bind. A point's configuration is itself a gin file (`Point.configuration`): stored with
every record, it runs that point again through `experiments/run.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speccascade_jax import controls, rules
from speccascade_jax.data.tasks import get_task
from speccascade_jax.engine import BONUSES
from speccascade_jax.summary import DRAFT, TARGET

# Most of token_v3's range lies where hardly anything is deferred (METHODS section 3).
DENSE_GRIDS: dict[str, tuple[float, ...]] = {"token_v3": (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)}


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Which two models: `name` of a shipped pair, or the path of a folder as `sc.load_pair` takes it."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """On what a point is measured, and how thoroughly.

    Attributes:
        task: a name in `speccascade_jax.data.tasks.TASKS`; split: one of its splits (`None`: the task's own choice).
        max_new_tokens: longest output in tokens; `None` is the task's.
        quality_examples: examples that quality and counts are taken on; quality_batch: rows decoded together.
        latency_examples: examples timed one at a time; latency_trials: how often each. Published tables: 500 and 3.
        resamples: bootstrap resamples behind the spread of quality.
    """

    task: str
    split: str | None = None
    max_new_tokens: int | None = None
    quality_examples: int = 64
    quality_batch: int = 32
    latency_examples: int = 16
    latency_trials: int = 2
    resamples: int = 200

    def resolved(self) -> Evaluation:
        """The same with the task's own split and output length where none is named; ValueError on an unknown task."""
        task = get_task(self.task)
        split = task.splits[0] if self.split is None else self.split
        longest = task.max_output_length if self.max_new_tokens is None else self.max_new_tokens
        return dataclasses.replace(self, split=split, max_new_tokens=longest)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How tokens are made: `name` is a rule of `rules.RULES`, `autoregressive` or `autoregressive_draft`.

    The last two have neither α nor block nor bonus; a rule without α has none either.
    """

    name: str
    alpha: float | None = None
    block_size: int | None = 5
    bonus: str | None = "rule"

    def __post_init__(self) -> None:
        if self.alpha is not None:
            object.__setattr__(self, "alpha", float(self.alpha))
        if self.autoregressive:
            object.__setattr__(self, "block_size", None)
            object.__setattr__(self, "bonus", None)

    @property
    def autoregressive(self) -> bool:
        """Whether one model writes alone."""
        return self.name in (TARGET, DRAFT)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling transform of both models; `draft_temperature=None` is the target's temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "draft_temperature"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration that becomes one record."""

    pair: ModelPair
    evaluation: Evaluation
    method: Method
    sampling: Sampling
    seed: int = 0

    def coordinates(self) -> dict[str, Any]:
        """Everything that the point is, flat, for records, tables and plots."""
        out: dict[str, Any] = {"pair": self.pair.name}
        out |= dataclasses.asdict(self.evaluation)
        out |= {"method": self.method.name, **dataclasses.asdict(self.method)}
        del out["name"]
        return out | dataclasses.asdict(self.sampling) | {"seed": self.seed}

    def configuration(self) -> str:
        """The point as a complete gin file for `experiments/run.py`."""
        lines = [
            "from __gin__ import dynamic_registration",
            "",
            "from speccascade_jax import experiment",
            "from speccascade_jax import points",
            "",
        ]
        for part in (self.pair, self.evaluation, self.method, self.sampling):
            lines.append(f"points.{type(part).__name__}:")
            lines += [f"  {name} = {value!r}" for name, value in dataclasses.asdict(part).items()]
        lines.append("experiment.run:")
        lines += [f"  {field} = @points.{kind}()" for field, kind in _PARTS.items()]
        return "\n".join([*lines, f"  seed = {self.seed}"]) + "\n"

    def label(self) -> str:
        """The point in a few words, for progress lines."""
        parts = [self.method.name]
        if self.method.alpha is not None:
            parts.append(f"alpha={self.method.alpha:g}")
        if self.method.block_size is not None:
            parts.append(f"block={self.method.block_size}")
        parts.append(f"T={self.sampling.temperature:g}")
        if self.sampling.top_p < 1:
            parts.append(f"top_p={self.sampling.top_p:g}")
        return " ".join([*parts, f"seed={self.seed}"])


_PARTS = {"pair": "ModelPair", "evaluation": "Evaluation", "method": "Method", "sampling": "Sampling"}


def default_alphas(rule: str, count: int = 7, vocab_size: int = 8192) -> tuple[float, ...]:
    """A grid over the rule's sweep range (METHODS section 3), ends included; `ln V` is rounded up to a tenth."""
    if rule in DENSE_GRIDS:
        return DENSE_GRIDS[rule]
    low, high = rules.grid_bounds(rules.get(rule), vocab_size)
    return tuple(float(np.round(alpha, 3)) for alpha in np.linspace(low, high, count))


def enumerate_points(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    rule_names: Sequence[str],
    alphas: Mapping[str, Sequence[float]] | None = None,
    block_sizes: Sequence[int] = (5,),
    samplings: Iterable[Sampling] = (Sampling(),),
    seeds: Sequence[int] = (0,),
    bonus: str = "rule",
) -> list[list[Point]]:
    """The points of a sweep, in groups that share a compilation and a batch (the α's of one rule).

    Target and draft alone come first for every sampling and seed: the two ends of every plot. A rule without α is one
    point; a rule that `alphas` does not name gets `default_alphas`.

    Raises:
        ValueError: an unknown rule, an α outside a rule's domain, any other value without a meaning, a point named
            twice; `alphas` for a rule that is not swept.
    """
    alphas = dict(alphas or {})
    if stray := [name for name in alphas if name not in rule_names]:
        raise ValueError(f"alphas names {', '.join(stray)}, which is not among the rules {', '.join(rule_names)}")
    _validate_evaluation(evaluation)
    evaluation = evaluation.resolved()
    groups: list[list[Point]] = []
    for sampling, seed in itertools.product(samplings, seeds):

        def group(*methods: Method, sampling: Sampling = sampling, seed: int = seed) -> list[Point]:
            shared: dict[str, Any] = {"pair": pair, "evaluation": evaluation, "sampling": sampling, "seed": seed}
            return [Point(method=method, **shared) for method in methods]

        groups += [group(Method(name=TARGET)), group(Method(name=DRAFT))]
        for block, name in itertools.product(block_sizes, rule_names):
            grid = _alphas(name, alphas.get(name))
            groups.append(group(*(Method(name=name, alpha=a, block_size=block, bonus=bonus) for a in grid)))
    points = [point for each in groups for point in each]
    for point in points:
        validate(point)
    if len(set(points)) < len(points):
        twice = next(point for n, point in enumerate(points) if point in points[:n])
        raise ValueError(f"the sweep names a point twice: {twice.label()}")
    return groups


def _alphas(rule: str, given: Sequence[float] | None) -> tuple[float | None, ...]:
    if rules.get(rule).grid is None:
        if given:
            raise ValueError(f"rule {rule!r} has no alpha, but alphas gives it {tuple(given)}")
        return (None,)
    if given is not None and not len(given):
        raise ValueError(f"alphas gives rule {rule!r} no value; leave the rule out of alphas to sweep its usual range")
    return tuple(default_alphas(rule) if given is None else given)


def validate(point: Point) -> None:
    """Refuse what has no meaning, naming value and remedy, before weights are read or anything is compiled.

    Raises:
        ValueError: as above.
    """
    _validate_evaluation(point.evaluation)
    sampling, method = point.sampling, point.method
    for temperature in (sampling.temperature, sampling.draft_temperature):
        controls.make_sampling(1, temperature or 0.0, sampling.top_p, sampling.top_k)
    controls.check_seed(point.seed)
    if method.autoregressive:
        if method.alpha is not None:
            raise ValueError(f"{method.name} has no alpha, got {method.alpha:g}")
        return
    rule = rules.get(method.name)
    controls.whole("block_size", method.block_size, 1)
    if method.bonus not in BONUSES:
        raise ValueError(f"bonus={method.bonus!r} is not one of {', '.join(BONUSES)}")
    if (rule.grid is None) != (method.alpha is None):
        need = "has no alpha, leave it out" if rule.grid is None else "needs an alpha"
        raise ValueError(f"rule {rule.name!r} {need} (alpha={method.alpha})")
    if method.alpha is not None:
        rules.check_alpha(rule, np.asarray(controls.per_row("alpha", method.alpha, 1)))
    rules.check_greedy(rule, sampling.temperature, sampling.draft_temperature)


def _validate_evaluation(evaluation: Evaluation) -> None:
    task = get_task(evaluation.task)
    if evaluation.split not in (None, *task.splits):
        raise ValueError(f"task {task.name} has no split {evaluation.split!r}; its splits: {', '.join(task.splits)}")
    lows = {"quality_examples": 1, "quality_batch": 1, "latency_examples": 0, "latency_trials": 1, "resamples": 1}
    for name, low in lows.items():
        controls.whole(name, getattr(evaluation, name), low)
    if evaluation.max_new_tokens is not None:
        controls.whole("max_new_tokens", evaluation.max_new_tokens, 1)
