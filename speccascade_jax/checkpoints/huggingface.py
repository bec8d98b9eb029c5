"""Directories of transformers: `config.json` and safetensors, whole or in shards, for T5, Gemma 2, Llama and Qwen 2.5.

Kernels are stored `[out, in]`, so all matrices but embeddings are transposed. Where the configuration ties the output
layer to the embedding, a stored `lm_head.weight` is ignored, as transformers does.
"""

import re
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import checksums, safetensors
from speccascade_jax.checkpoints.array_plan import Plan, Stored, as_it_is, check_tensors, transposed
from speccascade_jax.checkpoints.arrays import Tensors
from speccascade_jax.checkpoints.huggingface_config import read_config
from speccascade_jax.checkpoints.infer import check_layers, expected_shapes
from speccascade_jax.checkpoints.names import translate
from speccascade_jax.models.families import Config
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
    """Returns every parameter of the configuration, and the tensor it comes from.

    Args:
        entries: of `config.json`; tensors: those that are there, for names that releases write differently. With none
            the names are those that a release writes today: what an exporter needs.
    """
    names = _NAMES[entries["model_type"]]
    bare = "embed_tokens.weight" in tensors  # a stack saved without its output layer has no prefix
    pieces: Plan = {}
    for name, shape in expected_shapes(config).items():
        module, leaf = name.rsplit("/", 1)
        source = f"{translate(module, names)}.{'bias' if leaf == 'bias' else 'weight'}"
        source = _copy_of(source.removeprefix("model.") if bare else source, config, entries, tensors)
        is_transposed = leaf in ("kernel", "rel_embedding")
        pieces[name] = transposed(source, shape) if is_transposed else as_it_is(source, shape)
    return pieces


def _copy_of(source: str, config: Config, entries: dict[str, Any], tensors: Tensors) -> str:
    """Returns the name that is there of a tensor that transformers has several names for, and stores once."""
    names: tuple[str, ...] = ()
    if source == "shared.weight":
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) * config.tied))
    elif source == "lm_head.weight" and "scale_decoder_outputs" in entries:
        names = ("shared.weight",)  # release 5 ties T5's output always, and scales it or not
    elif source.endswith("embed_tokens.weight") and config.tied:
        names = ("lm_head.weight",)
    return next((name for name in (source, *names) if name in tensors), source)


_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o", "wi": "wi", "wi_0": "wi_0", "wi_1": "wi_1", "wo": "wo"}


def _t5_stack(stack: str, *sublayers: tuple[str, str, str]) -> dict[str, str]:
    """Returns the names of one stack's modules; `sublayers`: our name of each, that of its norm, and theirs."""
    names = {
        f"{stack}/{stack}_norm": f"{stack}.final_layer_norm",
        f"{stack}/relpos_bias": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
    }
    for number, (part, norm, theirs) in enumerate(sublayers):
        layer = f"{stack}.block.{{i}}.layer.{number}"
        names[f"{stack}/layers_{{i}}/pre_{norm}_layer_norm"] = f"{layer}.layer_norm"
        names |= {f"{stack}/layers_{{i}}/{part}/{name}": f"{layer}.{theirs}.{k}" for name, k in _KERNELS.items()}
    return names


_T5 = {
    "token_embedder": "shared",
    "decoder/logits_dense": "lm_head",
    **_t5_stack("encoder", ("attention", "attention", "SelfAttention"), ("mlp", "mlp", "DenseReluDense")),
    **_t5_stack(
        "decoder",
        ("self_attention", "self_attention", "SelfAttention"),
        ("encoder_decoder_attention", "cross_attention", "EncDecAttention"),
        ("mlp", "mlp", "DenseReluDense"),
    ),
}
_LLAMA = {
    "token_embedder": "model.embed_tokens",
    "decoder/decoder_norm": "model.norm",
    "decoder/logits_dense": "lm_head",
    "decoder/layers_{i}/self_attention/query": "model.layers.{i}.self_attn.q_proj",
    "decoder/layers_{i}/self_attention/key": "model.layers.{i}.self_attn.k_proj",
    "decoder/layers_{i}/self_attention/value": "model.layers.{i}.self_attn.v_proj",
    "decoder/layers_{i}/self_attention/out": "model.layers.{i}.self_attn.o_proj",
    "decoder/layers_{i}/mlp/wi_0": "model.layers.{i}.mlp.gate_proj",
    "decoder/layers_{i}/mlp/wi_1": "model.layers.{i}.mlp.up_proj",
    "decoder/layers_{i}/mlp/wo": "model.layers.{i}.mlp.down_proj",
    "decoder/layers_{i}/pre_self_attention_layer_norm": "model.layers.{i}.input_layernorm",
    "decoder/layers_{i}/pre_mlp_layer_norm": "model.layers.{i}.post_attention_layernorm",
}
_GEMMA2 = _LLAMA | {
    "decoder/layers_{i}/post_self_attention_layer_norm": "model.layers.{i}.post_attention_layernorm",
    "decoder/layers_{i}/pre_mlp_layer_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "decoder/layers_{i}/post_mlp_layer_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_NAMES = {"t5": _T5, "llama": _LLAMA, "qwen2": _LLAMA, "gemma2": _GEMMA2}
"""`model_type` -> our modules' names -> theirs."""
