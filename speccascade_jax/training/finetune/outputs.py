"""Batches in which outputs that a model samples replace the data's; the engine samples them in the compiled step.

The parameters are arguments of the program, so a student whose parameters change at every step needs no compilation.
They are not fused or packed as for decoding on a CPU: this would be repeated at every step, and at training's batch
sizes (20 rows and more) XLA multiplies plain matrices as fast.
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
"""Purposes of random bits, which `core.rngs` calls levels, so that their bits differ: sampling a student's outputs,
sampling a teacher's, and choosing between them."""


def step_seed(seed: Array | int, step: Array | int) -> Array:
    """Returns the uint32 seed for sampling the outputs of one training step; the steps of a run have different seeds.

    Step 0 uses a hash of the run's seed, and later steps count up from it. Without the hash, runs with neighbouring
    seeds would share most of their step seeds.
    """
    first = jax.random.bits(rngs.root(seed), dtype=jnp.uint32)
    return first + jnp.asarray(step).astype(jnp.uint32)


def starts_of(batch: Batch) -> Array:
    """Returns int32 `[B]`, the index in `tokens` of each row's first output token."""
    # Without an encoder, an output starts at index 1 at least, because a token before it must predict it.
    return jnp.maximum(batch.answers, 1) if batch.encoder_tokens is None else jnp.zeros_like(batch.answers)


def prompt_of(model: Any, batch: Batch) -> Prompt:
    """Returns the prompts of a batch: the encoder's input, or the tokens before the answers of a decoder-only model."""
    length = jnp.maximum(starts_of(batch), 1)
    if batch.encoder_tokens is None:
        inside = jnp.arange(batch.tokens.shape[1])[None] < length[:, None]
        return Prompt(jnp.where(inside, batch.tokens, 0), length)
    first = jnp.full((batch.tokens.shape[0], 1), model.config.start_id, jnp.int32)
    # At least one encoder token per row, because attention over an empty row is undefined.
    return Prompt(first, length, batch.encoder_tokens, jnp.maximum(batch.encoder_lengths, 1))


def outputs_of(batch: Batch) -> tuple[Array, Array]:
    """Returns the outputs of a batch from column 0 on, int32 `[B, T]`, padded with 0, and their lengths `[B]`."""
    start, width = starts_of(batch), batch.tokens.shape[1]
    lengths = jnp.maximum(batch.lengths - start, 0)
    columns = jnp.minimum(start[:, None] + jnp.arange(width)[None], width - 1)
    tokens = jnp.take_along_axis(batch.tokens, columns, axis=1)
    return jnp.where(jnp.arange(width)[None] < lengths[:, None], tokens, 0), lengths


def with_outputs(batch: Batch, tokens: Array, lengths: Array) -> Batch:
    """Returns the batch with `tokens` as the outputs after its prompts, cut to the width of the batch.

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
        model: the model, from which the engine samples with the method "autoregressive" (no draft).
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
        """Returns the batch with the model's outputs; an output that does not fit its row is cut.

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
            # Every round adds one token per row, so this many rounds fill the row with the most room.
            most_rounds=jnp.max(jnp.where(batch.lengths > 0, jnp.minimum(room, most), 0)),
        )
        return with_outputs(batch, generation.tokens, generation.lengths)


def whole_rows(model: Any, params: Params) -> Params:
    """Returns parameters in the layout for decoding: split along `model` only, and cast to the model's dtype.

    Training may also spread parameters along `data`. Without this function, they would be gathered for every token.
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
