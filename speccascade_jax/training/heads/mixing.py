"""Training batches for acceptance heads: random mixes of the target's tokens and the draft's proposals.

Huang et al. (2024), SpecDec++, section 3.3: token `Z_i` of a mix is the target's token `X_i` with probability
`from_target`, and otherwise the proposal `Y_i`. The loss counts only the positions with a proposal. Every epoch has new
mixes, and a batch depends only on seed and epoch. Batches of every width hold about the same number of positions, so
the programs that process their hidden states are compiled only once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import bucket
from speccascade_jax.core.types import Array, Params, Prompt, real_tokens
from speccascade_jax.models.teacher_forcing import states
from speccascade_jax.stopping.acceptance_head import with_law
from speccascade_jax.training.heads.shards import Examples

HELD_OUT = 2**31 - 1
"""Number that takes the place of the epoch in the seed of mixes for held-out prompts; no training epoch has it."""


class Batch(NamedTuple):
    """Batch of `B` examples with their row numbers in the data, `rows` `[B]`; rows of length 0 only fill it up."""

    prompt: Prompt
    rows: np.ndarray
    tokens: np.ndarray
    proposals: np.ndarray
    kept: np.ndarray
    max_q: np.ndarray
    drawn: np.ndarray
    lengths: np.ndarray


def uniforms(key: Array, rows: np.ndarray, width: int) -> Array:
    """Returns uniform numbers in [0, 1), float32 `[B, width]`, which depend only on key, row number and position."""
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(rows), width))
    zero = jnp.zeros(len(rows), jnp.int32)
    return rngs.RoundKeys(rngs.row_keys(key, jnp.asarray(rows), 0), zero, zero).uniform(slots, rngs.DRAFT)


def mix(key: Array, batch: Batch, from_target: float) -> tuple[Array, Array]:
    """Mixes the target's tokens with the draft's; returns the mix, int32 `[B, T]`, and the mask of draft tokens, bool.

    The random bits of a row depend only on `key` and the number of the row.
    """
    width = batch.tokens.shape[1]
    ours = uniforms(key, batch.rows, width) >= from_target
    counted = ours & (jnp.arange(width) < jnp.asarray(batch.lengths)[:, None])
    return jnp.where(ours, batch.proposals, batch.tokens), counted


Mixed = tuple[Array, Array, Array]
"""Flattened positions of a mix: the heads' inputs `[N, D + 2]`, labels `[N]`, and the mask of draft tokens `[N]`."""


def mix_key(seed: int, epoch: int | Array) -> Array:
    """Returns the random key of an epoch's mixes."""
    return jax.random.fold_in(rngs.root(seed), epoch)


@partial(jax.jit, static_argnames=("model", "from_target", "size"))
def mixed_states(model: Any, params: Params, batch: Batch, key: Array, from_target: float, size: int) -> Mixed:
    """Returns the heads' inputs and labels for a mix, flattened and padded to `size` positions.

    The hidden state of a proposal is computed after the mixed tokens. Its label, and the features of the draft's
    distribution, are those of the data, computed after the target's tokens.
    """
    z, counted = mix(key, batch, from_target)
    inputs = with_law(states(model, params, batch.prompt, z), jnp.asarray(batch.max_q), jnp.asarray(batch.drawn))
    missing = size - z.size

    def flat(x: Array) -> Array:
        x = x.reshape(z.size, *x.shape[2:])
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))

    return flat(inputs), flat(jnp.asarray(batch.kept)), flat(counted)


def split(prompts: Sequence[bytes], held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row numbers for training, and the row numbers held out; at least one of each.

    Each row is assigned at random to training or to evaluation. If several rows have the same prompt, the last one
    decides, and rows of this prompt that were assigned otherwise are left out. So no prompt is on both sides.

    Args:
        prompts: a key for each row's prompt (`shards.prompt_keys`).
        held_out: share of the rows that are held out, at least one row.
        seed: random seed of the assignment.

    Raises:
        ValueError: there are fewer than two prompts, or one side is empty.
    """
    count, last = len(prompts), {prompt: row for row, prompt in enumerate(prompts)}
    if len(last) < 2:
        raise ValueError(f"{len(last)} prompts are too few to hold some of them out: make more data")
    order = np.random.default_rng((seed, HELD_OUT)).permutation(count)
    side = np.zeros(count, bool)
    side[order[: min(max(1, round(held_out * count)), count - 1)]] = True
    stays = side == side[[last[prompt] for prompt in prompts]]
    train, aside = np.flatnonzero(stays & ~side), np.flatnonzero(stays & side)
    if not len(train) or not len(aside):
        raise ValueError(
            f"held_out={held_out} leaves no prompts on one side of the split of {len(last)}: make more data"
        )
    return train, aside


class Batches:
    """Examples in batches of at most `positions` positions (rows times width).

    Raises:
        ValueError: an example is longer than a batch.
    """

    def __init__(self, examples: Examples, positions: int):
        self.examples, self.positions = examples, positions
        encoder = np.asarray(real_tokens(jnp.asarray(examples.encoder_tokens)).sum(axis=1))
        longest = np.maximum(np.maximum(examples.lengths, examples.prompt_lengths), encoder)
        self.widths = np.asarray([bucket(int(length)) for length in longest])
        if self.widths.max() > positions:
            raise ValueError(
                f"batch_positions={positions} is too small for a row of width {self.widths.max()}: raise it"
            )

    def epoch(self, rows: np.ndarray, seed: int, epoch: int) -> list[Batch]:
        """Returns batches of all `rows` in random order, which depends on seed and epoch."""
        draws = np.random.default_rng((seed, epoch))
        cut = self.cut(draws.permutation(rows))
        return [self.batch(cut[n]) for n in draws.permutation(len(cut))]

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits row numbers into groups of rows with equal width, one for each batch; -1 fills a group up."""
        groups = []
        for width in np.unique(self.widths[rows]):
            same, size = rows[self.widths[rows] == width], self.positions // int(width)
            filled = np.pad(same, (0, -len(same) % size), constant_values=-1)
            groups += list(filled.reshape(-1, size))
        return groups

    def batch(self, rows: np.ndarray) -> Batch:
        """Returns the batch of one group of `cut`."""
        width, real = int(self.widths[rows[0]]), rows >= 0
        some = self.examples.rows(np.where(real, rows, rows[0]))
        prompt = some.prompt()
        encoder = None if prompt.encoder_tokens is None else prompt.encoder_tokens[:, :width]
        named = (some.tokens, some.proposals, some.kept, some.max_q, some.q_of_proposal)
        padded = [np.pad(array, [(0, 0), (0, max(0, width - array.shape[1]))]) for array in named]
        tokens, proposals, kept, max_q, drawn = (array[:, :width] for array in padded)
        prompt = Prompt(prompt.tokens[:, :width], prompt.length, encoder)
        lengths = np.where(real, some.lengths, 0)
        return Batch(prompt, rows.astype(np.int32), tokens, proposals, kept, max_q, drawn, lengths)
