"""Random T5s without a compilation: `module.init` as a program takes longer than most tests of what it makes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import BoundModel
from speccascade_jax.models.needs import abstract
from speccascade_jax.models.t5 import T5, T5Config


@functools.cache
def parameters(config: T5Config, seed: int = 0) -> dict[str, Any]:
    """In numpy, float32: scales of 1, embeddings and biases of positions of unit size, kernels of unit gain."""
    draws = np.random.default_rng(seed)

    def drawn(path: Any, leaf: Any) -> np.ndarray:
        if leaf.ndim == 1:
            return np.ones(leaf.shape, np.float32)
        gain = 1.0 if path[-1].key == "embedding" or "rel_embedding" in path[-1].key else leaf.shape[0] ** -0.5
        return draws.normal(size=leaf.shape).astype(np.float32) * np.float32(gain)

    found: dict[str, Any] = jax.tree_util.tree_map_with_path(drawn, abstract(T5(config)))
    return found


def bound(config: T5Config, seed: int = 0) -> BoundModel:
    """A model with `parameters`, as it is trained: nothing is fused."""
    return BoundModel(params=jax.device_put(parameters(config, seed)), model=T5(config))
