"""Reading T5X's checkpoints and our own, and writing our own."""

from speccascade_jax.checkpoints.errors import CheckpointError
from speccascade_jax.checkpoints.native import save
from speccascade_jax.checkpoints.reading import describe, load

__all__ = ["CheckpointError", "describe", "load", "save"]
