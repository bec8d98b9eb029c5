"""What one measured point is: pure values, checked before anything is loaded.

The classes are what gin files bind. A point's configuration is itself a gin file (`Point.configuration`): stored with
every record, it runs that point again through `experiments/run.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from speccascade_jax.core import validate_types
from speccascade_jax.core.checks import integer
from speccascade_jax.core.names import DRAFT, TARGET, shown
from speccascade_jax.core.types import DTYPES
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.evaluation.configurations import BESIDE, configuration, fields_of
from speccascade_jax.methods import table
from speccascade_jax.methods.build_selection import lossy_arms, selects
from speccascade_jax.methods.method import Recipe
from speccascade_jax.methods.settings import (
    AUTO,
    DRAFT_MODEL,
    TAIL,
    TOKEN,
    Arm,
    Level,
    Settings,
    chosen_text,
    tree_text,
    usual,
)
from speccascade_jax.rules.rule import Alpha, Rule
from speccascade_jax.runtime import mesh as meshes

__all__ = ["Arm", "Evaluation", "Level", "Method", "ModelPair", "Point", "Sampling"]


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Which two models.

    Attributes:
        name: of a shipped pair, or the path of a folder as `sc.load_pair` takes it; with `target` and `draft`, what
            the pair is called in records.
        target, draft, vocabulary: paths as `sc.Pair.load` takes them: any two checkpoints.
        others: name -> path of further drafts, which a method's `drafters` name.
        dtype: of parameters, a name in `core.types.DTYPES`; computation is as `checkpoints.load` says.
        draft_dtype: of the drafts' parameters, where they are held in another (`sc.Pair.load`).
        mesh: (data, model), over how many devices rows and the models are spread; draft_whole: whether drafts are not
            (`sc.Pair.load`).

    Raises:
        ValueError: one model without the other, a vocabulary without them, or an unknown dtype.
    """

    name: str
    target: str | None = None
    draft: str | None = None
    vocabulary: str | None = None
    others: Mapping[str, str] = field(default_factory=dict, hash=False)
    dtype: str = "float32"
    draft_dtype: str | None = None
    mesh: tuple[int, int] = (1, 1)
    draft_whole: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", meshes.checked(self.mesh))
        for name in ("name", "target", "draft", "vocabulary"):
            object.__setattr__(self, name, _text(getattr(self, name)))
        if isinstance(self.others, Mapping):
            object.__setattr__(self, "others", {name: _text(path) for name, path in self.others.items()})
        validate_types.check(ModelPair, vars(self))
        for name in ("dtype", "draft_dtype"):
            if (given := getattr(self, name)) is not None and given not in DTYPES:
                raise ValueError(f"{name}={given!r} is not one of {', '.join(DTYPES)}")
        if (self.target is None) != (self.draft is None):
            missing = "draft" if self.draft is None else "target"
            raise ValueError(f"the pair {self.name!r} lacks its {missing}: give target and draft, or its name alone")
        if self.vocabulary is not None and self.target is None:
            raise ValueError(
                f"vocabulary={self.vocabulary!r} goes with a target and a draft: leave it out, or give these too"
            )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """On what a point is measured, and how thoroughly.

    Attributes:
        task: a name in `data.tasks.table.TASKS` ("gsm8k:4": with 4 exemplars), the path of a file of one's own
            (`data.tasks.file_task`), or a `FileTask`, a `SeqioTask` or any other `Task`.
        split: one of its splits (`None`: the task's own choice).
        max_new_tokens: longest output in tokens; `None` is the task's.
        first_example: the first one measured on, for quality and latency; those before it are passed over.
        quality_examples: examples that quality and counts are taken on; quality_batch: rows decoded together.
        latency_examples: examples timed one at a time; latency_trials: how often each; with fewer than 3 no
            latency is called better. Published tables: 500 and 3.
        resamples: bootstrap resamples behind the spread of quality.
        execute_code: allow metrics that run what the models wrote, in the sandbox.
        keep_outputs: whether the outputs behind the quality are kept beside the store (`results.store.outputs`).
        keep_traces: of how many of them, from the first on, it is kept too what was proposed at each position and what
            the laws said of it (`results.store.trace`). Neither is part of what a point is.
    """

    task: str | Task
    split: str | None = None
    max_new_tokens: int | None = None
    first_example: int = 0
    quality_examples: int = 64
    quality_batch: int = 32
    latency_examples: int = 12
    latency_trials: int = 3
    resamples: int = 200
    execute_code: bool = False
    keep_outputs: bool = field(default=True, compare=False, metadata=BESIDE)
    keep_traces: int = field(default=4, compare=False, metadata=BESIDE)

    def __post_init__(self) -> None:
        counted = ("first_example", "quality_examples", "quality_batch", "latency_examples", "latency_trials")
        _integers(self, "max_new_tokens", *counted, "resamples", "keep_traces")
        validate_types.check(Evaluation, vars(self))

    def resolved(self) -> Evaluation:
        """The same with the task's own split and output length where none is named; ValueError on an unknown task."""
        task = get_task(self.task)
        split = task.splits[0] if self.split is None else self.split
        longest = task.max_output_length if self.max_new_tokens is None else self.max_new_tokens
        return dataclasses.replace(self, split=split, max_new_tokens=longest)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How tokens are made: a row of `methods.table.METHODS`, with what was chosen in place of its own parts.

    Attributes:
        name: the row's, or `module.NAME`, a method or a rule of your own.
        alpha: the rule's trade-off; rules without one have none.
        block_size, bonus: `None` is the method's own. Where nothing is drafted for a round there is neither.
        rule: the rule that decides, where the method takes several; `None` is its own.
        stop_threshold: where the method drafts only while it is sure, how unsure it may be.
        accept, verify, stop, tree, drafters, choose, lossy_arms, tail, tail_size: as of `methods.settings.Settings`.
        policy: where a trained policy chooses among drafters, the file of another one than the pair's own.
        head: where the method asks an acceptance head, the file of another one than the pair's own.

    Raises:
        ValueError: no such method, or parts that it does not take.
    """

    name: str
    alpha: float | None = None
    block_size: int | Literal["auto"] | None = None
    bonus: str | None = None
    rule: str | None = None
    accept: str | None = None
    verify: str = TOKEN
    stop: str | None = None
    stop_threshold: float | None = None
    head: str | None = None
    tree: tuple[int, ...] | None = None
    drafters: tuple[str | Level | Arm, ...] = (DRAFT_MODEL,)
    choose: str | None = None
    policy: str | None = None
    lossy_arms: bool = False
    tail: str | None = None
    tail_size: int = TAIL

    def __post_init__(self) -> None:
        _by_name(self)
        for name in ("head", "policy"):
            object.__setattr__(self, name, _text(getattr(self, name)))
        _integers(self, "block_size", "tail_size")
        validate_types.check(Method, vars(self))
        object.__setattr__(self, "drafters", tuple(map(_recorded, self.drafters)))
        _convert(self, _number, "alpha", "stop_threshold")
        own = self.recipe.resolved(self.settings())
        for name in ("rule", "block_size", "bonus", "tree"):
            object.__setattr__(self, name, getattr(own, name))

    @property
    def recipe(self) -> Recipe:
        """The row."""
        return table.get(self.name)

    def settings(self, sampling: Sampling | None = None, **changed: Any) -> Settings:
        """What `decode` would be told, under a sampling; `changed` takes the place of some of it."""
        parts = ["alpha", "block_size", "bonus", "rule", "accept", "verify", "stop", "stop_threshold"]
        parts += ["tree", "drafters", "choose", "policy", "lossy_arms", "tail", "tail_size"]
        given = {name: getattr(self, name) for name in parts}
        return Settings(**{"method": self.name} | given | dataclasses.asdict(sampling or Sampling()) | changed)

    @property
    def decides(self) -> Rule:
        """The rule."""
        return self.recipe.rule(self.settings())

    @property
    def trade_off(self) -> Alpha | None:
        """What its α may be."""
        return self.recipe.alpha(self.settings())

    @property
    def autoregressive(self) -> bool:
        """Whether one model writes alone."""
        return self.name in (TARGET, DRAFT)

    @property
    def swept_block(self) -> bool:
        """Whether γ is a choice of the sweep's; where it is not, the method stands beside those of any γ."""
        return self.recipe.sweeps_block(self.settings())

    @property
    def needs_head(self) -> bool:
        """Whether it asks an acceptance head."""
        return self.recipe.needs_head(self.settings())

    def curve(self) -> str:
        """What its points are a curve of: the name, with what was chosen for it and with its stop threshold."""
        return self.family() + ("" if self.stop_threshold is None else f"@{self.stop_threshold:g}")

    def family(self) -> str:
        """The same whatever the stop threshold is."""
        drafters = "" if usual(self) else chosen_text(self)
        rule = "" if self.rule == self.recipe.rule(Settings()).name else self.rule
        planned, jointly = (
            AUTO if self.block_size == AUTO else tree_text(self.tree),
            "" if self.verify == TOKEN else self.verify,
        )
        chosen = "".join(f"[{each}]" for each in (rule, self.accept, jointly, self.stop, planned, drafters) if each)
        return self.name + chosen + ("" if self.head is None else f":{Path(self.head).stem}")

    def facts(self) -> dict[str, Any]:
        """What tables and plots must know of it and cannot ask, for they know no methods."""
        settings, rule = self.settings(), self.decides
        law = rule.name if self.trade_off is rule.alpha else self.name
        lossless = rule.lossless and self.trade_off is None and not self.recipe.draft_alone
        lossless &= not lossy_arms(settings)
        if not lossless:  # it hangs on what is drafted
            greedy = ["greedy"] * getattr(self.recipe, "greedy_draft", False)
            chosen = [] if self.choose is None else [f"{self.choose} {self.policy or ''}".strip()]
            parts = [*chosen, *map(str, self.drafters), *greedy]
            law += "".join(f"[{each}]" for each in parts if each != DRAFT_MODEL)
        return {
            "title": self.recipe.heading(settings),
            "details": [*self.recipe.details(settings)],
            "rank": table.rank(self.name),
            "law": law,
            "lossless": lossless,
            "swept_block": self.swept_block,
            "on_rejection": self.recipe.on_rejection(settings),
            "symbol": self.recipe.symbol,
            "timed": self.recipe.timed,
        }


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling transform of both models; `draft_temperature=None` is the target's temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        _integers(self, "top_k")
        validate_types.check(Sampling, vars(self))
        _convert(self, _number, "temperature", "top_p", "draft_temperature")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration that becomes one record."""

    pair: ModelPair
    evaluation: Evaluation
    method: Method
    sampling: Sampling
    seed: int = 0

    def __post_init__(self) -> None:
        _integers(self, "seed")
        validate_types.check(Point, vars(self))

    def coordinates(self) -> dict[str, Any]:
        """Everything that the point is, flat, for records, tables and plots."""
        out: dict[str, Any] = {"pair": self.pair.name} | fields_of(self.pair) | fields_of(self.evaluation)
        out |= {"task": get_task(self.evaluation.task).name, **fields_of(self.method)}
        del out["name"]
        out["others"] = [f"{name}={path}" for name, path in self.pair.others.items()]
        out["mesh"] = list(self.pair.mesh)
        out["drafters"] = [str(each) for each in self.method.drafters]
        out |= {"method": self.method.name, "curve": self.method.curve(), "family": self.method.family()}
        if selects(self.method.settings()):
            out["chosen"] = self.method.choose
        return out | self.method.facts() | dataclasses.asdict(self.sampling) | {"seed": self.seed}

    def configuration(self) -> str:
        """The point as a complete gin file for `experiments/run.py`."""
        parts = {name: getattr(self, name) for name in ("pair", "evaluation", "method", "sampling")}
        return configuration(parts, self.seed)

    def label(self) -> str:
        """The point in a few words, for progress lines."""
        method, top_p = self.method, self.sampling.top_p
        parts: dict[str, Any] = {"alpha": method.alpha, "block": method.block_size}
        parts |= {"T": self.sampling.temperature, "top_p": top_p if top_p < 1 else None}
        known = {name: value for name, value in parts.items() if value is not None}
        told = [f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in known.items()]
        return " ".join([method.curve(), *told, f"seed={self.seed}"])


_NUMBERS = ("alpha", "stop_threshold", "temperature", "top_p", "draft_temperature")


def _number(value: Any) -> float:
    """The one float that stands for a number in records: `-0.0` is 0."""
    return float(value) + 0.0


def _integers(part: Any, *names: str) -> None:
    """Give whole numbers of a frozen dataclass, whatever their type, the one that records hold.

    Raises:
        ValueError: a fraction.
    """
    for name in names:
        object.__setattr__(part, name, integer(name, getattr(part, name)))


def _convert(part: Any, kind: Callable[[Any], Any], *names: str) -> None:
    """Give those of a frozen dataclass's fields that are not `None` one type, so that equal points are equal."""
    for name in names:
        if getattr(part, name) is not None:
            object.__setattr__(part, name, kind(getattr(part, name)))


def _text(path: Any) -> Any:
    """A path as the text that gin files and records hold; anything else as it is."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _recorded(drafter: Any) -> Any:
    """A drafter as records hold it: names, and one Python number for each of its numbers."""
    if isinstance(drafter, str):
        return drafter
    _by_name(drafter)
    if isinstance(drafter, Arm):
        return dataclasses.replace(drafter, drafter=_recorded(drafter.drafter))
    numbers = {name: getattr(drafter, name) for name in _NUMBERS}
    try:
        known: dict[str, Any] = {name: _number(number) for name, number in numbers.items() if number is not None}
    except (TypeError, ValueError) as error:
        raise ValueError(f"level {drafter.model!r} has a number that is none: {shown(numbers)}") from error
    return dataclasses.replace(drafter, **known, drafters=tuple(map(_recorded, drafter.drafters)))


def _by_name(part: Method | Level | Arm) -> None:
    """Refuse rules and policies that a record could not name."""
    for name in ("rule", "accept", "stop"):
        if not isinstance(getattr(part, name, None), str | None):
            raise ValueError(f"{name}={shown(getattr(part, name))} has no name in a record: write 'module.NAME'")
