"""The file that heads of early exits are kept in: of one target, each of another layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from speccascade_jax.core.types import Array, BoundModel
from speccascade_jax.models import fingerprints
from speccascade_jax.storage import array_file
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

_TRAIN = "train some (experiments/train_exit_heads.py)"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Which model's exits they are, and what they were trained on.

    Attributes:
        target_fingerprint: `fingerprints.of_model` of the model; pair: its pair's name.
        towards: the layer whose law each head was taught last; `None`: the model's own.
        data: fingerprint of the data folders; prompts, positions: how many were trained on; steps: of the optimiser.
    """

    target_fingerprint: str
    pair: str = ""
    towards: dict[int, int | None] = field(default_factory=dict)
    data: str = ""
    prompts: int = 0
    positions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class ExitHeads:
    """Kernels `[E, num_embeddings]` by layer, and their card."""

    kernels: dict[int, Array]
    card: Card

    @property
    def fingerprint(self) -> str:
        """Hash of heads and card."""
        return array_file.fingerprint(_named(self.kernels), asdict(self.card))

    def kernel(self, layer: int, path: str | Path = "the file") -> Array:
        """The head of one exit.

        Raises:
            ValueError: there is none for this layer.
        """
        if layer not in self.kernels:
            held = ", ".join(map(str, sorted(self.kernels)))
            raise ValueError(f"{path} holds no head of the exit at layer {layer}: it holds those of {held}")
        return self.kernels[layer]

    def check(self, target: BoundModel, path: str | Path = "the heads") -> None:
        """Refuse heads of another model (`ValueError`: names both fingerprints)."""
        found = fingerprints.of_model(target)
        if found != self.card.target_fingerprint:
            raise ValueError(
                f"{path} holds exits of the model {self.card.target_fingerprint} (pair {self.card.pair!r}), but the "
                f"target is {found} (the same weights in another dtype are another model): {_TRAIN} for this one"
            )


def save(path: str | Path, heads: ExitHeads) -> None:
    """Write heads as one file, whole or not at all."""
    array_file.save(path, _named(heads.kernels), asdict(heads.card))


def load(path: str | Path) -> ExitHeads:
    """Read heads.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: it is damaged (names what in it), or another kind of file.
    """
    params, card = array_file.load(path, "file of exit heads", _TRAIN)
    try:
        towards = {int(layer): teacher for layer, teacher in card.pop("towards").items()}
        return ExitHeads({int(layer): kernel for layer, kernel in params.items()}, Card(towards=towards, **card))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{expanded(path)} holds no heads of exits ({error!r}): {_TRAIN}") from error


def _named(kernels: dict[int, Array]) -> dict[str, Array]:
    return {str(layer): kernel for layer, kernel in kernels.items()}
