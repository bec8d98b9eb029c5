"""Files that hold a few parameter arrays and a card that describes them, such as acceptance heads and policies."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.types import Params, count
from speccascade_jax.storage import checksums
from speccascade_jax.storage.checksums import array_digest
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, damaged
from speccascade_jax.storage.files import expanded, write_atomically

FORMAT = 1


class _Dataclass(Protocol):
    """Type of any dataclass; the module `typing` has none."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


CardT = TypeVar("CardT", bound=_Dataclass)


@dataclass(frozen=True, repr=False)
class Carded(Generic[CardT]):
    """Parameters and a card, which is a dataclass of plain values that describes the parameters."""

    params: Params
    card: CardT

    def __repr__(self) -> str:
        """Returns one line with the number of parameters and the card."""
        return f"{type(self).__name__}({count(self.params):,} parameters, {self.card})"

    @property
    def fingerprint(self) -> str:
        """The hash of parameters and card, which identifies them in stored results."""
        return fingerprint(self.params, asdict(self.card))

    def save(self, path: str | Path) -> None:
        """Writes parameters and card to one file, atomically."""
        save(path, self.params, asdict(self.card))


def load_carded(path: str | Path, kind: str, again: str, card: type[CardT]) -> tuple[Params, CardT]:
    """Reads the parameters and the card of a `Carded` from a file; ignores entries that are no fields of the card.

    Args:
        path: the file.
        kind: noun for the file in errors, such as "acceptance head".
        again: what the user can do, such as "train the head again"; the end of every error message.
        card: the class of the card.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged or has another format, or an entry of the card is missing or invalid.
    """
    params, entries = load(path, kind, again)
    known = {field.name for field in fields(card)}
    try:
        return params, card(**{name: value for name, value in entries.items() if name in known})
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{expanded(path)}: its metadata (the card) lack an entry or have an invalid one ({error}): {again}"
        ) from error


def fingerprint(params: Params, card: Mapping[str, Any]) -> str:
    """Returns the hash of parameters and a card, as hexadecimal text."""
    parts = {name: array_digest(np.asarray(leaf)) for name, leaf in flatten_dict(params, sep="/").items()}
    return _text_digest(json.dumps({"card": card, **parts}, sort_keys=True))


def save(path: str | Path, params: Params, card: Mapping[str, Any]) -> None:
    """Writes parameters, converted to float32, and a card to one file, atomically."""
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flatten_dict(params, sep="/").items()}
    text = json.dumps(card, sort_keys=True)
    digests = {name: array_digest(array) for name, array in arrays.items()} | {"card": _text_digest(text)}
    payload = {"format": FORMAT, "card": text, "digests": digests, "arrays": arrays}
    content = flax.serialization.msgpack_serialize(payload)
    write_atomically(path, content, checksums.seal(content))


def load(path: str | Path, kind: str, again: str) -> tuple[Params, dict[str, Any]]:
    """Reads parameters and a card from a file that `save` wrote.

    Args:
        path: the file.
        kind: noun for the file in errors, such as "acceptance head".
        again: what the user can do, such as "train the head again"; the end of every error message.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged (names the damaged parts), or has another format.
    """
    path = expanded(path)
    if not path.is_file():
        raise FileNotFoundError(f"no {kind} at {path}: {again}")
    content = checksums.unsealed(path, path.read_bytes(), COPY_AGAIN, CheckpointError)
    try:
        payload = flax.serialization.msgpack_restore(content)
        number, text, digests, arrays = (payload[name] for name in ("format", "card", "digests", "arrays"))
        actual = {name: array_digest(array) for name, array in arrays.items()} | {"card": _text_digest(text)}
        missing = digests.keys() - actual.keys()
    except Exception as error:  # msgpack raises errors of many types for a damaged file.
        raise damaged(path, {"the file": f"it is no {kind} ({error!r})"}) from error
    if number != FORMAT:
        raise CheckpointError(f"{path} has format {number!r}, but this version reads {FORMAT}: {again}")
    changed = [name for name, value in actual.items() if value != digests.get(name)]
    wrong = dict.fromkeys(changed, "its bytes have changed") | dict.fromkeys(missing, "it is missing")
    if wrong:
        raise damaged(path, wrong)
    return jax.tree.map(jnp.asarray, unflatten_dict(arrays, sep="/")), json.loads(text)


def _text_digest(text: str) -> str:
    return array_digest(np.frombuffer(text.encode(), np.uint8))
