"""Reader of transformers directories (`config.json`, safetensors files) of the families in `huggingface_config.MODELS`.

Kernels are stored `[out, in]`, so all matrices except embeddings are transposed. A configuration may tie the output
layer to the embedding although a different `lm_head.weight` is stored. The stored output layer is then used, as in
transformers 5.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.checkpoints import expert_tensors, safetensors
from speccascade_jax.checkpoints.array_plan import Plan, Stored, Tensor, Tensors, check_tensors, translate, whole
from speccascade_jax.checkpoints.huggingface_config import read_config
from speccascade_jax.checkpoints.infer import check_layers, expected_shapes
from speccascade_jax.models.experts import EXPERTS
from speccascade_jax.models.families import Config
from speccascade_jax.models.t5_config import T5Config
from speccascade_jax.storage import checksums, errors
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError, listing
from speccascade_jax.storage.readers import json_object, parsed

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_HEADS = (f"language_model.{_HEAD}", "lm_head.out_proj.weight")
"""Other names of the output layer: in transformers 4's files of models of text and images, and in T5Gemma's."""
_OTHER_WEIGHTS = (
    "flax_model.msgpack", "flax_model.msgpack.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "tf_model.h5",
)  # fmt: skip
_COMPANIONS = (".json", ".model")
_WRITE_AGAIN = f"copy the file again, or write {checksums.CHECKSUMS} again if the file was changed on purpose"
# Names of arrays that a plan may leave out: buffers that older releases stored, copies of the embedding, and an unused
# bias in T5's first files.
_HARMLESS = re.compile(
    r".*rotary_emb\.inv_freq|(encoder|decoder)\.embed_tokens\.weight|(language_model\.)?lm_head\.(out_proj\.)?weight|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
_IMAGES = re.compile(
    r"(model\.)?(encoder\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio|multi_modal_projector)"
    r"\..*|model\.encoder\.embed_tokens\.eoi_embedding"  # the embedding of the token that ends an image
)
_ROOTS = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")
"""Prefixes of a decoder's array names: with an output layer, without it, and inside models of text and images."""


def model_type(directory: Path) -> str | None:
    """Returns the `model_type` of `config.json`, or `None` if there is no such file or entry."""
    try:
        value = json_object(directory / CONFIG, COPY_AGAIN).get("model_type")
    except (OSError, ValueError):
        return None
    return None if value is None else str(value)


def config_of(directory: Path) -> Config:
    """Returns the configuration that `config.json` describes; raises `CheckpointError` if it is not supported."""
    return read_config(directory / CONFIG, _json(directory / CONFIG))


def open_directory(path: Path) -> Stored:
    """Opens a directory that transformers wrote. Tensors are compared with `checksums.json`, if it exists, when read.

    Raises:
        CheckpointError: the configuration is not supported; shards are missing, truncated or damaged; or tensors are
            missing, unknown or of a wrong shape. Names the file, the tensor and the remedy.
    """
    entries = _json(path / CONFIG)
    config = read_config(path / CONFIG, entries)
    stored = open_tensors(path)
    tensors = expert_tensors.stacked(stored)
    check_layers(path / CONFIG, config, len(tensors))
    wanted = plan(config, entries, tensors)
    head = _head(tensors)
    other = config.tied and _another_head(wanted["token_embedder/embedding"][0].source, head, tensors)
    if other:
        warnings.warn(
            f"{path / CONFIG} ties the output layer to the embedding, but a different {head} is stored. The stored one "
            "is used: set tie_word_embeddings to false",
            stacklevel=5,
        )
        wanted = plan(config := dataclasses.replace(config, tied=False), entries, tensors)
    images = "text_config" in entries or entries["model_type"] == "t5gemma2"
    unused = [*harmless(config), *([_IMAGES] if images else [])]
    check_tensors(path, wanted, tensors, lambda name: any(pattern.fullmatch(name) for pattern in unused))
    tensors = expert_tensors.stacked(verified(path, stored))
    if other and isinstance(config, T5Config):
        tensors[_HEAD] = _scaled(tensors[_HEAD], config.d_model**-0.5)
    return Stored(path, f"Hugging Face, {entries['model_type']}", tensors, config, wanted)


def harmless(config: Config) -> list[re.Pattern[str]]:
    """Returns patterns of arrays that files may hold but no parameter needs, such as unused keys of layers.

    Layers that attend to an earlier layer's keys and values have unused kernels for keys and values in some files.
    """
    if isinstance(config, T5Config):
        return [_HARMLESS]
    layers = "|".join(str(i) for i in range(config.num_layers) if "key" not in config.layer(i).projections)
    shared = re.compile(rf".*layers\.({layers})\.self_attn\.([kv]_proj|[kv]_norm)\.weight")
    return [_HARMLESS, shared] if layers else [_HARMLESS]


def _head(tensors: Tensors) -> str:
    """Returns the name that the output layer has in a checkpoint, or would have."""
    return next((name for name in _HEADS if name in tensors), _HEAD)


def _another_head(embedding: str, head: str, tensors: Tensors) -> bool:
    """Returns whether the tensors hold an output layer `head` whose values differ from the embedding's."""
    if embedding not in tensors or head not in tensors or embedding == head:
        return False
    try:
        return not np.array_equal(tensors[embedding].read(), tensors[head].read())
    except UnreadableError:
        return False  # The tensors are read again later, and that read raises an error which names the damaged one.


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Returns a tensor that is multiplied by `factor` when it is read.

    A T5 with a tied output layer multiplies the hidden states by this factor. If the output layer is loaded as an
    untied one, its kernel must be multiplied instead.
    """
    return tensor.mapped(lambda array: array.astype(np.float32) * np.float32(factor), "float32")


def open_tensors(path: Path) -> Tensors:
    """Returns the tensors of all shards by name, not yet read, in the order in which they are stored.

    Raises:
        CheckpointError: shards or the index are missing or damaged, or a shard lacks a tensor that the index names.
    """
    if (path / WEIGHTS).is_file():
        return safetensors.open_file(path / WEIGHTS)
    if not (path / INDEX).is_file():
        names = listing(entry.name for entry in path.iterdir()) or "nothing"
        if other := next((file for file in _OTHER_WEIGHTS if (path / file).is_file()), None):
            raise CheckpointError(
                f"{path} holds {other}, which is not read: give the model's {WEIGHTS}, or load it with transformers"
                f"{' (from_flax=True)' if other.endswith('.msgpack') else ''} and save_pretrained it"
            )
        raise CheckpointError(
            f"{path} is incomplete: it has neither {WEIGHTS} nor {INDEX} (found {names}); {COPY_AGAIN}"
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
    """Returns whether `file` is a file name without a folder, because an index must not refer to other folders."""
    return isinstance(file, str) and Path(file).name == file


def _json(file: Path) -> dict[str, Any]:
    return parsed(checksums.read(file, CheckpointError), str(file), COPY_AGAIN, CheckpointError)


def companions(directory: Path) -> list[str]:
    """Returns the names of the configuration and vocabulary files in a directory."""
    files = directory.iterdir() if directory.is_dir() else ()
    return sorted(file.name for file in files if file.suffix in _COMPANIONS and file.name != checksums.CHECKSUMS)


def write_checksums(directory: Path, tensors: Tensors, advance: Callable[[int, int], None] | None = None) -> Path:
    """Writes the digests of a directory's tensors and `companions` to `checksums.json`; returns its path.

    Without digests, a loader cannot detect a flipped bit in a weight. The file holds `{"format": 1, "algorithm":
    "blake2b-128", "bytes": {file: digest}, "files": {file: {tensor: {"shape", "dtype", "blake2b"}}}}`. The entry
    "bytes" has the digests of whole small files (`storage.checksums`), and "files" those of tensors.

    Args:
        directory: the folder that holds the tensors, into which `checksums.json` is written.
        tensors: the stored tensors by name.
        advance: function that is called after each tensor is read, with the tensor's bytes and the bytes of all
            tensors.

    Raises:
        CheckpointError: tensors cannot be read.
    """
    files: dict[str, dict[str, Any]] = {}
    failures = {}
    total = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        row = {"shape": list(tensor.shape), "dtype": tensor.dtype}
        try:
            row["blake2b"] = checksums.array_digest(tensor.read())
        except UnreadableError as error:
            failures[name] = error
        files.setdefault(tensor.file.name, {})[name] = row
        if advance:
            advance(tensor.nbytes, total)
    if failures:
        raise errors.unreadable(directory, failures, len(tensors))
    return checksums.write(directory, companions(directory), files=files)


def verified(directory: Path, tensors: Tensors) -> Tensors:
    """Returns the tensors so that reading one compares it with its digest in `checksums.json`, if that file exists.

    Raises:
        CheckpointError: `checksums.json` is damaged or of another format, or disagrees with a tensor's shape or dtype.
    """
    file = directory / checksums.CHECKSUMS
    if not file.is_file():
        return tensors
    files = checksums.record(directory, CheckpointError).get("files")
    if not isinstance(files, dict) or not all(isinstance(rows, dict) for rows in files.values()):
        raise CheckpointError(f"{file} is damaged (files is {files!r:.80}): write it again, or {COPY_AGAIN}")
    return {name: _verified(file, name, tensor, files) for name, tensor in tensors.items()}


def _verified(file: Path, name: str, tensor: Tensor, files: dict[str, Any]) -> Tensor:
    row = files.get(tensor.file.name, {}).get(name)
    if not isinstance(row, dict):
        raise CheckpointError(f"{file} does not list tensor {name} of {tensor.file.name}: {_WRITE_AGAIN}")
    if (row.get("shape"), row.get("dtype")) != (list(tensor.shape), tensor.dtype):
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {file.name} says "
            f"{row.get('dtype')} {row.get('shape')}: {_WRITE_AGAIN}"
        )
    return tensor.checked(row.get("blake2b"), f"{tensor.file.name}: its bytes do not match {checksums.CHECKSUMS}")


def plan(config: Config, entries: dict[str, Any], tensors: Tensors) -> Plan:
    """Returns the plan that maps each parameter of the configuration to its tensor.

    Args:
        config: the model's configuration, which determines its parameters.
        entries: the entries of `config.json`.
        tensors: the stored tensors, whose names differ between releases of transformers. If it is empty, the plan has
            the names of the current release, which an exporter needs.
    """
    names = _NAMES[entries["model_type"]]
    known = ("embed_tokens.weight", "norm.weight")
    root = next((root for root in _ROOTS if any(root + name in tensors for name in known)), "model.")
    pieces: Plan = {}
    for name, shape in expected_shapes(config).items():
        module, leaf = name.rsplit("/", 1)
        source = translate(module, names)
        if not source.endswith(("_scalar", ".scale", "_scale")):
            source += ".bias" if leaf == "bias" else ".weight"
        source = root + source.removeprefix("model.") if source.startswith("model.") else source
        source = _copy_of(_head(tensors) if source == _HEAD else source, config, entries, tensors)
        if f"/{EXPERTS}/" in name:
            pieces[name] = expert_tensors.pieces(source, shape, tensors)
        else:
            pieces[name] = whole(source, shape, transposed=leaf in ("kernel", "rel_embedding", "weight"))
    return pieces


def _copy_of(source: str, config: Config, entries: dict[str, Any], tensors: Tensors) -> str:
    """Returns the name under which a tensor is stored; transformers stores a shared tensor under one of its names."""
    names: tuple[str, ...] = ()
    if source == "shared.weight":
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) * config.tied))
    elif source == _HEAD and ("scale_decoder_outputs" in entries or entries["model_type"] == "mt5"):
        names = ("shared.weight",)  # Release 5 always ties T5's output layer and may store it as the embedding only.
    elif source.endswith("embed_tokens.weight") and config.tied:
        names = (_head(tensors),)
    return next((name for name in (source, *names) if name in tensors), source)


_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o", "wi": "wi", "wi_0": "wi_0", "wi_1": "wi_1", "wo": "wo"}


def _t5_stack(stack: str, *sublayers: tuple[str, str, str]) -> dict[str, str]:
    """Returns a table of module names for a T5's encoder or decoder: this package's name -> the name in transformers.

    Each of `sublayers` has this package's name of a sublayer, the name of its norm, and its name in transformers.
    """
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
_UMT5 = _T5 | {
    f"{stack}/layers_{{i}}/relpos_bias": f"{stack}.block.{{i}}.layer.0.SelfAttention.relative_attention_bias"
    for stack in ("encoder", "decoder")
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
    "decoder/layers_{i}/mlp/router": "model.layers.{i}.mlp.gate",
    "decoder/layers_{i}/mlp/experts/wi_0": "model.layers.{i}.mlp.experts.gate_proj",
    "decoder/layers_{i}/mlp/experts/wi_1": "model.layers.{i}.mlp.experts.up_proj",
    "decoder/layers_{i}/mlp/experts/wo": "model.layers.{i}.mlp.experts.down_proj",
    "decoder/layers_{i}/self_attention/query_norm": "model.layers.{i}.self_attn.q_norm",
    "decoder/layers_{i}/self_attention/key_norm": "model.layers.{i}.self_attn.k_norm",
    "decoder/layers_{i}/pre_self_attention_layer_norm": "model.layers.{i}.input_layernorm",
    "decoder/layers_{i}/pre_mlp_layer_norm": "model.layers.{i}.post_attention_layernorm",
}
_GEMMA2 = _LLAMA | {
    "decoder/layers_{i}/post_self_attention_layer_norm": "model.layers.{i}.post_attention_layernorm",
    "decoder/layers_{i}/pre_mlp_layer_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "decoder/layers_{i}/post_mlp_layer_norm": "model.layers.{i}.post_feedforward_layernorm",
}


def _t5gemma_stack(stack: str) -> dict[str, str]:
    """Returns a table of module names, as `_t5_stack` does, for the encoder or the decoder of a T5Gemma."""
    ours, theirs = f"{stack}/layers_{{i}}", f"model.{stack}.layers.{{i}}"
    names = {f"{stack}/{stack}_norm": f"model.{stack}.norm"}
    for part, attention in (("self_attention", "self_attn"), ("encoder_decoder_attention", "cross_attn")):
        names |= {
            f"{ours}/{part}/{name}": f"{theirs}.{attention}.{_KERNELS[name]}_proj"
            for name in ("query", "key", "value", "out")
        }
    names |= {f"{ours}/self_attention/{name}_norm": f"{theirs}.self_attn.{name[0]}_norm" for name in ("query", "key")}
    norms = {"self_attention": "self_attn", "cross_attention": "cross_attn", "mlp": "feedforward"}
    for time in ("pre", "post"):
        names |= {f"{ours}/{time}_{a}_layer_norm": f"{theirs}.{time}_{b}_layernorm" for a, b in norms.items()}
    units = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    return names | {f"{ours}/mlp/{a}": f"{theirs}.mlp.{b}_proj" for a, b in units.items()}


_T5GEMMA = {
    "token_embedder": "model.decoder.embed_tokens",
    "encoder/token_embedder": "model.encoder.embed_tokens",
    "decoder/logits_dense": "lm_head",
    **_t5gemma_stack("encoder"),
    **_t5gemma_stack("decoder"),
}
_T5GEMMA2 = _T5GEMMA | {"token_embedder": "model.encoder.embed_tokens"}
GEMMA4 = _GEMMA2 | {
    "layer_inputs/embedder": "model.embed_tokens_per_layer",
    "layer_inputs/projection": "model.per_layer_model_projection",
    "layer_inputs/norm": "model.per_layer_projection_norm",
    "decoder/layers_{i}/layer_input_gate": "model.layers.{i}.per_layer_input_gate",
    "decoder/layers_{i}/layer_input_out": "model.layers.{i}.per_layer_projection",
    "decoder/layers_{i}/post_layer_input_layer_norm": "model.layers.{i}.post_per_layer_input_norm",
    "decoder/layers_{i}/output": "model.layers.{i}.layer_scalar",
    "decoder/layers_{i}/post_dense_layer_norm": "model.layers.{i}.post_feedforward_layernorm_1",
    "decoder/layers_{i}/pre_mixture_layer_norm": "model.layers.{i}.pre_feedforward_layernorm_2",
    "decoder/layers_{i}/post_mixture_layer_norm": "model.layers.{i}.post_feedforward_layernorm_2",
    "decoder/layers_{i}/mixture/router": "model.layers.{i}.router.proj",
    "decoder/layers_{i}/mixture/router/norm": "model.layers.{i}.router.scale",
    "decoder/layers_{i}/mixture/factors": "model.layers.{i}.router.per_expert_scale",
    "decoder/layers_{i}/mixture/experts/wi_0": "model.layers.{i}.experts.gate_proj",
    "decoder/layers_{i}/mixture/experts/wi_1": "model.layers.{i}.experts.up_proj",
    "decoder/layers_{i}/mixture/experts/wo": "model.layers.{i}.experts.down_proj",
}
_NAMES = {
    "t5": _T5, "mt5": _T5, "umt5": _UMT5,
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "gemma"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma3"), _GEMMA2), "t5gemma": _T5GEMMA,
    "t5gemma2": _T5GEMMA2,
    **dict.fromkeys(("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"), GEMMA4),
}  # fmt: skip
"""`model_type` -> this package's name of a module -> its name in transformers."""
