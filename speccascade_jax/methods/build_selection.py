"""Selection of one drafter for each query: builds a `SelectedDrafter` from the settings `drafters` and `choose`.

Source: Huang et al., 2024 (assistant selection).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from speccascade_jax.core import names
from speccascade_jax.core.checks import whole
from speccascade_jax.core.names import TARGET, shown
from speccascade_jax.core.protocols import Drafter, PromptSummary
from speccascade_jax.core.types import Params
from speccascade_jax.drafters.chooser import Chooser, always, at_random
from speccascade_jax.drafters.model import NoDrafter
from speccascade_jax.drafters.selected import SelectedDrafter
from speccascade_jax.methods.settings import AUTO, Arm, Level, Settings
from speccascade_jax.models.teacher_forcing import features
from speccascade_jax.pairs import policy_files
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.policy_files import Policy
from speccascade_jax.rules import deferral
from speccascade_jax.rules.verification import ByArm, Verifier
from speccascade_jax.storage.files import point_key

LEARNT = ("greedy", "dynamic", "thompson", "optimistic")
"""Values of the setting `choose` that need a trained policy; `drafters.chooser.DRAWS` holds a function for each."""
RANDOM = "random"
MOST = 8
"""The largest number of drafters to choose from, because `rngs.below` has random keys for 8 drafters per engine."""

Part = Callable[[str | Level, int | None], tuple[Drafter, Params]]
"""A function that builds a drafter and its parameters from an arm's drafter and block size."""


def selects(settings: Settings) -> bool:
    """Returns whether a drafter is chosen for each query."""
    return settings.choose is not None or len(settings.drafters) != 1 or isinstance(settings.drafters[0], Arm)


def lossy_arms(settings: Settings) -> bool:
    """Returns whether one of the drafters to choose from (arms) has its own rule and this rule is lossy."""
    rules = [arm.rule for arm in arms_of(settings) if arm.rule is not None] if selects(settings) else []
    return any(not deferral.get(rule).lossless for rule in rules)


def arms_of(settings: Settings) -> tuple[Arm, ...]:
    """Returns the drafters to choose from, each as an `Arm`."""
    return tuple(drafter if isinstance(drafter, Arm) else Arm(drafter=drafter) for drafter in settings.drafters)


def check(settings: Settings, owner: str, verifier: Callable[[Any], Verifier]) -> None:
    """Checks the settings of a selection before any model is loaded.

    Args:
        settings: the settings.
        owner: name of the method, for error messages.
        verifier: a function that returns the verifier of a rule; for `None` it uses the method's own rule.

    Raises:
        ValueError: a setting is invalid; the message names its value and the remedy.
    """
    arms = arms_of(settings)
    called = [arm.called for arm in arms]
    if not arms:
        raise ValueError(f"{owner} has no drafters to choose from: name at least one in drafters")
    if len(arms) > MOST:
        raise ValueError(f"{owner} chooses among {len(arms)} drafters: give at most {MOST}")
    if twice := [name for name in called if called.count(name) > 1]:
        raise ValueError(f"{owner} has two drafters named {twice[0]!r}: rename one with Arm(name=…)")
    if taken := {RANDOM, *LEARNT} & set(called):
        raise ValueError(f"{owner} has a drafter named {taken.pop()!r}, which is a value of choose: rename the drafter")
    ways = [*LEARNT, RANDOM, *called]
    if settings.choose not in ways:
        said = "" if settings.choose is None else f"choose={shown(settings.choose)} is unknown; "
        raise ValueError(
            f"{owner} has {len(arms)} drafters ({', '.join(called)}) and needs choose, which selects one for each "
            f"query: {said}set choose to one of {', '.join(ways)}"
        )
    if settings.policy is not None and settings.choose not in LEARNT:
        raise ValueError(f"choose={settings.choose!r} of {owner} uses no policy: leave policy={settings.policy!r} out")
    if settings.tail is not None or settings.block_size == AUTO:
        named = f"block_size={AUTO!r}" if settings.tail is None else f"tail={settings.tail!r}"
        raise ValueError(f"{named} of {owner} needs a single drafter, without choose: leave it out")
    for arm in arms:
        _check_arm(arm, owner, settings.lossy_arms, verifier)


def _check_arm(arm: Arm, owner: str, lossy: bool, verifier: Callable[[Any], Verifier]) -> None:
    if arm.block_size is not None:
        whole(f"block_size of arm {arm.called!r}", arm.block_size, 1)
        if isinstance(arm.drafter, Level) or arm.drafter == TARGET:
            why = "it decodes with the target alone" if arm.drafter == TARGET else "its drafter, a Level, has one"
            raise ValueError(
                f"block_size={arm.block_size} of arm {arm.called!r} has no effect, because {why}: leave it out"
            )
    chosen = verifier(arm.rule)
    if not chosen.lossless and not lossy:
        raise ValueError(
            f"arm {arm.called!r} of {owner} is verified by {chosen.name!r}, which is lossy: outputs that it drafts "
            f"would not follow the target; give it rule='spec_decode', or set lossy_arms=True to allow this"
        )


def verifier_of(settings: Settings, verifier: Callable[[Any], Verifier]) -> Verifier:
    """Returns one verifier for all arms if their rules are the same, otherwise a `ByArm` of each arm's verifier."""
    verifiers = tuple(verifier(arm.rule) for arm in arms_of(settings))
    return verifiers[0] if len(set(verifiers)) == 1 else ByArm(verifiers)


def drafter_of(
    pair: Pair, settings: Settings, owner: str, part: Part, tells_arm: bool
) -> tuple[SelectedDrafter, Params]:
    """Builds the drafter that chooses among the arms; returns it with its parameters.

    Args:
        pair: the models.
        settings: the settings.
        owner: name of the method, for error messages.
        part: a function that builds the drafter of an arm.
        tells_arm: whether every block records which arm drafted it.

    Raises:
        ValueError: a policy is needed and the pair has none, or the policy was trained for other drafters or another
            target.
    """
    arms = arms_of(settings)
    parts = [(NoDrafter(), {}) if arm.drafter == TARGET else part(arm.drafter, arm.block_size) for arm in arms]
    drafters, place = list[Drafter](), 0
    for arm, (drafter, _) in zip(arms, parts, strict=True):
        if isinstance(arm.drafter, Level):  # its index among the levels selects its engine's controls and random keys
            drafter, place = replace(drafter, arm=place), place + 1  # type: ignore[type-var]
        drafters.append(drafter)
    chooser, numbers = chooser_of(pair, settings, owner)
    return SelectedDrafter(tuple(drafters), chooser, tells_arm), {
        "arms": tuple(values for _, values in parts),
        "policy": numbers,
    }


def chooser_of(pair: Pair, settings: Settings, owner: str) -> tuple[Chooser, Params]:
    """Returns the chooser, which assigns an arm to each query, and its parameters; raises errors like `drafter_of`."""
    called = [arm.called for arm in arms_of(settings)]
    if settings.choose == RANDOM:
        return at_random(len(called))
    if settings.choose in called:
        return always(called.index(settings.choose), len(called))
    policy = policy_of(pair, settings.policy)
    numbers = policy.among(prints(pair, arms_of(settings)), *target_of(pair), f"{owner} of pair {pair.name!r}")
    if settings.choose in ("thompson", "optimistic") and policy.card.scores != "ridge":
        raise ValueError(
            f"choose={settings.choose!r} needs the policy's certainty, but a policy of kind {policy.card.scores!r} "
            "does not report it: give a policy that was trained by 'linucb', or set choose='greedy'"
        )
    return Chooser(policy.card.scores, str(settings.choose)), numbers


def policy_of(pair: Pair, policy: str | Path | Policy | None) -> Policy:
    """Returns the given policy, or a policy loaded from the given file, or the pair's own policy.

    Raises a ValueError if no policy is given and the pair has none.
    """
    if isinstance(policy, Policy):
        return policy
    if policy is not None:
        return policy_files.load(policy)
    if pair.policy is None:
        raise ValueError(f"the pair {pair.name!r} has no selection policy: {policy_files.TRAIN}")
    return pair.policy


def prints(pair: Pair, arms: tuple[Arm, ...]) -> dict[str, str]:
    """Returns a fingerprint for each arm's name; it identifies the models that draft and how they are combined."""
    return {arm.called: _print(pair, arm.drafter) for arm in arms}


def target_of(pair: Pair) -> tuple[str, int]:
    """Returns the target's fingerprint, and the number of features that its prefill computes.

    Raises:
        ValueError: the target computes no features of a prompt.
    """
    width = features(pair.target)
    if width is None or not isinstance(pair.target.model, PromptSummary):
        raise ValueError(
            f"the target of pair {pair.name!r} computes no features of a prompt, so no drafter can be chosen by them: "
            f"set choose to {RANDOM!r}, or to the name of one drafter"
        )
    return pair.print_of("target"), width


def _print(pair: Pair, drafter: str | Level) -> str:
    if isinstance(drafter, Level):
        parts = (drafter.model, *drafter.drafters, *([] if drafter.tail is None else [drafter.tail]))
        return point_key(level=str(drafter), models=[_print(pair, part) for part in parts])
    name = "target" if drafter == TARGET else drafter
    return pair.print_of(name) if name in pair.models else names.shown(drafter)
