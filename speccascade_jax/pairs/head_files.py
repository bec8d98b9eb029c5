"""Files that hold an acceptance head: its parameters, and a card that describes the head and its training.

An acceptance head predicts which of a draft's tokens the target accepts.
"""

from dataclasses import dataclass
from pathlib import Path

from speccascade_jax.core.types import BoundModel
from speccascade_jax.models import fingerprints
from speccascade_jax.models.teacher_forcing import features
from speccascade_jax.storage.array_file import Carded, load_carded

FILE = "acceptance_head.msgpack"
"""File name of a pair's acceptance head in the pair's folder."""
_TRAIN = "train one for this pair (experiments/train_acceptance_head.py), or choose the pair that it was trained for"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Description of an acceptance head: its architecture and its training.

    Attributes:
        depth: number of residual blocks; features: width of the draft's hidden states; law: whether the head also
            reads two log-probabilities of the draft's distribution (`stopping.acceptance_head.with_law`).
        w_rej: weight of rejections in the training loss (`training.heads.train`). If it is 1, the head's outputs
            estimate probabilities.
        rule, alpha: the verification rule whose acceptance probabilities the head learned, and the rule's parameter.
        temperature, top_p, top_k, draft_temperature: sampling settings of the training.
        pair: name of the pair; pair_fingerprint: `Pair.fingerprint` of the pair; draft_fingerprint:
            `fingerprints.of_model` of the draft.
        data: fingerprint of the folders with training data; prompts, positions: numbers of training prompts and
            positions; steps: number of optimizer steps.
    """

    depth: int
    features: int
    w_rej: float
    rule: str
    alpha: float | None
    temperature: float
    top_p: float
    top_k: int
    draft_temperature: float | None
    pair: str
    pair_fingerprint: str
    draft_fingerprint: str
    law: bool = False
    data: str = ""
    prompts: int = 0
    positions: int = 0
    steps: int = 0


class Head(Carded[Card]):
    """An acceptance head: its parameters and its card."""

    def check(self, draft: BoundModel, pair: str) -> None:
        """Checks that the head was trained for this draft; compiles nothing.

        Args:
            draft: the model whose hidden states the head will read.
            pair: name of the draft's pair, for the error.

        Raises:
            ValueError: the head was trained for another draft; the message names both fingerprints or sizes, and the
                remedy.
        """
        width = features(draft)
        if width != self.card.features:
            size = "no hidden states" if width is None else f"{width} features"
            raise ValueError(
                f"the acceptance head reads {self.card.features} features, but the draft has {size}: {_TRAIN}"
            )
        fingerprint = fingerprints.of_model(draft)
        if fingerprint != self.card.draft_fingerprint:
            raise ValueError(
                f"the acceptance head belongs to the draft {self.card.draft_fingerprint} of pair {self.card.pair!r}, "
                f"but the draft of {pair!r} is {fingerprint} (the same weights in another dtype count as another "
                f"draft): {_TRAIN}"
            )


def save(path: str | Path, head: Head) -> None:
    """Writes an acceptance head and its card to one file, atomically."""
    head.save(path)


def load(path: str | Path) -> Head:
    """Reads an acceptance head and its card from a file that `save` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged (the message names the damaged parts), or has another format.
    """
    return Head(*load_carded(path, "acceptance head", _TRAIN, Card))
