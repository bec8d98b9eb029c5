"""Files that hold a drafter's parameters and the fingerprint of the target that the drafter was trained for.

Examples:
    >>> import numpy as np
    >>> import speccascade_jax as sc
    >>> from speccascade_jax.extend import drafter_files
    >>> pair = sc.Pair(target=sc.TableLM(np.eye(8)), draft=sc.TableLM(np.zeros((8, 8))))
    >>> drafter_files.save("head.msgpack", {"mix": np.ones((16, 8))}, pair, layers=[0, 1])
    >>> params, about = drafter_files.load("head.msgpack", pair)
    >>> params["mix"].shape, about
    ((16, 8), {'layers': [0, 1]})
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speccascade_jax.core.types import Params
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.storage import array_file
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

_TRAIN = "train it for this target, or load the pair that it was trained for"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Description of a drafter's parameters: the target that they were trained for, and further values.

    Attributes:
        target_fingerprint: `fingerprints.of_model` of the target; pair: name of the target's pair.
        about: further JSON values by name, which the caller of `save` gave, such as the layers that the drafter reads.
    """

    target_fingerprint: str
    pair: str
    about: dict[str, Any] = field(default_factory=dict)


def save(path: str | Path, params: Params, pair: Pair, **about: Any) -> None:
    """Writes a drafter's parameters to one file, atomically.

    Args:
        path: the file to write.
        params: a nested dict of arrays, which are stored in float32.
        pair: the pair whose target the drafter was trained for.
        about: further JSON values, which `load` returns.
    """
    card = Card(target_fingerprint=pair.print_of("target"), pair=pair.name, about=about)
    array_file.save(path, params, asdict(card))


def load(path: str | Path, pair: Pair) -> tuple[Params, dict[str, Any]]:
    """Reads a drafter's parameters from a file, after checking that they were trained for the target of `pair`.

    Args:
        path: the file.
        pair: the pair with the target.

    Returns:
        The parameters, and the `about` values that `save` stored.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged (the message names the damaged parts), or of another kind.
        ValueError: the drafter was trained for another target (the message names both fingerprints).
    """
    params, entries = array_file.load(path, "file of a drafter's parameters", "train the drafter and save it")
    try:
        card = Card(**entries)
    except TypeError as error:
        raise CheckpointError(
            f"{expanded(path)} does not hold a drafter's parameters ({error}): choose a file that drafter_files.save "
            "wrote"
        ) from error
    fingerprint = pair.print_of("target")
    if fingerprint != card.target_fingerprint:
        raise ValueError(
            f"{path} holds a drafter for the target {card.target_fingerprint} of pair {card.pair!r}, but the target of "
            f"{pair.name!r} is {fingerprint} (the same weights in another dtype count as another target): {_TRAIN}"
        )
    return params, card.about
