"""Points: plain values that describe one measurement (models, examples, settings, seed), checked before loading.

Gin files bind these classes. `Point.configuration` returns a point as a gin file. Every record stores this file, and
`experiments/run.py` can run the point again from it.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from speccascade_jax.core import checks, validate_types
from speccascade_jax.core.checks import integer
from speccascade_jax.core.names import DRAFT, TARGET, check_own, shown
from speccascade_jax.core.protocols import StopPolicy
from speccascade_jax.core.types import DTYPES, STORED
from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.evaluation import curves
from speccascade_jax.methods import table
from speccascade_jax.methods.build_drafter import check_length, models_of, policy_of
from speccascade_jax.methods.build_selection import selects
from speccascade_jax.methods.method import Method
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.metrics import quality, sandbox
from speccascade_jax.pairs.chat import checked_variables
from speccascade_jax.results.store.record import curve_title
from speccascade_jax.rules import deferral
from speccascade_jax.rules.rule import BEYOND, beyond, ends
from speccascade_jax.runtime import mesh as meshes

BESIDE = {"beside": True}
"""Metadata of fields that do not identify a point: they are in no configuration and in no record's key."""
UNLISTED = {"unlisted": True}
"""Metadata of fields that were added after records had been stored.

Configurations and records list such a field only if it is set, so that older configurations keep their text.
"""
_MODULES: Mapping[type, str] = {FileTask: "data.tasks import file_task", SeqioTask: "data.tasks import seqio_task"}
_POINTS = "evaluation import points"
_COUNTED = (
    "first_example", "quality_examples", "quality_batch", "latency_examples", "latency_trials", "resamples",
    "keep_traces",
)  # fmt: skip
# vocabulary size that `Alpha.usual` assumes; α's that are useful at this size cause no warning
_SMALL = 8192
_LARGE = 2**20  # no vocabulary is larger
_MOST_RESAMPLES = 100_000  # more resamples would only need more memory

__all__ = ["Arm", "Evaluation", "Level", "ModelPair", "Point", "Settings", "recorded"]


def __getattr__(name: str) -> Any:
    """Raises an AttributeError, which names the replacement of a removed class.

    `runtime.legacy_gin` translates gin texts with removed classes.
    """
    if name in ("Method", "Sampling"):
        raise AttributeError(f"points.{name} is part of points.Settings now: write Settings(method=…, temperature=…)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """The two models of a point (target and draft), and how they are loaded.

    Attributes:
        name: name of a shipped pair, or the path of a folder as `sc.load_pair` takes it; if `target` and `draft` are
            given, only the pair's name in records.
        target, draft, vocabulary: paths of any two checkpoints and of a vocabulary, or their names on the hub, as
            `sc.Pair.load` takes them.
        others: maps names to the paths of further drafts; the `drafters` of a method use these names.
        dtype: dtype of the parameters, a name in `core.types.DTYPES`; `checkpoints.load` describes the dtype of the
            computation.
        draft_dtype: dtype of the drafts' parameters, as for `sc.Pair.load`. In a record, the actual dtype replaces
            "stored".
        mesh: (data, model), the numbers of devices over which rows and models are split; draft_whole: whether the
            drafts are not split over devices (`sc.Pair.load`).

    Raises:
        ValueError: one model is given without the other, a vocabulary is given without models, or a dtype is unknown.
    """

    name: str
    target: str | None = None
    draft: str | None = None
    vocabulary: str | None = None
    others: Mapping[str, str] = field(default_factory=dict, hash=False)
    dtype: str = "float32"
    draft_dtype: str | None = field(default=STORED, metadata={"omitted": None})
    mesh: tuple[int, int] = (1, 1)
    draft_whole: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", meshes.checked(self.mesh))
        for name in ("name", "target", "draft", "vocabulary"):
            object.__setattr__(self, name, _text(getattr(self, name)))
        if isinstance(self.others, Mapping):
            object.__setattr__(self, "others", {name: _text(path) for name, path in self.others.items()})
        validate_types.check(ModelPair, vars(self))
        for name in self.others:
            check_own("a further draft", name)
        for name in ("dtype", "draft_dtype"):
            known = DTYPES if name == "dtype" else (*DTYPES, STORED)
            if (dtype := getattr(self, name)) is not None and dtype not in known:
                raise ValueError(f"{name}={dtype!r} is not one of {', '.join(known)}")
        if (self.target is None) != (self.draft is None):
            missing = "draft" if self.draft is None else "target"
            raise ValueError(f"the pair {self.name!r} has no {missing}: give both target and draft, or the name alone")
        if self.vocabulary is not None and self.target is None:
            raise ValueError(
                f"vocabulary={self.vocabulary!r} needs a target and a draft: give them too, or leave vocabulary out"
            )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Examples that a point is measured on, and the numbers of examples, timings and resamples.

    Attributes:
        task: a name in `data.tasks.table.TASKS` ("gsm8k:4": with 4 exemplars), the path of your own file
            (`data.tasks.file_task`), or a `FileTask`, a `SeqioTask` or any other `Task`.
        split: one of the task's splits (`None`: the task's own choice).
        max_new_tokens: longest output in tokens; `None`: the task's own limit.
        first_example: index of the first example, for quality and latency; earlier examples are skipped.
        quality_examples: number of examples for quality and counters; quality_batch: number of rows that are decoded
            together.
        latency_examples: number of examples timed at batch 1; latency_trials: number of times that each of them is
            timed. With fewer than 3 trials, no latency is called better than another. Published tables use 500 examples
            and 3 trials.
        resamples: number of bootstrap resamples that estimate the spread of quality.
        execute_code: whether metrics may run code that the models write, in the sandbox.
        keep_outputs: whether the outputs are stored in a file beside the store (`results.store.outputs`).
        keep_traces: number of outputs, from the first on, for which the proposal at each position and its probabilities
            are stored too (`results.store.trace`). Neither `keep_outputs` nor `keep_traces` identifies a point.
        chat: whether the chat template of the tokenizer writes each prompt, as one message of a user. Outputs then also
            end at the template's end of a turn. If a prompt is too long, the message is cut, never the text of the
            template. The template's function `strftime_now` always returns the same date (`chat.TASK_DATE`).
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`.
        cut_thinking: whether a model's thinking is removed from its output before the output is scored
            (`data.vocabularies.thinking`). Stop strings of the task then end only the answer, because thinking may
            contain them.
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
    chat: bool = field(default=False, metadata=UNLISTED)
    template_variables: Mapping[str, Any] = field(default_factory=dict, hash=False, metadata=UNLISTED)
    cut_thinking: bool = field(default=False, metadata=UNLISTED)

    def __post_init__(self) -> None:
        _integers(self, "max_new_tokens", *_COUNTED)
        validate_types.check(Evaluation, vars(self))

    def resolved(self) -> Evaluation:
        """Returns a copy in which the task's split and output length replace `None`; ValueError for an unknown task."""
        task = get_task(self.task)
        split = task.splits[0] if self.split is None else self.split
        longest = task.max_output_length if self.max_new_tokens is None else self.max_new_tokens
        return dataclasses.replace(self, split=split, max_new_tokens=longest)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration to measure, whose result is one record.

    Attributes:
        pair: the models; evaluation: the examples; settings: how tokens are generated, in the form that records store
            (`recorded`); seed: the random seed.
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
        """The point's method, from `methods.table.METHODS`."""
        return table.get(self.settings.method)

    def with_settings(self, **changed: Any) -> Point:
        """Returns a copy of the point with some settings changed."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changed))

    def coordinates(self) -> dict[str, Any]:
        """Returns all settings of the point as a flat dictionary, which records, tables and plots use."""
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
        inside = [part for value in parts.values() for part in (value, *fields_of(value).values())]
        modules = {_POINTS, "evaluation import experiment"} | {_MODULES[type(x)] for x in inside if type(x) in _MODULES}
        head = ["from __gin__ import dynamic_registration", ""]
        head += [*(f"from speccascade_jax.{module}" for module in sorted(modules)), ""]
        blocks = [line for part in parts.values() for line in gin_blocks(part)]
        run = [f"  {name} = @{_selector(part)}()" for name, part in parts.items()]
        return "\n".join([*head, *blocks, "experiment.run:", *run, f"  seed = {self.seed}"]) + "\n"

    def title(self) -> str:
        """Returns the name of the point's curve in tables and progress lines."""
        return curve_title(self.coordinates())

    def label(self) -> str:
        """Returns a short description of the point with the names that flags use, for lists and errors."""
        settings = self.settings
        numbers: dict[str, Any] = {"alpha": settings.alpha, "block": settings.block_size, "T": settings.temperature}
        numbers["top_p"] = settings.top_p if settings.top_p < 1 else None
        known = {name: value for name, value in numbers.items() if value is not None}
        words = [f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in known.items()]
        return " ".join([curves.curve(settings), *words, f"seed={self.seed}"])


def recorded(settings: Settings) -> Settings:
    """Returns settings in the form that records store: rules by name, plain numbers, and the method's defaults.

    Raises:
        ValueError: the method is unknown or does not take a setting, a rule or policy is an object instead of a name,
            or a setting is an array with one number per row.
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
    """Types that settings have in records; `decode` also accepts some of them as arrays or objects."""

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
    """Returns a number as the float that records store; `-0.0` becomes `0.0`."""
    return float(value) + 0.0


def _integers(part: Any, *names: str) -> None:
    """Converts the named fields of a frozen dataclass to Python's `int`, if they are whole numbers of another type.

    Raises:
        ValueError: a number is not a whole number.
    """
    for name in names:
        object.__setattr__(part, name, integer(name, getattr(part, name)))


def _text(path: Any) -> Any:
    """Returns a path object as text, which gin files and records can store; returns any other value unchanged."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _recorded_drafter(drafter: Any) -> Any:
    """Returns a drafter in the form that records store: rules and policies by name, and plain numbers."""
    if isinstance(drafter, str):
        return drafter
    _by_name(drafter)
    if isinstance(drafter, Arm):
        return dataclasses.replace(drafter, drafter=_recorded_drafter(drafter.drafter))
    numbers = {name: getattr(drafter, name) for name in _NUMBERS}
    try:
        known: dict[str, Any] = {name: _number(number) for name, number in numbers.items() if number is not None}
    except (TypeError, ValueError) as error:
        raise ValueError(f"level {drafter.model!r} has a value that is not a number: {shown(numbers)}") from error
    return dataclasses.replace(drafter, **known, drafters=tuple(map(_recorded_drafter, drafter.drafters)))


def _by_name(part: Settings | Level | Arm) -> None:
    """Refuses rules and policies that are objects instead of names, because records store names."""
    for name in ("rule", "accept", "stop"):
        if not isinstance(getattr(part, name, None), str | None):
            raise ValueError(f"{name}={shown(getattr(part, name))} has no name for a record: write 'module.NAME'")


def fields_of(part: Any) -> dict[str, Any]:
    """Returns a dictionary of those fields of a dataclass that identify a point; unlisted ones only if they are set."""
    identifying = (item for item in dataclasses.fields(part) if item.init and "beside" not in item.metadata)
    values = ((item, getattr(part, item.name)) for item in identifying)
    return {item.name: value for item, value in values if value or "unlisted" not in item.metadata}


def gin_blocks(part: Any, scope: str = "") -> Iterator[str]:
    """Yields the lines of a dataclass's gin block, then the blocks of the dataclasses in it, each in its own scope."""
    inside = list[tuple[Any, str]]()

    def text(value: Any, name: str) -> str:
        if isinstance(value, tuple):
            return "(" + "".join(text(item, f"{name}{number}") + ", " for number, item in enumerate(value)) + ")"
        if isinstance(value, Task) and type(value) not in _MODULES:
            return _made_in_python(value)
        if not dataclasses.is_dataclass(value):
            return repr(value)
        inside.append((value, f"{scope}{name}_"))
        return f"@{scope}{name}_/{_selector(value)}()"

    lines = [f"  {name} = {text(value, name)}" for name, value in fields_of(part).items()]
    yield f"{scope}/{_selector(part)}:" if scope else f"{_selector(part)}:"
    yield from lines
    for value, within in inside:
        yield from gin_blocks(value, within)


def _selector(part: Any) -> str:
    return f"{_MODULES.get(type(part), _POINTS).rpartition(' ')[2]}.{type(part).__name__}"


def _made_in_python(task: Task) -> str:
    """Returns a gin placeholder for a `Task` object, which no gin file can name; a comment lists its plain fields."""
    known = {name: value for name, value in fields_of(task).items() if isinstance(value, str | int | tuple | None)}
    return f"%gin.REQUIRED  # a Task made in Python, give it as 'module.NAME'; it had {known}"


def validate(point: Point, timed: bool = True) -> None:
    """Refuses an invalid point with a ValueError that names the value and the remedy.

    Args:
        point: the point.
        timed: whether the point's latency is measured, which some meshes exclude.
    """
    evaluation, settings, method = point.evaluation.resolved(), point.settings, point.method
    validate_evaluation(evaluation)
    checks.check_seed(point.seed)
    check_length(evaluation.max_new_tokens, settings)
    if settings.alpha is not None and method.alpha(settings) is None:
        named = f"method {method.name!r}" if method.name in (TARGET, DRAFT) else f"rule {method.rule(settings).name!r}"
        raise ValueError(f"{named} has no alpha: leave it out (alpha={settings.alpha:g})")
    method.controls(settings, 1)
    if settings.head is not None and not method.needs_head(settings):
        raise ValueError(f"method {method.name!r} uses no acceptance head: leave head={settings.head!r} out")
    _check_models(point.pair, settings)
    if timed:
        _check_mesh(point.pair, evaluation)


def _check_models(pair: ModelPair, settings: Settings) -> None:
    """Refuses drafters that the pair lacks; does not check a pair given by name, as its folder may hold more drafts."""
    known = {"target", "draft", *pair.others}
    strange = [name for name in models_of(settings.drafters, settings.tail) if name not in known]
    if pair.target is not None and strange:
        raise ValueError(
            f"method {settings.method!r} names the model {strange[0]!r}, but the pair {pair.name!r} has only "
            f"{', '.join(sorted(known))}: give its path as ModelPair.others = {{{strange[0]!r}: 'path'}}"
        )


def _check_mesh(pair: ModelPair, evaluation: Evaluation) -> None:
    """Refuses to time single examples on a mesh that splits the batch, because only one device would have a row."""
    if pair.mesh[0] > 1 and evaluation.latency_examples:
        raise ValueError(
            f"latency_examples={evaluation.latency_examples} are timed one at a time, but mesh={pair.mesh} splits the "
            f"batch over {pair.mesh[0]} devices: give latency_examples=0, or time on a mesh of (1, {pair.mesh[1]})"
        )


def validate_evaluation(evaluation: Evaluation) -> None:
    """Refuses an invalid evaluation with a ValueError that names the value and the remedy."""
    task = get_task(evaluation.task)
    if evaluation.split not in (None, *task.splits):
        raise ValueError(f"task {task.name} has no split {evaluation.split!r}; its splits: {', '.join(task.splits)}")
    for name in _COUNTED:
        low = 0 if name in ("first_example", "latency_examples", "keep_traces") else 1
        checks.whole(name, getattr(evaluation, name), low, _MOST_RESAMPLES if name == "resamples" else checks.MOST)
    if evaluation.max_new_tokens is not None:
        checks.whole("max_new_tokens", evaluation.max_new_tokens, 1, checks.LONGEST)
    if checked_variables(evaluation.template_variables) and not evaluation.chat:
        raise ValueError("Evaluation.template_variables belong to a chat template: set Evaluation.chat = True")
    check_code(evaluation)


def warn_of_ranges(chosen: Iterable[Settings], vocab_size: int = _LARGE, *, warned: bool = False) -> None:
    """Warns of α's and stop thresholds, nested drafters included, outside the range in which they change results.

    Args:
        chosen: the settings.
        vocab_size: the target's vocabulary size, on which some ranges depend. Without it, only numbers are named that
            are outside at any size, so that the warning can come before the models are loaded.
        warned: whether a call without a vocabulary size has warned before, so that its warnings are not repeated.
    """
    chosen = list(chosen)
    lines = _all_beyond(chosen, max(vocab_size, _SMALL))
    known = _all_beyond(chosen, _LARGE) if warned else {}
    if news := [sentence for subject, sentence in lines.items() if subject not in known]:
        listed = [*news[:5], *[f"and {len(news) - 5} more"] * (len(news) > 5)]
        warnings.warn(f"{'; '.join(listed)}: {BEYOND}", stacklevel=2)


def _all_beyond(chosen: Iterable[Settings], size: int) -> dict[str, str]:
    """Returns the sentences of `_beyond`, by their first words, which do not depend on the vocabulary size."""
    sentences = (sentence for settings in chosen for sentence in _beyond(settings, size))
    return {sentence.partition(" lies outside ")[0]: sentence for sentence in sentences}


def _beyond(settings: Settings | Level, size: int) -> Iterator[str]:
    """Yields a sentence for each α or stop threshold outside its useful range."""
    if isinstance(settings, Level):
        owner, trade_off = f"level {settings.model!r}", deferral.get(settings.rule).alpha
        policy: StopPolicy | None = policy_of(settings.stop, settings.block_size)
    else:
        method = table.get(settings.method)
        owner, trade_off = repr(method.name), method.alpha(settings)
        policy = method.policy(settings) if isinstance(method, Speculation) else None
    ranges = {"alpha": trade_off and trade_off.useful_bounds(size)}
    stops = getattr(policy, "useful", None)
    ranges |= {"stop_threshold": stops and ends(stops, size)}
    for name, useful in ranges.items():
        value = getattr(settings, name)
        if value is not None and useful and (sentence := beyond(name, owner, value, useful)):
            yield sentence
    for drafter in (arm.drafter if isinstance(arm, Arm) else arm for arm in settings.drafters):
        if isinstance(drafter, Level):
            yield from _beyond(drafter, size)


def check_code(evaluation: Evaluation) -> None:
    """Refuses metrics that run code written by models, unless `execute_code` is set and there is a sandbox."""
    task = get_task(evaluation.task)
    running = ", ".join(name for name in task.metrics if quality.get_metric(name).executes)
    if not running:
        return
    if not evaluation.execute_code:
        raise ValueError(
            f"task {task.name} is scored by {running}, which runs the code that the models write: "
            "to allow this in the sandbox, set Evaluation.execute_code = True"
        )
    if (reason := sandbox.available()) is not None:
        raise ValueError(f"task {task.name} runs the code that the models write, which is not possible here: {reason}")
