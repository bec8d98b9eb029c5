"""Settings of decoding as plain values; `decode`, `stream`, gin files and records describe a method by its settings."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from speccascade_jax.core import names, validate_types
from speccascade_jax.core.checks import integer, whole
from speccascade_jax.rules import deferral
from speccascade_jax.rules.rule import Rule

DRAFT_MODEL = "draft"
"""The name of the pair's model that drafts by default."""

TOKEN: Final = "token"
"""The default value of `verify`: drafts are verified token by token."""

TAIL = 10
"""The default number of tokens that a tail, a second drafting model, appends to a draft.

Source: Globerson et al., 2025, appendix D.
"""

AUTO: Final = "auto"
"""The value of `block_size` with which a planner chooses lengths, from measured costs and the acceptance so far."""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """The settings that `Settings` and `Level` share: how a model's tokens are drafted, and which of them are kept.

    Attributes:
        rule: a name in `rules.deferral.RULES`, `module.NAME` for a user's rule, or a `Rule`. `None` is the method's own
            rule; that of the method "speculative" is lossless.
        alpha: the rule's trade-off α, a number or `[B]`; rules without α ignore it.
        accept: "speculative" (keep as many drafts as the rule's distribution allows), or "deferral" (defer with
            probability r: keep a draft with probability 1 − r, otherwise sample from the target).
        verify: "token" verifies drafts one by one; "block" verifies them jointly, which keeps more of them under the
            same distribution (`rules.block_wise`) and requires accept="speculative".
        bonus: the distribution of the token after a fully kept block: "rule", "target" or "none" (docs/methods.md,
            section 2).
        block_size: γ, the largest number of draft tokens per round.
        stop: the stop policy, which may end a draft before its block is full: a name in `stopping.policies.STOPS`,
            `module.NAME` for a user's policy, or a policy's class.
        stop_threshold: the threshold of the stop policy, a number or `[B]`; the draft ends when the policy's measure of
            doubt exceeds it.
        temperature, top_p, top_k: how this model's tokens are sampled, numbers or `[B]`; temperature 0 is greedy, top_k
            0 is off.
        draft_temperature: the temperature of the model that drafts; `None`: this model's temperature.
        drafters: the name of one of the pair's models, a `Level`, or `module.NAME` for a user's drafter
            (`methods.build_drafter`).
        tail: the name of another model of the pair, which appends more tokens to each draft.
        tail_size: the largest number of tokens that the tail appends.
    """

    rule: Any = None
    alpha: Any = None
    accept: str | None = None
    verify: str = TOKEN
    bonus: str | None = None
    block_size: int | Literal["auto"] | None = None
    stop: Any = None
    stop_threshold: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    draft_temperature: Any = None
    drafters: tuple[Any, ...] = (DRAFT_MODEL,)
    tail: str | None = None
    tail_size: int = TAIL

    def __repr__(self) -> str:
        """Returns an expression of these settings that leaves out the defaults."""
        return _short_repr(self)


def _short_repr(settings: Any) -> str:
    """Returns a Python expression of a dataclass's instance, without the fields that have their default values."""
    # an array is always listed, because no default is an array; `!=` would compare its entries one by one
    changed = [
        f"{field.name}={value!r}"
        for field in fields(settings)
        for value in [_plain(getattr(settings, field.name))]
        if hasattr(value, "tolist") or value != field.default
    ]
    return f"{type(settings).__name__}({', '.join(changed)})"


_MOST_LISTED = 64
"""Largest number of entries of an array that the text of settings lists; NumPy shortens larger arrays itself."""


def _plain(value: Any) -> Any:
    """Converts a short NumPy or JAX array to plain numbers, and a rule of `RULES` to its name, for `_short_repr`.

    Other values are returned unchanged.
    """
    if isinstance(value, Rule) and deferral.RULES.get(value.name) is value:
        return value.name
    return value.tolist() if hasattr(value, "tolist") and value.size <= _MOST_LISTED else value


@dataclass(frozen=True, kw_only=True, repr=False)
class Level(Drafting):
    """A model between draft and target: it verifies drafts and passes its own tokens to the next larger model.

    The larger model verifies these tokens as drafts that were drawn from the level's distribution (Globerson et al.,
    2025). Where `temperature`, `top_p` or `top_k` is `None`, the level uses the setting that the larger model has for
    its drafts.

    Attributes:
        model: the name of one of the pair's models (`Pair.models`).
        budget: the number of tokens that the level collects before it passes them to the next larger model.

    Raises:
        ValueError: a number is not whole, a value has the wrong type, or `block_size` is "auto".

    Examples:
        >>> import speccascade_jax as sc
        >>> level = sc.Level(model="middle", budget=4, block_size=2, rule="chow", alpha=0.5)
        >>> str(level)  # blocks of 2 of the draft are verified by "middle", which passes on 4 tokens at a time
        'draft 2 → middle 4 rule chow alpha 0.5'
    """

    model: str
    budget: int
    rule: str | Rule = "spec_decode"
    accept: str = "speculative"
    bonus: str = "rule"
    block_size: int = 5
    stop: str = "fixed"
    drafters: tuple[str | Level, ...] = (DRAFT_MODEL,)

    def __post_init__(self) -> None:
        if cast(Any, self.block_size) == AUTO:  # a caller may pass it although the annotation says `int`
            raise ValueError(
                f"level {self.model!r}: block_size={AUTO!r} is only for the drafter of the target: give a number"
            )
        for name in ("budget", "block_size", "top_k", "tail_size"):
            object.__setattr__(self, name, integer(f"level {self.model!r}: {name}", getattr(self, name)))
        if (depth := _depth(self)) > MOST_LEVELS:
            raise ValueError(f"level {self.model!r} is above {depth - 1} others: nest at most {MOST_LEVELS} levels")
        validate_types.check(Level, vars(self))
        object.__setattr__(self, "drafters", tuple(self.drafters))

    def __str__(self) -> str:
        """Returns the model, the budget and all settings that are not defaults, so that different levels differ."""
        named = {"model", "budget", "block_size", "drafters", "tail", "tail_size"}
        unusual = "".join(
            f" {name.replace('_', ' ')} {_text(getattr(self, name))}"
            for name, default in ((field.name, field.default) for field in fields(Level))
            if name not in named and getattr(self, name) != default
        )
        return f"{_drafting_text(self, self.block_size)} → {self.model} {self.budget}{unusual}"


MOST_LEVELS = 10
"""The largest number of nested levels; deeper levels would have no random bits of their own (`core.rngs.below`)."""


def _depth(level: Level) -> int:
    """Returns the number of nested levels, this one included; inner levels were checked, so the recursion is short."""
    return 1 + max((_depth(below) for below in level.drafters if isinstance(below, Level)), default=0)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of several drafters, from which one is chosen for each query; used if a model's name does not suffice.

    Source: Huang et al., 2024 (assistant selection).

    Attributes:
        drafter: as in `Settings.drafters`; "autoregressive" means that the target decodes alone, without a drafter.
        block_size: the block size of a model that drafts; `None`: the method's block size.
        rule: the rule that decides about this drafter's tokens; `None`: the method's rule.
        name: the arm's name in policies, records and `Settings.choose`; by default the drafter and its own block size.

    Raises:
        ValueError: the block size is not whole, or a value has the wrong type.

    Examples:
        >>> import speccascade_jax as sc
        >>> arm = sc.Arm(drafter="draft", block_size=3, rule="chow")
        >>> arm.called, str(arm)
        ('draft 3', 'draft 3 by chow')
        >>> arm
        Arm(drafter='draft', block_size=3, rule='chow')
    """

    drafter: str | Level
    block_size: int | None = None
    rule: str | Rule | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", integer("block_size of an Arm", self.block_size))
        validate_types.check(Arm, vars(self))
        if self.name and self.name != self.drafter:
            names.check_own("an Arm", self.name)

    @property
    def called(self) -> str:
        """The arm's name in policies, records and `Settings.choose`."""
        return self.name or drafters_text((self.drafter,), self.block_size)

    def __repr__(self) -> str:
        """Returns an expression of the arm that leaves out the defaults."""
        return _short_repr(self)

    def __str__(self) -> str:
        """Returns a text for tables: the name, the drafter if the name is another, and the arm's own rule if set."""
        drawn = drafters_text((self.drafter,), self.block_size)
        named = drawn if self.called == drawn else f"{self.called}: {drawn}"
        return named + ("" if self.rule is None else f" by {_text(self.rule)}")


MOST_NODES, MOST_SIBLINGS = 1024, 32
"""The largest number of tokens in a tree, and of branches after one token; larger trees compile very slowly."""


_SLOW = 256
"""The number of tokens in a tree above which a warning says that compilation takes about a minute."""


def checked_tree(tree: Sequence[int] | None) -> tuple[int, ...] | None:
    """Checks a tree's numbers of branches, one for each depth, and returns them as a tuple; `None` without a tree.

    Raises:
        ValueError: a number of branches is invalid, or the tree has too many tokens.
    """
    if tree is None:
        return None
    children = tuple(whole("tree", branches, 1) for branches in tree)
    if not children:
        raise ValueError("tree=() drafts nothing: give the number of branches at each depth, for example (2, 2, 1)")
    size = sum(math.prod(children[: n + 1]) for n in range(len(children)))
    if size > MOST_NODES:
        raise ValueError(f"tree={names.shown(children)} has {size} tokens, more than {MOST_NODES}: use fewer branches")
    if max(children) > MOST_SIBLINGS:
        raise ValueError(
            f"tree={names.shown(children)} has more than {MOST_SIBLINGS} tokens after one token: use fewer branches"
        )
    if size > _SLOW:
        warnings.warn(f"tree={children} has {size} tokens: its first call compiles for about a minute", stacklevel=4)
    return children


def _text(value: Any) -> str:
    if isinstance(value, Rule):
        return value.name
    return f"{value:g}" if isinstance(value, float) else str(value)


def drafters_text(drafters: tuple[str | Level | Arm, ...], block_size: int | str | None) -> str:
    """Describes drafters for tables; the block size follows the name of a model or of a user's drafter."""
    size = "" if block_size is None else f" {block_size}"
    return " | ".join(f"{drafter}{size}" if isinstance(drafter, str) else str(drafter) for drafter in drafters)


def tree_text(tree: tuple[int, ...] | None) -> str:
    """Describes the branching of a draft tree for tables; returns an empty text without a tree."""
    return "" if tree is None else f"tree {'·'.join(map(str, tree))}"


def chosen_text(settings: Settings) -> str:
    """Describes for tables the drafters and how one of them is chosen; empty for the pair's draft model alone."""
    if settings.choose is None:
        usual = settings.drafters == (DRAFT_MODEL,) and settings.tail is None
        return "" if usual else _drafting_text(settings, None)
    path = settings.policy if isinstance(settings.policy, str | Path) else None
    # Show the name of the file's folder, because most policy files have the same name.
    asked = "" if path is None else f" ({Path(path).parent.name or Path(path).stem})"
    return f"{settings.choose}{asked} of {_drafting_text(settings, None)}"


def _drafting_text(drafting: Drafting, block_size: int | str | None) -> str:
    """Returns the text that tables show for the drafters and the tail."""
    tail = "" if drafting.tail is None else f" + {drafting.tail} {drafting.tail_size}"
    return drafters_text(drafting.drafters, block_size) + tail


def meant(settings: Settings, *names: str) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each named setting that the caller set to something other than the default."""
    for name in names:
        value = getattr(settings, name)
        if not (value is None or value is False or isinstance(value, str | tuple) and value in (TOKEN, (DRAFT_MODEL,))):
            yield name, value


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings(Drafting):
    """All settings of decoding: the method, its rule and drafters, and sampling; `None` means the method's own value.

    Attributes:
        method: a name in `methods.table.METHODS`, or `module.NAME` for a user's method. Examples: "speculative";
            "autoregressive" (the target alone) and "autoregressive_draft" (the draft alone); a rule's name; "fuzzy",
            "bild" and "token_cascade".
        block_size: γ, the largest number of draft tokens per round; "auto": a planner repeatedly chooses the length
            with the least expected time per token, which may be 0 (`methods.block_costs`).
        tree: a tree of drafts in place of a block: the number of tokens drafted after each token, depth by depth, for
            example `(3, 2, 1)` (`core.trees`). `None`, or a tuple of ones, gives a chain of tokens.
        drafters: as in `Drafting`. If there are several, one is chosen for each query; each may be an `Arm`, and
            "autoregressive" is the target alone.
        choose: how one of several drafters is chosen: "greedy" (the best one by a trained policy), "dynamic" (at random
            with the policy's probabilities), "random", or the name of a drafter. A policy that measures its uncertainty
            also allows "thompson" and "optimistic".
        policy: the selection policy, as a file (`pairs.policy_files`) or a loaded policy; `None`: the pair's own
            policy.
        lossy_arms: whether drafters with a lossy rule are allowed among several drafters.
        head: the file of an acceptance head that replaces the pair's own, if the method needs one.

    Raises:
        ValueError: a value has the wrong type, or a tree has invalid numbers. Whether the method accepts the settings
            is checked when the decoder is built.

    Examples:
        >>> from dataclasses import replace
        >>> from speccascade_jax.extend import Settings
        >>> settings = Settings(method="chow", alpha=0.5)
        >>> replace(settings, temperature=0.7, tree=[2, 1])  # shows what differs from the defaults
        Settings(alpha=0.5, temperature=0.7, method='chow', tree=(2, 1))
        >>> settings.temperature, settings.drafters, settings.block_size  # None: the method's own
        (0.0, ('draft',), None)
    """

    method: Any = "speculative"
    tree: tuple[int, ...] | None = None
    drafters: tuple[str | Level | Arm, ...] = (DRAFT_MODEL,)
    choose: str | None = None
    policy: Any = None
    lossy_arms: bool = False
    head: Any = None
    temperature: Any = 0.0
    top_p: Any = 1.0
    top_k: Any = 0

    def __post_init__(self) -> None:
        validate_types.check(Settings, vars(self))
        object.__setattr__(self, "drafters", tuple(self.drafters))
        object.__setattr__(self, "tree", checked_tree(self.tree))

    @classmethod
    def of(cls, caller: str, arguments: dict[str, Any]) -> Settings:
        """Returns the settings from the keyword arguments of a function call.

        Raises:
            TypeError: a setting is unknown; the message names the nearest known one.
            ValueError: as for `Settings`.
        """
        known = sorted(cls.__dataclass_fields__)
        for name in arguments:
            if name not in known:
                why = UNSUPPORTED.get(name) or names.hint(name, [*known, *_ARGUMENTS])
                raise TypeError(f"{caller} has no setting {name!r}: {why}the settings are {', '.join(known)}")
        return cls(**arguments)


_ARGUMENTS = ("example_ids", "max_new_tokens", "seed", "stop_ids", "trace")
_OTHER_DISTRIBUTION = "it changes the distributions that a rule compares; here only temperature, top_p and top_k may; "
UNSUPPORTED = {
    "num_beams": "beam search draws from no distribution, so drafts cannot be verified against it; leave it out; ",
    **dict.fromkeys(("n", "num_return_sequences"), "repeat the prompt once per output: each row is sampled anew; "),
    **dict.fromkeys(("frequency_penalty", "logit_bias", "logits_processor", "min_p", "no_repeat_ngram_size",
                     "presence_penalty", "repetition_penalty", "typical_p"), _OTHER_DISTRIBUTION),
}  # fmt: skip
"""Settings of other libraries that this package does not have, each with the reason."""

Function = TypeVar("Function", bound=Callable[..., Any])


def with_settings(function: Function) -> Function:
    """Makes `help()` and `inspect.signature` list the settings of a function that takes them as `**settings`."""
    signature = inspect.signature(function)
    arguments = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = inspect.signature(Settings).parameters.values()
    function.__signature__ = signature.replace(parameters=[*arguments, *settings])  # type: ignore[attr-defined]
    return function


SAMPLING = ("temperature", "top_p", "top_k", "draft_temperature")
"""The names of the settings of sampling, which every method has."""


def sampling_of(settings: Drafting) -> dict[str, Any]:
    """Returns the values of the settings named in `SAMPLING`, by name."""
    return {name: getattr(settings, name) for name in SAMPLING}


def check_sampling_alone(settings: Settings, caller: str) -> Settings:
    """Checks that only settings of sampling are set, for callers that choose the methods themselves.

    Raises:
        ValueError: another setting is set; the message names the first one.
    """
    plain = Settings(**sampling_of(settings))
    for name in Settings.__dataclass_fields__:
        if getattr(settings, name) != getattr(plain, name):
            raise ValueError(
                f"Settings.{name}={names.shown(getattr(settings, name))} has no effect on {caller}, which reads "
                f"only {', '.join(SAMPLING)}: leave it out"
            )
    return settings
