"""Random T5s whose weights NumPy draws, because compiling `module.init` takes longer than most tests."""

from __future__ import annotations

import functools

import jax
import numpy as np

from benchmarks import random_models
from speccascade_jax.core.types import BoundModel, Params
from speccascade_jax.models.t5 import T5, T5Config


@functools.cache
def parameters(config: T5Config, seed: int = 0) -> Params:
    """Returns parameters drawn in numpy, as benchmarks draw them, but not fused."""
    return random_models.parameters(T5(config), seed)


def bound(config: T5Config, seed: int = 0, noise: float = 0.0) -> BoundModel:
    """Returns a model with unfused `parameters`, as for training.

    `noise` is added to each parameter, relative to its size; with a little noise, the model is a draft that often
    agrees with the model without noise.
    """
    params, rng = parameters(config, seed), np.random.default_rng(1000 + seed)
    if noise:
        params = jax.tree.map(lambda x: x + noise * np.std(x) * rng.normal(size=x.shape).astype(np.float32), params)
    return BoundModel(params=jax.device_put(params), model=T5(config))
