"""Table of the model families, T5 and decoder-only, which checkpoint readers and early exits use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.models.decoder_presets import PRESETS as DECODERS
from speccascade_jax.models.eagle3 import Eagle3, Eagle3Config, eagle3_shapes
from speccascade_jax.models.gemma4_assistant import Assistant, AssistantConfig, assistant_shapes
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.models.t5_config import T5_PRESETS, infer_t5, t5_shapes

Config = T5Config | DecoderConfig
Model = T5 | DecoderLM
Shapes = dict[str, tuple[int, ...]]


class Family(NamedTuple):
    """Description of a model family, from which checkpoints of the family are read and written.

    Attributes:
        config, model: the classes of the family's configurations and models.
        shapes: function from a configuration to the shape of every parameter by name.
        depths: names of the configuration's fields that count layers; the decoder's field is the last.
        infer: function for formats that store no configuration. From a checkpoint's path (for errors) and its arrays'
            shapes by name, it returns the configuration that they imply, or `None` if the arrays belong to another
            family. `infer` itself is `None` if every format of the family stores a configuration.
    """

    config: type[Config]
    model: type[Any]
    shapes: Callable[[Any], Shapes]
    depths: tuple[str, ...]
    infer: Callable[[Path, Shapes], Config | None] | None = None


FAMILIES = {
    "t5": Family(T5Config, T5, t5_shapes, ("num_encoder_layers", "num_decoder_layers"), infer_t5),
    # The classes of heads are subclasses of the decoder's. Their rows come first, because the first match counts.
    "eagle3": Family(Eagle3Config, Eagle3, eagle3_shapes, ("num_layers",)),
    "gemma4_assistant": Family(AssistantConfig, Assistant, assistant_shapes, ("num_layers",)),
    "decoder": Family(DecoderConfig, DecoderLM, parameter_shapes, ("num_encoder_layers", "num_layers")),
}
"""The model families by name; the `config.json` of a checkpoint contains such a name."""


PRESETS: dict[str, Config] = {**T5_PRESETS, **DECODERS}
"""The configurations of published models of all families, by name."""


def family_name(config: Config) -> str:
    """Returns the name of the model family that a configuration belongs to."""
    return next(name for name, family in FAMILIES.items() if isinstance(config, family.config))


def family_of(config: Config) -> Family:
    """Returns the model family that a configuration belongs to."""
    return FAMILIES[family_name(config)]


def model_from(config: Config) -> Model:
    """Returns the model that a configuration describes, without parameters."""
    # The annotation is needed because each family's class accepts only its own kind of configuration.
    model: Callable[[Any], Model] = family_of(config).model
    return model(config)
