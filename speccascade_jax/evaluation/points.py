"""What one measured point is: pure values, checked before anything is loaded.

The classes are what gin files bind. A point's configuration is itself a gin file (`Point.configuration`): stored with
every record, it runs that point again through `experiments/run.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speccascade_jax.core import validate_types
from speccascade_jax.core.checks import integer
from speccascade_jax.core.names import shown
from speccascade_jax.core.types import DTYPES
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.evaluation import curves
from speccascade_jax.evaluation.configurations import BESIDE, configuration, fields_of
from speccascade_jax.methods import table
from speccascade_jax.methods.build_selection import selects
from speccascade_jax.methods.method import Method
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.runtime import mesh as meshes

__all__ = ["Arm", "Evaluation", "Level", "ModelPair", "Point", "Settings", "recorded"]


def __getattr__(name: str) -> Any:
    """Says where the classes of earlier versions went; gin texts are translated (`runtime.legacy_gin`)."""
    if name in ("Method", "Sampling"):
        raise AttributeError(f"points.{name} is part of points.Settings now: write Settings(method=…, temperature=…)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
class Point:
    """One configuration that becomes one record.

    Attributes:
        pair: which models; evaluation: on what; settings: how tokens are made, as records hold them (`recorded`).
    """

    pair: ModelPair
    evaluation: Evaluation
    settings: Settings
    seed: int = 0

    def __post_init__(self) -> None:
        _integers(self, "seed")
        validate_types.check(Point, vars(self))
        object.__setattr__(self, "settings", recorded(self.settings))

    @property
    def method(self) -> Method:
        """The row of `methods.table.METHODS`."""
        return table.get(self.settings.method)

    def with_settings(self, **changed: Any) -> Point:
        """Returns the point under other settings."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changed))

    def coordinates(self) -> dict[str, Any]:
        """Returns everything that the point is, flat, for records, tables and plots."""
        settings = self.settings
        out: dict[str, Any] = {"pair": self.pair.name} | fields_of(self.pair) | fields_of(self.evaluation)
        out |= {"task": get_task(self.evaluation.task).name, **fields_of(settings)}
        del out["name"]
        out["others"] = [f"{name}={path}" for name, path in self.pair.others.items()]
        out["mesh"] = list(self.pair.mesh)
        out["drafters"] = [str(drafter) for drafter in settings.drafters]
        out |= {"curve": curves.curve(settings), "family": curves.family(settings)}
        if selects(settings):
            out["chosen"] = settings.choose
        return out | curves.facts(settings) | {"seed": self.seed}

    def configuration(self) -> str:
        """Returns the point as a complete gin file for `experiments/run.py`."""
        parts = {name: getattr(self, name) for name in ("pair", "evaluation", "settings")}
        return configuration(parts, self.seed)

    def label(self) -> str:
        """Returns the point in a few words, for progress lines."""
        settings = self.settings
        numbers: dict[str, Any] = {"alpha": settings.alpha, "block": settings.block_size, "T": settings.temperature}
        numbers["top_p"] = settings.top_p if settings.top_p < 1 else None
        known = {name: value for name, value in numbers.items() if value is not None}
        words = [f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in known.items()]
        return " ".join([curves.curve(settings), *words, f"seed={self.seed}"])


def recorded(settings: Settings) -> Settings:
    """Returns settings as records hold them: names, one Python number each, and what the method fills in.

    Raises:
        ValueError: an unknown method, parts that it does not take, a rule or policy without a name, a number per row.
    """
    _by_name(settings)
    changed = {name: _text(getattr(settings, name)) for name in ("head", "policy")}
    changed |= {name: integer(name, getattr(settings, name)) for name in ("block_size", "tail_size", "top_k")}
    numbers = {name: getattr(settings, name) for name in _NUMBERS}
    validate_types.check(_Recordable, {"method": settings.method} | numbers | changed)
    changed |= {name: _number(number) for name, number in numbers.items() if number is not None}
    changed["drafters"] = tuple(map(_recorded_drafter, settings.drafters))
    return table.get(settings.method).resolved(dataclasses.replace(settings, **changed))


@dataclass(frozen=True)
class _Recordable:
    """What records hold of settings that `decode` takes in more forms: one number each, names, paths."""

    method: str
    head: str | None
    policy: str | None
    alpha: float | None
    stop_threshold: float | None
    temperature: float
    top_p: float
    top_k: int
    draft_temperature: float | None


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


def _text(path: Any) -> Any:
    """A path as the text that gin files and records hold; anything else as it is."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _recorded_drafter(drafter: Any) -> Any:
    """A drafter as records hold it: names, and one Python number for each of its numbers."""
    if isinstance(drafter, str):
        return drafter
    _by_name(drafter)
    if isinstance(drafter, Arm):
        return dataclasses.replace(drafter, drafter=_recorded_drafter(drafter.drafter))
    numbers = {name: getattr(drafter, name) for name in _NUMBERS}
    try:
        known: dict[str, Any] = {name: _number(number) for name, number in numbers.items() if number is not None}
    except (TypeError, ValueError) as error:
        raise ValueError(f"level {drafter.model!r} has a number that is none: {shown(numbers)}") from error
    return dataclasses.replace(drafter, **known, drafters=tuple(map(_recorded_drafter, drafter.drafters)))


def _by_name(part: Settings | Level | Arm) -> None:
    """Refuse rules and policies that a record could not name."""
    for name in ("rule", "accept", "stop"):
        if not isinstance(getattr(part, name, None), str | None):
            raise ValueError(f"{name}={shown(getattr(part, name))} has no name in a record: write 'module.NAME'")
