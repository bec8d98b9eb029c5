"""Translation of a transformers `config.json` into this package's configuration; unsupported options raise errors.

Sources: the configuration classes of transformers for the types in `MODELS`, releases 4 and 5. Keys that a file omits
get the default of their class in transformers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.infer import MOST_LAYERS
from speccascade_jax.models.decoder_config import DecoderConfig, RopeScaling
from speccascade_jax.models.families import Config
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.t5_config import PADDED_VOCABULARIES
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, listing
from speccascade_jax.storage.readers import json_object

_NO_DEFAULTS: Mapping[str, Any] = {}
_KINDS = {"sliding_attention": "local", "full_attention": "global"}
_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "global_kv_heads"}
"""Entries that differ between local and global layers of Gemma 4 -> the configuration's names for global layers."""


class Record:
    """The entries of a `config.json`, with getters that check the type and range of a value.

    `defaults` holds values for absent entries. They take precedence over a getter's own argument `default`.
    """

    def __init__(
        self, file: Path, entries: dict[str, Any], inside: str = "", defaults: Mapping[str, Any] = _NO_DEFAULTS
    ):
        self.file, self.entries, self._inside = file, entries, f"{inside}." if inside else ""
        self._defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry, or the default if it is absent or null."""
        value = self.entries.get(key)
        return self._defaults.get(key, default) if value is None else value

    def inner(self, key: str, kind: str) -> "Record":
        """Returns the entries that are nested under `key` and describe a model of type `kind`."""
        entries = self.get(key)
        if not isinstance(entries, dict):
            raise CheckpointError(f"{self.file}: {key} is {entries!r:.200}: give the entries of a {kind} model")
        record = Record(self.file, {"model_type": kind, **entries}, key, _DEFAULTS.get(kind, {}))
        record.only("model_type", (kind,))
        return record

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], least: float, remedy: str) -> Any:
        value = self.get(key, default)
        if type(value) not in kinds or not value >= least:
            raise CheckpointError(f"{self.file}: {self._inside}{key} is {value!r}: give {remedy}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Returns an entry that is an integer of at least 1."""
        return int(self._typed(key, default, (int,), 1, "a whole number of at least 1"))

    def layers(self, key: str, default: int | None = None) -> int:
        """Returns an entry that is a number of layers; raises an error for more than `MOST_LAYERS`.

        Later code loops over the layers, which would take very long for the number in a damaged file.
        """
        if (layers := self.size(key, default)) > MOST_LAYERS:
            raise CheckpointError(
                f"{self.file}: {self._inside}{key} is {layers:,}: at most {MOST_LAYERS:,} are supported; correct the "
                f"file or {COPY_AGAIN}"
            )
        return layers

    def flag(self, key: str, default: bool) -> bool:
        """Returns an entry that is true or false."""
        return bool(self._typed(key, default, (bool,), False, "true or false"))

    def number(self, key: str, default: float | None = None) -> float:
        """Returns an entry that is a number above 0."""
        return float(self._typed(key, default, (int, float), math.ulp(0.0), "a number above 0"))

    def cap(self, key: str, default: float | None) -> float | None:
        """Returns an entry that is a number above 0, or `None` if the entry is null (no cap)."""
        value = self.entries.get(key, default)
        return None if value is None else self.number(key, default)

    def only(self, key: str, supported: Sequence[Any], default: Any = None) -> Any:
        """Returns an entry; raises an error unless its value is one of `supported`."""
        value = self.get(key, default)
        if value not in supported:
            known = " or ".join(repr(option) for option in supported)
            raise CheckpointError(
                f"{self.file}: {self._inside}{key} is {value!r}, but only {known} is supported: choose a checkpoint "
                "without it"
            )
        return value


def read_config(file: Path, entries: dict[str, Any]) -> Config:
    """Returns the model configuration that the entries of a `config.json` describe.

    Args:
        file: path of the `config.json`, for errors.
        entries: the contents of the file.

    Raises:
        CheckpointError: the `model_type` is unknown, an entry is missing or invalid, or an option is not supported;
            names the entry, its value and the supported values.
    """
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise CheckpointError(
            f"{file}: model_type {kind!r} is an unknown architecture; known: {', '.join(MODELS)}: choose a checkpoint "
            "of one of these"
        )
    try:
        return _translated(Record(file, entries, defaults=_DEFAULTS.get(kind, {})))
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _translated(record: Record) -> Config:
    """Returns the configuration for entries of a known `model_type`; raises an error for unsupported options."""
    return MODELS[record.get("model_type")](_supported(record))


def _supported(record: Record) -> Record:
    """Returns the entries unchanged; raises an error if an option is not supported for their `model_type`."""
    record.only("quantization_config", (None,))
    for key, supported in _SUPPORTED[record.get("model_type")].items():
        record.only(key, supported, supported[0])
    return record


def _t5(record: Record) -> T5Config:
    rows, layers = record.size("vocab_size"), record.layers("num_layers")
    gated = (
        record.get("feed_forward_proj", _SUPPORTED[record.get("model_type")]["feed_forward_proj"][0]) == "gated-gelu"
    )
    record.only("dense_act_fn", ("gelu_new",) if gated else ("relu",), "gelu_new" if gated else "relu")
    return T5Config(
        vocab_size=PADDED_VOCABULARIES.get(rows, rows),
        num_embeddings=rows,
        d_model=record.size("d_model"),
        num_heads=record.size("num_heads"),
        head_dim=record.size("d_kv"),
        d_ff=record.size("d_ff"),
        num_encoder_layers=layers,
        num_decoder_layers=record.layers("num_decoder_layers", layers),
        relative_buckets=record.size("relative_attention_num_buckets", 32),
        relative_max_distance=record.size("relative_attention_max_distance", 128),
        gated=gated,
        # Release 5 of transformers stores this option as scale_decoder_outputs, release 4 as tie_word_embeddings.
        tied=record.flag("scale_decoder_outputs", record.flag("tie_word_embeddings", True)),
        layer_norm_epsilon=record.number("layer_norm_epsilon", 1e-6),
        start_id=_start_id(record),
        pad_id=pad if (pad := record.get("pad_token_id", 0)) in range(rows) else 0,
    )


def _mt5(record: Record) -> T5Config:
    # The entry for a tied output layer is ignored: transformers never scales mT5's, and Google's weights do not tie it.
    return dataclasses.replace(_t5(record), tied=False)


def _umt5(record: Record) -> T5Config:
    # Google's files say that the output layer is not tied, so its input is not scaled, as in release 4 of transformers.
    # Release 5 ignores the entry, writes true, and always scales.
    return dataclasses.replace(_t5(record), layer_biases=True)


def _start_id(record: Record) -> int:
    """Returns the id of the token that decoding starts from, which is chosen as in `generate` of transformers."""
    file = record.file.parent / "generation_config.json"
    generation = json_object(file, COPY_AGAIN, CheckpointError) if file.is_file() else {}
    tables = (generation, record.entries)
    names = ("decoder_start_token_id", "bos_token_id")
    chosen = [table[name] for name in names for table in tables if table.get(name) is not None]
    start = [*chosen, record.get("pad_token_id", 0)][0]
    if type(start) is not int:
        raise CheckpointError(f"{record.file}: decoder_start_token_id is {start!r}: give one id")
    return start


def _decoder(
    record: Record, kinds: Sequence[str] = (), *, rope: Mapping[str, Any] | None = None, **options: Any
) -> DecoderConfig:
    """Returns the configuration of a decoder-only model.

    Args:
        record: the entries of its `config.json`.
        kinds: each layer's kind, one of `decoder_config.KINDS`; by default all are "global".
        rope: options of rotary frequencies; by default those that all layers share.
        options: the family's options of `DecoderConfig`.
    """
    rows, heads, width = record.size("vocab_size"), record.size("num_attention_heads"), record.size("hidden_size")
    pattern = _shortest(kinds or ("global",))
    # In transformers, null means as many key-value heads as query heads, whatever the family's default.
    is_null = record.entries.get("num_key_value_heads", heads) is None
    return DecoderConfig(
        vocab_size=rows,
        num_embeddings=rows,
        d_model=width,
        num_layers=record.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if is_null else record.size("num_key_value_heads", heads),
        head_dim=record.size("head_dim", width // heads),
        d_ff=record.size("intermediate_size"),
        tied=record.flag("tie_word_embeddings", False),
        norm_epsilon=record.number("rms_norm_eps", 1e-6),
        pattern=pattern,
        window=record.size("sliding_window", 4096) if "local" in pattern else None,
        max_length=record.size("max_position_embeddings"),
        **(_rope(record) if rope is None else rope),
        **options,
    )


def _has_window(record: Record) -> bool:
    """Returns whether a model has a window: an absent entry means the default window, null means none."""
    return record.entries.get("sliding_window", 4096) is not None


def _mistral(record: Record) -> DecoderConfig:
    return _decoder(record, _all_local(record, _has_window(record)))


def _all_local(record: Record, windowed: bool) -> list[str]:
    """Returns the kinds of layers that all have a window, or an empty list if none has."""
    return ["local"] * record.layers("num_hidden_layers") if windowed else []


def _experts(record: Record, units: str, **options: Any) -> dict[str, Any]:
    """Returns the options of layers of experts; `units` names the entry with an expert's number of hidden units."""
    # transformers 5 uses Mixtral's name of this entry for Qwen, too.
    key = "num_local_experts" if "num_local_experts" in record.entries else "num_experts"
    counts = {"num_experts": record.size(key), "experts_per_token": record.size("num_experts_per_tok")}
    return counts | {"expert_d_ff": record.size(units)} | options


def _mixtral(record: Record) -> DecoderConfig:
    windowed = record.get("sliding_window") is not None
    experts = _experts(record, "intermediate_size", norm_expert_weights=True)
    return _decoder(record, _all_local(record, windowed), **experts)


def _qwen3_moe(record: Record) -> DecoderConfig:
    layers, step = record.layers("num_hidden_layers"), record.size("decoder_sparse_step", 1)
    listed = record.get("mlp_only_layers", [])
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise CheckpointError(f"{record.file}: mlp_only_layers is {listed!r:.200}: give a list of numbers of layers")
    dense = tuple(layer for layer in range(layers) if (layer + 1) % step or layer in listed)
    normed = record.flag("norm_topk_prob", False)
    experts = _experts(record, "moe_intermediate_size", dense_layers=dense, norm_expert_weights=normed)
    windowed = record.flag("use_sliding_window", False) and _has_window(record)
    return _decoder(record, _all_local(record, windowed), qk_norm=True, **experts)


def _qwen2(record: Record, **options: Any) -> DecoderConfig:
    layers = record.layers("num_hidden_layers")
    windowed = record.flag("use_sliding_window", False) and _has_window(record)
    first = record.get("max_window_layers", 28) if windowed else layers
    kinds = _kinds(record, ["sliding_attention" if i >= first else "full_attention" for i in range(layers)])
    if "local" in kinds and not windowed:
        # Depending on its release, transformers ignores the window or ends with an error.
        raise CheckpointError(
            f"{record.file}: layer_types has sliding_attention, but there is no window: set use_sliding_window to true "
            "and sliding_window to a number, or remove layer_types"
        )
    return _decoder(record, kinds, **options)


def _smollm3(record: Record) -> DecoderConfig:
    layers, interval = record.layers("num_hidden_layers"), record.size("no_rope_layer_interval", 4)
    rotated = record.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
    # The entry's name is the opposite of its meaning: 1 stands for a layer that rotates.
    if not isinstance(rotated, list) or len(rotated) < layers or any(value not in (0, 1) for value in rotated):
        raise CheckpointError(f"{record.file}: no_rope_layers is {rotated!r:.200}: give {layers} entries of 0 or 1")
    if "local" in _kinds(record, ["full_attention"] * layers):
        raise CheckpointError(
            f"{record.file}: layer_types has sliding_attention, but only full_attention is supported in this family: "
            "choose a checkpoint without it"
        )
    return _decoder(record, ["global" if value else "unrotated" for value in rotated[:layers]])


def _gemma(record: Record, kinds: Sequence[str] = (), **options: Any) -> DecoderConfig:
    scale = math.sqrt(record.size("hidden_size"))
    return _decoder(record, kinds, activation="gelu", norm_offset=1.0, embedding_scale=scale, **options)


def _gemma2(record: Record) -> DecoderConfig:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(record.layers("num_hidden_layers"))]
    return _gemma(
        record, _kinds(record, kinds), post_norms=True,
        query_scale=record.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=record.cap("attn_logit_softcapping", 50.0),
        output_cap=record.cap("final_logit_softcapping", 30.0),
    )  # fmt: skip


def _t5gemma(record: Record) -> DecoderConfig:
    encoder, decoder = (_supported(record.inner(stack, "t5_gemma_module")) for stack in ("encoder", "decoder"))
    return _encoder_decoder(record, encoder, decoder, _gemma2)


def _encoder_decoder(
    record: Record, encoder: Record, decoder: Record, family: Callable[[Record], DecoderConfig], **options: Any
) -> DecoderConfig:
    """Returns the configuration of two stacks of a decoder-only family's layers; `options` are the encoder's."""
    # transformers takes ids that are absent at the top of the file from the decoder's entries.
    ids = {name: decoder.get(name) for name in ("bos_token_id", "pad_token_id")}
    record = Record(record.file, ids | record.entries)
    config = family(decoder)
    return dataclasses.replace(
        config,
        encoder=dataclasses.replace(family(encoder), tied=True, **options),
        tied=record.flag("tie_word_embeddings", True),
        start_id=_start_id(record),
        pad_id=pad if (pad := record.get("pad_token_id", 0)) in range(config.num_embeddings) else 0,
    )


def _gemma3_text(record: Record) -> DecoderConfig:
    layers, period = record.layers("num_hidden_layers"), record.size("sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    return _gemma(
        record, _kinds(record, kinds), post_norms=True, qk_norm=True,
        query_scale=record.number("query_pre_attn_scalar", 256) ** -0.5,
        output_cap=record.cap("final_logit_softcapping", None),
        rope=_ropes_by_kind(record),
    )  # fmt: skip


def _t5gemma2(record: Record) -> DecoderConfig:
    """Returns the configuration of the text model inside a model whose encoder also reads images."""
    text = record.inner("encoder", "t5gemma2_encoder").inner("text_config", "t5gemma2_text")
    decoder = record.inner("decoder", "t5gemma2_decoder")
    config = _encoder_decoder(record, _supported(text), _supported(decoder), _gemma3_text, centered_window=True)
    return dataclasses.replace(config, merged_attention=True, shared_embedding=True)


def _gemma3(record: Record) -> Config:
    """Returns the configuration of the text model inside a model that also reads images."""
    tied = record.flag("tie_word_embeddings", True)
    return dataclasses.replace(_translated(record.inner("text_config", "gemma3_text")), tied=tied)


def _gemma4_text(record: Record) -> DecoderConfig:
    layers, shared = record.layers("num_hidden_layers"), record.get("num_kv_shared_layers", 0)
    kinds = _kinds(record, ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)])
    kinds[-1] = "global"  # as in transformers, whatever the file says
    if type(shared) is not int or not 0 <= shared < layers:
        raise CheckpointError(
            f"{record.file}: num_kv_shared_layers is {shared!r}: give a number from 0 to {layers - 1}"
        )
    rows, width = record.size("vocab_size"), record.get("hidden_size_per_layer_input")
    if width:
        record.only("vocab_size_per_layer_input", (rows,), 262_144)
    wide = record.flag("use_double_wide_mlp", False) and shared
    return _decoder(
        record, kinds, activation="gelu", embedding_scale=math.sqrt(record.size("hidden_size")), query_scale=1.0,
        post_norms=True, qk_norm=True, value_norm=True, output_scale=True,
        output_cap=record.cap("final_logit_softcapping", None),
        keys_as_values=record.flag("attention_k_eq_v", False), kv_layers=layers - shared if shared else None,
        shared_d_ff=2 * record.size("intermediate_size") if wide else None,
        layer_input=record.size("hidden_size_per_layer_input") if width else None,
        rope=_ropes_by_kind(record), **_global_heads(record, kinds), **_gemma4_experts(record),
    )  # fmt: skip


def _gemma4_experts(record: Record) -> dict[str, Any]:
    """Returns the options of Gemma 4's layers of experts; an empty dictionary if the model has none."""
    if not record.flag("enable_moe_block", False):
        return {}
    counts = {"num_experts": record.size("num_experts"), "experts_per_token": record.size("top_k_experts")}
    units = {"expert_d_ff": record.size("moe_intermediate_size")}
    return counts | units | {"norm_expert_weights": True, "parallel_experts": True}


def _global_heads(record: Record, kinds: Sequence[str]) -> dict[str, int]:
    """Returns the sizes of global layers where they differ from those of local layers.

    Published files store them as `global_head_dim` and `num_global_key_value_heads`. Release 5.23 of transformers
    writes them for each layer, in `per_layer_config`, which is empty if the sizes are equal.
    """
    by_layer = record.get("per_layer_config")
    if by_layer is None:
        # transformers ignores this number of heads unless keys serve as values, too.
        heads = record.get("num_global_key_value_heads") if record.get("attention_k_eq_v") else None
        inner = {"head_dim": record.get("global_head_dim", 512)} | ({"num_key_value_heads": heads} if heads else {})
    elif by_layer == {}:
        inner = {}
    else:
        inner = _of_layers(record, by_layer, [i for i, kind in enumerate(kinds) if kind == "global"])
    sizes = Record(record.file, inner, "per_layer_config")
    return {_GLOBAL[name]: sizes.size(name) for name in inner if inner[name] != record.size(name)}


def _of_layers(record: Record, by_layer: Any, layers: list[int]) -> dict[str, Any]:
    """Returns the sizes that all global layers have in `per_layer_config`, whose keys may begin with zeros."""
    numbers = {int(key) if key.isdecimal() else None for key in by_layer} if isinstance(by_layer, dict) else set()
    sizes = list(by_layer.values()) if numbers == set(layers) else [None]
    if not isinstance(sizes[0], dict) or any(entry != sizes[0] for entry in sizes):
        raise CheckpointError(
            f"{record.file}: per_layer_config is {by_layer!r:.200}: give equal sizes for the layers "
            f"{', '.join(map(str, layers))} of full_attention, and for no other layers"
        )
    if not sizes[0].keys() <= _GLOBAL.keys():
        raise CheckpointError(
            f"{record.file}: per_layer_config has {listing(sizes[0])}, but only {listing(_GLOBAL)} may differ between "
            "layers: choose a checkpoint without it"
        )
    return sizes[0]


def _gemma4(record: Record) -> Config:
    """Returns the configuration of the text model inside a model that also reads images and sound."""
    tied, text = record.flag("tie_word_embeddings", True), f"{record.get('model_type')}_text"
    return dataclasses.replace(_translated(record.inner("text_config", text)), tied=tied)


def _kinds(record: Record, default: Sequence[str]) -> list[str]:
    """Returns each layer's kind, from the entry `layer_types` or else from `default`, in the words of transformers."""
    types = record.get("layer_types", default)
    if not isinstance(types, list) or len(types) != len(default) or not set(types) <= _KINDS.keys():
        raise CheckpointError(
            f"{record.file}: layer_types is {types!r:.200}: give {len(default)} entries of {', '.join(_KINDS)}, or "
            "remove it"
        )
    return [_KINDS[name] for name in types]


def _shortest(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern whose repetition gives all layers' kinds."""
    lengths = range(1, len(kinds) + 1)
    period = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[:period])


def _rope(record: Record) -> dict[str, Any]:
    """Returns the options of rotary frequencies that all layers share.

    Release 5 of transformers stores them in `rope_parameters`, and release 4 in `rope_theta` and `rope_scaling`. Both
    read `rope_scaling` if a file has both.
    """
    key = "rope_scaling" if record.get("rope_scaling") else "rope_parameters"
    return _frequencies(record, key, record.get(key, {}), record.get("rope_theta"))


def _ropes_by_kind(record: Record) -> dict[str, Any]:
    """Returns the options of rotary frequencies that differ between local and global layers.

    Release 5 stores them in `rope_parameters` by kind of layer. Release 4 scales the global layers by `rope_scaling`,
    and its `rope_local_base_freq` is the base of local layers. Entries of `rope_scaling` come first, as in release 5.
    """
    by_kind = record.get("rope_parameters", {})
    if not isinstance(by_kind, dict) or not by_kind.keys() <= _KINDS.keys():
        raise CheckpointError(
            f"{record.file}: rope_parameters is {by_kind!r:.200}: give one set for each of {', '.join(_KINDS)}"
        )
    local = by_kind.get("sliding_attention") or {}
    everywhere, scaling = by_kind.get("full_attention") or {}, record.get("rope_scaling", {})
    key = "rope_scaling" if scaling else "rope_parameters.full_attention"
    if isinstance(everywhere, dict) and isinstance(scaling, dict):
        everywhere = everywhere | scaling
    local = _frequencies(record, "rope_parameters.sliding_attention", local, record.get("rope_local_base_freq"))
    if local.keys() != {"rope_base"}:
        raise CheckpointError(
            f"{record.file}: rope_parameters.sliding_attention is scaled, but only 'default' is supported there: "
            "choose a checkpoint without it"
        )
    return _frequencies(record, key, everywhere, record.get("rope_theta")) | {"local_rope_base": local["rope_base"]}


def _frequencies(record: Record, key: str, entries: Any, base: Any) -> dict[str, Any]:
    """Returns the options of `DecoderConfig` for one set of rotary frequencies.

    Args:
        record: the entries of `config.json`.
        key: name of the set, for errors.
        entries: the set, which may lack the base.
        base: base of a set that lacks it; `None`: 10,000.
    """
    if not isinstance(entries, dict) or any(isinstance(value, dict) for value in entries.values()):
        raise CheckpointError(
            f"{record.file}: {key} is {entries!r:.200}, but only one set of RoPE parameters, shared by all layers, is "
            "supported: choose a checkpoint without it"
        )
    rope = Record(record.file, {"rope_theta": base, **entries}, key)
    kind = "type" if "type" in entries and "rope_type" not in entries else "rope_type"
    options: dict[str, Any] = {"rope_base": rope.number("rope_theta", 10_000.0)}
    scaling = rope.only(kind, ("default", "linear", "llama3", "proportional"), "default")
    if scaling == "proportional":
        factor, share = rope.number("factor", 1.0), rope.number("partial_rotary_factor", 1.0)
        return options | {"rope_factor": factor, "rope_share": share}
    for place in (record, rope):
        place.only("partial_rotary_factor", (1.0,), 1.0)
    if scaling == "linear":
        options["rope_factor"] = rope.number("factor")
    elif scaling == "llama3":
        factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        options["rope_scaling"] = RopeScaling(factor, low, high, rope.size("original_max_position_embeddings"))
    return options


MODELS: dict[str, Callable[[Record], Config]] = {
    "t5": _t5, "mt5": _mt5, "umt5": _umt5, "llama": _decoder, "mistral": _mistral,
    "qwen2": partial(_qwen2, qkv_bias=True), "qwen3": partial(_qwen2, qk_norm=True), "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral, "smollm3": _smollm3, "gemma": _gemma, "gemma2": _gemma2,
    "gemma3_text": _gemma3_text, "gemma3": _gemma3, "t5gemma": _t5gemma, "t5gemma2": _t5gemma2,
    "gemma4_text": _gemma4_text, "gemma4": _gemma4, "gemma4_unified_text": _gemma4_text, "gemma4_unified": _gemma4,
}  # fmt: skip
"""`model_type` -> the function that converts a `config.json` of this type to a configuration."""

_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}  # fmt: skip
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
    "qwen3_moe": {
        "num_key_value_heads": 4, "max_position_embeddings": 32_768, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "mixtral": {
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        "num_experts": 8, "num_experts_per_tok": 2,
    },
    "smollm3": {
        "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    "gemma": {
        "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "t5_gemma_module": {
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "bos_token_id": 2, "pad_token_id": 0,
    },
    # A model that reads images stores only what differs from these values.
    **dict.fromkeys(("gemma3_text", "t5gemma2_text", "t5gemma2_decoder"), {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "tie_word_embeddings": True, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "bos_token_id": 2,
        "pad_token_id": 0,
    }),
    "gemma4_text": _GEMMA4_DEFAULTS | {
        "max_position_embeddings": 131_072, "sliding_window": 512, "hidden_size_per_layer_input": 256,
    },
    "gemma4_unified_text": _GEMMA4_DEFAULTS | {"max_position_embeddings": 262_144, "sliding_window": 1024},
}  # fmt: skip
"""`model_type` -> name of an entry -> its value if it is absent or null (`num_key_value_heads`: only if absent)."""

_GEMMA: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), "use_bidirectional_attention": (False,),
}  # fmt: skip
_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "t5": {"feed_forward_proj": ("relu", "gated-gelu")},
    **dict.fromkeys(("mt5", "umt5"), {"feed_forward_proj": ("gated-gelu", "relu")}),
    "llama": {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": {
        "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "layer_types": (None,),
    },
    "qwen2": {"hidden_act": ("silu", "swish")},
    "qwen3": {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    "qwen3_moe": {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    "mixtral": {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    "smollm3": {
        "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,),
        "use_sliding_window": (False,),
    },
    # The first files call the tanh approximation "gelu".
    "gemma": {"hidden_act": ("gelu_pytorch_tanh", "gelu"), **_GEMMA},
    "gemma2": _GEMMA,
    "t5gemma": {"is_encoder_decoder": (True,)},
    "t5_gemma_module": _GEMMA,
    **dict.fromkeys(("gemma3_text", "t5gemma2_text", "t5gemma2_decoder"), {
        **_GEMMA, "attn_logit_softcapping": (None,),
    }),
    # The embeddings of encoder and decoder and the output layer are one array.
    "t5gemma2": {"is_encoder_decoder": (True,), "tie_word_embeddings": (True,)},
    "gemma3": {},
    # Text attends to earlier text only, even where images attend in both directions.
    "gemma4_text": _GEMMA | {"use_bidirectional_attention": (None, "vision")},
    "gemma4_unified_text": _GEMMA | {"use_bidirectional_attention": (None, "vision"), "enable_moe_block": (False,)},
    "gemma4": {}, "gemma4_unified": {},
}  # fmt: skip
"""`model_type` -> name of an entry -> its supported values. The first value is the default of an absent entry."""
