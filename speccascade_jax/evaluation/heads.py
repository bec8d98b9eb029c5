"""The acceptance heads that methods ask: read once, and checked before anything is measured."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from speccascade_jax.methods import table
from speccascade_jax.methods.settings import Settings
from speccascade_jax.pairs import head_files
from speccascade_jax.pairs.head_files import Card, Head
from speccascade_jax.pairs.pair import Pair


class Heads:
    """The heads that methods ask of a pair. Each file is read once, so that a record names the head that was used."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._read: dict[str | None, tuple[Head, str]] = {}

    def of(self, settings: Settings) -> Head | None:
        """Returns the head that settings ask, or the pair's; `None` where they ask none; errors as `check`."""
        return self._read_once(settings.head)[0] if asks_head(settings) else None

    def fingerprint(self, settings: Settings) -> dict[str, str]:
        """Returns what a record's key and its `fingerprints` hold of the head; nothing where none is asked."""
        return {"head": self._read_once(settings.head)[1]} if asks_head(settings) else {}

    def described(self, settings: Settings) -> dict[str, Any]:
        """Returns what else a record says, under "head": the weight of rejections, which says what h means."""
        head = self.of(settings)
        return {} if head is None else {"head": {"w_rej": head.card.w_rej}}

    def _read_once(self, file: str | None) -> tuple[Head, str]:
        if file not in self._read:
            head = self._pair.require_head() if file is None else head_files.load(file)
            self._read[file] = head, head.fingerprint
        return self._read[file]

    def check(self, chosen: Iterable[Settings]) -> None:
        """Refuse heads that are missing or of another draft, and warn of those made for other settings.

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
            head = self._read_once(file)[0]
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


def asks_head(settings: Settings) -> bool:
    """Returns whether settings ask an acceptance head."""
    return table.get(settings.method).needs_head(settings)


def _differences(card: Card, chosen: Iterable[Settings]) -> Iterator[str]:
    """In what settings differ from those that a head was trained for, both sides named."""
    taught = _told(card.rule, card.alpha, card)
    asked = [_told(table.get(s.method).rule(s).name, s.alpha, s) for s in chosen]
    for name, value in taught.items():
        if others := [other for other in dict.fromkeys(each[name] for each in asked) if other != value]:
            yield f"{name} {value} and is asked under {', '.join(others)}"


def _told(rule: str, alpha: float | None, sampling: Card | Settings) -> dict[str, str]:
    """Everything that kept probabilities depend on, beside the two models."""
    draft = sampling.draft_temperature
    return {
        "rule": rule if alpha is None else f"{rule} (alpha {alpha:g})",
        "temperature": f"{sampling.temperature:g}",
        "draft_temperature": "the target's" if draft is None or draft == sampling.temperature else f"{draft:g}",
        "top_p": f"{sampling.top_p:g}",
        "top_k": f"{sampling.top_k:g}",
    }
