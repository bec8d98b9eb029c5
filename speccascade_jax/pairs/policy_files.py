"""The file that a selection policy is kept in: which drafters it chooses among, for which target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.storage.array_file import Carded, load_carded

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

    def __post_init__(self) -> None:
        """Makes tuples again of what JSON gives as lists."""
        for name in ("arms", "prints"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class Policy(Carded[Card]):
    """A policy's parameters and its card."""

    def among(self, prints: Mapping[str, str], target: str, features: int, whose: str) -> Params:
        """Returns the parameters with scores in the order of `prints`; compiles nothing.

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
    """Returns a policy's parameters with its arms at these places, one for each, in this order."""
    order = np.asarray(places)
    if "mean" in params:  # a ridge regression: an entry per arm
        return {**params, "mean": params["mean"][order], "covariance": params["covariance"][order]}
    last = f"layers_{len(params) - 1}"
    return {**params, last: jax.tree.map(lambda x: x[..., order], params[last])}


def save(path: str | Path, policy: Policy) -> None:
    """Writes a policy as one file, whole or not at all."""
    policy.save(path)


def load(path: str | Path) -> Policy:
    """Reads a policy.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: it is damaged (names what in it), or of another format.
    """
    return Policy(*load_carded(path, "selection policy", TRAIN, Card))
