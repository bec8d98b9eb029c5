"""Reader of Gemma 4's assistants, which transformers writes; `config.json` describes their layers in `text_config`.

Source: the model types `gemma4_assistant` and `gemma4_unified_assistant` of transformers 5.
"""

import dataclasses
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.array_plan import Plan, Stored, check_tensors, translate, vocabulary_ids, whole
from speccascade_jax.checkpoints.huggingface_config import Record, read_config
from speccascade_jax.checkpoints.infer import check_layers, expected_shapes
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.gemma4_assistant import AssistantConfig
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError
from speccascade_jax.storage.readers import json_object

_KINDS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
"""`model_type` of an assistant -> that of its layers."""
_ORDER, _SHARED = "masked_embedding.token_ordering", "num_kv_shared_layers"
_NAMES = huggingface.GEMMA4 | {
    "decoder/pre_projection": "pre_projection",
    "decoder/post_projection": "post_projection",
    "decoder/centroids": "masked_embedding.centroids",
    "decoder/clusters": _ORDER,
}
"""This package's name of a module -> its name in transformers."""


def is_assistant(directory: Path) -> bool:
    """Returns whether a folder's `config.json` describes an assistant."""
    return huggingface.model_type(directory) in _KINDS


def open_directory(path: Path) -> Stored:
    """Opens the folder of an assistant.

    Raises:
        CheckpointError: an option is not supported; tensors are missing, unknown, damaged or of a wrong shape. Names
            the entry or the tensor, and the remedy.
    """
    file = path / huggingface.CONFIG
    record = Record(file, json_object(file, COPY_AGAIN, CheckpointError))
    try:
        config = _config(record)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    tensors = huggingface.verified(path, huggingface.open_tensors(path))
    check_layers(file, config, len(tensors))
    plan, unused = _plan(config), huggingface.harmless(config)
    check_tensors(path, plan, tensors, lambda name: any(pattern.fullmatch(name) for pattern in unused))
    if config.num_centroids is not None:
        tensors[_ORDER] = vocabulary_ids(_ORDER, tensors[_ORDER], config.num_embeddings)
    return Stored(path, f"Hugging Face, {record.get('model_type')}", tensors, config, plan)


def _config(record: Record) -> AssistantConfig:
    """Returns the configuration of an assistant."""
    record.only("quantization_config", (None,))
    record.only("tie_word_embeddings", (True,), True)
    kind = _KINDS[record.get("model_type")]
    text = record.inner("text_config", kind)
    layers = text.layers("num_hidden_layers")
    text.only(_SHARED, (layers, 0), layers)
    text.only("enable_moe_block", (False,), False)
    # All layers of an assistant use the target's keys and values. `read_config` refuses this, because in a model with a
    # cache some layer must have keys, so the entry is replaced.
    base: Any = read_config(record.file, {**text.entries, _SHARED: 0})
    if base.layer_input is not None:
        raise CheckpointError(f"{record.file}: text_config.hidden_size_per_layer_input is {base.layer_input}: give 0")
    options = {field.name: getattr(base, field.name) for field in dataclasses.fields(DecoderConfig)}
    clusters = record.size("num_centroids", 2048) if record.flag("use_ordered_embeddings", False) else None
    return AssistantConfig(
        # The output layer of an assistant has no cap, whatever its configuration says.
        **options | {"output_cap": None, "tied": True},
        target_width=record.size("backbone_hidden_size", 1536 if kind == "gemma4_text" else 3840),
        num_centroids=clusters,
        active_centroids=record.size("centroid_intermediate_top_k", 32),
    )


def _plan(config: AssistantConfig) -> Plan:
    """Returns the plan that maps each parameter of an assistant to its tensor."""
    plan: Plan = {}
    for name, shape in expected_shapes(config).items():
        module, leaf = name.rsplit("/", 1)
        source = translate(module, _NAMES)
        plain = leaf == "ids" or source.endswith("_scalar")
        plan[name] = whole(source if plain else f"{source}.weight", shape, transposed=leaf == "kernel")
    return plan
