"""Readers of checkpoints (Hugging Face, T5X, llama2.c, Gemma's, our own) and the writer of our own format."""

from speccascade_jax.checkpoints.converting import write_checksums
from speccascade_jax.checkpoints.native import put_back, save
from speccascade_jax.checkpoints.reading import describe, load, model_of
from speccascade_jax.storage.errors import CheckpointError

__all__ = ["CheckpointError", "describe", "load", "model_of", "put_back", "save", "write_checksums"]
