"""Refusing points that have no meaning, before weights are read or anything is compiled."""

import warnings
from collections.abc import Iterable, Iterator

from speccascade_jax.core import checks
from speccascade_jax.core.protocols import StopPolicy
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation.curves import autoregressive
from speccascade_jax.evaluation.points import Arm, Evaluation, Level, ModelPair, Point, Settings
from speccascade_jax.methods import table
from speccascade_jax.methods.build_drafter import check_length, models_of, policy_of
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.metrics import sandbox
from speccascade_jax.metrics.quality import METRICS
from speccascade_jax.rules import deferral
from speccascade_jax.rules.rule import BEYOND, beyond, ends

_SMALL = 8192  # what `Alpha.usual` takes a vocabulary to be: its range is nothing to warn of
_MOST_RESAMPLES = 100_000  # more take memory, and show no digit more


def validate(point: Point) -> None:
    """ValueError for what has no meaning, naming value and remedy."""
    evaluation, settings, method = point.evaluation.resolved(), point.settings, point.method
    validate_evaluation(evaluation)
    checks.check_seed(point.seed)
    check_length(evaluation.max_new_tokens, settings)
    if settings.alpha is not None and method.alpha(settings) is None:
        what = f"method {method.name!r}" if autoregressive(settings) else f"rule {method.rule(settings).name!r}"
        raise ValueError(f"{what} has no alpha, leave it out (alpha={settings.alpha:g})")
    method.controls(settings, 1)
    if settings.head is not None and not method.needs_head(settings):
        raise ValueError(f"method {method.name!r} asks no acceptance head: leave head={settings.head!r} out")
    _check_models(point.pair, settings)
    _check_mesh(point.pair, evaluation)


def _check_models(pair: ModelPair, settings: Settings) -> None:
    """Refuse drafters that are named and not there; a pair known by its name alone may have more in its folder."""
    held = {"target", "draft", *pair.others}
    if pair.target is not None and (
        strange := [name for name in models_of(settings.drafters, settings.tail) if name not in held]
    ):
        raise ValueError(
            f"method {settings.method!r} names the model {strange[0]!r}, and the pair {pair.name!r} holds "
            f"{', '.join(sorted(held))}: give its path as ModelPair.others = {{{strange[0]!r}: 'path'}}"
        )


def _check_mesh(pair: ModelPair, evaluation: Evaluation) -> None:
    """Refuse timing single examples where rows are spread over devices, of which all but one would have none."""
    if pair.mesh[0] > 1 and evaluation.latency_examples:
        raise ValueError(
            f"latency_examples={evaluation.latency_examples} are timed one at a time, and mesh={pair.mesh} spreads "
            f"rows over {pair.mesh[0]} devices: give latency_examples=0, or time on a mesh of (1, {pair.mesh[1]})"
        )


def validate_evaluation(evaluation: Evaluation) -> None:
    """ValueError for an evaluation that has no meaning, naming value and remedy."""
    task = get_task(evaluation.task)
    if evaluation.split not in (None, *task.splits):
        raise ValueError(f"task {task.name} has no split {evaluation.split!r}; its splits: {', '.join(task.splits)}")
    lows = {"first_example": 0, "quality_examples": 1, "quality_batch": 1, "latency_examples": 0}
    lows |= {"latency_trials": 1, "resamples": 1, "keep_traces": 0}
    for name, low in lows.items():
        checks.whole(name, getattr(evaluation, name), low, _MOST_RESAMPLES if name == "resamples" else checks.MOST)
    if evaluation.max_new_tokens is not None:
        checks.whole("max_new_tokens", evaluation.max_new_tokens, 1, checks.LONGEST)
    check_code(evaluation)


def warn_of_ranges(chosen: Iterable[Settings], vocab_size: int) -> None:
    """Warn of α's and thresholds, those of levels too, beyond which hardly anything changes."""
    told = list(dict.fromkeys(each for settings in chosen for each in _beyond(settings, max(vocab_size, _SMALL))))
    if told:
        listed = [*told[:5], *[f"and {len(told) - 5} more"] * (len(told) > 5)]
        warnings.warn(f"{'; '.join(listed)}: {BEYOND}", stacklevel=2)


def _beyond(settings: Settings | Level, size: int) -> Iterator[str]:
    """Says which of the numbers lie outside their useful range."""
    if isinstance(settings, Level):
        whose, trade_off = f"level {settings.model!r}", deferral.get(settings.rule).alpha
        policy: StopPolicy | None = policy_of(settings.stop, settings.block_size)
    else:
        method = table.get(settings.method)
        whose, trade_off = repr(method.name), method.alpha(settings)
        policy = method.policy(settings) if isinstance(method, Speculation) else None
    ranges = {"alpha": trade_off and trade_off.useful_bounds(size)}
    stops = getattr(policy, "useful", None)
    ranges |= {"stop_threshold": stops and ends(stops, size)}
    for name, useful in ranges.items():
        value = getattr(settings, name)
        if value is not None and useful and (said := beyond(name, whose, value, useful)):
            yield said
    for each in (arm.drafter if isinstance(arm, Arm) else arm for arm in settings.drafters):
        if isinstance(each, Level):
            yield from _beyond(each, size)


def check_code(evaluation: Evaluation) -> None:
    """ValueError if the task's metrics run what models write, and nobody set `execute_code`, or there is no sandbox."""
    task = get_task(evaluation.task)
    running = ", ".join(name for name in task.metrics if name in METRICS and METRICS[name].executes)
    if not running:
        return
    if not evaluation.execute_code:
        raise ValueError(
            f"task {task.name} is scored by {running}, which runs the code that the models write: "
            "to allow that, in the sandbox, set Evaluation.execute_code = True"
        )
    if (reason := sandbox.available()) is not None:
        raise ValueError(f"task {task.name} runs the code that the models write, which cannot be done here: {reason}")
