"""Construction of drafters and their parameters from the setting `drafters`: models, levels and a user's functions.

A user's drafter is a function `(pair, block_size) -> (drafter, parameters)` in a file that Python can import, named
`module.NAME`; docs/extending.md shows one.
"""

import inspect
from types import FunctionType
from typing import Any, cast

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.core.checks import LONGEST, per_row, whole
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.names import TARGET
from speccascade_jax.core.protocols import AttachedModel, Drafter, Planner, StopPolicy, TargetHead
from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import BoundModel, Controls, Params
from speccascade_jax.drafters.assistant import AssistantDrafter, BranchingAssistantDrafter
from speccascade_jax.drafters.heads import BranchingHeadDrafter, HeadDrafter
from speccascade_jax.drafters.model import BranchingDrafter, ExitDrafter, ModelDrafter
from speccascade_jax.drafters.nested import AppendedDrafter, NestedDrafter
from speccascade_jax.engine.engine import Engine, check_bonus
from speccascade_jax.methods.settings import AUTO, TAIL, TOKEN, Arm, Drafting, Level, Settings, sampling_of
from speccascade_jax.models.early_exit import HEAD, EarlyExit
from speccascade_jax.models.gemma4_assistant import Assistant
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral
from speccascade_jax.rules.acceptance import VERIFIERS
from speccascade_jax.rules.block_wise import JOINT
from speccascade_jax.rules.branching import BranchWise
from speccascade_jax.rules.rule import Rule, checked_alpha
from speccascade_jax.rules.verification import TokenWise, Verifier
from speccascade_jax.stopping.policies import STOPS, AcceptanceHead, Oracle


def policy_of(stop: Any, block_size: int, *, stop_known: bool = False) -> StopPolicy:
    """Builds a stop policy from a name or a class, for blocks of at most `block_size` tokens.

    Args:
        stop: a name, or a policy's class.
        block_size: the longest block.
        stop_known: whether the method computes beforehand where the oracle must stop.

    Raises:
        ValueError: the policy is unknown, or the block size is below 1.
    """
    kind = names.look_up("stop policy", stop, STOPS, object) if isinstance(stop, str) else stop
    size = whole("block_size", block_size, 1)
    policy: Any = kind(size) if callable(kind) and not isinstance(kind, Rule) else None
    if not all(hasattr(policy, name) for name in ("block", "adaptive", "threshold", "init")):
        raise ValueError(f"stop policy {stop!r} is not a policy: it must be a class like those of stopping.policies")
    if isinstance(policy, Oracle) and not stop_known:
        raise ValueError(f"stop={stop!r} must know beforehand where to stop: use method 'stop_oracle'")
    return cast(StopPolicy, policy)


def verifier_of(accept: str, rule: Rule, verify: str = TOKEN) -> Verifier:
    """Builds the verifier of a rule from the settings `accept` (how drafts are accepted) and `verify` (token or block).

    Raises:
        ValueError: `accept` is unknown or does not fit the rule, or `verify` is unknown or does not fit `accept`.
    """
    if verify not in (TOKEN, *JOINT):
        raise ValueError(f"unknown verify={names.shown(verify)}: choose one of {', '.join((TOKEN, *JOINT))}")
    if accept not in VERIFIERS:
        raise ValueError(f"unknown acceptance {accept!r}: choose one of {', '.join(VERIFIERS)}")
    if verify == TOKEN:
        return VERIFIERS[accept](rule)
    if accept != "speculative":
        raise ValueError(
            f"verify={verify!r} accepts as much of a block as the distribution allows, and accept={accept!r} accepts "
            f"less: choose accept='speculative' or verify={TOKEN!r}"
        )
    return JOINT[verify](rule)


def checked_threshold(policy: StopPolicy, owner: str, threshold: Any) -> Any:
    """Checks the threshold of a stop policy and returns it; 0 if the policy uses none.

    Raises:
        ValueError: the threshold is missing although the policy needs one, is set although the policy uses none, or is
            outside the policy's range.
    """
    if policy.threshold and threshold is None:
        raise ValueError(f"{owner} needs stop_threshold, or in a sweep stop_thresholds: {policy.threshold}")
    if threshold is None:
        return 0.0
    if not policy.threshold:
        raise ValueError(f"{owner} has no stop_threshold ({threshold}): its stop policy uses none; leave it out")
    (low, high), rows = policy.between, len(threshold) if np.ndim(threshold) else 1
    values = per_row("stop_threshold", threshold, rows)
    if (bad := values[(values < low) | (values > high)]).size:
        raise ValueError(f"stop_threshold={bad[0]:.8g} is outside {low:g} … {high:g}; {owner}: {policy.threshold}")
    return threshold


Drafters = tuple[str | Level | Arm, ...]


def the_one(drafters: Drafters, owner: str) -> str | Level:
    """Returns the only drafter; there must be exactly one.

    Raises:
        ValueError: there is no drafter, or there are several.
    """
    if len(drafters) != 1:
        named = ", ".join(map(str, drafters)) or "none"
        raise ValueError(f"{owner} takes one drafter, got {len(drafters)} ({named}): name exactly one in drafters")
    return _plain(drafters[0])


def _plain(drafter: str | Level | Arm) -> str | Level:
    return drafter.drafter if isinstance(drafter, Arm) else drafter


def by_model(drafters: Drafters) -> bool:
    """Returns whether all drafters are models of the pair; stop policies work only with models."""
    return all(isinstance(name, str) and "." not in name for name in map(_plain, drafters))


def check_tail(settings: Drafting, owner: str) -> None:
    """Checks the settings of a tail, which is a second model that continues each draft.

    A tail size must be set with a tail only, and `block_size="auto"` without a tail.

    Raises:
        ValueError: the settings contradict each other; the message names the value and the remedy.
    """
    size = whole("tail_size", settings.tail_size, 1)
    if settings.tail is None and size != TAIL:
        raise ValueError(f"tail_size={size} of {owner} has no effect without a tail: name a tail, or leave it out")
    if settings.tail is not None and settings.block_size == AUTO:
        raise ValueError(f"block_size={AUTO!r} of {owner} allows no tail: give a number, or leave tail out")


def check(drafters: Drafters, owner: str) -> None:
    """Checks the drafters at every level of a hierarchy, before any model is loaded.

    Raises:
        ValueError: a drafter is invalid, as in `drafter_of`, or a setting has no effect. Names of models are not
            checked here, because only a loaded pair knows its models.
    """
    for drafter in map(_plain, drafters):
        if isinstance(drafter, Level):
            the_one(drafter.drafters, f"level {drafter.model!r}")
            _check_level(drafter)
        elif not by_model((drafter,)):
            names.look_up("drafter", drafter, {}, FunctionType)


def _check_level(level: Level) -> None:
    level_name = f"level {level.model!r}"
    whole("budget", level.budget, 1)
    if level.model == "target":
        raise ValueError("level 'target' is the target itself: as a level, name a smaller model of the pair")
    check_tail(level, level_name)
    check_bonus(level.bonus)
    verifier_of(level.accept, deferral.get(level.rule), level.verify)
    policy_of(level.stop, level.block_size)
    check(level.drafters, level_name)
    below, unread = level.drafters[0], list[str]()
    if not by_model(level.drafters):
        unread += ["stop", "stop_threshold"]
    if isinstance(below, Level):
        unread += ["block_size"] + ["draft_temperature"] * (below.temperature is not None)
    for name in unread:
        if (value := getattr(level, name)) is not None and value != Level.__dataclass_fields__[name].default:
            raise ValueError(f"{name}={value!r} of {level_name} has no effect with its drafter: leave it out")


def asks_head(drafters: Drafters, policy: StopPolicy) -> bool:
    """Returns whether a model among the drafters, at any level, needs an acceptance head to end its blocks."""
    levels = [drafter for drafter in map(_plain, drafters) if isinstance(drafter, Level)]
    asks = by_model(drafters) and isinstance(policy, AcceptanceHead)
    return asks or any(asks_head(drafter.drafters, policy_of(drafter.stop, drafter.block_size)) for drafter in levels)


def drafter_of(
    pair: Pair, drafting: Drafting, policy: StopPolicy, owner: str, head: Head | None = None, above: str = "target"
) -> tuple[Drafter, Params]:
    """Builds an engine's drafter, with its tail if one is set; returns the drafter and its parameters.

    Args:
        pair: the models.
        drafting: the settings of the method, or of a level.
        policy: the stop policy of a model that drafts; a user's drafter gets only its block size.
        owner: name of the method or level that uses the drafter, for error messages.
        head: an acceptance head that replaces the pair's own.
        above: name of the model that verifies the drafts. A drafter that is an early exit of this model shares its
            cache.

    Raises:
        ValueError: a name is neither a model of the pair nor a user's function; a needed acceptance head is missing, as
            in `Pair.require_head`; a draft that belongs to the target (`AttachedModel`) is in a level.
    """
    drafter: Drafter
    name = the_one(drafting.drafters, owner)
    if isinstance(name, Level):
        engine, params = level_engine(pair, name, head)
        drafter = NestedDrafter(engine, name.budget)
    elif name in pair.models:
        drafter, params = _model_drafter(pair, pair.models[name], policy, head, pair.model(above))
    else:
        drafter, params = _own_drafter(name, pair, policy.block)
    if drafting.tail is None:
        return drafter, params
    bound = pair.model(drafting.tail)
    tail = ModelDrafter(bound.model, STOPS["fixed"](drafting.tail_size))
    return AppendedDrafter(drafter, tail), {"first": params, "tail": {"model": bound.params}}


_MEMBERS = ("block", "adaptive", "reads_features", "init", "stats", "propose", "commit")


def _own_drafter(name: str, pair: Pair, block_size: int) -> tuple[Drafter, Params]:
    """Calls a user's function; raises a ValueError if it does not return a drafter and its parameters."""
    make = names.look_up("drafter", name, pair.models, FunctionType)
    try:
        inspect.signature(make).bind(pair, block_size)
    except TypeError as error:
        raise ValueError(f"{name!r} must accept the arguments (pair, block_size): {error}") from error
    result = make(pair, block_size)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"{name!r} must return (drafter, params), not {names.shown(result)}")
    drafter = result[0]
    members = _MEMBERS[:5] if isinstance(drafter, Planner) else _MEMBERS
    if lacking := [member for member in members if not hasattr(drafter, member)]:
        shown = f"drafter {name!r}: {type(drafter).__name__} has no {' and no '.join(lacking)}"
        raise ValueError(f"{shown}; help(speccascade_jax.extend.Drafter) lists what a drafter needs")
    if type(drafter).__hash__ is None:
        raise ValueError(f"drafter {name!r}: {type(drafter).__name__} must be hashable: use @dataclass(frozen=True)")
    return drafter, result[1]


def _model_drafter(
    pair: Pair, bound: BoundModel, policy: StopPolicy, head: Head | None, above: BoundModel
) -> tuple[Drafter, Params]:
    params: dict[str, Params] = {}
    if isinstance(policy, AcceptanceHead):
        chosen_head = pair.require_head() if head is None else head
        if chosen_head is not pair.head or bound is not pair.draft:
            chosen_head.check(bound, pair.name)
        params["stop"] = chosen_head.params
    # Such a model must draft for the target itself: a level has other weights, even if its configuration is the
    # target's, and does not pass its hidden states to its draft.
    if isinstance(bound.model, AttachedModel) and above is not pair.target:
        kind = type(bound.model).__name__
        raise ValueError(f"the draft ({kind}) reads its target's states or cache: use it to draft for the target only")
    if _is_exit_of(bound, above):
        kernel = {HEAD: bound.params["decoder"]["logits_dense"]["kernel"]} if bound.model.own_head else {}
        return ExitDrafter(bound.model, policy), {**params, **kernel}
    return _kinds(bound)[0](bound.model, policy), {**params, "model": bound.params}


_DRAFTERS: tuple[tuple[type, Any, Any], ...] = (
    (Assistant, AssistantDrafter, BranchingAssistantDrafter),
    (TargetHead, HeadDrafter, BranchingHeadDrafter),
)
"""Classes of models that need their own drafters: the class, its drafter of blocks, and its drafter of trees.

The first row whose class a model has is used.
"""


def _kinds(bound: BoundModel) -> tuple[Any, Any]:
    """Returns the classes of drafters that draft blocks and trees with a model; most models use the general ones."""
    rows = [(blocks, trees) for model, blocks, trees in _DRAFTERS if isinstance(bound.model, model)]
    return rows[0] if rows else (ModelDrafter, BranchingDrafter)


def _is_exit_of(bound: BoundModel, above: BoundModel) -> bool:
    """Returns whether a draft model consists of the first layers of the model above it, with the same arrays."""
    model, over = bound.model, above.model
    if not isinstance(model, EarlyExit):
        return False
    if isinstance(over, EarlyExit):
        shares = over.of == model.of and over.layer >= model.layer and (model.own_head or not over.own_head)
    else:
        shares = over == model.of
    return shares and bound.params["token_embedder"]["embedding"] is above.params["token_embedder"]["embedding"]


def branching(
    pair: Pair, settings: Settings, verifier: Verifier, owner: str
) -> tuple[BranchingDrafter, Params, BranchWise]:
    """Builds a drafter of token trees; returns the drafter, its parameters, and the verifier of trees.

    Raises:
        ValueError: a model is unknown, or does not support trees.
    """
    assert settings.tree is not None and isinstance(verifier, TokenWise)
    tree, name = Tree.of_branching(settings.tree), settings.drafters[0]
    for called in ("target", str(name)):
        if not hasattr(pair.model(called).model, "extend_branch"):
            kind = type(pair.model(called).model).__name__
            raise ValueError(
                f"tree={settings.tree} of {owner}: {called!r} is a {kind}, which does not support trees: "
                "give block_size in place of tree, or another model"
            )
    bound: Any = pair.model(str(name))
    return _kinds(bound)[1](bound.model, tree), {"model": bound.params}, BranchWise(verifier.rule, tree)


def level_engine(pair: Pair, level: Level, head: Head | None = None) -> tuple[Engine, Params]:
    """Builds the engine of a level, which is a model between draft and target; returns it with its parameters."""
    policy, bound = policy_of(level.stop, level.block_size), pair.model(level.model)
    drafter, params = drafter_of(pair, level, policy, f"level {level.model!r}", head, level.model)
    verifier = verifier_of(level.accept, deferral.get(level.rule), level.verify)
    engine = Engine(target=bound.model, drafter=drafter, verifier=verifier, bonus=level.bonus)
    return engine, {"target": bound.params, "drafter": params}


def draft_sampling(drafters: Drafters, default: Any) -> Any:
    """Returns the temperature at which drafts are sampled: that of a single level if it is set, otherwise `default`."""
    first = drafters[0] if len(drafters) == 1 else None
    return first.temperature if isinstance(first, Level) and first.temperature is not None else default


def inner_controls(drafters: Drafters, above: dict[str, Any], rows: int) -> tuple[Controls, ...]:
    """Returns the controls (numbers per row) of the levels among `drafters`, nested in the same way as the levels.

    Args:
        drafters: the drafters.
        above: sampling settings of the model that verifies their drafts, from `settings.sampling_of`.
        rows: the number of rows.
    """
    drawn = above["draft_temperature"]
    above = above if drawn is None else above | {"temperature": drawn}
    return tuple(_level_controls(level, above, rows) for level in map(_plain, drafters) if isinstance(level, Level))


def _level_controls(level: Level, above: dict[str, Any], rows: int) -> Controls:
    level_name, rule, sampling = f"level {level.model!r}", deferral.get(level.rule), sampling_of(level)
    sampling |= {name: above[name] for name in ("temperature", "top_p", "top_k") if sampling[name] is None}
    sampling["draft_temperature"] = drawn = draft_sampling(level.drafters, level.draft_temperature)
    rule.check_temperatures(sampling["temperature"], drawn)
    return make_controls(
        rows,
        alpha=checked_alpha(rule.alpha, f"{level_name}: rule {rule.name!r}", level.alpha, rows),
        stop_threshold=checked_threshold(policy_of(level.stop, level.block_size), level_name, level.stop_threshold),
        inner=inner_controls(level.drafters, sampling, rows),
        **sampling,
    )


def check_length(max_new_tokens: Any, settings: Settings) -> int:
    """Checks `max_new_tokens` and returns it as an int.

    A block that is longer than an output is an error, because it would only cost memory.

    Raises:
        ValueError: `max_new_tokens` is not a whole number from 1 to `checks.LONGEST`, or a block, tree, tail or budget
            is larger than it. Sizes up to 20 are allowed for any output, because they are the defaults of some methods.
    """
    longest = whole("max_new_tokens", max_new_tokens, 1, LONGEST)
    sizes = [("block_size", settings.block_size), ("tail_size", settings.tail_size)]
    sizes += [("the depth of tree", len(settings.tree or ()))]
    for name, size in [*sizes, *_sizes(settings.drafters)]:
        if isinstance(size, int) and size > max(longest, 20):
            raise ValueError(f"{name}={size} is longer than an output: max_new_tokens is {longest}; lower {name}")
    return longest


def _sizes(drafters: Drafters) -> list[tuple[str, int]]:
    arms = [
        ("Arm.block_size", drafter.block_size)
        for drafter in drafters
        if isinstance(drafter, Arm) and drafter.block_size
    ]
    levels = [drafter for drafter in map(_plain, drafters) if isinstance(drafter, Level)]
    level_sizes = [
        (f"Level.{name}", getattr(drafter, name))
        for drafter in levels
        for name in ("block_size", "budget", "tail_size")
    ]
    return arms + level_sizes + [size for drafter in levels for size in _sizes(drafter.drafters)]


def levels_of(drafters: Drafters) -> list[Level]:
    """Returns the levels of a hierarchy, from the level right below the target down to the lowest one."""
    levels: list[Level] = []
    while len(drafters) == 1 and isinstance(drafters[0], Level):
        levels.append(drafters[0])
        drafters = drafters[0].drafters
    return levels


def models_of(drafters: Drafters, tail: str | None = None) -> list[str]:
    """Returns the names of the pair's models among drafters, levels and their tails, without a user's drafters."""
    model_names = [] if tail is None else [tail]
    for drafter in map(_plain, drafters):
        if isinstance(drafter, Level):
            model_names += [drafter.model, *models_of(drafter.drafters, drafter.tail)]
        elif "." not in drafter and drafter != TARGET:
            model_names.append(drafter)
    return model_names


def threshold_text(method: Any, settings: Settings) -> str:
    """Describes how the stop policy uses `stop_threshold`, with its value; returns an empty text if it uses none."""
    policy = getattr(method, "policy", None)
    said = getattr(policy(settings), "threshold", "") if policy else ""
    number = settings.stop_threshold
    return f"{said}; stop_threshold = {number:g}" if said and isinstance(number, int | float) else said
