"""Reader of EAGLE-3 heads: folders of the library speculators, and of EAGLE's authors if they hold safetensors files.

In files of speculators, `config.json` describes the decoder layer in `transformer_layer_config`, and the first layer is
called `layers.0`. In files of the authors, the description is at the top of `config.json`, and the layer is called
`midlayer`. Both store the draft vocabulary as `d2t`: token `i` of the draft is the target's id `i + d2t[i]`. `t2d`, a
mask of the same ids, is not needed.

Sources: vllm-project/speculators and SafeAILab/EAGLE.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.array_plan import Plan, Stored, Tensors, check_tensors, translate, whole
from speccascade_jax.checkpoints.huggingface_config import Record, read_config
from speccascade_jax.checkpoints.infer import check_layers, expected_shapes
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.eagle3 import Eagle3Config
from speccascade_jax.storage import errors
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError
from speccascade_jax.storage.readers import json_object

_KIND, _DRAFT_SIZE, _LAYER = "speculators_model_type", "draft_vocab_size", "transformer_layer_config"
_UNUSED = re.compile(r"d2t|t2d|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")
_IN_LAYER = {
    **{f"self_attention/{ours}": f"self_attn.{theirs}_proj"
       for ours, theirs in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()},
    **{f"self_attention/{name}_norm": f"self_attn.{name[0]}_norm" for name in ("query", "key")},
    "mlp/wi_0": "mlp.gate_proj", "mlp/wi_1": "mlp.up_proj", "mlp/wo": "mlp.down_proj", "hidden_norm": "hidden_norm",
    "pre_self_attention_layer_norm": "input_layernorm", "pre_mlp_layer_norm": "post_attention_layernorm",
}  # fmt: skip
_NAMES = {
    "token_embedder": "embed_tokens", "decoder/decoder_norm": "norm", "decoder/logits_dense": "lm_head",
    "decoder/fc": "fc", "decoder/input_norm": "input_norm",
    **{f"decoder/layers_{{i}}/{ours}": f"layers.{{i}}.{theirs}" for ours, theirs in _IN_LAYER.items()},
}  # fmt: skip
"""This package's name of a module -> its name in speculators."""


def is_head(directory: Path) -> bool:
    """Returns whether a folder's `config.json` describes an EAGLE-3 head or another kind of head from speculators."""
    try:
        entries = json_object(directory / huggingface.CONFIG, COPY_AGAIN)
    except (OSError, ValueError):
        return False
    return _KIND in entries or _DRAFT_SIZE in entries


def open_directory(path: Path) -> Stored:
    """Opens the folder of a head. Its configuration lacks the target's layers if `config.json` names none.

    Raises:
        CheckpointError: the head is of another kind, or an option is not supported; tensors are missing, unknown,
            damaged or of a wrong shape. Names the entry or the tensor, and the remedy.
    """
    file = path / huggingface.CONFIG
    entries = json_object(file, COPY_AGAIN, CheckpointError)
    tensors = _renamed(huggingface.verified(path, huggingface.open_tensors(path)))
    try:
        config = _config(Record(file, entries), tensors)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    check_layers(file, config, len(tensors))
    plan = _plan(config)
    check_tensors(path, plan, tensors, lambda name: _UNUSED.fullmatch(name) is not None)
    return Stored(path, f"EAGLE-3 head{', speculators' if _KIND in entries else ''}", tensors, config, plan)


def _renamed(tensors: Tensors) -> Tensors:
    """Returns the tensors under the names of speculators."""
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _config(record: Record, tensors: Tensors) -> Eagle3Config:
    """Returns the configuration of a head."""
    record.only(_KIND, ("eagle3",), "eagle3")
    layer = record.get(_LAYER, {}) if _KIND in record.entries else record.entries
    if not isinstance(layer, dict):
        raise CheckpointError(f"{record.file}: {_LAYER} is {layer!r:.200}: give a Llama's entries of config.json")
    # A head never shares its output layer with its embedding, whatever its target does.
    layer = {"model_type": "llama", **layer, "tie_word_embeddings": False}
    Record(record.file, layer, _LAYER).only("model_type", ("llama", "qwen3"))
    base: Any = read_config(record.file, layer)
    if set(base.pattern) != {"global"}:
        raise CheckpointError(
            f"{record.file}: the head has attention windows, which are not supported: choose a head without them"
        )
    options = {field.name: getattr(base, field.name) for field in dataclasses.fields(DecoderConfig)}
    draft_size = record.size(_DRAFT_SIZE, base.vocab_size)
    inner = record.get("eagle_config", {})
    layers = record.get(_LAYERS, inner.get(_LAYERS) if isinstance(inner, dict) else None) or ()
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise CheckpointError(f"{record.file}: {_LAYERS} is {layers!r:.200}: give a list of layers")
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    options |= {name: record.flag(name, False) for name in names}
    return Eagle3Config(
        **options,
        draft_vocab_size=draft_size,
        target_ids=_target_ids(record.file, tensors, draft_size) if draft_size != base.vocab_size else (),
        target_width=record.size("target_hidden_size", base.d_model),
        # Implementations of targets collect the states in the order of the layers, whatever the order of this list.
        layers=tuple(sorted(layers)),
        has_embedding="embed_tokens.weight" in tensors,
    )


_LAYERS = "eagle_aux_hidden_state_layer_ids"


def _target_ids(file: Path, tensors: Tensors, draft_size: int) -> tuple[int, ...]:
    """Returns the target's id of each token of the draft vocabulary."""
    if "d2t" not in tensors:
        raise CheckpointError(
            f"{file}: the draft vocabulary has {draft_size} tokens, but no tensor d2t maps them to the target's ids: "
            f"{COPY_AGAIN}"
        )
    if tensors["d2t"].shape != (draft_size,) or "int" not in tensors["d2t"].dtype:
        stored = f"d2t is {tensors['d2t'].dtype} {list(tensors['d2t'].shape)}"
        raise CheckpointError(f"{tensors['d2t'].file}: {stored}, but must be {draft_size} integers: {COPY_AGAIN}")
    try:
        offsets = tensors["d2t"].read()
    except UnreadableError as error:
        raise errors.damaged(file.parent, {"d2t": str(error)}) from error
    return tuple((offsets.astype(np.int64) + np.arange(draft_size)).tolist())


def _plan(config: Eagle3Config) -> Plan:
    """Returns the plan that maps each parameter of a head to its tensor."""
    plan: Plan = {}
    for name, shape in expected_shapes(config).items():
        module, leaf = name.rsplit("/", 1)
        number = re.fullmatch(r"decoder/fc_norm_(\d+)", module)
        source = f"fc_norm.{number[1]}" if number else translate(module, _NAMES)
        plan[name] = whole(f"{source}.{'bias' if leaf == 'bias' else 'weight'}", shape, transposed=leaf == "kernel")
    return plan
