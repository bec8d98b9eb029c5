"""Files that hold a selection policy: its parameters, and a card that describes its drafters, target and training.

A selection policy scores several drafters (*arms*) from a prompt's features, and chooses one for each prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.storage.array_file import Carded, load_carded

FILE = "selection_policy.msgpack"
"""File name of a pair's selection policy in the pair's folder."""
TRAIN = "train one for these models (experiments/train_policy.py), or set choose to 'random' or a drafter's name"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Description of a selection policy: how it scores drafters, the drafters and the target, and its training.

    Attributes:
        scores: name of the scoring function in `drafters.chooser.SCORERS`; features: number of features that it reads.
        arms: the drafters' names, in the order of the scores; prints: the drafters' fingerprints in the same order.
        target: fingerprint of the target, whose prefill computes the features.
        trained: the training objective; alignment_weight: weight, in the training rewards, of how well a draft matches
            the target (docs/methods.md, section 8).
        pair: name of the pair; data: fingerprint of the training data; queries: number of training queries; steps:
            number of optimizer steps.
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
        """Converts lists back to tuples, because JSON stores tuples as lists."""
        for name in ("arms", "prints"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class Policy(Carded[Card]):
    """A selection policy: its parameters and its card."""

    def among(self, prints: Mapping[str, str], target: str, features: int, owner: str) -> Params:
        """Returns the policy's parameters for scores in the order of the drafters in `prints`; compiles nothing.

        Args:
            prints: the drafters' fingerprints by name, in the wanted order.
            target: the target's fingerprint.
            features: number of features that the target's prefill returns.
            owner: name of whatever holds these models, such as a pair, for errors.

        Raises:
            ValueError: the policy was trained for other drafters or another target; the message names them and the
                remedy.
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
    """Returns a policy's parameters with its drafters reordered: drafter `i` of the result was drafter `places[i]`."""
    order = np.asarray(places)
    if "mean" in params:  # These are a ridge regression's arrays, which have one entry per drafter.
        return {**params, "mean": params["mean"][order], "covariance": params["covariance"][order]}
    last = f"layers_{len(params) - 1}"
    return {**params, last: jax.tree.map(lambda x: x[..., order], params[last])}


def save(path: str | Path, policy: Policy) -> None:
    """Writes a selection policy and its card to one file, atomically."""
    policy.save(path)


def load(path: str | Path) -> Policy:
    """Reads a selection policy and its card from a file that `save` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged (the message names the damaged parts), or has another format.
    """
    return Policy(*load_carded(path, "selection policy", TRAIN, Card))
