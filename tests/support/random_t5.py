"""Random T5s without a compilation: `module.init` as a program takes longer than most tests of what it makes."""

from __future__ import annotations

import functools

import jax

from benchmarks import random_models
from speccascade_jax.core.types import BoundModel, Params
from speccascade_jax.models.t5 import T5, T5Config


@functools.cache
def parameters(config: T5Config, seed: int = 0) -> Params:
    """In numpy, as benchmarks draw them, but not fused."""
    return random_models.parameters(T5(config), seed)


def bound(config: T5Config, seed: int = 0) -> BoundModel:
    """A model with `parameters`, as it is trained: nothing is fused."""
    return BoundModel(params=jax.device_put(parameters(config, seed)), model=T5(config))
