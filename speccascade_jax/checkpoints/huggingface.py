"""Directories of transformers: `config.json` and safetensors, whole or in shards, for T5, Gemma 2, Llama and Qwen 2.5.

Kernels are stored `[out, in]`, so all matrices but embeddings are transposed. Where the configuration ties the output
layer to the embedding, a stored `lm_head.weight` is ignored, as transformers does.
"""

import re
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import checksums, safetensors
from speccascade_jax.checkpoints.array_plan import Config, Plan, Stored, as_it_is, check_tensors, transposed
from speccascade_jax.checkpoints.arrays import Tensors
from speccascade_jax.checkpoints.huggingface_config import read_config
from speccascade_jax.checkpoints.infer import check_layers, expected_shapes
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.storage.checksums import read
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, listing
from speccascade_jax.storage.readers import json_object, parsed

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers that older releases stored, copies of the embedding, and a bias that T5's first files hold in vain.
_HARMLESS = re.compile(
    r".*rotary_emb\.inv_freq|(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


def model_type(directory: Path) -> str | None:
    """What `config.json` says the model is; `None` where there is no such file or entry."""
    try:
        found = json_object(directory / CONFIG, COPY_AGAIN).get("model_type")
    except (OSError, ValueError):
        return None
    return None if found is None else str(found)


def open_directory(path: Path) -> Stored:
    """Open a directory of transformers; tensors are compared with `checksums.json` where there is one.

    Raises:
        CheckpointError: an unsupported configuration; shards that are missing, truncated or damaged; tensors that are
            missing, without a place or of a wrong shape. Names file, tensor and remedy.
    """
    entries = _json(path / CONFIG)
    config = read_config(path / CONFIG, entries)
    tensors = open_tensors(path)
    check_layers(path / CONFIG, config, len(tensors))
    wanted = plan(config, entries, tensors)
    check_tensors(path, wanted, tensors, lambda name: bool(_HARMLESS.fullmatch(name)))
    return Stored(path, f"Hugging Face, {entries['model_type']}", checksums.verified(path, tensors), config, wanted)


def open_tensors(path: Path) -> Tensors:
    """The tensors of all shards, not yet read, in the order of their bytes.

    Raises:
        CheckpointError: shards or the index are missing or damaged, or a shard lacks a tensor that the index names.
    """
    if (path / WEIGHTS).is_file():
        return safetensors.open_file(path / WEIGHTS)
    if not (path / INDEX).is_file():
        found = listing(entry.name for entry in path.iterdir()) or "nothing"
        raise CheckpointError(
            f"{path} is incomplete: neither {WEIGHTS} nor {INDEX} is there (found {found}); {COPY_AGAIN}. Pickled "
            "weights (pytorch_model.bin) are not read: save them again with safetensors"
        )
    index = _json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(_is_name(file) for file in index.values()):
        raise CheckpointError(f"{path / INDEX} is damaged: its weight_map names no files; {COPY_AGAIN}")
    files = sorted(set(index.values()))
    if absent := [file for file in files if not (path / file).is_file()]:
        lost = [name for name, file in index.items() if file in absent]
        raise CheckpointError(
            f"{path} is incomplete: {len(absent)} of {len(files)} shards are missing ({listing(absent)}), and with "
            f"them {len(lost)} tensors ({listing(lost)}); {COPY_AGAIN}"
        )
    tensors: Tensors = {}
    for file in files:
        shard = safetensors.open_file(path / file)
        if gone := [name for name, owner in index.items() if owner == file and name not in shard]:
            raise CheckpointError(
                f"{path / file} lacks {len(gone)} tensors that {INDEX} places there ({listing(gone)}); {COPY_AGAIN}"
            )
        tensors |= {name: tensor for name, tensor in shard.items() if index.get(name, file) == file}
    return tensors


def _is_name(file: Any) -> bool:
    """A plain file name: an index may not lead out of its directory."""
    return isinstance(file, str) and Path(file).name == file


def _json(file: Path) -> dict[str, Any]:
    return parsed(read(file, CheckpointError), str(file), COPY_AGAIN, CheckpointError)


def plan(config: Config, entries: dict[str, Any], tensors: Tensors) -> Plan:
    """Every parameter of the configuration, and the tensor it comes from.

    Args:
        entries: of `config.json`; tensors: those that are there, for names that releases write differently. With none
            the names are those that a release writes today: what an exporter needs.
    """
    gemma = entries["model_type"] == "gemma2"
    prefix = "" if "embed_tokens.weight" in tensors else "model."  # a stack saved without its output layer has none
    made: Plan = {}
    for name, shape in expected_shapes(config).items():
        source = _t5_name(name) if isinstance(config, T5Config) else _decoder_name(name, prefix, gemma)
        turned = name.endswith(("kernel", "rel_embedding"))
        source = _copy_of(source, config, entries, tensors)
        made[name] = transposed(source, shape) if turned else as_it_is(source, shape)
    return made


def _copy_of(source: str, config: Config, entries: dict[str, Any], tensors: Tensors) -> str:
    """Tensors that are one in transformers are stored once, under any of their names: the one that is there."""
    names: tuple[str, ...] = ()
    if source == "shared.weight":
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) * config.tied))
    elif source == "lm_head.weight" and "scale_decoder_outputs" in entries:
        names = ("shared.weight",)  # release 5 ties T5's output always, and scales it or not
    elif source.endswith("embed_tokens.weight") and config.tied:
        names = ("lm_head.weight",)
    return next((name for name in (source, *names) if name in tensors), source)


def _decoder_name(name: str, prefix: str, gemma: bool) -> str:
    if name in _OUTSIDE_DECODER:
        return _OUTSIDE_DECODER[name].format(prefix)
    _, layer, module = name.split("/", 2)
    module, leaf = module.rsplit("/", 1)
    theirs = (_GEMMA_NORMS if gemma else {}).get(module) or _DECODER_MODULES[module]
    return f"{prefix}layers.{layer.removeprefix('layers_')}.{theirs}.{'bias' if leaf == 'bias' else 'weight'}"


def _t5_name(name: str) -> str:
    if name in _OUTSIDE_T5:
        return _OUTSIDE_T5[name]
    stack, layer, module = name.split("/", 2)
    if layer == "relpos_bias":
        return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    part, inner, *_ = module.split("/")
    theirs = _T5_SUBLAYERS[stack][part] + (f".{_T5_KERNELS.get(inner, inner)}" if inner != "scale" else "")
    return f"{stack}.block.{layer.removeprefix('layers_')}.layer.{theirs}.weight"


_OUTSIDE_T5 = {
    "token_embedder/embedding": "shared.weight",
    "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
    "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
}
_T5_SUBLAYERS = {
    "encoder": {
        "pre_attention_layer_norm": "0.layer_norm",
        "attention": "0.SelfAttention",
        "pre_mlp_layer_norm": "1.layer_norm",
        "mlp": "1.DenseReluDense",
    },
    "decoder": {
        "pre_self_attention_layer_norm": "0.layer_norm",
        "self_attention": "0.SelfAttention",
        "pre_cross_attention_layer_norm": "1.layer_norm",
        "encoder_decoder_attention": "1.EncDecAttention",
        "pre_mlp_layer_norm": "2.layer_norm",
        "mlp": "2.DenseReluDense",
    },
}
_T5_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_OUTSIDE_DECODER = {
    "token_embedder/embedding": "{}embed_tokens.weight",
    "decoder/decoder_norm/scale": "{}norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
}
_DECODER_MODULES = {
    "self_attention/query": "self_attn.q_proj",
    "self_attention/key": "self_attn.k_proj",
    "self_attention/value": "self_attn.v_proj",
    "self_attention/out": "self_attn.o_proj",
    "mlp/wi_0": "mlp.gate_proj",
    "mlp/wi_1": "mlp.up_proj",
    "mlp/wo": "mlp.down_proj",
    "pre_self_attention_layer_norm": "input_layernorm",
    "pre_mlp_layer_norm": "post_attention_layernorm",
}
_GEMMA_NORMS = {
    "post_self_attention_layer_norm": "post_attention_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "post_mlp_layer_norm": "post_feedforward_layernorm",
}
