"""Drafting of a whole block by a small T5 decoder, as one kernel for TPUs that reads the decoder's weights once.

XLA reads a draft model's weights from HBM at every draft step, and a step of T5 small is 180 operations. The kernel
copies all matrices to VMEM, where they stay for the whole block: it feeds a missed token, then feeds and draws one
token after another. Caches that fit stay in VMEM too (`resident_sizes`); of others, the kernel reads those of the next
rows while it computes. It rounds where XLA's path rounds.

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
        layers: per layer `qkv` `[E, 3 H K]`, the output's `[H K, E]`, the cross-attention's queries `[E, H K]` and
            output `[H K, E]`, both gated halves `[E, 2 F]`, and `[F, E]`.
        head: the output layer, `[E, M]`.
        scales: `[E]` each, scales of the norms in the order of their use: three per layer, and the last.
    """

    table: Array
    layers: tuple[tuple[Array, ...], ...]
    head: Array
    scales: tuple[Array, ...]


class Caches(NamedTuple):
    """Per layer, keys `[B * H, K, S]` and values `[B * H, S, K]`, and those of the encoder's `N` tokens."""

    keys: Layers
    values: Layers
    cross_keys: Layers
    cross_values: Layers


class Feed(NamedTuple):
    """Tokens and numbers with which the kernel feeds and draws.

    Attributes:
        start: int32 `[B]`, the slot of the first token that is fed.
        missed: bool `[B]`, whether a row is fed its missed token before its pending one.
        tokens: int32 `[B, 2]`, the missed token and the pending one.
        uniforms: float32 `[B, G]`, random numbers in [0, 1) of the draws.
        temperature: float32 `[B]`; 0 is greedy.
        bias: float32 `[B, H, T, S]`, the mask and relative bias of `T` consecutive slots' queries.
        first: int32 `[B]`, the slot of the first query of `bias`.
        cross_bias: float32 `[B, 1, 1, N]`.
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

        Entries of the logits that are no tokens are -inf.
        """
        # What no row needs, such as turn 0 or a draw, is told by scalars. The kernel's branches cannot depend on
        # vectors, which would have to be reduced first.
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
        """Returns the operands that are in VMEM as a whole, with rows in whole registers."""
        rows, heads = self.padded - self.rows, self.padded_heads - self.heads
        missing = self.turns - feed.uniforms.shape[1]  # the bonus position draws nothing
        uniforms = jnp.pad(feed.uniforms.T, ((0, missing), (0, rows)))[..., None]
        bias = jnp.pad(feed.bias, ((0, 0), (0, heads), (0, 0), (0, 0))).swapaxes(1, 2)
        scales = [scale[None] for scale in weights.scales]
        return jnp.pad(feed.temperature, (0, rows))[:, None], uniforms, bias, feed.cross_bias[:, 0], *scales

    def _call(self, *operands: Array) -> list[Array]:
        caches = operands[-2 * self.layers :]
        first, outputs, whole = len(operands) - len(caches), 2, 4 + 3 * self.layers + 1
        # The kernel copies these arrays itself. Pallas would copy a whole operand before the first turn, and twice.
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        # Turns 0 and 1 have the same block, which turn 1 fills.
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
        """Returns the arrays of keys and values that stay, and of those that are read anew."""
        dtype: Any = jnp.dtype(self.dtype)
        kept, buffers = self.kept(crossed), self.buffers(crossed)
        # an array without elements cannot be allocated, so one that nothing reads has the smallest size
        stay = (kept, 2, self.rows * self.heads, self.size, slots) if kept else (1, 1)
        # two halves: the kernel computes the rows of one while the rows of the other arrive
        near = (2, 2, buffers // 2 * self.heads, self.size, slots) if buffers else (1, 1)
        return [pltpu.VMEM(stay, dtype), pltpu.VMEM(near, dtype)]

    def _costs(self) -> pl.CostEstimate:
        """Returns the costs of a call, without those of a missed token, which is fed only after a block kept whole."""
        products = self.layers * sum(rows * columns for rows, columns in self.shapes) + self.width * self.entries
        return pl.CostEstimate(
            flops=2 * self.turns * self.rows * products,
            transcendentals=self.turns * self.rows * self.entries,
            bytes_accessed=self.moved_bytes,
        )
