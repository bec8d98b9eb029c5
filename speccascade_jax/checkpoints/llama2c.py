"""llama2.c's `*.bin` files of version 0: 7 integers, then float32 matrices by kind (Karpathy, 2023).

RoPE rotates adjacent pairs there. Sources: https://github.com/karpathy/llama2.c, `export.py` and `run.c`.
"""

import dataclasses
import functools
import math
import struct
from pathlib import Path

import numpy as np

from speccascade_jax.checkpoints.array_plan import Plan, Stored, as_it_is, transposed
from speccascade_jax.checkpoints.arrays import Tensor, Tensors, read_bytes
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError

_HEADER = struct.Struct("<7i")
_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_LATER_VERSIONS = 0x616B3432  # "ak42", what versions 1 and 2 begin with


def is_model(file: Path) -> bool:
    """Whether a file's size is the one that its header announces."""
    try:
        return bool(open_file(file))
    except (CheckpointError, OSError):
        return False


def open_file(file: Path) -> Stored:
    """Open a model file.

    Raises:
        CheckpointError: sizes of the header that don't fit together, or another file size than they need.
    """
    config = _config(file)
    needed, size = _bytes(config), file.stat().st_size
    if size != needed:  # before anything is as long as the header says
        raise CheckpointError(
            f"{file} has {size:,} bytes, but its header (d_model {config.d_model}, {config.num_layers} layers, "
            f"vocabulary {config.vocab_size}) needs {needed:,}: it is truncated or no version-0 file of llama2.c; "
            f"{COPY_AGAIN}"
        )
    plan = _plan(config)
    tensors: Tensors = {}
    offset = _HEADER.size
    for name, shape in _layout(config, plan):
        read = functools.partial(read_bytes, file, offset, shape, np.dtype("<f4"))
        tensors[name] = Tensor(shape, "float32", file, read)
        offset += 4 * math.prod(shape)
    return Stored(file, "llama2.c, version 0", tensors, config, plan)


def _bytes(c: DecoderConfig) -> int:
    """How long a configuration's file is."""
    shapes = parameter_shapes(dataclasses.replace(c, num_layers=1))
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("decoder/layers_"))
    rope = 2 * c.max_length * (c.head_dim // 2)
    return _HEADER.size + 4 * (sum(sizes.values()) + (c.num_layers - 1) * layer + rope)


def _config(file: Path) -> DecoderConfig:
    with open(file, "rb") as opened:
        header = opened.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise CheckpointError(f"{file} has {len(header)} bytes: too short for llama2.c's header; {COPY_AGAIN}")
    values = _HEADER.unpack(header)
    if values[0] == _LATER_VERSIONS:
        raise CheckpointError(
            f"{file} is of llama2.c's version {values[1]}, and version 0 is read: export it with --version 0"
        )
    sizes = dict(zip(_FIELDS, values, strict=True))
    dim, heads, vocab = sizes["dim"], sizes["n_heads"], sizes["vocab_size"]
    if heads < 1 or dim % heads or sizes["seq_len"] < 1:
        raise CheckpointError(f"{file} is no version-0 file of llama2.c: its header says {sizes}; {COPY_AGAIN}")
    try:
        return DecoderConfig(
            vocab_size=abs(vocab), num_embeddings=abs(vocab), d_model=dim, num_layers=sizes["n_layers"],
            num_heads=heads, num_kv_heads=sizes["n_kv_heads"], head_dim=dim // heads, d_ff=sizes["hidden_dim"],
            tied=vocab > 0, norm_epsilon=1e-5, rope_pairs="adjacent", max_length=sizes["seq_len"],
        )  # fmt: skip
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{file} is no version-0 file of llama2.c: {error}; {COPY_AGAIN}") from error


def _layout(c: DecoderConfig, plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Arrays in the file's order with their stored shapes, one layer each: `wq.3` is layer 3's."""
    layers = [f"{kind}.{i}" for kind in _LAYER.values() for i in range(c.num_layers)]
    names = ["token_embedding", *layers, "rms_final", "rope_cosines", "rope_sines", *([] if c.tied else ["wcls"])]
    shapes = {piece.source: piece.stored for (piece,) in plan.values()}
    shapes |= dict.fromkeys(("rope_cosines", "rope_sines"), (c.max_length, c.head_dim // 2))  # unused
    return [(name, shapes[name]) for name in names]


def _plan(config: DecoderConfig) -> Plan:
    plan: Plan = {}
    for name, shape in parameter_shapes(config).items():
        source = _NAMES.get(name)
        if source is None:
            _, layer, part = name.split("/", 2)
            source = f"{_LAYER[part]}.{layer.removeprefix('layers_')}"
        plan[name] = transposed(source, shape) if name.endswith("kernel") else as_it_is(source, shape)
    return plan


_NAMES = {
    "token_embedder/embedding": "token_embedding",
    "decoder/decoder_norm/scale": "rms_final",
    "decoder/logits_dense/kernel": "wcls",
}
_LAYER = {  # in the file's order
    "pre_self_attention_layer_norm/scale": "rms_att",
    "self_attention/query/kernel": "wq",
    "self_attention/key/kernel": "wk",
    "self_attention/value/kernel": "wv",
    "self_attention/out/kernel": "wo",
    "pre_mlp_layer_norm/scale": "rms_ffn",
    "mlp/wi_0/kernel": "w1",
    "mlp/wo/kernel": "w2",
    "mlp/wi_1/kernel": "w3",
}
