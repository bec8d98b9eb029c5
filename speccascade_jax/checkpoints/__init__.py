"""Readers of checkpoints (Hugging Face, T5X, llama2.c, Google's Gemma, MaxText, this package's), and writers of two.

`save` writes this package's format, and `save_t5x` that of T5X.

Examples:
    >>> from importlib.resources import files
    >>> from speccascade_jax import checkpoints
    >>> shipped = files("speccascade_jax") / "assets/pairs/tatoeba_en_de/draft"
    >>> model, params = checkpoints.load(shipped)
    >>> checkpoints.save("copy", model, params, dtype="bfloat16")
    >>> checkpoints.describe("copy").splitlines()[2]
    'parameters: 2,180,864 in 56 arrays, bfloat16'
"""

from speccascade_jax.checkpoints.converting import write_checksums
from speccascade_jax.checkpoints.native import put_back, save
from speccascade_jax.checkpoints.reading import belongs_to_target, describe, load, model_of, named
from speccascade_jax.checkpoints.t5x_writing import save_t5x
from speccascade_jax.storage.errors import CheckpointError

__all__ = ["CheckpointError", "belongs_to_target", "describe", "load", "model_of", "named", "put_back", "save"]
__all__ += ["save_t5x", "write_checksums"]
