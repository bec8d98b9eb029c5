"""Reader of llama2.c's `*.bin` files of version 0: a header of 7 integers, then float32 matrices (Karpathy, 2023).

The models' rotary positions rotate adjacent coordinates. Sources: https://github.com/karpathy/llama2.c, `export.py` and
`run.c`.
"""

import dataclasses
import math
import struct
from pathlib import Path

from speccascade_jax.checkpoints.array_plan import Plan, Stored, Tensors, stored_at, translate, whole
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError

_HEADER = struct.Struct("<7i")
_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_LATER_VERSIONS = 0x616B3432  # "ak42", the magic number at the beginning of files of versions 1 and 2.

# Parameter name -> array name, in the file's order: all layers' arrays of a kind follow each other, such as `wq.0` and
# `wq.1`.
_NAMES = {
    "token_embedder/embedding": "token_embedding",
    "decoder/layers_{i}/pre_self_attention_layer_norm/scale": "rms_att.{i}",
    "decoder/layers_{i}/self_attention/query/kernel": "wq.{i}",
    "decoder/layers_{i}/self_attention/key/kernel": "wk.{i}",
    "decoder/layers_{i}/self_attention/value/kernel": "wv.{i}",
    "decoder/layers_{i}/self_attention/out/kernel": "wo.{i}",
    "decoder/layers_{i}/pre_mlp_layer_norm/scale": "rms_ffn.{i}",
    "decoder/layers_{i}/mlp/wi_0/kernel": "w1.{i}",
    "decoder/layers_{i}/mlp/wo/kernel": "w2.{i}",
    "decoder/layers_{i}/mlp/wi_1/kernel": "w3.{i}",
    "decoder/decoder_norm/scale": "rms_final",
    "rope cosines, unused": "rope_cosines",
    "rope sines, unused": "rope_sines",
    "decoder/logits_dense/kernel": "wcls",
}


def is_model(file: Path) -> bool:
    """Returns whether a file is a model of version 0: its header is valid and matches the file's size."""
    try:
        return bool(open_file(file))
    except (CheckpointError, OSError):
        return False


def open_file(file: Path) -> Stored:
    """Opens a model file of version 0.

    Raises:
        CheckpointError: the sizes in the header contradict each other, or do not match the size of the file.
    """
    if isinstance(file, BucketPath):
        file = file.pinned()  # Weights of a file that is replaced later do not fit this header.
    config = _config(file)
    needed, size = _bytes(config), file.stat().st_size
    # The check comes before any memory is allocated, because a damaged header may claim enormous sizes.
    if size != needed:
        raise CheckpointError(
            f"{file} has {size:,} bytes, but its header (d_model {config.d_model}, {config.num_layers} layers, "
            f"vocabulary {config.vocab_size}) needs {needed:,}: it is truncated or not a version-0 file of llama2.c; "
            f"{COPY_AGAIN}"
        )
    plan: Plan = {
        name: whole(translate(name, _NAMES), shape, transposed=name.endswith("kernel"))
        for name, shape in parameter_shapes(config).items()
    }
    return Stored(file, "llama2.c, version 0", _tensors(file, config, plan), config, plan)


def _bytes(c: DecoderConfig) -> int:
    """Returns the size in bytes of a file that holds a model with this configuration."""
    shapes = parameter_shapes(dataclasses.replace(c, num_layers=1))
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("decoder/layers_"))
    rope = 2 * math.prod(_rope_shape(c))
    return _HEADER.size + 4 * (sum(sizes.values()) + (c.num_layers - 1) * layer + rope)


def _rope_shape(c: DecoderConfig) -> tuple[int, int]:
    return (c.max_length, c.head_dim // 2)


def _config(file: Path) -> DecoderConfig:
    with file.open("rb", buffering=0) as opened:
        header = opened.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise CheckpointError(f"{file} has {len(header)} bytes: too short for llama2.c's header; {COPY_AGAIN}")
    values = _HEADER.unpack(header)
    if values[0] == _LATER_VERSIONS:
        raise CheckpointError(
            f"{file} has llama2.c's version {values[1]}, but only version 0 is supported: export it with --version 0"
        )
    sizes = dict(zip(_FIELDS, values, strict=True))
    dim, heads, vocab = sizes["dim"], sizes["n_heads"], sizes["vocab_size"]
    if heads < 1 or dim % heads or sizes["seq_len"] < 1:
        raise CheckpointError(f"{file} is not a version-0 file of llama2.c: its header says {sizes}; {COPY_AGAIN}")
    try:
        return DecoderConfig(
            vocab_size=abs(vocab), num_embeddings=abs(vocab), d_model=dim, num_layers=sizes["n_layers"],
            num_heads=heads, num_kv_heads=sizes["n_kv_heads"], head_dim=dim // heads, d_ff=sizes["hidden_dim"],
            tied=vocab > 0, norm_epsilon=1e-5, rope_pairs="adjacent", max_length=sizes["seq_len"],
        )  # fmt: skip
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{file} is not a version-0 file of llama2.c: {error}; {COPY_AGAIN}") from error


def _tensors(file: Path, c: DecoderConfig, plan: Plan) -> Tensors:
    """Returns the file's arrays in the order in which they are stored, with a separate array for each layer."""
    shapes = {piece.source: piece.stored for (piece,) in plan.values()}
    shapes |= dict.fromkeys(("rope_cosines", "rope_sines"), _rope_shape(c))
    tensors: Tensors = {}
    offset = _HEADER.size
    for kind in _NAMES.values():
        layers = range(c.num_layers if "{i}" in kind else 1)
        for name in (kind.replace("{i}", str(i)) for i in layers):
            if name in shapes:  # The file stores no output layer if it is tied.
                tensors[name] = stored_at(file, offset, shapes[name], "float32")
                offset += 4 * math.prod(shapes[name])
    return tensors
