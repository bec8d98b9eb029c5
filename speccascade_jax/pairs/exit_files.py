"""Files that hold output heads for a target's early exits, one head for each exit layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from speccascade_jax.core.types import Array, BoundModel
from speccascade_jax.models import fingerprints
from speccascade_jax.storage.array_file import Carded, load_carded

_TRAIN = "train exit heads (experiments/train_exit_heads.py)"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Description of exit heads: the model that they belong to, and their training.

    Attributes:
        target_fingerprint: `fingerprints.of_model` of the model; pair: name of the model's pair.
        towards: for each exit layer, the layer of the exit that was the head's last teacher in distillation; `None` if
            the whole model was its teacher.
        data: fingerprint of the folders with training data; prompts, positions: numbers of training prompts and
            positions; steps: number of optimizer steps.
    """

    target_fingerprint: str
    pair: str = ""
    towards: dict[int, int | None] = field(default_factory=dict)
    data: str = ""
    prompts: int = 0
    positions: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        """Converts the layers back to integers, because JSON stores keys as strings."""
        object.__setattr__(self, "towards", {int(layer): teacher for layer, teacher in self.towards.items()})


class ExitHeads(Carded[Card]):
    """Output heads of a model's early exits: a kernel `[E, num_embeddings]` for each exit layer, and a card."""

    def __init__(self, kernels: Mapping[int, Array] | Mapping[str, Array], card: Card):
        super().__init__({str(layer): kernel for layer, kernel in kernels.items()}, card)

    @property
    def kernels(self) -> dict[int, Array]:
        """The output head of each exit, `[E, num_embeddings]`, by the exit's layer."""
        return {int(layer): kernel for layer, kernel in self.params.items()}

    def kernel(self, layer: int, path: str | Path = "the file") -> Array:
        """Returns the output head of the exit at `layer`, `[E, num_embeddings]`; `path` names the file in errors.

        Raises:
            ValueError: there is no head for this layer.
        """
        kernels = self.kernels
        if layer not in kernels:
            layers = ", ".join(map(str, sorted(kernels)))
            raise ValueError(f"{path} holds no head for the exit at layer {layer}: it holds heads for layers {layers}")
        return kernels[layer]

    def check(self, target: BoundModel, path: str | Path = "the heads") -> None:
        """Raises `ValueError`, with both fingerprints, if the heads were trained for another model than `target`."""
        fingerprint = fingerprints.of_model(target)
        if fingerprint != self.card.target_fingerprint:
            raise ValueError(
                f"{path} holds exit heads for the model {self.card.target_fingerprint} (pair {self.card.pair!r}), but "
                f"the target is {fingerprint} (the same weights in another dtype count as another model): "
                f"{_TRAIN} for this model"
            )


def save(path: str | Path, heads: ExitHeads) -> None:
    """Writes exit heads and their card to one file, atomically."""
    heads.save(path)


def load(path: str | Path) -> ExitHeads:
    """Reads exit heads and their card from a file that `save` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged (the message names the damaged parts), or of another kind.
    """
    return ExitHeads(*load_carded(path, "file of exit heads", _TRAIN, Card))
