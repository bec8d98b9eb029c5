"""What a named method is, and what it builds."""

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from speccascade_jax.core.types import Array, Controls, Params, Prompt, count
from speccascade_jax.engine.generate import Generation
from speccascade_jax.methods.settings import Settings
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.rule import BEYOND, Alpha, Rule, beyond


class Program(Protocol):
    """What generates: the one loop (`engine.generate.Generator`), or a few of its generations in one program."""

    def generate(self, params: Params, prompt: Prompt, seed: int | Array = 0, **more: Any) -> Generation:
        """Arguments and result as of `engine.generate.generate`, but for the engine and the level."""


class Built(NamedTuple):
    """What a method is for a pair: a program, and the parameters to pass to its `generate`."""

    program: Program
    params: Params

    def __repr__(self) -> str:
        """Without the numbers."""
        return f"Built({self.program}, {count(self.params):,} parameters)"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The base of the kinds of methods: a name, and what the tools ask of it under given settings.

    Attributes:
        name: how `decode`, gin and records call it; title: what tables call it, by default the name; detail: what sets
            it apart from methods of one title.
        symbol: what a stop threshold is called in tables.
        timed: whether its time means anything.
    """

    name: str
    title: str = ""
    detail: str = ""
    symbol: str = "h"
    timed: ClassVar[bool] = True

    @property
    def draft_alone(self) -> bool:
        """Whether the draft writes alone, in the target's place in the engine."""
        return False

    def rule(self, settings: Settings) -> Rule:
        """The rule that decides; where none does, the one whose law the outputs have.

        Raises:
            ValueError: no such rule, or one that the method does not take.
        """
        return RULES["spec_decode"]

    def alpha(self, settings: Settings) -> Alpha | None:
        """What its trade-off may be; `None`: it has none."""
        return None

    def heading(self, settings: Settings) -> str:
        """What tables call it under these settings."""
        return self.title or self.name

    def details(self, settings: Settings) -> tuple[str, ...]:
        """What stands in brackets behind the heading."""
        return (self.detail,) if self.detail else ()

    def sweeps_block(self, settings: Settings) -> bool:
        """Whether γ is a setting worth sweeping: not where the draft itself says when to stop."""
        return False

    def threshold(self, settings: Settings) -> str:
        """What it does with a stop threshold of its own, in words; empty where it has none."""
        return ""

    def on_rejection(self, settings: Settings) -> bool:
        """Whether the threshold is compared with P(some token of the block is rejected)."""
        return False

    def needs_head(self, settings: Settings) -> bool:
        """Whether it asks an acceptance head."""
        return False

    def resolved(self, settings: Settings) -> Settings:
        """The settings with the method's own block size and bonus where none is named; `None` where it has neither.

        Raises:
            ValueError: parts that it has no use for.
        """
        return settings

    def controls(self, settings: Settings, rows: int) -> Controls:
        """The numbers of a generation, one value per row: the one place where all are checked, before all else.

        Raises:
            ValueError: a number without meaning, as `rules.rule.checked_alpha` and `core.controls.make_controls`; a
                temperature or a stop threshold that the method cannot have, or needs and lacks.
        """
        raise NotImplementedError

    def warn_of_alpha(self, settings: Settings, vocab_size: int) -> None:
        """Warn of an α beyond which hardly anything changes: a slip, more often than not."""
        trade_off = self.alpha(settings)
        if trade_off is None or settings.alpha is None:
            return
        whose = settings.method if settings.rule is None else self.rule(settings).name
        if said := beyond("alpha", repr(whose), settings.alpha, trade_off.useful_bounds(vocab_size)):
            warnings.warn(f"{said}: {BEYOND}", stacklevel=3)

    def build(self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...], head: Head | None = None) -> Built:
        """Put the engine's parts together.

        Args:
            head: instead of the pair's own acceptance head, where the method asks one.

        Raises:
            ValueError: parts without meaning; a pair that lacks a model or a head, or a head of another draft.
        """
        raise NotImplementedError
