"""The selection policies that methods ask: read once, and checked before anything is measured."""

import itertools
from collections.abc import Iterable
from typing import Any

from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.points import Method, Sampling
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Settings, drafters_text
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.policy_files import Policy
from speccascade_jax.rules import deferral


class Policies:
    """The policies that methods ask of a pair. Each file is read once, so that a record names the one that was used."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._read: dict[str | None, tuple[Policy, str]] = {}

    def settings(self, method: Method) -> Settings:
        """A method's settings, with its policy read."""
        return method.settings(policy=self._found(method.policy)[0]) if asks(method) else method.settings()

    def fingerprint(self, method: Method) -> dict[str, str]:
        """What a record's key and its `fingerprints` hold of the policy: nothing where none is asked."""
        return {"policy": self._found(method.policy)[1]} if asks(method) else {}

    def described(self, method: Method) -> dict[str, Any]:
        """What else a record says of a selection, under "selection": its arms and their rules, and what chose.

        `drafts` is what drafts under each arm's name; `lossy_arms` names those by which outputs lose the target's law.
        """
        settings = method.settings()
        if not build_selection.selects(settings):
            return {}
        arms = build_selection.arms_of(settings)
        rules = [method.decides.name if arm.rule is None else str(arm.rule) for arm in arms]
        told: dict[str, Any] = {"arms": [arm.called for arm in arms], "rules": rules, "choose": method.choose}
        if asks(method):
            card = self._found(method.policy)[0].card
            told |= {"trained": card.trained, "alignment_weight": card.alignment_weight, "queries": card.queries}
        told["drafts"] = [drafters_text((arm.drafter,), arm.block_size) for arm in arms]
        decided = [method.decides if arm.rule is None else deferral.get(arm.rule) for arm in arms]
        lossy = [not rule.lossless and arm.drafter != TARGET for rule, arm in zip(decided, arms, strict=True)]
        return {"selection": told | {"lossy_arms": [arm.called for arm in itertools.compress(arms, lossy)]}}

    def _found(self, file: str | None) -> tuple[Policy, str]:
        if file not in self._read:
            policy = build_selection.policy_of(self._pair, file)
            self._read[file] = policy, policy.fingerprint
        return self._read[file]

    def check(self, chosen: Iterable[tuple[Method, Sampling]]) -> None:
        """Refuse policies that are missing, or of other drafters or another target. Compiles nothing.

        Raises:
            FileNotFoundError, CheckpointError: as `policy_files.load`.
            ValueError: as `selecting.chooser_of`; names the file.
        """
        for method in dict.fromkeys(method for method, _ in chosen if asks(method)):
            try:
                build_selection.chooser_of(self._pair, self.settings(method), f"method {method.name!r}")
            except ValueError as error:
                raise error if method.policy is None else ValueError(f"{method.policy}: {error}") from error


def asks(method: Method) -> bool:
    """Whether a trained policy chooses."""
    return method.choose in build_selection.LEARNT
