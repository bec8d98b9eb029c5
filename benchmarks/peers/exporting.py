"""A writer of checkpoints for transformers: writes our parameters as `config.json` and `model.safetensors`, in float32.

Tensor names come from the plan with which our own reader loads such a folder (`checkpoints/huggingface.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.huggingface import plan
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5Config


def write(config: T5Config | DecoderConfig, flat: Mapping[str, np.ndarray], folder: Path) -> None:
    """Writes a model's folder.

    Args:
        config: configuration of a T5 or a Llama; flat: parameters by name, with the names of
            `checkpoints.infer.expected_shapes`.

    Raises:
        ValueError: the model is decoder-only and not a Llama.
    """
    entries = _t5(config) if isinstance(config, T5Config) else _llama(config)
    tensors = {}
    for name, (piece,) in plan(config, entries, {}).items():
        values = np.asarray(flat[name], np.float32)
        if isinstance(config, DecoderConfig) and config.rope_pairs == "adjacent":
            values = _halves(name, values, config.head_dim)
        tensors[piece.source] = values if piece.order is None else values.transpose(piece.order)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    _safetensors(folder / "model.safetensors", tensors)


def read(path: Path) -> tuple[T5Config | DecoderConfig, dict[str, np.ndarray]]:
    """Returns the configuration of any checkpoint and its parameters by name, in float32.

    Raises:
        CheckpointError: the checkpoint cannot be read, see `checkpoints.load`.
    """
    model: Any
    model, params = checkpoints.load(path, dtype="float32")
    return model.config, dict(_flat(params))


def _flat(tree: Any, before: str = "") -> Any:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, np.asarray(value)


def _halves(name: str, values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders a query or key kernel, because transformers' rotary embedding pairs coordinates half a head apart.

    In the kernel `values`, neighbouring coordinates form the pairs.
    """
    if not name.endswith(("query/kernel", "key/kernel")):
        return values
    heads = values.reshape(len(values), -1, head_dim // 2, 2)
    return heads.transpose(0, 1, 3, 2).reshape(values.shape)


def _t5(c: T5Config) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": c.num_embeddings,
        "d_model": c.d_model,
        "d_kv": c.head_dim,
        "d_ff": c.d_ff,
        "num_heads": c.num_heads,
        "num_layers": c.num_encoder_layers,
        "num_decoder_layers": c.num_decoder_layers,
        "relative_attention_num_buckets": c.relative_buckets,
        "relative_attention_max_distance": c.relative_max_distance,
        "feed_forward_proj": "gated-gelu" if c.gated else "relu",
        "layer_norm_epsilon": c.layer_norm_epsilon,
        "tie_word_embeddings": c.tied,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _llama(c: DecoderConfig) -> dict[str, Any]:
    extras = (
        c.qkv_bias,
        c.post_norms,
        c.norm_offset,
        c.attention_cap,
        c.output_cap,
        c.rope_scaling,
        c.window,
        c.qk_norm,
    )
    if (
        any(extras)
        or set(c.pattern) != {"global"}
        or c.rope_factor != 1
        or c.embedding_scale != 1
        or c.activation != "silu"
        or c.query_scale is not None
    ):
        raise ValueError(f"{c} is not a plain Llama, the only decoder-only family that can be exported")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": c.num_embeddings,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rope_base,
        "tie_word_embeddings": c.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def _safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file: header length, JSON header padded to eight bytes, arrays one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            out.write(np.ascontiguousarray(values, "<f4").tobytes())
