"""Files with output heads for the early exits of one target: one head for each layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from speccascade_jax.core.types import Array, BoundModel
from speccascade_jax.models import fingerprints
from speccascade_jax.storage.array_file import Carded, load_carded

_TRAIN = "train exit heads (experiments/train_exit_heads.py)"


@dataclass(frozen=True, kw_only=True)
class Card:
    """The model that the exit heads belong to, and how the heads were trained.

    Attributes:
        target_fingerprint: `fingerprints.of_model` of the model; pair: its pair's name.
        towards: exit layer -> the layer whose distribution its head learned last; `None`: the whole model's.
        data: fingerprint of the data folders; prompts, positions: numbers of training prompts and positions; steps:
            optimizer steps.
    """

    target_fingerprint: str
    pair: str = ""
    towards: dict[int, int | None] = field(default_factory=dict)
    data: str = ""
    prompts: int = 0
    positions: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        """Converts the layers back to integers, because JSON's keys are strings."""
        object.__setattr__(self, "towards", {int(layer): teacher for layer, teacher in self.towards.items()})


class ExitHeads(Carded[Card]):
    """Kernels `[E, num_embeddings]` by layer, and their card."""

    def __init__(self, kernels: Mapping[int, Array] | Mapping[str, Array], card: Card):
        super().__init__({str(layer): kernel for layer, kernel in kernels.items()}, card)

    @property
    def kernels(self) -> dict[int, Array]:
        """Layer of an exit -> its head."""
        return {int(layer): kernel for layer, kernel in self.params.items()}

    def kernel(self, layer: int, path: str | Path = "the file") -> Array:
        """Returns the head of one exit.

        Raises:
            ValueError: there is no head for this layer.
        """
        kernels = self.kernels
        if layer not in kernels:
            layers = ", ".join(map(str, sorted(kernels)))
            raise ValueError(f"{path} holds no head for the exit at layer {layer}: it holds heads for layers {layers}")
        return kernels[layer]

    def check(self, target: BoundModel, path: str | Path = "the heads") -> None:
        """Raises `ValueError`, with both fingerprints, if the heads belong to another model."""
        fingerprint = fingerprints.of_model(target)
        if fingerprint != self.card.target_fingerprint:
            raise ValueError(
                f"{path} holds exit heads for the model {self.card.target_fingerprint} (pair {self.card.pair!r}), but "
                f"the target is {fingerprint} (the same weights in another dtype count as another model): "
                f"{_TRAIN} for this model"
            )


def save(path: str | Path, heads: ExitHeads) -> None:
    """Writes heads as one file, atomically."""
    heads.save(path)


def load(path: str | Path) -> ExitHeads:
    """Reads a file of exit heads.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: it is damaged (names the damaged parts), or of another kind.
    """
    return ExitHeads(*load_carded(path, "file of exit heads", _TRAIN, Card))
