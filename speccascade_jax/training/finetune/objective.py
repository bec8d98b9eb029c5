"""The loss of a training step: the cross-entropy of the whole model and, if wanted, of its early exits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from speccascade_jax.core.types import Array
from speccascade_jax.training.finetune.losses import token_losses


@dataclass(frozen=True)
class Predictions:
    """A model's logits for the tokens of a batch that count.

    Attributes:
        logits: float32 `[B, T, num_embeddings]`, each predicting the token of `targets` at its position.
        targets: int32 `[B, T]`.
        counted: bool `[B, T]`, which positions count.
        hidden: for each decoder layer its output `[B, T, E]`; `None` unless asked for.
    """

    logits: Array
    targets: Array
    counted: Array
    hidden: Sequence[Array] | None = None

    def total(self, values: Array) -> Array:
        """Returns the sum of `values` `[B, T]` over the positions that count."""
        return jnp.sum(jnp.where(self.counted, values, 0.0))


@dataclass(frozen=True)
class Objective:
    """Cross-entropy per target token, and that of early exits.

    Attributes:
        smoothing: label smoothing of the cross-entropy.
        z_loss: weight of the squared logarithm of the softmax's normaliser; 1e-4 in T5's recipe (`losses`).
        exit_weight: weight of early exits; 0 trains none. Every step adds the cross-entropy of one early exit, computed
            with the model's own head; the exits take turns. The exit after layer `l` of `L` has the weight
            `exit_weight * l / L`, and the whole model has the weight 1. Turns, and weights that grow with depth, follow
            LayerSkip (Elhoushi et al., 2024), section 4.2.
    """

    smoothing: float = 0.0
    z_loss: float = 0.0
    exit_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing={self.smoothing} must be in [0, 1)")
        for name in ("exit_weight", "z_loss"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0, or a positive weight")

    def check(self, model: Any) -> None:
        """Raises ValueError if the decoder has too few layers for an early exit."""
        layers = getattr(model.config, "num_decoder_layers", 0) or getattr(model.config, "num_layers", 0)
        if self.exit_weight and layers < 2:
            raise ValueError(
                "a decoder of one layer has no early exit: set exit_weight to 0, or num_decoder_layers to 2 or more"
            )

    def total(
        self, predictions: Predictions, vocab_size: int, step: Array, exit_logits: Callable[[Array], Array]
    ) -> Array:
        """Returns the loss in nats, summed over the tokens of a batch that count.

        Args:
            predictions: the model's predictions.
            vocab_size: number of real vocabulary entries.
            step: number of the step, from 0.
            exit_logits: function from a layer's output to logits.
        """
        loss = self._cross_entropy(predictions, predictions.logits, vocab_size)
        if self.exit_weight:
            assert predictions.hidden is not None
            hidden, weight = exit_in_turn(predictions.hidden, step, self.exit_weight)
            early = self._cross_entropy(predictions, exit_logits(hidden), vocab_size)
            loss = (loss + weight * early) / (1.0 + weight)
        return loss

    def _cross_entropy(self, predictions: Predictions, logits: Array, vocab_size: int) -> Array:
        return predictions.total(token_losses(logits, predictions.targets, vocab_size, self.smoothing, self.z_loss))


def exit_in_turn(hidden: Sequence[Array], step: Array, weight: float) -> tuple[Array, Array]:
    """Returns the hidden states of the early exit whose turn it is at this step, and the weight of its loss."""
    below = len(hidden) - 1  # the exit after the last layer is the whole model
    turn = step % below
    return jnp.stack(hidden[:-1])[turn], weight * (turn + 1) / len(hidden)
