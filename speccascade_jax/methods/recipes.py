"""★ Methods: named ways to put the engine's parts together. A new one is one row in `METHODS` below.

A method fixes an acceptance, a stop policy, what follows a kept block, and which rule decides if none is named. All of
them run in the same loop (`engine.py`); a paper's method is the row, not code. Sources: METHODS sections 2, 4, 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.core.checks import per_row, whole
from speccascade_jax.core.protocols import StopPolicy
from speccascade_jax.rules import deferral as rules
from speccascade_jax.rules import laws
from speccascade_jax.rules.deferral import Rule
from speccascade_jax.stopping.policies import AcceptanceHead, Confidence, CumulativeConfidence, Entropy, Fixed, Oracle


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a method is made of; a caller's own choice replaces `rule`, `block_size` or `bonus`, unless they are fixed.

    Attributes:
        name: how `decode`, gin and records call it.
        alone: "target" or "draft", where one model writes alone; everything below then means nothing.
        rule: the rule that decides, a name in `rules.RULES`; rules: those that may take its place (empty: any).
        accept: a name in `accept.ACCEPT_FNS`.
        policy: the stop policy of the draft, from the block size.
        block_size: the default, or the only one where `fixed_block`.
        bonus: the default.
        greedy_draft: whether the draft is greedy unless a draft temperature is named.
        alpha_stops: whether α is the stop policy's threshold too.
        stop_range: the least and the largest stop threshold that means something; `None`: not checked.
        verify_final: see `Engine`.
        score: for sequence cascades (`sequence.SCORES`), where the draft's whole output is scored and no rule decides;
            threshold: stands in the rule's place and says what α may be.
    """

    name: str
    alone: str | None = None
    rule: str = "spec_decode"
    rules: tuple[str, ...] = ()
    accept: str = "speculative"
    policy: Callable[[int], StopPolicy] = Fixed
    block_size: int = 5
    fixed_block: bool = False
    bonus: str = "rule"
    greedy_draft: bool = False
    alpha_stops: bool = False
    stop_range: tuple[float, float] | None = None
    verify_final: bool = True
    score: str | None = None
    threshold: Rule | None = None

    @property
    def swept_block(self) -> bool:
        """Whether γ is a setting worth sweeping: not where the draft itself says when to stop."""
        return self.policy is Fixed and not self.fixed_block and self.score is None

    @property
    def stops(self) -> bool:
        """Whether the stop policy needs a threshold of its own."""
        return bool(self._policy.threshold) and not self.alpha_stops

    @property
    def needs_head(self) -> bool:
        """Whether it asks an acceptance head."""
        return isinstance(self._policy, AcceptanceHead)

    @property
    def oracle(self) -> bool:
        """Whether it knows beforehand what a policy can only guess: greedy, and not to be timed."""
        return isinstance(self._policy, Oracle)

    @property
    def needs_threshold(self) -> str:
        """What the stop policy compares its threshold with, in words."""
        return self._policy.threshold

    @property
    def _policy(self) -> StopPolicy:
        return self.policy(self.block_size)


def get(name: str) -> Recipe:
    """The method of that name.

    Raises:
        ValueError: no such method; the message names the nearest ones.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: {names.hint(name, METHODS)}the methods are {', '.join(METHODS)}")
    return METHODS[name]


def rule_of(recipe: Recipe, rule: str | Rule | None) -> Rule:
    """The rule that decides: the caller's, or the recipe's own.

    Raises:
        ValueError: no such rule, or one that the method does not take.
    """
    if recipe.threshold is not None:
        if rule not in (None, recipe.threshold):
            raise ValueError(f"method {recipe.name!r} decides by a score, not by a rule: leave rule={rule!r} out")
        return recipe.threshold
    chosen = rules.get(recipe.rule if rule is None else rule)
    if recipe.rules and chosen.name not in recipe.rules:
        raise ValueError(f"method {recipe.name!r} takes rule {' or '.join(recipe.rules)}, not {chosen.name!r}")
    return chosen


def block_size(recipe: Recipe, given: int | None) -> int:
    """γ: the caller's, or the recipe's own.

    Raises:
        ValueError: below 1, or another than the only one that the method has.
    """
    size = recipe.block_size if given is None else whole("block_size", given, 1)
    if recipe.fixed_block and size != recipe.block_size:
        raise ValueError(f"method {recipe.name!r} has blocks of {recipe.block_size}: leave block_size={size} out")
    return size


def stop_threshold(recipe: Recipe, alpha: Any, given: Any) -> Any:
    """What the stop policy compares with: α, the caller's threshold, or 0 where the method has no use for one.

    Raises:
        ValueError: a threshold that the method needs and lacks, has no use for, or outside `stop_range`.
    """
    if recipe.stops and given is None:
        raise ValueError(f"method {recipe.name!r} needs stop_threshold: {recipe.needs_threshold}")
    if not recipe.stops and given is not None:
        why = "its alpha is the threshold" if recipe.alpha_stops else "nothing compares with one"
        raise ValueError(f"method {recipe.name!r} has no stop_threshold ({given}): {why}; leave it out")
    if recipe.stop_range is not None:
        low, high = recipe.stop_range
        values = per_row("stop_threshold", given, np.size(given))
        if (bad := values[(values < low) | (values > high)]).size:
            said = f"stop_threshold={bad[0]:.8g} is outside {low:g} … {high:g}"
            raise ValueError(f"{said}; method {recipe.name!r}: {recipe.needs_threshold}")
    return alpha if recipe.alpha_stops else 0.0 if given is None else given


def check_sampling(recipe: Recipe, temperature: Any, draft_temperature: Any = None) -> None:
    """Refuse sampling where the method is about greedy decoding.

    Raises:
        ValueError: names the temperature.
    """
    for name, value in (("temperature", temperature), ("draft_temperature", draft_temperature)):
        if recipe.oracle and value is not None and np.max(np.asarray(value)) > 0:
            raise ValueError(f"method {recipe.name!r} is an oracle of greedy decoding, got {name}={value}: set it to 0")


def _sequence(name: str, score: str, grid: tuple[float, float], closed: bool = False) -> Recipe:
    """A row for a sequence cascade; a `closed` one has `grid` as its domain."""
    threshold = Rule(name=name, law=laws.spec_decode, grid=grid)
    threshold = replace(threshold, domain=grid, closed=True) if closed else threshold
    return Recipe(name=name, score=score, threshold=threshold, block_size=1, fixed_block=True)


_CAP = 10  # draft tokens in a row before the target must write one (paper 1, section F.1)
_LONGEST = 20  # draft tokens in a block that ends when its policy says so (paper 3, section 4.1)
_CHANCE = (0.0, 1.0)  # where a stop threshold is compared with a probability

_ROWS = (
    Recipe(name="speculative"),
    Recipe(name="autoregressive", alone="target"),
    Recipe(name="autoregressive_draft", alone="draft"),
    # paper 2: all tokens of a position or none, replaced from the target; the draft is greedy, the target sampled
    Recipe(name="fuzzy", rule="fuzzy_js", accept="deferral", bonus="target", greedy_draft=True),
    # its variant: lossless first, and by divergence only what that rejects
    Recipe(name="fuzzy_after_sd", rule="fuzzy_js", bonus="target", greedy_draft=True),
    Recipe(
        name="sd_reference", rule="sd_reference", rules=("sd_reference",), accept="soft_ratio", bonus="target",
        greedy_draft=True,
    ),
    Recipe(
        name="random_accept", rule="random_accept", rules=("random_accept",), accept="deferral", bonus="target",
        greedy_draft=True,
    ),
    # Big-Little: fallback where the draft is unsure (stop threshold), rollback where the target disagrees (α)
    Recipe(
        name="bild", rule="bild_star", accept="deferral", policy=Confidence, block_size=_CAP, bonus="target",
        verify_final=False,
    ),
    # paper 1, Algorithm 2: the rule reads q alone, so it is asked before the target is
    Recipe(
        name="token_cascade", rule="chow", rules=("chow",), accept="deferral", policy=Confidence, block_size=_CAP,
        bonus="target", alpha_stops=True, verify_final=False,
    ),
    Recipe(
        name="token_cascade_log", rule="chow_log", rules=("chow_log",), accept="deferral", policy=Entropy,
        block_size=_CAP, bonus="target", alpha_stops=True, verify_final=False,
    ),
    # paper 1, Algorithm 3: both models at every token
    Recipe(name="oracle_cascade", rule="diff", accept="deferral", block_size=1, fixed_block=True, bonus="none"),
    # paper 3: the draft stops when its tokens have become unlikely to be kept; whatever decides that, any rule fits
    Recipe(name="specdecpp", policy=AcceptanceHead, block_size=_LONGEST, stop_range=_CHANCE),
    Recipe(name="specdecpp_lag0", policy=partial(AcceptanceHead, lag=0), block_size=_LONGEST, stop_range=_CHANCE),
    Recipe(name="stop_confidence", policy=Confidence, block_size=_LONGEST, stop_range=_CHANCE),
    Recipe(name="stop_cumulative_confidence", policy=CumulativeConfidence, block_size=_LONGEST, stop_range=_CHANCE),
    Recipe(name="stop_entropy", policy=Entropy, block_size=_LONGEST, stop_range=(0.0, np.inf)),
    Recipe(name="stop_oracle", rules=("spec_decode",), policy=Oracle, block_size=_LONGEST),
    # the draft writes the whole output, the target writes anew where its score is below α (paper 1, eq. 1)
    _sequence("seq_cascade", "sum", (-30.0, 0.0)),
    _sequence("seq_cascade_mean", "mean", (-2.0, 0.0)),
    _sequence("seq_cascade_quantile", "quantile", (-5.0, 0.0)),
    # paper 2's baseline: the target writes a share α of the outputs, whatever they are
    _sequence("random_allocation", "random", (0.0, 1.0), closed=True),
)  # fmt: skip
METHODS: dict[str, Recipe] = {row.name: row for row in _ROWS}
