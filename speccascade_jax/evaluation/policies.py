"""The selection policies that methods ask: read once, and checked before anything is measured."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from speccascade_jax.core.names import TARGET
from speccascade_jax.methods import build_selection, table
from speccascade_jax.methods.settings import Settings, drafters_text
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.policy_files import Policy
from speccascade_jax.rules import deferral


class Policies:
    """The policies that methods ask of a pair. Each file is read once, so that a record names the one that was used."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._read: dict[str | None, tuple[Policy, str]] = {}

    def loaded(self, settings: Settings) -> Settings:
        """Returns settings with their policy read."""
        return replace(settings, policy=self._read_once(settings.policy)[0]) if asks(settings) else settings

    def fingerprint(self, settings: Settings) -> dict[str, str]:
        """Returns what a record's key and its `fingerprints` hold of the policy; nothing where none is asked."""
        return {"policy": self._read_once(settings.policy)[1]} if asks(settings) else {}

    def described(self, settings: Settings) -> dict[str, Any]:
        """What else a record says of a selection, under "selection": its arms and their rules, and what chose.

        `drafts` is what drafts under each arm's name; `lossy_arms` names those by which outputs lose the target's law.
        """
        if not build_selection.selects(settings):
            return {}
        arms = build_selection.arms_of(settings)
        rule = table.get(settings.method).rule(settings)
        rules = [rule.name if arm.rule is None else str(arm.rule) for arm in arms]
        told: dict[str, Any] = {"arms": [arm.called for arm in arms], "rules": rules, "choose": settings.choose}
        if asks(settings):
            card = self._read_once(settings.policy)[0].card
            told |= {"trained": card.trained, "alignment_weight": card.alignment_weight, "queries": card.queries}
        told["drafts"] = [drafters_text((arm.drafter,), arm.block_size) for arm in arms]
        decided = [rule if arm.rule is None else deferral.get(arm.rule) for arm in arms]
        lossy = [not decides.lossless and arm.drafter != TARGET for decides, arm in zip(decided, arms, strict=True)]
        return {"selection": told | {"lossy_arms": [arm.called for arm in itertools.compress(arms, lossy)]}}

    def _read_once(self, file: str | None) -> tuple[Policy, str]:
        if file not in self._read:
            policy = build_selection.policy_of(self._pair, file)
            self._read[file] = policy, policy.fingerprint
        return self._read[file]

    def check(self, chosen: Iterable[Settings]) -> None:
        """Refuse policies that are missing, or of other drafters or another target. Compiles nothing.

        Raises:
            FileNotFoundError, CheckpointError: as `policy_files.load`.
            ValueError: as `selecting.chooser_of`; names the file.
        """
        for settings in dict.fromkeys(filter(asks, chosen)):
            try:
                build_selection.chooser_of(self._pair, self.loaded(settings), f"method {settings.method!r}")
            except ValueError as error:
                raise error if settings.policy is None else ValueError(f"{settings.policy}: {error}") from error


def asks(settings: Settings) -> bool:
    """Returns whether a trained policy chooses."""
    return settings.choose in build_selection.LEARNT
