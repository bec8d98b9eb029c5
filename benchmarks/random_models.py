"""Models of chosen sizes with random weights, for timing: speed does not depend on the values of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import BoundModel, Params
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.models.decoder import DecoderConfig, DecoderLM
from speccascade_jax.models.layers import fuse
from speccascade_jax.models.memory_estimate import abstract
from speccascade_jax.models.products import pack
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.pairs.pair import Pair

T5_10M = T5Config(4096, 4096, 320, 5, 64, 512, 3, 4)
T5_29M = T5Config(4096, 4096, 320, 5, 64, 2048, 4, 6)
T5_77M = T5Config(32128, 32128, 512, 6, 64, 1024, 8, 8)
DECODER_100M = DecoderConfig(
    vocab_size=32_000, num_embeddings=32_000, d_model=768, num_layers=8, num_heads=12, num_kv_heads=12, head_dim=64,
    d_ff=2048, max_length=2048, tied=False, activation="silu",
)  # fmt: skip
SIZES: Mapping[str, T5Config | DecoderConfig] = {
    "T5 10 M": T5_10M,
    "T5 29 M": T5_29M,
    "T5 77 M": T5_77M,
    "decoder 106 M": DECODER_100M,
}
"""Models by name: the first is like the smaller shipped target, the third like T5 1.1 small, the last like a Llama."""
PLAIN = "XLA's products"


def random(config: T5Config | DecoderConfig, seed: int = 0) -> BoundModel:
    """Returns a model with random `parameters`, whose kernels are fused but not packed for products on a CPU."""
    model: T5 | DecoderLM = T5(config) if isinstance(config, T5Config) else DecoderLM(config)
    return BoundModel(params=fuse(parameters(model, seed)), model=model)


def parameters(model: T5 | DecoderLM, seed: int = 0) -> Params:
    """Draws parameters: norm scales are 1, embeddings and position biases have unit size, kernels have unit gain."""
    draws = np.random.default_rng(seed)

    def drawn(path: Any, leaf: Any) -> np.ndarray:
        if len(leaf.shape) == 1:
            return np.ones(leaf.shape, np.float32)
        gain = 1.0 if "embedding" in path[-1].key else leaf.shape[0] ** -0.5
        return draws.standard_normal(leaf.shape, np.float32) * np.float32(gain)

    drawn_all: Params = jax.tree_util.tree_map_with_path(drawn, abstract(model))
    return drawn_all


def random_pair(name: str, vocabulary: TextVocabulary | None) -> Pair:
    """Returns a pair in float32: a T5 of `SIZES` as the target, and a draft as small as the smallest shipped one."""
    config = SIZES[name]
    small = T5Config(config.vocab_size, config.num_embeddings, 128, 2, 64, 384, 4, 1)
    target, draft = (held_as(random(model_config), "float32") for model_config in (config, small))
    return Pair(target, draft, vocabulary, name=name)


def held_as(bound: BoundModel, kind: str) -> BoundModel:
    """Returns the model with matrices stored as `kind` (of `runtime.products.KINDS`), or unpacked for XLA (`PLAIN`)."""
    params: Params = bound.params if kind == PLAIN else pack(bound.params, bound.model.config, kind)
    return BoundModel(params=jax.device_put(params), model=bound.model)
