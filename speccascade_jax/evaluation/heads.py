"""Acceptance heads and selection policies that methods need, read once and checked before any measurement.

An acceptance head predicts whether the target will accept a drafted token (Huang et al., 2024, SpecDec++). A selection
policy chooses a drafter for each query.
"""

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
    """Acceptance heads that the methods of a pair need.

    Each file is read only once, so that a record names exactly the head that was used.
    """

    def __init__(self, pair: Pair):
        self._pair, self._read = pair, cache(partial(_head, pair))

    def of(self, settings: Settings) -> Head | None:
        """Returns the head that `settings` name, or else the pair's own head; `None` if the method needs no head."""
        return self._read(settings.head)[0] if asks_head(settings) else None

    def fingerprint(self, settings: Settings) -> dict[str, str]:
        """Returns the head's entry for a record's key and `fingerprints`; empty if the method needs no head."""
        return {"head": self._read(settings.head)[1]} if asks_head(settings) else {}

    def described(self, settings: Settings) -> dict[str, Any]:
        """Returns a record's entry "head": the weight of rejected tokens in the head's training loss (`w_rej`).

        The weight shifts the predicted probabilities, so a threshold h means something else for another weight.
        """
        head = self.of(settings)
        return {} if head is None else {"head": {"w_rej": head.card.w_rej}}

    def check(self, chosen: Iterable[Settings]) -> None:
        """Refuses heads that are missing or belong to another draft, and warns of heads trained for other settings.

        A head that was trained for another rule or sampling is no error, because outputs keep their distribution under
        any head. One warning per head names all differences. Nothing is compiled.

        Raises:
            FileNotFoundError, CheckpointError: the errors of `head_files.load`.
            ValueError: the pair has no head, or a file belongs to another draft.
        """
        asked: dict[str | None, list[Settings]] = defaultdict(list)
        for settings in chosen:
            if asks_head(settings):
                asked[settings.head].append(settings)
        known = set()  # so that the draft's weights are hashed once, not once per head
        for file, members in asked.items():
            head = self._read(file)[0]
            if file is not None and (belongs := (head.card.features, head.card.draft_fingerprint)) not in known:
                try:
                    head.check(self._pair.draft, self._pair.name)
                except ValueError as error:
                    raise ValueError(f"{file}: {error}") from error
                known.add(belongs)
            if differences := list(_differences(head.card, members)):
                name = f"the acceptance head of {self._pair.name!r}" if file is None else f"the acceptance head {file}"
                warnings.warn(
                    f"{name} was trained for {'; for '.join(differences)}: outputs keep their distribution, but "
                    "blocks end at worse positions than with a head trained for these settings "
                    "(experiments/train_acceptance_head.py)",
                    stacklevel=2,
                )


def _head(pair: Pair, file: str | None) -> tuple[Head, str]:
    """Returns the head in `file`, or the pair's own head if no file is named, and the head's fingerprint."""
    head = pair.require_head() if file is None else head_files.load(file)
    return head, head.fingerprint


def asks_head(settings: Settings) -> bool:
    """Returns whether the method with these settings needs an acceptance head."""
    return table.get(settings.method).needs_head(settings)


def _differences(card: Card, chosen: Iterable[Settings]) -> Iterator[str]:
    """Yields a text with both values for every setting in which a head's use differs from its training."""
    taught = _told(card.rule, card.alpha, card)
    asked = [_told(table.get(s.method).rule(s).name, s.alpha, s) for s in chosen]
    for name, value in taught.items():
        if differing := [text for text in dict.fromkeys(facts[name] for facts in asked) if text != value]:
            yield f"{name} {value} but is used with {', '.join(differing)}"


def _told(rule: str, alpha: float | None, sampling: Card | Settings) -> dict[str, str]:
    """Returns the settings that acceptance probabilities depend on, as texts by name: the rule, α and the sampling."""
    draft = sampling.draft_temperature
    return {
        "rule": rule if alpha is None else f"{rule} (alpha {alpha:g})",
        "temperature": f"{sampling.temperature:g}",
        "draft_temperature": "the target's" if draft is None or draft == sampling.temperature else f"{draft:g}",
        "top_p": f"{sampling.top_p:g}",
        "top_k": f"{sampling.top_k:g}",
    }


class Policies:
    """Selection policies that the methods of a pair need.

    Each file is read only once, so that a record names exactly the policy that was used.
    """

    def __init__(self, pair: Pair):
        self._pair, self._read = pair, cache(partial(_policy, pair))

    def loaded(self, settings: Settings) -> Settings:
        """Returns settings in which the loaded policy replaces the name of the policy's file."""
        return replace(settings, policy=self._read(settings.policy)[0]) if asks_policy(settings) else settings

    def fingerprint(self, settings: Settings) -> dict[str, str]:
        """Returns the policy's entry for a record's key and `fingerprints`; empty if the method needs no policy."""
        return {"policy": self._read(settings.policy)[1]} if asks_policy(settings) else {}

    def described(self, settings: Settings) -> dict[str, Any]:
        """Returns a record's entry "selection": the arms (drafters to choose from), their rules, and how one is chosen.

        `drafts` describes the drafter of each arm. `lossy_arms` names the arms whose outputs do not keep the target's
        distribution.
        """
        if not build_selection.selects(settings):
            return {}
        arms = build_selection.arms_of(settings)
        rule = table.get(settings.method).rule(settings)
        rules = [rule.name if arm.rule is None else str(arm.rule) for arm in arms]
        selection: dict[str, Any] = {"arms": [arm.called for arm in arms], "rules": rules, "choose": settings.choose}
        if asks_policy(settings):
            card = self._read(settings.policy)[0].card
            selection |= {"trained": card.trained, "alignment_weight": card.alignment_weight, "queries": card.queries}
        selection["drafts"] = [drafters_text((arm.drafter,), arm.block_size) for arm in arms]
        decided = [rule if arm.rule is None else deferral.get(arm.rule) for arm in arms]
        pairs = zip(arms, decided, strict=True)
        selection["lossy_arms"] = [arm.called for arm, rule in pairs if not rule.lossless and arm.drafter != TARGET]
        return {"selection": selection}

    def check(self, chosen: Iterable[Settings]) -> None:
        """Raises an error if a policy is missing, or belongs to other drafters or another target.

        Nothing is compiled.

        Raises:
            FileNotFoundError, CheckpointError: the errors of `policy_files.load`.
            ValueError: the errors of `build_selection.chooser_of`, with the file's name.
        """
        for settings in dict.fromkeys(filter(asks_policy, chosen)):
            try:
                build_selection.chooser_of(self._pair, self.loaded(settings), f"method {settings.method!r}")
            except ValueError as error:
                raise error if settings.policy is None else ValueError(f"{settings.policy}: {error}") from error


def _policy(pair: Pair, file: str | None) -> tuple[Policy, str]:
    """Returns the policy in `file`, or the pair's own policy if no file is named, and the policy's fingerprint."""
    policy = build_selection.policy_of(pair, file)
    return policy, policy.fingerprint


def asks_policy(settings: Settings) -> bool:
    """Returns whether a trained policy chooses the drafter."""
    return settings.choose in build_selection.LEARNT
