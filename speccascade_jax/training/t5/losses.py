"""What training minimises: label-smoothed cross-entropy and distillation.

Both return a sum over the real target positions (token 0 is padding), so that batches of any shape can be
combined. Nothing of shape `[B, T, V]` is built besides the logits: comparisons with an index range fuse into
the reductions, where a one-hot target would be another array of the logits' size.
"""

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array


def smoothed_cross_entropy(logits: Array, targets: Array, vocab_size: int, smoothing: float = 0.0) -> Array:
    """Sum of `-(1 - s) log P(target) - s mean_v log P(v)` in nats: Szegedy et al. (2016), section 7.

    Args:
        logits: float32 `[B, T, num_embeddings]`; entries from `vocab_size` on are ignored, -inf included.
        targets: int32 `[B, T]`, 0 where padded.
        smoothing: s, the mass spread evenly over the `vocab_size` real entries.
    """
    real = logits[..., :vocab_size]
    normaliser = jax.nn.logsumexp(real, axis=-1)
    at_target = jnp.arange(vocab_size) == targets[..., None]
    chosen = jnp.sum(jnp.where(at_target, real, 0.0), axis=-1)
    losses = normaliser - (1.0 - smoothing) * chosen
    if smoothing:
        losses -= smoothing * jnp.mean(real, axis=-1)
    return jnp.sum(jnp.where(targets > 0, losses, 0.0))


def distillation(logits: Array, teacher_logits: Array, targets: Array, vocab_size: int) -> Array:
    """Sum of `KL(teacher || student)` in nats: word-level distillation (Kim and Rush, 2016, section 3.1).

    Args:
        logits, teacher_logits: float32 `[B, T, num_embeddings]`, real entries first.
        targets: int32 `[B, T]`; says which positions are real (not 0), no more.
    """
    student = jax.nn.log_softmax(logits[..., :vocab_size])
    teacher = jax.nn.log_softmax(teacher_logits[..., :vocab_size])
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
    return jnp.sum(jnp.where(targets > 0, divergence, 0.0))
