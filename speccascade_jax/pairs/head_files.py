"""The file that an acceptance head is kept in, and what it was trained on."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.checkpoints.checksums import digest
from speccascade_jax.checkpoints.errors import COPY_AGAIN, CheckpointError, damaged
from speccascade_jax.core import checksums
from speccascade_jax.core.files import expanded, write_atomically
from speccascade_jax.core.types import BoundModel, Params, count
from speccascade_jax.models import fingerprints
from speccascade_jax.models.along import features

FILE = "acceptance_head.msgpack"
"""How a pair's own head is called in its folder."""
FORMAT = 1
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
        parts = {name: digest(np.asarray(leaf)) for name, leaf in flatten_dict(self.params, sep="/").items()}
        return _text_digest(json.dumps({"card": asdict(self.card), **parts}, sort_keys=True))

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
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flatten_dict(head.params, sep="/").items()}
    card = json.dumps(asdict(head.card), sort_keys=True)
    digests = {name: digest(array) for name, array in arrays.items()} | {"card": _text_digest(card)}
    payload = {"format": FORMAT, "card": card, "digests": digests, "arrays": arrays}
    content = flax.serialization.msgpack_serialize(payload)
    write_atomically(path, content, checksums.seal(content))


def load(path: str | Path) -> Head:
    """Read a head.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: it is damaged (names what in it), or of another format.
    """
    path = expanded(path)
    if not path.is_file():
        raise FileNotFoundError(f"no acceptance head at {path}: {_TRAIN}")
    content = checksums.unsealed(path, path.read_bytes(), COPY_AGAIN, CheckpointError)
    try:
        payload = flax.serialization.msgpack_restore(content)
        number, text, digests, arrays = (payload[name] for name in ("format", "card", "digests", "arrays"))
        found = {name: digest(array) for name, array in arrays.items()} | {"card": _text_digest(text)}
        missing = digests.keys() - found.keys()
    except Exception as error:  # msgpack has an error of its own for every kind of damage
        raise damaged(path, {"the file": f"it is no acceptance head ({error!r})"}) from error
    if number != FORMAT:
        raise CheckpointError(f"{path} has format {number!r}, this version reads {FORMAT}: train the head again")
    changed = [name for name, one in found.items() if one != digests.get(name)]
    wrong = dict.fromkeys(changed, "its bytes are not those written") | dict.fromkeys(missing, "it is not there")
    if wrong:
        raise damaged(path, wrong)
    return Head(jax.tree.map(jnp.asarray, unflatten_dict(arrays, sep="/")), _card(path, text))


def _card(path: Path, text: str) -> Card:
    given: dict[str, Any] = json.loads(text)
    known = {field.name for field in fields(Card)}
    try:
        return Card(**{name: value for name, value in given.items() if name in known})
    except TypeError as error:
        raise CheckpointError(f"{path}: its card lacks an entry ({error}); train the head again") from error


def _text_digest(text: str) -> str:
    return digest(np.frombuffer(text.encode(), np.uint8))
