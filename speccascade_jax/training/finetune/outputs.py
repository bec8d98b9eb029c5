"""Batches in which a model's own outputs replace the data's, sampled in the engine's loop inside a compiled program.

The parameters are arguments of the program, so a student whose parameters change at every step needs no compilation.
They stay plain: for the batches of training (20 rows and more), XLA multiplies plain matrices on a CPU as fast as fused
or packed ones, which would have to be made anew at every step.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from speccascade_jax.core import rngs
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Array, Params, Prompt, is_packed
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.generations import engine_of
from speccascade_jax.models import sharding
from speccascade_jax.models.layers import CachedModel
from speccascade_jax.training.finetune.batches import Batch

STUDENT, TEACHER, CHOICE = range(3)
"""Purposes of random bits, as levels of `core.rngs`: a student's outputs, a teacher's, and the choice between them."""


def step_seed(seed: Array | int, step: Array | int) -> Array:
    """Returns the uint32 seed of the outputs of one training step; two steps of a run never share one.

    A hash of the run's seed is the seed of step 0, so runs whose seeds are neighbours do not share the seeds of later
    steps.
    """
    first = jax.random.bits(rngs.root(seed), dtype=jnp.uint32)
    return first + jnp.asarray(step).astype(jnp.uint32)


def starts_of(batch: Batch) -> Array:
    """Returns int32 `[B]`, the index in `tokens` of each row's first output token."""
    # Without an encoder, the first output token needs a token before it that predicts it.
    return jnp.maximum(batch.answers, 1) if batch.encoder_tokens is None else jnp.zeros_like(batch.answers)


def prompt_of(model: Any, batch: Batch) -> Prompt:
    """Returns the prompts of a batch: the encoder's input, or the tokens before the answers of a decoder-only model."""
    length = jnp.maximum(starts_of(batch), 1)
    if batch.encoder_tokens is None:
        inside = jnp.arange(batch.tokens.shape[1])[None] < length[:, None]
        return Prompt(jnp.where(inside, batch.tokens, 0), length)
    first = jnp.full((batch.tokens.shape[0], 1), model.config.start_id, jnp.int32)
    # An empty row of the encoder would have no token to attend to.
    return Prompt(first, length, batch.encoder_tokens, jnp.maximum(batch.encoder_lengths, 1))


def outputs_of(batch: Batch) -> tuple[Array, Array]:
    """Returns the outputs of a batch from column 0 on, int32 `[B, T]`, padded with 0, and their lengths `[B]`."""
    start, width = starts_of(batch), batch.tokens.shape[1]
    lengths = jnp.maximum(batch.lengths - start, 0)
    columns = jnp.minimum(start[:, None] + jnp.arange(width)[None], width - 1)
    tokens = jnp.take_along_axis(batch.tokens, columns, axis=1)
    return jnp.where(jnp.arange(width)[None] < lengths[:, None], tokens, 0), lengths


def with_outputs(batch: Batch, tokens: Array, lengths: Array) -> Batch:
    """Returns the batch with other outputs after its prompts, cut to the width of its rows.

    Args:
        batch: the batch; rows that only fill it up stay empty.
        tokens: int32 `[B, N]`, the outputs from column 0 on.
        lengths: int32 `[B]`, their lengths.
    """
    start, width = starts_of(batch)[:, None], batch.tokens.shape[1]
    total = jnp.where(batch.lengths > 0, jnp.minimum(start[:, 0] + lengths, width), 0)
    places = jnp.arange(width)[None]
    columns = jnp.clip(places - start, 0, tokens.shape[1] - 1)
    joined = jnp.where(places < start, batch.tokens, jnp.take_along_axis(tokens, columns, axis=1))
    return batch._replace(tokens=jnp.where(places < total[:, None], joined, 0), lengths=total)


@dataclass(frozen=True)
class Sampler:
    """Sampler of a model's outputs for the prompts of a batch; jit may trace it, and it is hashable.

    Attributes:
        model: the model, of which the engine runs the method "autoregressive".
        stop_ids: token ids that end an output.
        temperature: 0 decodes greedily, 1 samples from the model's own distribution.
        max_new_tokens: largest number of new tokens, the stop id included; 0: as many as fit a row of the batch.
        level: purpose of the random bits, such as `STUDENT`.
    """

    model: Any
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    max_new_tokens: int = 0
    level: int = STUDENT

    def __call__(self, params: Params, batch: Batch, seed: Array | int) -> Batch:
        """Returns the batch with the model's outputs; an output that does not fit its row lacks its end.

        The random bits of a row depend on `seed`, the row's number and `level` only.

        Args:
            params: plain parameters of the model, possibly spread over a mesh as training spreads them.
            batch: the batch, whose arrays keep their shapes.
            seed: uint32, such as `step_seed`.
        """
        rows, width = batch.tokens.shape
        room = width - starts_of(batch)
        most = min(self.max_new_tokens or width, width)
        generation = generate(
            engine_of(self.model, self.stop_ids),
            {"target": whole_rows(self.model, params), "drafter": {}},
            prompt_of(self.model, batch),
            seed,
            controls=make_controls(rows, temperature=self.temperature),
            max_new_tokens=most,
            level=self.level,
            # Rounds after the longest row is full would be cut off, and every round commits one token per row.
            most_rounds=jnp.max(jnp.where(batch.lengths > 0, jnp.minimum(room, most), 0)),
        )
        return with_outputs(batch, generation.tokens, generation.lengths)


def whole_rows(model: Any, params: Params) -> Params:
    """Returns parameters in the layout for decoding: split along `model` only, and cast to the model's dtype.

    Training may also spread parameters along `data`. Without this function, every token would gather them again.
    """
    if not isinstance(model, CachedModel):
        return params

    def ready(path: str, leaf: Array) -> Array:
        if model.mesh is not None:
            leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(model.mesh, sharding.spec_of(path)))
        # Vectors and tables of biases keep their dtype, because norms and biases compute in float32.
        is_matrix = path.endswith(("kernel", "embedding")) and not path.endswith("rel_embedding")
        return leaf.astype(model.config.dtype) if is_matrix and not is_packed(leaf) else leaf

    return unflatten_dict({path: ready(path, leaf) for path, leaf in flatten_dict(params, sep="/").items()}, sep="/")
