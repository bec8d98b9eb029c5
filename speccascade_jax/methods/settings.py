"""How tokens are made, as plain values: what `decode`, `stream`, gin and records say of a method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from speccascade_jax.core import names, validate_types
from speccascade_jax.core.checks import integer, whole
from speccascade_jax.rules.rule import Rule

DRAFT_MODEL = "draft"
"""The model of a pair that drafts where nothing else is said."""

TOKEN: Final = "token"
"""How blocks are verified where nothing else is said: token after token."""

TAIL = 10
"""Tokens of a tail where nothing else is said (paper 4, appendix D)."""

AUTO: Final = "auto"
"""A block size for each round, chosen by what rounds cost and by what was kept so far."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A model below the target that verifies what is drafted for it, and hands up what it holds (paper 4).

    Attributes:
        model: which of the pair's, by name (`Pair.models`); budget: hand up once so many tokens are there.
        rule, alpha, accept, verify, bonus: how it decides; its law is what the level above divides by.
        block_size, stop, stop_threshold: of the model that drafts for it.
        temperature, top_p, top_k: of this model; `None`: those at which the model above samples its draft.
        draft_temperature: of the model that drafts for it; `None`: this one's own.
        drafters: what drafts for it: the name of one of the pair's models, a `Level`, or `module.NAME`, a drafter of
            one's own (`methods.build_drafter`).
        tail: another of the pair's models that goes on behind what is drafted; tail_size: for so many tokens at most.
    """

    model: str
    budget: int
    rule: str | Rule = "spec_decode"
    alpha: Any = None
    accept: str = "speculative"
    verify: str = TOKEN
    bonus: str = "rule"
    block_size: int = 5
    stop: str = "fixed"
    stop_threshold: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    draft_temperature: Any = None
    drafters: tuple[str | Level, ...] = (DRAFT_MODEL,)
    tail: str | None = None
    tail_size: int = TAIL

    def __post_init__(self) -> None:
        if self.block_size == AUTO:
            raise ValueError(
                f"level {self.model!r}: block_size={AUTO!r} is for what drafts for the target: give a level a number"
            )
        for name in ("budget", "block_size", "top_k", "tail_size"):
            object.__setattr__(self, name, integer(f"level {self.model!r}: {name}", getattr(self, name)))
        validate_types.check(Level, vars(self))
        object.__setattr__(self, "drafters", tuple(self.drafters))

    def __str__(self) -> str:
        """For readers: model and budget, and all that is out of the ordinary: levels that differ read differently."""
        told = {"model", "budget", "block_size", "drafters", "tail", "tail_size"}
        own = "".join(
            f" {each.name.replace('_', ' ')} {_text(getattr(self, each.name))}"
            for each in fields(self)
            if each.name not in told and getattr(self, each.name) != each.default
        )
        drawn = drafters_text(self.drafters, self.block_size) + tail_text(self.tail, self.tail_size)
        return f"{drawn} → {self.model} {self.budget}{own}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of several drafters among which is chosen for each query (paper 5), where it takes more than a name.

    Attributes:
        drafter: as in `Settings.drafters`; "autoregressive" is none: the target alone.
        block_size: of a model that drafts; `None`: the method's.
        rule: what decides about its drafts; `None`: the method's rule.
        name: what policies, records and `Settings.choose` call it; by default what drafts and its own block size.
    """

    drafter: str | Level
    block_size: int | None = None
    rule: str | Rule | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", integer("block_size of an Arm", self.block_size))
        validate_types.check(Arm, vars(self))

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or drafters_text((self.drafter,), self.block_size)

    def __str__(self) -> str:
        """For readers: what it is called, what drafts where that is another word, and a rule of its own."""
        drawn = drafters_text((self.drafter,), self.block_size)
        named = drawn if self.called == drawn else f"{self.called}: {drawn}"
        return named + ("" if self.rule is None else f" by {_text(self.rule)}")


MOST_NODES, MOST_SIBLINGS = 1024, 32
"""Tokens of a tree, and of those behind one token: more is a slip, and long to compile."""


def checked_tree(tree: Sequence[int] | None) -> tuple[int, ...] | None:
    """A tree's branching, or `None`.

    Raises:
        ValueError: numbers that are none of branches, or too many tokens.
    """
    if tree is None:
        return None
    children = tuple(whole("tree", each, 1) for each in tree)
    if not children:
        raise ValueError("tree=() drafts nothing: give how many tokens follow each, depth by depth, say (2, 2, 1)")
    size = sum(math.prod(children[: n + 1]) for n in range(len(children)))
    if size > MOST_NODES:
        raise ValueError(f"tree={children} has {size} tokens, more than {MOST_NODES}: branch less")
    if max(children) > MOST_SIBLINGS:
        raise ValueError(f"tree={children} has more than {MOST_SIBLINGS} tokens behind one: branch less")
    return children


def _text(value: Any) -> str:
    if isinstance(value, Rule):
        return value.name
    return f"{value:g}" if isinstance(value, float) else str(value)


def drafters_text(drafters: tuple[str | Level | Arm, ...], block_size: int | str | None) -> str:
    """What drafts, for readers; of a model its block size too."""
    size = "" if block_size is None else f" {block_size}"
    return " | ".join(f"{each}{size}" if isinstance(each, str) else str(each) for each in drafters)


def tree_text(tree: tuple[int, ...] | None) -> str:
    """A tree's branching, for readers; empty without one."""
    return "" if tree is None else f"tree {'·'.join(map(str, tree))}"


def chosen_text(settings: Any, block_size: int | str | None = None) -> str:
    """What drafts under settings or a point's method, for readers, and how it is chosen where there are several."""
    drawn = drafters_text(settings.drafters, block_size) + tail_text(settings.tail, settings.tail_size)
    if settings.choose is None:
        return drawn
    path = settings.policy if isinstance(settings.policy, str | Path) else None
    asked = "" if path is None else f" ({Path(path).parent.name or Path(path).stem})"  # files are mostly called alike
    return f"{settings.choose}{asked} of {drawn}"


def usual(settings: Any) -> bool:
    """Whether the draft alone drafts, which need not be said."""
    return settings.drafters == (DRAFT_MODEL,) and settings.tail is None and settings.choose is None


def tail_text(tail: str | None, size: int) -> str:
    """What goes on behind what drafts, for readers."""
    return "" if tail is None else f" + {tail} {size}"


def meant(settings: Settings, *names: str) -> Iterator[tuple[str, Any]]:
    """Those of the named settings that somebody chose, and what they are."""
    for name in names:
        value = getattr(settings, name)
        if not (value is None or value is False or isinstance(value, str | tuple) and value in (TOKEN, (DRAFT_MODEL,))):
            yield name, value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that says how tokens are made; what is `None` is the method's own.

    Attributes:
        method: a name of `methods.table.METHODS`, or `module.NAME`, one of your own: "speculative"; the two ends of
            every plot, "autoregressive" (the target alone) and "autoregressive_draft"; a rule's name; "fuzzy", "bild",
            "token_cascade" and others.
        rule: a name of `rules.deferral.RULES`, `module.NAME`, or a `Rule`; `None` is the method's own, which for
            "speculative" is lossless.
        accept: "speculative", or "deferral" (keep with probability 1 − r, replace from the target).
        verify: "token" after token, or a "block" jointly, which keeps more of it under the same law
            (`rules.block_wise`) and goes with accept="speculative".
        block_size: γ, draft tokens per round at most; "auto": for each round the one, 0 included, that costs the least
            time per token, see `methods.block_costs`.
        bonus: what follows a fully kept block: "rule", "target" or "none" (METHODS section 2).
        stop: when the draft ends before its block is full: a name of `stopping.policies.STOPS`, `module.NAME`, or a
            policy's class.
        tree: drafts that branch: how many tokens are drafted behind each, depth by depth, `(3, 2, 1)`, in place of a
            block size (`core.trees`). `None`, and ones alone: a chain.
        drafters: what drafts for the target, as in `Level`: another of the pair's models, or a hierarchy of levels. Of
            several, each of which may be an `Arm`, one is chosen for each query; "autoregressive" is the target alone.
        choose: how: "greedy" or "dynamic" (the best by a trained policy, or drawn from it; one that knows how sure it
            is can be asked for "thompson" or "optimistic" too), "random", or the name of one of them.
        policy: the policy's file (`pairs.policy_files`), or a loaded one; `None`: the pair's own.
        lossy_arms: whether drafters may be among them whose rule is lossy.
        tail, tail_size: as in `Level`: paper 4's horizontal heuristic, for what drafts for the target.
        alpha: the rule's trade-off, a number or `[B]`; rules without one ignore it.
        stop_threshold: where the draft goes on only while it is sure, how unsure it may be, a number or `[B]`.
        temperature: 0 is greedy; a number or `[B]`. So are `top_p`, `top_k` (0: off) and `draft_temperature`
            (`None`: the target's).
    """

    method: Any = "speculative"
    rule: Any = None
    accept: str | None = None
    verify: str = TOKEN
    block_size: int | Literal["auto"] | None = None
    bonus: str | None = None
    stop: Any = None
    tree: tuple[int, ...] | None = None
    drafters: tuple[str | Level | Arm, ...] = (DRAFT_MODEL,)
    choose: str | None = None
    policy: Any = None
    lossy_arms: bool = False
    tail: str | None = None
    tail_size: int = TAIL
    alpha: Any = None
    stop_threshold: Any = None
    temperature: Any = 0.0
    top_p: Any = 1.0
    top_k: Any = 0
    draft_temperature: Any = None

    def __post_init__(self) -> None:
        validate_types.check(Settings, vars(self))
        object.__setattr__(self, "drafters", tuple(self.drafters))
        object.__setattr__(self, "tree", checked_tree(self.tree))

    @classmethod
    def of(cls, caller: str, given: dict[str, Any]) -> Settings:
        """The settings that a function was called with.

        Raises:
            TypeError: one that there is not; names the nearest.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = names.hint(name, known)
                raise TypeError(f"{caller} has no setting {name!r}: {near}the settings are {', '.join(known)}")
        return cls(**given)
