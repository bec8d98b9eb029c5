"""Files of selection policies, which name their drafters and their target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.storage.array_file import Carded, load_carded

FILE = "selection_policy.msgpack"
"""File name of a pair's policy in the pair's folder."""
TRAIN = "train one for these models (experiments/train_policy.py), or choose by 'random' or a drafter's name"


@dataclass(frozen=True, kw_only=True)
class Card:
    """The kind of a policy, its drafters and its training.

    Attributes:
        scores: its way of scoring arms, a name of `drafters.chooser.SCORERS`; features: number of features it reads.
        arms: the drafters' names, in the order of its scores; prints: the drafters' fingerprints in this order.
        target: fingerprint of the model whose prefill it reads.
        trained: its training objective; alignment_weight: weight in its rewards (METHODS section 8).
        pair: the pair's name; data: fingerprint of the data; queries: number of training queries; steps: optimizer
            steps.
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

    def __post_init__(self) -> None:
        """Converts the lists that JSON returns back to tuples."""
        for name in ("arms", "prints"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class Policy(Carded[Card]):
    """A policy's parameters and its card."""

    def among(self, prints: Mapping[str, str], target: str, features: int, owner: str) -> Params:
        """Returns the policy's parameters, reordered to score the drafters in the order of `prints`; compiles nothing.

        Args:
            prints: each arm's name -> its fingerprint, in the wanted order.
            target: the target's fingerprint.
            features: the number of features that the target has.
            owner: name of these models' owner, for errors.

        Raises:
            ValueError: the policy has other drafters or another target; names them and the remedy.
        """
        if set(prints) != set(self.card.arms):
            raise ValueError(
                f"the selection policy chooses among {', '.join(self.card.arms)}, but {owner} chooses among "
                f"{', '.join(prints)}: {TRAIN}"
            )
        if self.card.features != features or self.card.target != target:
            raise ValueError(
                f"the selection policy was trained for the target {self.card.target} ({self.card.features} features), "
                f"but the target of {owner} is {target} ({features} features; the same weights in another dtype count "
                f"as another target): {TRAIN}"
            )
        trained = dict(zip(self.card.arms, self.card.prints, strict=True))
        if wrong := [name for name in prints if prints[name] != trained[name]]:
            raise ValueError(
                f"the selection policy was trained for another drafter {wrong[0]!r} ({trained[wrong[0]]}) than that "
                f"of {owner} ({prints[wrong[0]]}): {TRAIN}"
            )
        return reordered(self.params, [self.card.arms.index(name) for name in prints])


def reordered(params: Params, places: Sequence[int]) -> Params:
    """Returns a policy's parameters with its arms reordered: arm `i` of the result was arm `places[i]`."""
    order = np.asarray(places)
    if "mean" in params:  # A ridge regression has an entry per arm.
        return {**params, "mean": params["mean"][order], "covariance": params["covariance"][order]}
    last = f"layers_{len(params) - 1}"
    return {**params, last: jax.tree.map(lambda x: x[..., order], params[last])}


def save(path: str | Path, policy: Policy) -> None:
    """Writes a policy as one file, atomically."""
    policy.save(path)


def load(path: str | Path) -> Policy:
    """Reads a file with a selection policy.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: it is damaged (names the damaged parts), or of another format.
    """
    return Policy(*load_carded(path, "selection policy", TRAIN, Card))
