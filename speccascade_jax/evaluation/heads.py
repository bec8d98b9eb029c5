"""The acceptance heads and selection policies that methods ask: read once, and checked before anything is measured."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from speccascade_jax.core.names import TARGET
from speccascade_jax.methods import build_selection, table
from speccascade_jax.methods.settings import Settings, drafters_text
from speccascade_jax.pairs import head_files
from speccascade_jax.pairs.head_files import Card, Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.policy_files import Policy
from speccascade_jax.rules import deferral


class Heads:
    """The heads that methods ask of a pair. Each file is read once, so that a record names the head that was used."""

    def __init__(self, pair: Pair):
        self._pair, self._read = pair, cache(partial(_head, pair))

    def of(self, settings: Settings) -> Head | None:
        """Returns the head that settings ask, or the pair's; `None` where they ask none; errors as `check`."""
        return self._read(settings.head)[0] if asks_head(settings) else None

    def fingerprint(self, settings: Settings) -> dict[str, str]:
        """Returns what a record's key and its `fingerprints` hold of the head; nothing where none is asked."""
        return {"head": self._read(settings.head)[1]} if asks_head(settings) else {}

    def described(self, settings: Settings) -> dict[str, Any]:
        """Returns what else a record says, under "head": the weight of rejections, which says what h means."""
        head = self.of(settings)
        return {} if head is None else {"head": {"w_rej": head.card.w_rej}}

    def check(self, chosen: Iterable[Settings]) -> None:
        """Refuses heads that are missing or of another draft, and warns of those made for other settings.

        Outputs keep their law under any head, so that one of another rule or sampling is no error. One warning per
        head names all in which it differs. Compiles nothing.

        Raises:
            FileNotFoundError, CheckpointError: as `head_files.load`.
            ValueError: the pair has no head, or a file is another draft's.
        """
        asked: dict[str | None, list[Settings]] = defaultdict(list)
        for settings in chosen:
            if asks_head(settings):
                asked[settings.head].append(settings)
        known = set()  # the draft's weights are hashed once, not once per head
        for file, members in asked.items():
            head = self._read(file)[0]
            if file is not None and (belongs := (head.card.features, head.card.draft_fingerprint)) not in known:
                try:
                    head.check(self._pair.draft, self._pair.name)
                except ValueError as error:
                    raise ValueError(f"{file}: {error}") from error
                known.add(belongs)
            if others := list(_differences(head.card, members)):
                name = f"the acceptance head of {self._pair.name!r}" if file is None else f"the acceptance head {file}"
                warnings.warn(
                    f"{name} was trained for {'; for '.join(others)}: outputs keep their law, but blocks end less "
                    "aptly than with a head trained for these settings (experiments/train_acceptance_head.py)",
                    stacklevel=2,
                )


def _head(pair: Pair, file: str | None) -> tuple[Head, str]:
    """Returns a file's head, or the pair's, and its fingerprint."""
    head = pair.require_head() if file is None else head_files.load(file)
    return head, head.fingerprint


def asks_head(settings: Settings) -> bool:
    """Returns whether settings ask an acceptance head."""
    return table.get(settings.method).needs_head(settings)


def _differences(card: Card, chosen: Iterable[Settings]) -> Iterator[str]:
    """Yields in what settings differ from those that a head was trained for, both sides named."""
    taught = _told(card.rule, card.alpha, card)
    asked = [_told(table.get(s.method).rule(s).name, s.alpha, s) for s in chosen]
    for name, value in taught.items():
        if others := [other for other in dict.fromkeys(each[name] for each in asked) if other != value]:
            yield f"{name} {value} and is asked under {', '.join(others)}"


def _told(rule: str, alpha: float | None, sampling: Card | Settings) -> dict[str, str]:
    """Returns everything that kept probabilities depend on, beside the two models."""
    draft = sampling.draft_temperature
    return {
        "rule": rule if alpha is None else f"{rule} (alpha {alpha:g})",
        "temperature": f"{sampling.temperature:g}",
        "draft_temperature": "the target's" if draft is None or draft == sampling.temperature else f"{draft:g}",
        "top_p": f"{sampling.top_p:g}",
        "top_k": f"{sampling.top_k:g}",
    }


class Policies:
    """The policies that methods ask of a pair. Each file is read once, so that a record names the one that was used."""

    def __init__(self, pair: Pair):
        self._pair, self._read = pair, cache(partial(_policy, pair))

    def loaded(self, settings: Settings) -> Settings:
        """Returns settings with their policy read."""
        return replace(settings, policy=self._read(settings.policy)[0]) if asks_policy(settings) else settings

    def fingerprint(self, settings: Settings) -> dict[str, str]:
        """Returns what a record's key and its `fingerprints` hold of the policy; nothing where none is asked."""
        return {"policy": self._read(settings.policy)[1]} if asks_policy(settings) else {}

    def described(self, settings: Settings) -> dict[str, Any]:
        """Returns what else a record says, under "selection": its arms and their rules, and what chose.

        `drafts` is what drafts under each arm's name; `lossy_arms` names those by which outputs lose the target's law.
        """
        if not build_selection.selects(settings):
            return {}
        arms = build_selection.arms_of(settings)
        rule = table.get(settings.method).rule(settings)
        rules = [rule.name if arm.rule is None else str(arm.rule) for arm in arms]
        told: dict[str, Any] = {"arms": [arm.called for arm in arms], "rules": rules, "choose": settings.choose}
        if asks_policy(settings):
            card = self._read(settings.policy)[0].card
            told |= {"trained": card.trained, "alignment_weight": card.alignment_weight, "queries": card.queries}
        told["drafts"] = [drafters_text((arm.drafter,), arm.block_size) for arm in arms]
        decided = [rule if arm.rule is None else deferral.get(arm.rule) for arm in arms]
        pairs = zip(arms, decided, strict=True)
        told["lossy_arms"] = [arm.called for arm, rule in pairs if not rule.lossless and arm.drafter != TARGET]
        return {"selection": told}

    def check(self, chosen: Iterable[Settings]) -> None:
        """Refuses policies that are missing, or of other drafters or another target. Compiles nothing.

        Raises:
            FileNotFoundError, CheckpointError: as `policy_files.load`.
            ValueError: as `selecting.chooser_of`; names the file.
        """
        for settings in dict.fromkeys(filter(asks_policy, chosen)):
            try:
                build_selection.chooser_of(self._pair, self.loaded(settings), f"method {settings.method!r}")
            except ValueError as error:
                raise error if settings.policy is None else ValueError(f"{settings.policy}: {error}") from error


def _policy(pair: Pair, file: str | None) -> tuple[Policy, str]:
    """Returns a file's policy, or the pair's, and its fingerprint."""
    policy = build_selection.policy_of(pair, file)
    return policy, policy.fingerprint


def asks_policy(settings: Settings) -> bool:
    """Returns whether a trained policy chooses."""
    return settings.choose in build_selection.LEARNT
