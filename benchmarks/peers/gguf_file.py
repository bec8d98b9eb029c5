"""A converter from a Llama's folder for transformers to GGUF, llama.cpp's format, in float32, float16 or 8 bits.

This module imports only packages of llama.cpp's environment. Tensor names, metadata keys and the order of coordinates
are those of the package `gguf`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file

TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
BLOCK = 32
"""The number of weights in an 8-bit block; it must divide the length of a row."""


def write(folder: Path, file: Path, kind: str) -> None:
    """Writes `file` from `folder`; `kind` is one of `TYPES`. Vectors stay in float32, as in llama.cpp's own files."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, stored = TYPES[kind]
    out = gguf.GGUFWriter(str(file), "llama")
    _describe(out, config)
    out.add_file_type(stored)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in load_file(str(folder / "model.safetensors")).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = neighbours(values, config["head_dim"])
        place = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 1:
            out.add_tensor(place, values)
            continue
        # rows that are not a whole number of blocks stay in float16, as in llama.cpp
        tensor_type = weights if kind != "q8" or values.shape[1] % BLOCK == 0 else gguf.GGMLQuantizationType.F16
        out.add_tensor(place, quantize(values, tensor_type), raw_dtype=tensor_type)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def neighbours(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders a query or key matrix `[out, in]` for rotary positions on neighbouring coordinates.

    In the folder for transformers, a rotation pairs coordinates that are half a head apart.
    """
    heads = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3).reshape(values.shape))


def _describe(out: Any, config: dict[str, Any]) -> None:
    out.add_vocab_size(config["vocab_size"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_tokenizer_model("no_vocab")
