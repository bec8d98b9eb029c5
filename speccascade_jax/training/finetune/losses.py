"""Cross-entropy per token, and the positions that count in it."""

from functools import partial

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array


def counted_positions(lengths: Array, answers: Array, width: int) -> Array:
    """Returns bool `[B, width]`: whether a position of `tokens` counts in the loss.

    A position counts if `answers <= position < lengths`. So the prompt of a decoder-only model and padding do not
    count, whatever their tokens are, and no position of a row of length 0 counts.

    Args:
        lengths: int32 `[B]`, number of real tokens of each row.
        answers: int32 `[B]`, index of the first token that counts.
        width: number of positions of each row.
    """
    position = jnp.arange(width)
    return (answers[:, None] <= position) & (position < lengths[:, None])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def token_losses(logits: Array, targets: Array, vocab_size: int, smoothing: float = 0.0, z_loss: float = 0.0) -> Array:
    """Returns float32 `[B, T]`: `-(1 - s) log P(target) - s mean_v log P(v) + z (log Z)^2`, in nats.

    Smoothing is that of Szegedy et al. (2016), section 7. T5X spreads `s` over the `vocab_size - 1` other entries
    instead, and subtracts the entropy of the smoothed target, which changes no gradient. `z (log Z)^2` keeps the
    normaliser Z of the softmax near 1, with z = 1e-4 in T5X (`cross_entropy_with_logits`).

    The logits are the only array of shape `[B, T, V]` that is kept for the backward pass, which computes the softmax
    again from the logits and `log Z`. Instead of one-hot targets, token ids are compared with an index range. Padding
    entries of the vocabulary are masked rather than sliced off, because a slice would move logits that are sharded
    along the vocabulary.

    Args:
        logits: `[B, T, num_embeddings]` of any float dtype; entries from `vocab_size` on are ignored, -inf included.
        targets: int32 `[B, T]`, below `vocab_size`, also at positions that do not count.
        vocab_size: number of real vocabulary entries.
        smoothing: s, the probability mass that is spread evenly over the `vocab_size` real entries.
        z_loss: z, the weight of the squared log-normaliser.
    """
    return _losses_and_normaliser(logits, targets, vocab_size, smoothing, z_loss)[0]


def _losses_and_normaliser(
    logits: Array, targets: Array, vocab_size: int, smoothing: float, z_loss: float
) -> tuple[Array, Array]:
    """Returns the losses and `log Z`, both float32 `[B, T]`."""
    index = jnp.arange(logits.shape[-1])
    real = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(jnp.where(index < vocab_size, real, -jnp.inf), axis=-1)
    chosen = jnp.sum(jnp.where(index == targets[..., None], real, 0.0), axis=-1)
    losses = log_z - (1.0 - smoothing) * chosen + z_loss * log_z**2
    if smoothing:
        losses -= smoothing / vocab_size * jnp.sum(jnp.where(index < vocab_size, real, 0.0), axis=-1)
    return losses, log_z


def _forward(
    logits: Array, targets: Array, vocab_size: int, smoothing: float, z_loss: float
) -> tuple[Array, tuple[Array, Array, Array]]:
    losses, log_z = _losses_and_normaliser(logits, targets, vocab_size, smoothing, z_loss)
    return losses, (logits, targets, log_z)


def _backward(
    vocab_size: int, smoothing: float, z_loss: float, kept: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, None]:
    """Returns the gradient of the losses by the logits, in their dtype."""
    logits, targets, log_z = kept
    index = jnp.arange(logits.shape[-1])
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    wanted = jnp.where(index == targets[..., None], 1.0 - smoothing, 0.0) + smoothing / vocab_size
    gradient = probabilities * (1.0 + 2.0 * z_loss * log_z[..., None]) - wanted
    real = jnp.where(index < vocab_size, gradient, 0.0)
    return (cotangent[..., None] * real).astype(logits.dtype), None


token_losses.defvjp(_forward, _backward)
