"""Drafting of whole blocks by a T5: the parameters and caches that the kernel `resident_draft` takes.

Small T5s with untied, gated layers draft in the kernel on a TPU. All other models, and all models on other devices,
draft step by step.
"""

from dataclasses import replace

import flax.linen as nn
from flax.traverse_util import flatten_dict

from speccascade_jax.core.types import Params, is_packed
from speccascade_jax.models.cache import KVCache
from speccascade_jax.models.resident_draft import Kernel, Weights
from speccascade_jax.models.t5_config import T5Config
from speccascade_jax.runtime import platforms

_MATRICES = (
    "self_attention/qkv", "self_attention/out", "encoder_decoder_attention/query", "encoder_decoder_attention/out",
    "mlp/wi_01", "mlp/wo",
)  # fmt: skip
_NORMS = ("pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm")


def kernel_of(config: T5Config, cache: KVCache, turns: int) -> Kernel:
    """Returns the kernel that drafts a T5's blocks of `turns` tokens."""
    kernel = Kernel(
        rows=cache.length.shape[0], turns=turns, layers=config.num_decoder_layers, heads=config.num_heads,
        size=config.head_dim, width=config.d_model, hidden=config.d_ff, entries=config.num_embeddings,
        vocab=config.vocab_size, slots=cache.keys[0].shape[-1], fixed=cache.static.cross[0][0].shape[-1],
        dtype=config.dtype, epsilon=config.layer_norm_epsilon, gate=nn.gelu, vmem=platforms.vmem_bytes(),
    )  # fmt: skip
    # A row's operations wait for each other. With groups of four rows, the core can work on other rows meanwhile. But
    # smaller groups need smaller buffers, which leaves more VMEM for caches.
    groups = [replace(kernel, group=size) for size in (4, 2, 1) if kernel.rows % size == 0]
    return min(groups, key=lambda kernel: (not kernel.fits, kernel.moved_bytes))


def weights_of(config: T5Config, params: Params) -> Weights:
    """Returns the weights of a T5's decoder from its fused parameters."""
    flat = flatten_dict(params, sep="/")
    layers = [f"decoder/layers_{number}" for number in range(config.num_decoder_layers)]
    norms = [*(f"{layer}/{name}" for layer in layers for name in _NORMS), "decoder/decoder_norm"]
    return Weights(
        table=flat["token_embedder/embedding"],
        layers=tuple(tuple(flat[f"{layer}/{name}/kernel"] for name in _MATRICES) for layer in layers),
        head=flat["decoder/logits_dense/kernel"],
        scales=tuple(flat[f"{norm}/scale"] for norm in norms),
    )


def can_draft(config: T5Config, params: Params, cache: KVCache, turns: int) -> bool:
    """Returns whether the kernel can draft a T5's blocks of `turns` tokens; otherwise XLA drafts step by step."""
    usual = config.gated and not (config.tied or config.scanned or config.layer_biases)
    # Drawn tokens are fed, so each must have a row in the embedding. The kernel, unlike XLA, does not clip ids.
    usual = usual and config.num_embeddings >= config.vocab_size
    # With a single layer, a turn could read a tile of the cache before the previous turn has written it.
    if not (platforms.uses_kernels() and usual and config.num_decoder_layers > 1):
        return False
    # Parameters of another dtype would be cast at every call, and packed ones are for a CPU.
    flat = flatten_dict(params, sep="/")
    names = [f"decoder/layers_{n}/{m}/kernel" for n in range(config.num_decoder_layers) for m in _MATRICES]
    matrices = [flat.get(name) for name in (*names, "decoder/logits_dense/kernel", "token_embedder/embedding")]
    if any(is_packed(matrix) or matrix is None or matrix.dtype != config.dtype for matrix in matrices):
        return False
    return kernel_of(config, cache, turns).fits
