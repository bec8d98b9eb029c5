"""Drafting of a whole block by a small T5 decoder: one TPU kernel, which reads the decoder's weights once.

Step by step, XLA reads a draft model's weights from HBM at every draft step, and a step of T5 small is 180 operations.
The kernel copies all matrices to VMEM, where they stay for the whole block. It feeds the *missed* token, if the cache
lacks the token before the pending one because the last block was accepted in full. Then it feeds the pending token, and
draws and feeds one token after another. Caches that fit stay in VMEM too (`resident_sizes`). The kernel reads the other
caches from HBM in every turn, those of the next rows while it computes. It rounds where the layers without it round.

Shape letters: those of `core/types.py`, and here `E` is d_model, `F` is d_ff, `H` is the number of heads, `K` is
head_dim, `N` is the number of encoder tokens, `M` is the number of rows of the embedding, and `R` is `B` in whole
registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.core.types import Array
from speccascade_jax.models.cache import Layers
from speccascade_jax.models.resident_sizes import SUBLANES, Sizes
from speccascade_jax.models.resident_turns import run
from speccascade_jax.runtime import platforms


class Weights(NamedTuple):
    """A decoder's weights, in the dtype of its activations; each layer's matrices are in the order of their use.

    Attributes:
        table: the embedding, `[M, E]`.
        layers: per layer six matrices: self-attention's fused `qkv` `[E, 3 H K]` and output `[H K, E]`,
            cross-attention's query `[E, H K]` and output `[H K, E]`, and the feed-forward's gated units `[E, 2 F]` and
            output `[F, E]`.
        head: the output layer, `[E, M]`.
        scales: `[E]` each, the scales of the norms in the order of their use: three per layer, and the last norm's.
    """

    table: Array
    layers: tuple[tuple[Array, ...], ...]
    head: Array
    scales: tuple[Array, ...]


class Caches(NamedTuple):
    """A decoder's caches: per layer, self-attention's keys `[B * H, K, S]` and values `[B * H, S, K]`.

    `cross_keys` and `cross_values` are those of cross-attention, with the encoder's `N` tokens as slots.
    """

    keys: Layers
    values: Layers
    cross_keys: Layers
    cross_values: Layers


class Feed(NamedTuple):
    """Inputs of the kernel besides weights and caches.

    Attributes:
        start: int32 `[B]`, the slot of the first token that is fed.
        missed: bool `[B]`, whether the row's missed token is fed before its pending one.
        tokens: int32 `[B, 2]`, the missed token and the pending one.
        uniforms: float32 `[B, G]`, one uniform random number in [0, 1) for each draw.
        temperature: float32 `[B]`; 0 is greedy.
        bias: float32 `[B, H, T, S]`, the mask and relative bias of queries in `T` consecutive slots.
        first: int32 `[B]`, the slot of the first query of `bias`.
        cross_bias: float32 `[B, 1, 1, N]`, the mask of the encoder's padding.
    """

    start: Array
    missed: Array
    tokens: Array
    uniforms: Array
    temperature: Array
    bias: Array
    first: Array
    cross_bias: Array


@dataclass(frozen=True)
class Kernel(Sizes):
    """The kernel of these sizes."""

    def __call__(self, weights: Weights, caches: Caches, feed: Feed) -> tuple[Array, Array, Caches]:
        """Returns logits float32 `[B, turns, M]`, the drawn tokens int32 `[B, turns]`, and the caches.

        Logits of the embedding's padding rows are -inf.
        """
        # `sampled` and `late` let the kernel skip draws and turn 0 if no row needs them. They are reduced here, because
        # a branch of the kernel depends on a scalar.
        sampled = jnp.broadcast_to(jnp.any(feed.temperature > 0), feed.start.shape)
        late = jnp.broadcast_to(jnp.any(feed.missed), feed.start.shape)
        numbers = (feed.start, feed.missed, feed.tokens[:, 0], feed.tokens[:, 1], feed.first, sampled, late)
        # The slots of values are the last axis too, because a tile has 128 columns, and heads have fewer.
        values, cross_values = (tuple(jnp.swapaxes(x, -1, -2) for x in part) for part in (caches[1], caches[3]))
        outputs = self._call(
            jnp.stack([number.astype(jnp.int32) for number in numbers]),
            *self._whole(weights, feed),
            weights.table, weights.head, *(matrix for layer in weights.layers for matrix in layer),
            *caches.cross_keys, *cross_values, *caches.keys, *values,
        )  # fmt: skip
        logits, tokens, *written = outputs
        keys, values = written[: self.layers], tuple(jnp.swapaxes(x, -1, -2) for x in written[self.layers :])
        return logits.swapaxes(0, 1), tokens.swapaxes(0, 1), caches._replace(keys=tuple(keys), values=values)

    def _whole(self, weights: Weights, feed: Feed) -> tuple[Array, ...]:
        """Returns the operands that are in VMEM in full, with their rows padded to whole registers."""
        rows, heads = self.padded - self.rows, self.padded_heads - self.heads
        missing = self.turns - feed.uniforms.shape[1]  # the bonus position draws nothing
        uniforms = jnp.pad(feed.uniforms.T, ((0, missing), (0, rows)))[..., None]
        bias = jnp.pad(feed.bias, ((0, 0), (0, heads), (0, 0), (0, 0))).swapaxes(1, 2)
        scales = [scale[None] for scale in weights.scales]
        return jnp.pad(feed.temperature, (0, rows))[:, None], uniforms, bias, feed.cross_bias[:, 0], *scales

    def _call(self, *operands: Array) -> list[Array]:
        caches = operands[-2 * self.layers :]
        first, outputs, whole = len(operands) - len(caches), 2, 4 + 3 * self.layers + 1
        # The kernel copies matrices and caches itself. Pallas would copy each of them in full before the first turn,
        # and keep two buffers for it.
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        # Turns 0 and 1 have the same block of logits. Turn 0 draws nothing, and turn 1 fills the block.
        logits = pl.BlockSpec((1, self.rows, self.entries), lambda turn, _: (jnp.maximum(turn - 1, 0), 0, 0))
        results: list[Array] = pl.pallas_call(
            partial(run, self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.turns + 1,),
                in_specs=[*[pl.BlockSpec(memory_space=pltpu.VMEM)] * whole, *[anywhere] * (len(operands) - whole - 1)],
                out_specs=[logits, pl.BlockSpec(memory_space=pltpu.SMEM), *[anywhere] * len(caches)],
                scratch_shapes=self._scratch(),
            ),
            out_shape=[
                jax.ShapeDtypeStruct((self.turns, self.rows, self.entries), jnp.float32),
                jax.ShapeDtypeStruct((self.turns, self.rows), jnp.int32),
                *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
            ],
            # The caches are updated in place: a turn writes the tiles that hold its tokens.
            input_output_aliases={first + number: outputs + number for number in range(len(caches))},
            cost_estimate=self._costs(),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=self.vmem),
            interpret=platforms.interpreter(),
            name="resident_draft",
        )(*operands)
        return results

    def _scratch(self) -> list[Any]:
        dtype: Any = jnp.dtype(self.dtype)
        return [
            *(pltpu.VMEM((self.layers, *shape), dtype) for shape in self.shapes),
            pltpu.VMEM((self.width, self.entries), dtype),
            *self._cache_scratch(self.slots, crossed=False),
            *self._cache_scratch(self.fixed, crossed=True),
            pltpu.VMEM((self.rows, SUBLANES, self.width), dtype),
            pltpu.VMEM((self.padded, self.width), jnp.float32),
            pltpu.VMEM((self.padded, 3 * self.inner), jnp.float32),
            pltpu.VMEM((self.padded, self.inner), jnp.float32),
            pltpu.VMEM((self.padded, self.entries), jnp.float32),
            pltpu.SMEM((self.rows,), jnp.int32),
            pltpu.SemaphoreType.DMA((self.layers * len(self.shapes) + 1,)),
            pltpu.SemaphoreType.DMA((2, self.layers, 2)),
            pltpu.SemaphoreType.DMA((2, 2, 2)),
            pltpu.SemaphoreType.DMA((self.group, 2)),
            pltpu.SemaphoreType.DMA((self.rows,)),
        ]

    def _cache_scratch(self, slots: int, crossed: bool) -> list[Any]:
        """Returns scratch arrays for the keys and values that stay in VMEM, and for those that every turn reads."""
        dtype: Any = jnp.dtype(self.dtype)
        kept, buffers = self.kept(crossed), self.buffers(crossed)
        # An array that is not used has one element, because an array without elements cannot be allocated.
        stay = (kept, 2, self.rows * self.heads, self.size, slots) if kept else (1, 1)
        # There are two halves: the kernel computes with the rows in one while the next rows are copied to the other.
        near = (2, 2, buffers // 2 * self.heads, self.size, slots) if buffers else (1, 1)
        return [pltpu.VMEM(stay, dtype), pltpu.VMEM(near, dtype)]

    def _costs(self) -> pl.CostEstimate:
        """Returns the costs of a call without a missed token, which is fed only if the last block was all accepted."""
        products = self.layers * sum(rows * columns for rows, columns in self.shapes) + self.width * self.entries
        return pl.CostEstimate(
            flops=2 * self.turns * self.rows * products,
            transcendentals=self.turns * self.rows * self.entries,
            bytes_accessed=self.moved_bytes,
        )
