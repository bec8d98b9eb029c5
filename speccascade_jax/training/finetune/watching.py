"""Progress of training, norm of the gradient, tokens per second, and model FLOPs utilisation (MFU)."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from speccascade_jax.core.types import Array, Params
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.operations import cross_flops, encoder_flops, token_costs
from speccascade_jax.models.t5_config import T5Config
from speccascade_jax.runtime import hosts
from speccascade_jax.runtime.peaks import peak_flops
from speccascade_jax.training.finetune.schedule import Schedule

FORWARD_AND_BACKWARD = 3
"""Cost of a training step in forward passes: the backward pass has two matrix products for each product of the forward
pass, one with the inputs and one with the weights."""


def gradient_norm(gradients: Params) -> Array:
    """Returns the global norm of the gradients, float32 `[]`; the step computes it before any clipping."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)))


def training_flops(config: T5Config | DecoderConfig, lengths: Any, encoder_lengths: Any = None) -> Any:
    """Returns the floating-point operations of one training step on the real tokens of a batch.

    The count follows PaLM (Chowdhery et al., 2022, appendix B): the matrix products of the model, forward and backward,
    with attention of every token to every token of its row (or of its window). Padding, rematerialisation, a teacher,
    element-wise operations and the look-up of embeddings are not counted: they cost time, so they lower the
    utilisation. The lengths may be NumPy arrays or, inside a step, JAX arrays with the rows of all hosts.

    Args:
        config: a model's configuration.
        lengths: int `[B]`, number of tokens that a decoder reads in each row.
        encoder_lengths: int `[B]`, number of tokens that an encoder reads in each row.
    """
    # Converted to float, because sums of squared lengths could overflow int32.
    lengths = lengths * 1.0
    if isinstance(config, T5Config):
        forward = _t5_flops(config, lengths, encoder_lengths * 1.0)
    else:
        forward = _decoder_flops(config, lengths)
        if config.encoder is not None:
            encoded = encoder_lengths * 1.0
            forward += (encoder_flops(config, encoded) + cross_flops(config, lengths, encoded)).sum()
    return FORWARD_AND_BACKWARD * forward


def _t5_flops(c: T5Config, target: Any, source: Any) -> Any:
    """Returns the operations of a T5's forward pass."""
    costs = token_costs(c)
    encoder = costs.encoder_layer * source + costs.attention * source**2
    decoder = costs.layer * target + costs.cross * source + costs.attention * (target**2 + target * source)
    return (c.num_encoder_layers * encoder + c.num_decoder_layers * decoder + costs.logits * target).sum()


def _decoder_flops(c: DecoderConfig, lengths: Any) -> Any:
    """Returns the operations of a decoder-only model's forward pass."""
    total = token_costs(c).logits * lengths
    for number, window in enumerate(c.windows):
        costs = token_costs(c, number)
        keys = lengths if window is None else lengths.clip(max=window)
        total = total + costs.layer * lengths + costs.attention * lengths * keys
    return total.sum()


def speeds(tokens: float, flops: float, seconds: float, devices: Sequence[Any]) -> dict[str, float | None]:
    """Returns the speed of some steps: `tokens_per_second`, and `mfu` as a share of the devices' peak.

    Args:
        tokens: number of real tokens of these steps.
        flops: their operations by `training_flops`.
        seconds: time that they took.
        devices: all devices of the mesh, which are of one kind. Where their peak is unknown, `mfu` is `None`.
    """
    peak = peak_flops(devices[0])
    mfu = None if peak is None else flops / (seconds * peak * len(devices))
    return {"tokens_per_second": tokens / seconds, "mfu": mfu}


TELL_EVERY = 30.0
"""Seconds without a report after which a line shows that training continues."""


class Progress:
    """Lines that show that training continues when reports are rare: after the first step, then twice a minute.

    Args:
        schedule: the run's schedule.
        minutes: minutes that the run has taken before this process began.
    """

    def __init__(self, schedule: Schedule, minutes: float):
        self.schedule, self.minutes = schedule, minutes
        self.began = self.told_at = time.monotonic()
        self.first: tuple[float, float] | None = None

    def tell(self, step: int) -> None:
        """Logs a line in the first process if one is due; `step` is the number of the latest step that has started."""
        now = time.monotonic()
        # uses the clock of this process only, because agreeing on a time would make all processes wait for each other
        done = self.schedule.progress(step, self.minutes + (now - self.began) / 60)
        if self.first is None:
            self.first, self.told_at = (now, done), now
            if hosts.first():
                logging.info("the training step was compiled; %.0f s since the start", now - self.began)
        elif now - self.told_at > TELL_EVERY and hosts.first():
            self.told_at, (began, before) = now, self.first
            left = (now - began) * (1 - done) / (done - before) if done > before else float("nan")
            logging.info("step %d  %.1f%%, %.1f min left", step, 100 * done, left / 60)
