"""How tokens are made, as plain values: what `decode`, `stream`, gin and records say of a method."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from speccascade_jax.core import names, typed
from speccascade_jax.core.checks import integer
from speccascade_jax.rules.rule import Rule

DRAFT_MODEL = "draft"
"""The model of a pair that drafts where nothing else is said."""

AUTO: Final = "auto"
"""A block size for each round, chosen by what rounds cost and by what was kept so far."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A model below the target that verifies what is drafted for it, and hands up what it holds (paper 4).

    Attributes:
        model: which of the pair's, by name (`Pair.models`); budget: hand up once so many tokens are there.
        rule, alpha, accept, bonus: how it decides; its law is what the level above divides by.
        block_size, stop, stop_threshold: of the model that drafts for it.
        temperature, top_p, top_k: of this model; `None`: those at which the model above samples its draft.
        draft_temperature: of the model that drafts for it; `None`: this one's own.
        drafters: what drafts for it: the name of one of the pair's models, a `Level`, or `module.NAME`, a drafter of
            one's own (`methods.drafting`).
    """

    model: str
    budget: int
    rule: str | Rule = "spec_decode"
    alpha: Any = None
    accept: str = "speculative"
    bonus: str = "rule"
    block_size: int = 5
    stop: str = "fixed"
    stop_threshold: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    draft_temperature: Any = None
    drafters: tuple[str | Level, ...] = (DRAFT_MODEL,)

    def __post_init__(self) -> None:
        if self.block_size == AUTO:
            raise ValueError(
                f"level {self.model!r}: block_size={AUTO!r} is for what drafts for the target: give a level a number"
            )
        for name in ("budget", "block_size", "top_k"):
            object.__setattr__(self, name, integer(f"level {self.model!r}: {name}", getattr(self, name)))
        typed.check(Level, vars(self))
        object.__setattr__(self, "drafters", tuple(self.drafters))

    def __str__(self) -> str:
        """For readers: model and budget, and all that is out of the ordinary: levels that differ read differently."""
        told = {"model", "budget", "block_size", "drafters"}
        own = "".join(
            f" {each.name.replace('_', ' ')} {_text(getattr(self, each.name))}"
            for each in fields(self)
            if each.name not in told and getattr(self, each.name) != each.default
        )
        return f"{drafters_text(self.drafters, self.block_size)} → {self.model} {self.budget}{own}"


def _text(value: Any) -> str:
    if isinstance(value, Rule):
        return value.name
    return f"{value:g}" if isinstance(value, float) else str(value)


def drafters_text(drafters: tuple[str | Level, ...], block_size: int | str | None) -> str:
    """What drafts, for readers; of a model its block size too."""
    size = "" if block_size is None else f" {block_size}"
    return " | ".join(str(each) if isinstance(each, Level) else f"{each}{size}" for each in drafters)


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
        block_size: γ, draft tokens per round at most; "auto": for each round the one, 0 included, that costs the least
            time per token, see `methods.costs`.
        bonus: what follows a fully kept block: "rule", "target" or "none" (METHODS section 2).
        stop: when the draft ends before its block is full: a name of `stopping.policies.STOPS`, `module.NAME`, or a
            policy's class.
        drafters: what drafts for the target, as in `Level`: another of the pair's models, or a hierarchy of levels.
        alpha: the rule's trade-off, a number or `[B]`; rules without one ignore it.
        stop_threshold: where the draft goes on only while it is sure, how unsure it may be, a number or `[B]`.
        temperature: 0 is greedy; a number or `[B]`. So are `top_p`, `top_k` (0: off) and `draft_temperature`
            (`None`: the target's).
    """

    method: Any = "speculative"
    rule: Any = None
    accept: str | None = None
    block_size: int | Literal["auto"] | None = None
    bonus: str | None = None
    stop: Any = None
    drafters: tuple[str | Level, ...] = (DRAFT_MODEL,)
    alpha: Any = None
    stop_threshold: Any = None
    temperature: Any = 0.0
    top_p: Any = 1.0
    top_k: Any = 0
    draft_temperature: Any = None

    def __post_init__(self) -> None:
        typed.check(Settings, vars(self))
        object.__setattr__(self, "drafters", tuple(self.drafters))

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
