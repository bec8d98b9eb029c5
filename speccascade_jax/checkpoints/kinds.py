"""The families of models: what `config.json` calls each, its configuration and its model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speccascade_jax.checkpoints.plan import Config
from speccascade_jax.models.decoder import DecoderConfig, DecoderLM
from speccascade_jax.models.t5 import T5, T5Config

Model = T5 | DecoderLM


@dataclass(frozen=True)
class Family:
    """The class of a family's configuration, and what makes a model of one."""

    config: type[T5Config] | type[DecoderConfig]
    model: Callable[[Any], Model]


def family(config: Config) -> str:
    """The name of a configuration's family."""
    return next(name for name, entry in FAMILIES.items() if isinstance(config, entry.config))


FAMILIES = {"t5": Family(T5Config, T5), "decoder": Family(DecoderConfig, DecoderLM)}
