"""Translation of a transformers `config.json` into this package's configuration; unsupported options raise errors.

Sources: the configuration classes of transformers (T5, Gemma 2, Llama, Qwen 2), releases 4 and 5. Keys that a file
omits get the default of their class in transformers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.infer import MOST_LAYERS
from speccascade_jax.models.decoder_config import DecoderConfig, RopeScaling
from speccascade_jax.models.families import Config
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.t5_config import PADDED_VOCABULARIES
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError
from speccascade_jax.storage.readers import json_object

_KINDS = {"sliding_attention": "local", "full_attention": "global"}


class Record:
    """The entries of a `config.json`, with getters that check the type and range of a value."""

    def __init__(self, file: Path, entries: dict[str, Any], inside: str = ""):
        self.file, self.entries, self._inside = file, entries, f"{inside}." if inside else ""

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry, or the default if it is absent or null."""
        value = self.entries.get(key)
        return default if value is None else value

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
                f"{self.file}: {self._inside}{key} is {layers:,}: at most {MOST_LAYERS:,} are supported"
            )
        return layers

    def flag(self, key: str, default: bool) -> bool:
        """Returns an entry that is true or false."""
        return bool(self._typed(key, default, (bool,), False, "true or false"))

    def number(self, key: str, default: float | None = None) -> float:
        """Returns an entry that is a number above 0."""
        return float(self._typed(key, default, (int, float), math.ulp(0.0), "a number above 0"))

    def cap(self, key: str, default: float) -> float | None:
        """Returns an entry that is a number above 0, or `None` if the entry is null (no cap)."""
        return None if key in self.entries and self.entries[key] is None else self.number(key, default)

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
    record = Record(file, entries)
    kind = record.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise CheckpointError(
            f"{file}: model_type {kind!r} is an unknown architecture; known: {', '.join(MODELS)}: choose a checkpoint "
            "of one of these"
        )
    record.only("quantization_config", (None,))
    for key, supported in _SUPPORTED[kind].items():
        record.only(key, supported, supported[0])
    try:
        return MODELS[kind](record)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{file}: {error}") from error


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
    # The entry is ignored: transformers never scales mT5's output layer, and Google's weights do not tie it.
    return dataclasses.replace(_t5(record), tied=False)


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


def _decoder(record: Record, max_length: int, layer_types: Sequence[str] = (), **options: Any) -> DecoderConfig:
    """Returns the configuration of a Llama, Qwen 2.5 or Gemma 2; `options` are the family's options and defaults."""
    rows, heads, width = record.size("vocab_size"), record.size("num_attention_heads"), record.size("hidden_size")
    base, scaling = _rope(record)
    pattern = _pattern(record, layer_types) if layer_types else ("global",)
    return DecoderConfig(
        vocab_size=rows,
        num_embeddings=rows,
        d_model=width,
        num_layers=record.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=record.size("num_key_value_heads", options.pop("kv_heads", heads)),
        head_dim=record.size("head_dim", options.pop("head_dim", width // heads)),
        d_ff=record.size("intermediate_size"),
        tied=record.flag("tie_word_embeddings", options.pop("tied", False)),
        norm_epsilon=record.number("rms_norm_eps", 1e-6),
        rope_base=base,
        rope_scaling=scaling,
        pattern=pattern,
        window=record.size("sliding_window", 4096) if "local" in pattern else None,
        max_length=record.size("max_position_embeddings", max_length),
        **options,
    )


def _llama(record: Record) -> DecoderConfig:
    return _decoder(record, max_length=2048)


def _qwen2(record: Record) -> DecoderConfig:
    layers = record.layers("num_hidden_layers")
    first = record.get("max_window_layers", 28) if record.get("use_sliding_window", False) else layers
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _decoder(record, max_length=32_768, qkv_bias=True, layer_types=kinds)


def _gemma2(record: Record) -> DecoderConfig:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(record.layers("num_hidden_layers"))]
    return _decoder(
        record, max_length=8192, kv_heads=4, head_dim=256, activation="gelu", tied=True, post_norms=True,
        norm_offset=1.0, embedding_scale=math.sqrt(record.size("hidden_size")), layer_types=kinds,
        query_scale=record.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=record.cap("attn_logit_softcapping", 50.0),
        output_cap=record.cap("final_logit_softcapping", 30.0),
    )  # fmt: skip


def _pattern(record: Record, default: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern of "local" and "global" layers whose repetition gives all layers' kinds.

    The kinds come from the entry `layer_types`, or else from `default`.
    """
    types = record.get("layer_types", default)
    if not isinstance(types, list) or len(types) != len(default) or not set(types) <= _KINDS.keys():
        raise CheckpointError(
            f"{record.file}: layer_types is {types!r:.200}: give {len(default)} entries of {', '.join(_KINDS)}, or "
            "remove it"
        )
    kinds = [_KINDS[name] for name in types]
    lengths = range(1, len(kinds) + 1)
    period = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[:period])


def _rope(record: Record) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling of rotary frequencies.

    Release 5 of transformers stores both in `rope_parameters`, and release 4 in `rope_theta` and `rope_scaling`.
    """
    key = "rope_parameters" if record.get("rope_parameters") else "rope_scaling"
    entries = record.get(key, {})
    if not isinstance(entries, dict) or any(isinstance(value, dict) for value in entries.values()):
        raise CheckpointError(
            f"{record.file}: {key} is {entries!r:.200}, but only one set of RoPE parameters, shared by all layers, is "
            "supported"
        )
    rope = Record(record.file, {"rope_theta": record.get("rope_theta"), **entries}, key)
    for place in (record, rope):
        place.only("partial_rotary_factor", (1.0,), 1.0)
    kind = "type" if "type" in entries and "rope_type" not in entries else "rope_type"
    base = rope.number("rope_theta", 10_000.0)
    if rope.only(kind, ("default", "llama3"), "default") == "default":
        return base, None
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return base, RopeScaling(factor, low, high, rope.size("original_max_position_embeddings"))


MODELS: dict[str, Callable[[Record], Config]] = {
    "t5": _t5, "mt5": _mt5, "llama": _llama, "qwen2": _qwen2, "gemma2": _gemma2,
}  # fmt: skip
"""`model_type` -> the function that converts a `config.json` of this type to a configuration."""

_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "t5": {"feed_forward_proj": ("relu", "gated-gelu")},
    "mt5": {"feed_forward_proj": ("gated-gelu", "relu")},
    "llama": {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"hidden_act": ("silu", "swish")},
    "gemma2": {
        "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
        "use_bidirectional_attention": (False,),
    },
}  # fmt: skip
"""`model_type` -> name of an entry -> its supported values. The first value is the default of an absent entry."""
