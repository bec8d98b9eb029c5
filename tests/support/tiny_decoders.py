"""Random decoder-only models of every preset's kind, with weights so large that reading a wrong cache slot shows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from speccascade_jax.core.types import BoundModel
from speccascade_jax.models.decoder import DecoderConfig, DecoderLM, parameter_shapes, tiny

KINDS = ("gemma2_2b", "llama2_7b", "llama3.1_8b", "qwen2.5_7b", "gemma3_4b", "smollm3_3b")
"""Presets, one for each combination of options."""
SHARED = dataclasses.replace(
    tiny("gemma4_e2b"), pattern=("local", "global"), num_layers=4, kv_layers=2, keys_as_values=True, global_kv_heads=1
)
"""Gemma 4 with all its options: a local and a global layer with keys and values, then one of each kind without."""
PARALLEL = dataclasses.replace(tiny("gemma4_26b_a4b"), pattern=("local", "global"), num_layers=2)
"""Gemma 4 with experts beside each dense feed-forward, and a layer of each kind."""


@functools.cache
def flat_parameters(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns float32 values by name: kernels with a gain of 1 or more, scales of about 1, and large biases."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.normal(size=shape).astype(np.float32)
        if name.endswith("scale"):
            return 1.0 - config.norm_offset + values / 5
        if name.endswith("bias"):
            return values
        # embeddings have small norms, because a model with tied embeddings would otherwise only repeat its last token
        return values * (1.5 / np.sqrt(shape[0]) if name.endswith("kernel") else 0.3 / np.sqrt(shape[1]))

    return {name: draw(name, shape) for name, shape in parameter_shapes(config).items()}


def bound(config: DecoderConfig, seed: int = 0, noise: float = 0.0) -> BoundModel:
    """Returns a model with `flat_parameters`, to which noise is added, `noise` times the size of each parameter.

    With a little noise, the model is a draft that often agrees with the model without noise.
    """
    rng = np.random.default_rng(1000 + seed)
    flat = {
        name: jnp.asarray(value + noise * value.std() * rng.normal(size=value.shape).astype(np.float32))
        for name, value in flat_parameters(config, seed).items()
    }
    model = DecoderLM(config)
    return BoundModel(params=jax.device_put(model.prepare(unflatten_dict(flat, sep="/"))), model=model)
