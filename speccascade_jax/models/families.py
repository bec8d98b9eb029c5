"""Table of model families: checkpoint readers of every format and early exits look models up here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import PRESETS as DECODERS
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.models.t5_config import T5_PRESETS, infer_t5, t5_shapes

Config = T5Config | DecoderConfig
Model = T5 | DecoderLM
Shapes = dict[str, tuple[int, ...]]


class Family(NamedTuple):
    """A family of models: everything that reading and writing its parameters needs to know.

    Attributes:
        config, model: the classes of its configurations and of its models.
        shapes: configuration -> the shape of every parameter by name.
        depths: the fields of a configuration that count layers, the decoder's last.
        infer: (path for errors, shapes by name) -> the configuration that a checkpoint's names and shapes imply, or
            `None` if they belong to another family. Only formats that store no configuration need it; `None` if
            there is no such format.
    """

    config: type[Config]
    model: type[Model]
    shapes: Callable[[Any], Shapes]
    depths: tuple[str, ...]
    infer: Callable[[Path, Shapes], Config | None] | None = None


FAMILIES = {
    "t5": Family(T5Config, T5, t5_shapes, ("num_encoder_layers", "num_decoder_layers"), infer_t5),
    "decoder": Family(DecoderConfig, DecoderLM, parameter_shapes, ("num_layers",)),
}
"""Model families by their name in a checkpoint's `config.json`."""


PRESETS: dict[str, Config] = {**T5_PRESETS, **DECODERS}
"""The configurations of published models of all families, by name."""


def family_name(config: Config) -> str:
    """Returns the name of a configuration's family."""
    return next(name for name, family in FAMILIES.items() if isinstance(config, family.config))


def family_of(config: Config) -> Family:
    """Returns the family of a configuration."""
    return FAMILIES[family_name(config)]


def model_from(config: Config) -> Model:
    """Returns the model of a configuration."""
    # The annotation joins the families' constructors, each of which accepts its own configuration only.
    model: Callable[[Any], Model] = family_of(config).model
    return model(config)
