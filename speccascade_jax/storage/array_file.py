"""Files of a few arrays with a card that describes them: acceptance heads, heads of early exits, policies."""

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
    """Any dataclass, for which `typing` has no name."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


CardT = TypeVar("CardT", bound=_Dataclass)


@dataclass(frozen=True, repr=False)
class Carded(Generic[CardT]):
    """Parameters with a card, a dataclass of plain values that describes them."""

    params: Params
    card: CardT

    def __repr__(self) -> str:
        """Returns one line without the parameters' values."""
        return f"{type(self).__name__}({count(self.params):,} parameters, {self.card})"

    @property
    def fingerprint(self) -> str:
        """Hash of parameters and card, which identifies them in records."""
        return fingerprint(self.params, asdict(self.card))

    def save(self, path: str | Path) -> None:
        """Writes parameters and card as one file, atomically."""
        save(path, self.params, asdict(self.card))


def load_carded(path: str | Path, kind: str, again: str, card: type[CardT]) -> tuple[Params, CardT]:
    """Reads the parameters and the card of a `Carded`; ignores entries that the card's class does not know.

    Raises:
        FileNotFoundError, CheckpointError: as `load`, or the card lacks an entry or has an invalid one.
    """
    params, entries = load(path, kind, again)
    known = {field.name for field in fields(card)}
    try:
        return params, card(**{name: value for name, value in entries.items() if name in known})
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{expanded(path)}: its card lacks an entry, or has an invalid one ({error}): {again}"
        ) from error


def fingerprint(params: Params, card: Mapping[str, Any]) -> str:
    """Returns the hash of parameters and card."""
    parts = {name: array_digest(np.asarray(leaf)) for name, leaf in flatten_dict(params, sep="/").items()}
    return _text_digest(json.dumps({"card": card, **parts}, sort_keys=True))


def save(path: str | Path, params: Params, card: Mapping[str, Any]) -> None:
    """Writes parameters, in float32, and card as one file, atomically."""
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flatten_dict(params, sep="/").items()}
    text = json.dumps(card, sort_keys=True)
    digests = {name: array_digest(array) for name, array in arrays.items()} | {"card": _text_digest(text)}
    payload = {"format": FORMAT, "card": text, "digests": digests, "arrays": arrays}
    content = flax.serialization.msgpack_serialize(payload)
    write_atomically(path, content, checksums.seal(content))


def load(path: str | Path, kind: str, again: str) -> tuple[Params, dict[str, Any]]:
    """Reads parameters and card.

    Args:
        path: the file.
        kind: kind of the file, for errors ("acceptance head").
        again: the way to another file, for errors.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: it is damaged (names the damaged parts), or of another format.
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
    except Exception as error:  # msgpack raises a different error for every kind of damage.
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
