"""The file that an acceptance head is kept in, and what it was trained on."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from speccascade_jax.core.types import BoundModel, Params, count
from speccascade_jax.models import fingerprints
from speccascade_jax.models.teacher_forcing import features
from speccascade_jax.storage import array_file
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

FILE = "acceptance_head.msgpack"
"""How a pair's own head is called in its folder."""
_TRAIN = "train one for this pair (experiments/train_acceptance_head.py), or choose the pair that it was trained for"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a head is and what it was trained on.

    Attributes:
        depth, features: residual blocks, and the width of the draft's hidden states; law: whether it reads `with_law`.
        w_rej: weight of rejections in its loss (`training.heads.train`); at 1 its probabilities are meant as such.
        rule, alpha: whose kept probabilities it was taught.
        temperature, top_p, top_k, draft_temperature: the sampling under which.
        pair: the pair's name; pair_fingerprint, draft_fingerprint: `Pair.fingerprint`, and `fingerprints.of_model` of
            the draft.
        data: fingerprint of the data folders; prompts, positions: how many were trained on; steps: of the optimiser.
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


@dataclass(frozen=True)
class Head:
    """A head's parameters and its card."""

    params: Params
    card: Card

    def __repr__(self) -> str:
        """Without the numbers."""
        return f"Head({count(self.params):,} parameters, {self.card})"

    @property
    def fingerprint(self) -> str:
        """Hash of parameters and card: what a record that used the head belongs to."""
        return array_file.fingerprint(self.params, asdict(self.card))

    def check(self, draft: BoundModel, pair: str) -> None:
        """Refuse a head of another draft; compiles nothing.

        Args:
            draft: the model whose states it is to read; pair: what its pair is called, for the error.

        Raises:
            ValueError: names both fingerprints or sizes, and the remedy.
        """
        found = features(draft)
        if found != self.card.features:
            size = "no hidden states" if found is None else f"{found} features"
            raise ValueError(
                f"the acceptance head reads {self.card.features} features, the draft gives {size}: {_TRAIN}"
            )
        found_print = fingerprints.of_model(draft)
        if found_print != self.card.draft_fingerprint:
            raise ValueError(
                f"the acceptance head belongs to the draft {self.card.draft_fingerprint} of pair {self.card.pair!r}, "
                f"but the draft of {pair!r} is {found_print} (the same weights in another dtype are another draft): "
                f"{_TRAIN}"
            )


def save(path: str | Path, head: Head) -> None:
    """Write a head as one file, whole or not at all."""
    array_file.save(path, head.params, asdict(head.card))


def load(path: str | Path) -> Head:
    """Read a head.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: it is damaged (names what in it), or of another format.
    """
    params, card = array_file.load(path, "acceptance head", _TRAIN)
    return Head(params, _card(expanded(path), card))


def _card(path: Path, given: dict[str, Any]) -> Card:
    known = {field.name for field in fields(Card)}
    try:
        return Card(**{name: value for name, value in given.items() if name in known})
    except TypeError as error:
        raise CheckpointError(f"{path}: its card lacks an entry ({error}); train the head again") from error
