"""The file that a selection policy is kept in: which drafters it chooses among, for which target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import Params, count
from speccascade_jax.storage import array_file
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

FILE = "selection_policy.msgpack"
"""How a pair's own policy is called in its folder."""
TRAIN = "train one for these (experiments/train_policy.py), or choose by 'random' or a drafter's name"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a policy is and what it was trained on.

    Attributes:
        scores: how it scores arms, a name of `drafters.chooser.SCORERS`; features: how many it reads.
        arms: the drafters' names, in the order of its scores; prints: what each of them is, a fingerprint.
        target: fingerprint of the model whose prefill it reads.
        trained: by which objective; alignment_weight: of its rewards (METHODS section 8).
        pair: the pair's name; data: fingerprint of the data; queries: how many; steps: of the optimiser.
    """

    scores: str
    features: int
    arms: tuple[str, ...]
    prints: tuple[str, ...]
    target: str
    trained: str = ""
    alignment_weight: float = 1.0
    pair: str = ""
    data: str = ""
    queries: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Policy:
    """A policy's parameters and its card."""

    params: Params
    card: Card

    def __repr__(self) -> str:
        """Without the numbers."""
        return f"Policy({count(self.params):,} parameters, {self.card})"

    @property
    def fingerprint(self) -> str:
        """Hash of parameters and card: what a record that used the policy belongs to."""
        return array_file.fingerprint(self.params, asdict(self.card))

    def among(self, prints: Mapping[str, str], target: str, features: int, whose: str) -> Params:
        """The parameters with scores in the order of `prints`; compiles nothing.

        Args:
            prints: the name of each arm -> its fingerprint, in the order wanted; target: the target's; features: how
                many it gives; whose: what is to be chosen for, for errors.

        Raises:
            ValueError: a policy of other drafters, or of another target; names them, and the remedy.
        """
        if set(prints) != set(self.card.arms):
            raise ValueError(
                f"the selection policy chooses among {', '.join(self.card.arms)}, and {whose} among "
                f"{', '.join(prints)}: {TRAIN}"
            )
        if self.card.features != features or self.card.target != target:
            raise ValueError(
                f"the selection policy was trained for the target {self.card.target} ({self.card.features} features), "
                f"and that of {whose} is {target} ({features}; the same weights in another dtype are another): {TRAIN}"
            )
        trained = dict(zip(self.card.arms, self.card.prints, strict=True))
        if others := [name for name in prints if prints[name] != trained[name]]:
            raise ValueError(
                f"the selection policy was trained for another drafter {others[0]!r}, {trained[others[0]]}, than that "
                f"of {whose}, {prints[others[0]]}: {TRAIN}"
            )
        return reordered(self.params, [self.card.arms.index(name) for name in prints])


def reordered(params: Params, places: Sequence[int]) -> Params:
    """A policy's parameters with its arms at these places, one for each, in this order."""
    at = np.asarray(places)
    if "mean" in params:  # a ridge regression: an entry per arm
        return {**params, "mean": params["mean"][at], "covariance": params["covariance"][at]}
    last = f"layers_{len(params) - 1}"
    return {**params, last: jax.tree.map(lambda x: x[..., at], params[last])}


def save(path: str | Path, policy: Policy) -> None:
    """Write a policy as one file, whole or not at all."""
    array_file.save(path, policy.params, asdict(policy.card))


def load(path: str | Path) -> Policy:
    """Read a policy.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: it is damaged (names what in it), or of another format.
    """
    params, card = array_file.load(path, "selection policy", TRAIN)
    known = {field.name for field in fields(Card)}
    try:
        found: Any = {name: value for name, value in card.items() if name in known}
        found |= {name: tuple(found[name]) for name in ("arms", "prints")}
        return Policy(params, Card(**found))
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{expanded(path)}: its card lacks an entry ({error}); train the policy again") from error
