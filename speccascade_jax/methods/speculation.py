"""Methods of speculative decoding, which combine a drafter, a rule, a verifier, a stop policy and a bonus token."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.names import TARGET
from speccascade_jax.core.protocols import Drafter, Planner, StopPolicy
from speccascade_jax.core.types import Controls, Params
from speccascade_jax.drafters.model import PlannedDrafter
from speccascade_jax.engine.engine import Engine, check_bonus
from speccascade_jax.methods import build_drafter, build_selection
from speccascade_jax.methods.method import Method, Program
from speccascade_jax.methods.settings import AUTO, TOKEN, Level, Settings, chosen_text, meant, sampling_of, tree_text
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral
from speccascade_jax.rules.rule import Alpha, Rule, checked_alpha
from speccascade_jax.rules.verification import TokenWise, Verifier
from speccascade_jax.stopping.block_planner import LENGTHS, Cheapest
from speccascade_jax.stopping.policies import Fixed


@dataclass(frozen=True, kw_only=True)
class Speculation(Method):
    """A method of speculative decoding; its fields are defaults, most of which the caller's settings can replace.

    Source: docs/methods.md, section 2; Leviathan et al., 2023; Narasimhan et al., 2024, Algorithm 4.

    Attributes:
        decides: the default rule.
        rules: names of the rules that may replace the default (empty: any rule).
        accept: the default acceptance, a name in `rules.acceptance.VERIFIERS`.
        stop: the default stop policy, a name in `stopping.policies.STOPS` or a policy's class.
        block_size: the default block size, or the only one if `fixed_block`.
        bonus: the default for the token after a fully kept block, as in `Engine`.
        greedy_draft: whether the draft is greedy unless a draft temperature is set.
        alpha_stops: whether α is also the threshold of the stop policy.
        verify_final: see `Engine`.
        bare: whether the method consists of a rule alone, so that a sweep may choose its bonus.

    Examples:
        >>> from speccascade_jax.extend import Settings, Speculation
        >>> method = Speculation(name="unsure", decides="chow", stop="entropy", block_size=8, bonus="target")
        >>> settings = Settings(method=method, alpha=0.5, stop_threshold=1.0)
        >>> method.rule(settings).name, method.policy(settings).block
        ('chow', 8)
        >>> method.threshold(settings)
        'it drafts while the entropy of q is at most stop_threshold (nats)'
    """

    decides: str | Rule = "spec_decode"
    rules: tuple[str, ...] = ()
    accept: str = "speculative"
    stop: Any = "fixed"
    block_size: int = 5
    fixed_block: bool = False
    bonus: str = "rule"
    greedy_draft: bool = False
    alpha_stops: bool = False
    verify_final: bool = True
    bare: bool = False

    def rule(self, settings: Settings) -> Rule:
        """Returns the named rule, or `decides` if none is named; raises a ValueError for a rule outside `rules`."""
        chosen = deferral.get(self.decides if settings.rule is None else settings.rule)
        if self.rules and chosen.name not in self.rules:
            raise ValueError(
                f"{self.called} takes rule {' or '.join(self.rules)}, not {chosen.name!r}: leave rule out, or set "
                "another method"
            )
        return chosen

    def alpha(self, settings: Settings) -> Alpha | None:
        """Returns the domain of α from the method's rule, or else from the first arm whose own rule has α.

        All rules share one value of α.
        """
        return next((rule.alpha for rule in self._rules(settings) if rule.alpha is not None), None)

    def _rules(self, settings: Settings) -> list[Rule]:
        """Returns the method's rule, followed by the rules of those drafters (arms) that set their own rule."""
        arm_rules = [arm.rule for arm in build_selection.arms_of(settings) if arm.rule is not None]
        return [self.rule(settings), *(self.rule(replace(settings, rule=rule)) for rule in arm_rules)]

    def heading(self, settings: Settings) -> str:
        """Returns the method's title, or the rule's if the method has none."""
        rule = self.rule(settings)
        return self.title or rule.title or rule.name

    def details(self, settings: Settings) -> tuple[str, ...]:
        """Returns the texts that tables print after the title: a detail, the rule's variant and the caller's choices.

        The caller may have chosen an acceptance, joint verification, a stop policy, planned block lengths or a tree,
        and drafters.
        """
        rule, stop = self.rule(settings), ""
        kind = rule.variant
        if self.title and not kind and rule.name != deferral.get(self.decides).name:
            kind = rule.title or rule.name
        accept = "" if settings.accept in (None, self.accept) else settings.accept
        if settings.stop is not None:
            stop = settings.stop if isinstance(settings.stop, str) else getattr(settings.stop, "__name__", "own stop")
        drawn = chosen_text(settings)
        planned = "γ auto" if settings.block_size == AUTO else tree_text(settings.tree)
        jointly = "" if settings.verify == TOKEN else f"{settings.verify}-wise"
        parts = (self.detail, kind, accept, jointly, stop.rpartition(".")[2], planned, drawn)
        return tuple(part for part in parts if part)

    def policy(self, settings: Settings) -> StopPolicy:
        """Returns the stop policy, which ends drafts.

        Raises:
            ValueError: the block size is below 1, or the method allows only another one; the policy is unknown; as in
                `_check_planned`.
        """
        if settings.block_size == AUTO:
            self._check_planned(settings)
            return Fixed(LENGTHS[-1])
        size = self.block_size if settings.block_size is None else whole("block_size", settings.block_size, 1)
        if self.fixed_block and size != self.block_size:
            raise ValueError(f"{self.called} has a fixed block size of {self.block_size}: leave block_size={size} out")
        stop = self.stop if settings.stop is None else settings.stop
        return build_drafter.policy_of(stop, size, stop_known=self.stop == "oracle")

    def _check_planned(self, settings: Settings) -> None:
        """Checks that `block_size="auto"` fits the other settings.

        No other setting may fix block lengths, and the distribution of the output may not depend on them.

        Raises:
            ValueError: a setting contradicts "auto"; the message names the setting and the remedy.
        """
        setting, stop = f"block_size={AUTO!r} of {self.called}", self.stop if settings.stop is None else settings.stop
        if self.fixed_block:
            raise ValueError(
                f"{self.called} has a fixed block size of {self.block_size}: leave block_size={AUTO!r} out"
            )
        if stop != "fixed":
            raise ValueError(f"{setting} and stop={stop!r} both set the block length: give a number, or leave stop out")
        if not build_drafter.by_model(settings.drafters):
            drawn = ", ".join(map(str, settings.drafters))
            raise ValueError(f"{setting} plans drafts of the pair's models only, not of {drawn}: give a number")
        rule, bonus = self.rule(settings), self.bonus if settings.bonus is None else settings.bonus
        if bonus == "target" and not rule.lossless:
            raise ValueError(
                f"{setting} needs bonus='rule' or 'none': with 'target' the distribution of rule {rule.name!r} depends "
                f"on the block size, and so on the speed of this machine"
            )

    def sweeps_block(self, settings: Settings) -> bool:
        """Returns whether a model drafts blocks of a fixed length γ, so that a sweep can vary γ."""
        if self.fixed_block or settings.block_size == AUTO or settings.tree:
            return False
        arms = build_selection.arms_of(settings)
        if all(isinstance(arm.drafter, Level) or arm.drafter == TARGET or arm.block_size for arm in arms):
            return False
        return isinstance(self.policy(settings), Fixed)

    def threshold(self, settings: Settings) -> str:
        """Describes how the stop policy uses its threshold; returns an empty text if α is the threshold."""
        return "" if self.alpha_stops else self.policy(settings).threshold

    def on_rejection(self, settings: Settings) -> bool:
        """Returns whether the stop policy compares its threshold with P(some token of the block is rejected)."""
        return self.policy(settings).on_rejection

    def needs_head(self, settings: Settings) -> bool:
        """Returns whether the stop policy of the method or of one of its levels needs an acceptance head."""
        return build_drafter.asks_head(settings.drafters, self.policy(settings))

    def resolved(self, settings: Settings) -> Settings:
        """Checks the settings; returns them with the method's default block size and bonus where the caller gave none.

        The block size is `None` if a level (a model between draft and target) drafts, or if a tree is drafted.
        """
        build_drafter.check(settings.drafters, self.called)
        self._check_tree(settings)
        self._check_choice(settings)
        build_drafter.check_tail(settings, self.called)
        size: Any = None if settings.tree else self.policy(settings).block
        if settings.block_size == AUTO:
            size = AUTO
        if not build_drafter.by_model(settings.drafters) and (stop := settings.stop or self.stop) != "fixed":
            raise ValueError(
                f"{self.called} ends blocks by {stop!r}, which needs a model: name a model of the pair in drafters"
            )
        if isinstance(settings.drafters[0], Level) and not build_selection.selects(settings):
            if settings.block_size is not None:
                raise ValueError(
                    f"block_size={settings.block_size} has no effect where a level drafts: set Level.block_size, for "
                    f"the model that drafts for the level, or Level.budget"
                )
            size = None
        bonus = self.bonus if settings.bonus is None else settings.bonus
        check_bonus(bonus)
        return replace(settings, block_size=size, bonus=bonus)

    def _check_tree(self, settings: Settings) -> None:
        """Checks that no setting of block length, verification or drafters contradicts a draft tree.

        Raises:
            ValueError: settings contradict the tree; the message names them.
        """
        if settings.tree is None:
            return
        conflicts = dict(meant(settings, "block_size", "verify", "tail", "choose"))
        accept, stop = settings.accept or self.accept, self.stop if settings.stop is None else settings.stop
        conflicts |= {"accept": accept} if accept != "speculative" else {}
        conflicts |= {"stop": stop} if stop != "fixed" else {}
        single = build_drafter.by_model(settings.drafters) and not build_selection.selects(settings)
        if conflicts or self.fixed_block or not single:
            names = ", ".join(f"{name}={value!r}" for name, value in conflicts.items()) or "its blocks or its drafter"
            raise ValueError(
                f"tree={settings.tree} of {self.called} cannot be combined with {names}: one model drafts a tree, "
                f"and its siblings are verified one by one; leave one of these settings out"
            )

    def _check_choice(self, settings: Settings) -> None:
        verifier = partial(self._verifier, settings)
        verifier(None)
        if build_selection.selects(settings):
            build_selection.check(settings, self.called, verifier)
        elif settings.policy is not None or settings.lossy_arms:
            raise ValueError(f"{self.called} has one drafter: leave policy and lossy_arms out, or name more drafters")

    def _verifier(self, settings: Settings, rule: str | Rule | None) -> Verifier:
        """Returns the verifier of a rule; `None` means the method's own rule."""
        chosen = self.rule(settings if rule is None else replace(settings, rule=rule))
        return build_drafter.verifier_of(settings.accept or self.accept, chosen, settings.verify)

    def controls(self, settings: Settings, rows: int) -> Controls:
        """Checks and returns the controls: α, thresholds, and the sampling of the target, its draft and all levels."""
        heat = 0.0 if self.greedy_draft and settings.draft_temperature is None else settings.draft_temperature
        drawn = build_drafter.draft_sampling(settings.drafters, heat)
        if settings.draft_temperature is not None and drawn is not heat:
            raise ValueError(
                f"draft_temperature={heat} contradicts the temperature={drawn} of the drafting level: "
                f"leave draft_temperature out"
            )
        alpha = np.zeros(rows, np.float32)
        for rule in self._rules(settings):
            rule.check_temperatures(settings.temperature, drawn)
            checked = checked_alpha(rule.alpha, f"rule {rule.name!r}", settings.alpha, rows)
            alpha = alpha if rule.alpha is None else checked
        sampling = sampling_of(settings) | {"draft_temperature": drawn}
        threshold = self._stop_threshold(settings, alpha)
        inner = build_drafter.inner_controls(settings.drafters, sampling, rows)
        return make_controls(rows, alpha=alpha, stop_threshold=threshold, inner=inner, **sampling)

    def _stop_threshold(self, settings: Settings, alpha: np.ndarray) -> Any:
        threshold = settings.stop_threshold
        if not self.alpha_stops:
            return build_drafter.checked_threshold(self.policy(settings), self.called, threshold)
        if threshold is not None:
            raise ValueError(
                f"{self.called} has no stop_threshold ({threshold}): its alpha is the threshold; leave it out"
            )
        return alpha

    def program(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...], head: Head | None = None
    ) -> tuple[Program, Params]:
        """Returns the engine with the drafter and the verifier that the settings describe, and its parameters."""
        settings = _as_chain(self.resolved(settings))
        verifier = self._verifier(settings, None)
        drafter: Drafter | Planner
        if build_selection.selects(settings):
            verifier = build_selection.verifier_of(settings, partial(self._verifier, settings))
            part = partial(self._arm, pair, settings, head)
            tells_arm = not isinstance(verifier, TokenWise)
            drafter, params = build_selection.drafter_of(pair, settings, self.called, part, tells_arm)
        elif settings.tree is not None:
            drafter, params, verifier = build_drafter.branching(pair, settings, verifier, self.called)
        elif settings.block_size == AUTO:
            # Length 0 is left out for a rule that reads q: the draft then makes a pass for every token of the output,
            # so a round without drafts would save nothing.
            plan = Cheapest(LENGTHS[1:] if verifier.reads_q else LENGTHS, settings.bonus or self.bonus)
            bound = pair.model(str(build_drafter.the_one(settings.drafters, self.called)))
            drafter, params = PlannedDrafter(bound.model, plan), {"model": bound.params}
        else:
            drafter, params = build_drafter.drafter_of(pair, settings, self.policy(settings), self.called, head)
        engine = Engine(
            target=pair.target.model,
            drafter=drafter,
            verifier=verifier,
            stop_ids=stop_ids,
            bonus=settings.bonus or self.bonus,
            verify_final=self.verify_final,
        )
        return engine, {"target": pair.target.params, "drafter": params}

    def _arm(
        self, pair: Pair, settings: Settings, head: Head | None, drafter: str | Level, block_size: int | None
    ) -> tuple[Drafter, Params]:
        """Builds the drafter of one arm; returns it with its parameters."""
        arm_settings = replace(settings, drafters=(drafter,), block_size=block_size or settings.block_size)
        return build_drafter.drafter_of(pair, arm_settings, self.policy(arm_settings), self.called, head)


def _as_chain(settings: Settings) -> Settings:
    """Replaces a draft tree without branches by plain blocks of the same depth; returns other settings unchanged."""
    if settings.tree is None or set(settings.tree) != {1}:
        return settings
    return replace(settings, tree=None, block_size=len(settings.tree))
