"""Refusing points that have no meaning, before weights are read or anything is compiled."""

from __future__ import annotations

import numpy as np

from speccascade_jax.core import checks, controls, names
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.engine.loop import BONUSES
from speccascade_jax.evaluation.points import _RULE_NAMES, Evaluation, Method, Point
from speccascade_jax.methods import recipes
from speccascade_jax.metrics import sandbox
from speccascade_jax.metrics.quality import METRICS
from speccascade_jax.rules import deferral


def validate(point: Point) -> None:
    """Refuse what has no meaning, naming value and remedy, before weights are read or anything is compiled.

    Raises:
        ValueError: as above.
    """
    validate_evaluation(point.evaluation)
    sampling, method = point.sampling, point.method
    for temperature in (sampling.temperature, sampling.draft_temperature):
        controls.make_sampling(1, temperature or 0.0, sampling.top_p, sampling.top_k)
    checks.check_seed(point.seed)
    if method.autoregressive:
        if method.alpha is not None:
            raise ValueError(f"{method.name} has no alpha, got {method.alpha:g}")
        return
    check_name(method)
    rule = method.decides
    if method.head is not None and not method.recipe.needs_head:
        raise ValueError(f"method {method.name!r} asks no acceptance head: leave head={method.head!r} out")
    recipes.check_sampling(method.recipe, sampling.temperature, sampling.draft_temperature)
    recipes.block_size(method.recipe, method.block_size)
    recipes.stop_threshold(method.recipe, method.alpha, method.stop_threshold)
    if method.bonus not in (None, *BONUSES):
        raise ValueError(f"bonus={method.bonus!r} is not one of {', '.join(BONUSES)}")
    if (rule.grid is None) != (method.alpha is None):
        need = "has no alpha, leave it out" if rule.grid is None else "needs an alpha"
        raise ValueError(f"rule {rule.name!r} {need} (alpha={method.alpha})")
    if method.alpha is not None:
        deferral.check_alpha(rule, np.asarray(checks.per_row("alpha", method.alpha, 1)))
    deferral.check_greedy(rule, sampling.temperature, sampling.draft_temperature)


def check_name(method: Method) -> None:
    """Refuse a name that is neither a method's nor a rule's (the message names the nearest), and a rule of a rule.

    Raises:
        ValueError: as above.
    """
    known = [*recipes.METHODS, *deferral.RULES]
    if method.name not in known:
        near = names.hint(method.name, known)
        raise ValueError(f"unknown rule {method.name!r}: {near}the rules and methods are {', '.join(known)}")
    if method.name in _RULE_NAMES and method.rule not in (None, method.name):
        raise ValueError(f"{method.name!r} is a rule already: leave rule={method.rule!r} out")


def validate_evaluation(evaluation: Evaluation) -> None:
    task = get_task(evaluation.task)
    if evaluation.split not in (None, *task.splits):
        raise ValueError(f"task {task.name} has no split {evaluation.split!r}; its splits: {', '.join(task.splits)}")
    lows = {"first_example": 0, "quality_examples": 1, "quality_batch": 1, "latency_examples": 0}
    lows |= {"latency_trials": 1, "resamples": 1}
    for name, low in lows.items():
        checks.whole(name, getattr(evaluation, name), low)
    if evaluation.max_new_tokens is not None:
        checks.whole("max_new_tokens", evaluation.max_new_tokens, 1)
    check_code(evaluation)


def check_code(evaluation: Evaluation) -> None:
    """Refuse to run what models write unless that was asked for and can be done where it harms nobody.

    Raises:
        ValueError: the task's metrics execute code, and `execute_code` is not set, or this system has no sandbox.
    """
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
