"""What one measured point is: pure values, checked before anything is loaded.

The classes are what gin files bind. A point's configuration is itself a gin file (`Point.configuration`): stored with
every record, it runs that point again through `experiments/run.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.core.types import DTYPES
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.methods import recipes
from speccascade_jax.rules import deferral, rule

# A name of both tables is a method's: its row says which rule that is.
_RULE_NAMES = frozenset(deferral.RULES) - frozenset(recipes.METHODS)


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Which two models.

    Attributes:
        name: of a shipped pair, or the path of a folder as `sc.load_pair` takes it; with `target` and `draft`, what
            the pair is called in records.
        target, draft, vocabulary: paths as `sc.Pair.load` takes them: any two checkpoints.
        dtype: of parameters and computation, a name in `models.base.DTYPES`: bfloat16 halves the memory (slow on CPU).

    Raises:
        ValueError: one model without the other, a vocabulary without them, or an unknown dtype.
    """

    name: str
    target: str | None = field(default=None, metadata={"unless": None})
    draft: str | None = field(default=None, metadata={"unless": None})
    vocabulary: str | None = field(default=None, metadata={"unless": None})
    dtype: str = field(default="float32", metadata={"unless": "float32"})

    def __post_init__(self) -> None:
        for path in ("target", "draft", "vocabulary"):
            if getattr(self, path) is not None:
                object.__setattr__(self, path, str(getattr(self, path)))  # a Path is nothing that gin files hold
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
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
        task: a name in `speccascade_jax.data.tasks.TASKS` ("gsm8k:4": with 4 exemplars), or a `SeqioTask`.
        split: one of its splits (`None`: the task's own choice).
        max_new_tokens: longest output in tokens; `None` is the task's.
        first_example: the first one measured on, for quality and latency; those before it are passed over.
        quality_examples: examples that quality and counts are taken on; quality_batch: rows decoded together.
        latency_examples: examples timed one at a time; latency_trials: how often each. Published tables: 500 and 3.
        resamples: bootstrap resamples behind the spread of quality.
        execute_code: allow metrics that run what the models wrote, in the sandbox.
    """

    task: str | SeqioTask
    split: str | None = None
    max_new_tokens: int | None = None
    first_example: int = 0
    quality_examples: int = 64
    quality_batch: int = 32
    latency_examples: int = 16
    latency_trials: int = 2
    resamples: int = 200
    execute_code: bool = field(default=False, metadata={"unless": False})

    def resolved(self) -> Evaluation:
        """The same with the task's own split and output length where none is named; ValueError on an unknown task."""
        task = get_task(self.task)
        split = task.splits[0] if self.split is None else self.split
        longest = task.max_output_length if self.max_new_tokens is None else self.max_new_tokens
        return dataclasses.replace(self, split=split, max_new_tokens=longest)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How tokens are made: `name` is a row of `methods.METHODS`, or a rule of `rules.RULES` under "speculative".

    Attributes:
        alpha: the rule's trade-off; rules without one have none.
        block_size, bonus: `None` is the method's own. Where nothing is drafted for a round there is neither.
        rule: the rule that decides, where `name` is a method that takes several; `None` is the method's own.
        stop_threshold: where the method drafts only while it is sure, how unsure it may be.
        head: where the method asks an acceptance head, the file of another one than the pair's own.
    """

    name: str
    alpha: float | None = None
    block_size: int | None = None
    bonus: str | None = None
    rule: str | None = None
    stop_threshold: float | None = None
    head: str | None = field(default=None, metadata={"unless": None})

    def __post_init__(self) -> None:
        if self.head is not None:
            object.__setattr__(self, "head", str(self.head))
        for name in ("alpha", "stop_threshold"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        if self.name not in (*recipes.METHODS, *deferral.RULES):
            return  # `validate` says so
        recipe = self.recipe
        for name in ("block_size", "bonus"):
            if recipe.score is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"{self.name} has no {name}, got {getattr(self, name)!r}: the draft writes whole outputs"
                )
        if recipe.alone is None and recipe.score is None:
            object.__setattr__(self, "block_size", _or(self.block_size, recipe.block_size))
            object.__setattr__(self, "bonus", _or(self.bonus, recipe.bonus))
        else:
            object.__setattr__(self, "block_size", None)
            object.__setattr__(self, "bonus", None)

    @property
    def recipe(self) -> recipes.Recipe:
        """How the engine's parts are put together; a rule's name means "speculative"."""
        return recipes.METHODS["speculative"] if self.name in _RULE_NAMES else recipes.get(self.name)

    @property
    def decides(self) -> rule.Rule:
        """The rule."""
        return recipes.rule_of(self.recipe, self.name if self.name in _RULE_NAMES else self.rule)

    @property
    def autoregressive(self) -> bool:
        """Whether one model writes alone."""
        return self.name in (TARGET, DRAFT)

    @property
    def swept_block(self) -> bool:
        """Whether γ is a choice of the sweep's; where it is not, the method stands beside those of any γ."""
        return self.recipe.swept_block and not self.autoregressive

    def curve(self) -> str:
        """What its points are a curve of: the name, with rule, head and stop threshold where those were chosen."""
        return self.family() + ("" if self.stop_threshold is None else f"@{self.stop_threshold:g}")

    def family(self) -> str:
        """The same whatever the stop threshold is."""
        rule = "" if self.rule in (None, self.recipe.rule) else f"[{self.rule}]"
        return self.name + rule + ("" if self.head is None else f":{Path(self.head).stem}")


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
        out: dict[str, Any] = {"pair": self.pair.name} | _settings(self.pair)
        out |= _settings(self.evaluation) | {"task": get_task(self.evaluation.task).name}
        out |= {"method": self.method.curve(), **dataclasses.asdict(self.method)}
        out |= {"swept_block": self.method.swept_block, "family": self.method.family()}
        out |= {"law": self.method.decides.name}
        del out["name"]
        return out | dataclasses.asdict(self.sampling) | {"seed": self.seed}

    def configuration(self) -> str:
        """The point as a complete gin file for `experiments/run.py`."""
        imports = ["from speccascade_jax.evaluation import experiment", "from speccascade_jax.evaluation import points"]
        blocks: dict[str, Any] = {
            f"points.{type(part).__name__}": part for part in (self.pair, self.evaluation, self.method, self.sampling)
        }
        if isinstance(self.evaluation.task, SeqioTask):
            imports.append("from speccascade_jax.data.tasks import seqio_task")
            blocks["seqio_task.SeqioTask"] = self.evaluation.task
        lines = ["from __gin__ import dynamic_registration", "", *imports, ""]
        for block, part in blocks.items():
            lines.append(f"{block}:")
            lines += [f"  {name} = {_in_gin(value)}" for name, value in _settings(part).items()]
        lines.append("experiment.run:")
        lines += [f"  {part} = @points.{kind}()" for part, kind in _PARTS.items()]
        return "\n".join([*lines, f"  seed = {self.seed}"]) + "\n"

    def label(self) -> str:
        """The point in a few words, for progress lines."""
        parts = [self.method.curve()]
        if self.method.alpha is not None:
            parts.append(f"alpha={self.method.alpha:g}")
        if self.method.block_size is not None:
            parts.append(f"block={self.method.block_size}")
        parts.append(f"T={self.sampling.temperature:g}")
        if self.sampling.top_p < 1:
            parts.append(f"top_p={self.sampling.top_p:g}")
        return " ".join([*parts, f"seed={self.seed}"])


def _settings(part: Any) -> dict[str, Any]:
    """Name -> value of what a dataclass is made of.

    Settings that came later are left out at the value that points had before (`unless`), so that the keys of older
    records hold.
    """
    values = {one: getattr(part, one.name) for one in dataclasses.fields(part) if one.init}
    return {one.name: value for one, value in values.items() if value != one.metadata.get("unless", _NEVER)}


def _in_gin(value: Any) -> str:
    return "@seqio_task.SeqioTask()" if isinstance(value, SeqioTask) else repr(value)


_NEVER = object()
_PARTS = {"pair": "ModelPair", "evaluation": "Evaluation", "method": "Method", "sampling": "Sampling"}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
