"""Layers of decoder-only models and of T5Gemma: rotary positions, attention, feed-forward, and the stack of layers.

Sources: RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), gated feed-forward (Shazeer, 2020),
grouped-query attention (Ainslie et al., 2023), soft caps, windows and post-norms (Gemma Team, 2024), norms of queries
and keys (Qwen Team, 2025), layers without rotary positions (Yang et al., 2025), shared keys and values and
embeddings for each layer (Gemma Team, 2025 and 2026), merged attention (Zhang et al., 2025, T5Gemma 2).

Shape letters: those of `core/types.py`, and here `N` is the number of query heads, `n` of key-value heads,
`g = N / n`, `K` is head_dim, `E` is d_model and `I` is layer_input. Keys are `[B * n, K, S]`, values `[B * n, S, K]`.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Params
from speccascade_jax.models.chains import chain, computes_around, in_stack, tiled_scales
from speccascade_jax.models.decoder_config import (
    DecoderConfig,
    LayerSizes,
)
from speccascade_jax.models.experts import MixtureOfExperts, activation, in_place
from speccascade_jax.models.layers import (
    EXITS,
    MASKED,
    KeysValues,
    RMSNorm,
    Slots,
    cross_keys_values,
    gated_units,
    in_chunks,
    normalized,
)
from speccascade_jax.models.product_chains import Link, Rotation
from speccascade_jax.models.products import Dense, Embed
from speccascade_jax.models.sharding import COLUMNS, HEADS, P, local, shards
from speccascade_jax.models.stacks import STACK, in_order, layer_at, over_layers, recomputed, recomputed_layer, stack_of
from speccascade_jax.models.triton_products import Norm
from speccascade_jax.runtime import platforms
from speccascade_jax.runtime.mesh import DATA

CHUNK = 256
"""Largest number of tokens whose attention is computed at once."""
Cross: TypeAlias = tuple[Array | KeysValues, Array]
"""Input of a layer's cross-attention: the encoder's output or the layer's keys and values, and `Encoded.real`."""


class Encoded(NamedTuple):
    """An encoder's output, as cross-attention reads it.

    Attributes:
        source: the states `[B, N, E]` of the encoder's width or, in a cache, each layer's keys `[B * n, K, N]` and
            values `[B * n, N, K]`; if the layers run in a scan, one pair for all layers, `[L, B * n, …]`.
        real: bool `[B, N]`, which tokens are not padding.
    """

    source: Array | tuple[KeysValues, ...]
    real: Array


class Turns(NamedTuple):
    """Cosines and sines of the angles of rotary positions, float32 `[B or 1, T, 1, K / 2]`.

    Attributes:
        cosine, sine: for the angle of each pair of coordinates.
        columns: for the TPU kernel, a cosine and a signed sine for each column of the fused `qkv` product on a device,
            `[B or 1, T, (N + 2 n) K]` (`with_columns`).
    """

    cosine: Array
    sine: Array
    columns: tuple[Array, Array] | None = None


def turns(config: DecoderConfig, positions: Array, rotation: str = "global") -> Turns:
    """Returns the cosines and sines of the rotary angles at `positions` int32 `[B or 1, T]`.

    `rotation` is one of `DecoderConfig.rotations`.
    """
    # The angles are always float32, because bfloat16 has too few digits for the angles of late positions.
    angles = positions[..., None, None].astype(jnp.float32) * config.frequencies(rotation)
    return Turns(jnp.cos(angles), jnp.sin(angles))


def with_columns(by: Turns, heads: int, values: int) -> Turns:
    """Returns turns with `columns` for `heads` heads of queries and keys, and `values` heads that are not rotated."""
    half = by.cosine.shape[-1]
    column = jnp.arange(2 * half * (heads + values))
    cosine, sine = (jnp.tile(part[:, :, 0], 2 * (heads + values)) for part in (by.cosine, by.sine))
    is_turned, is_first = column < 2 * half * heads, column % (2 * half) < half
    cosine = jnp.where(is_turned, cosine, 1.0)
    sine = jnp.where(is_turned, jnp.where(is_first, -sine, sine), 0.0)
    # Without the barrier, XLA would compute the columns in every iteration of a loop over layers.
    return by._replace(columns=jax.lax.optimization_barrier((cosine, sine)))


def turns_by_place(config: DecoderConfig, positions: Array) -> tuple[Turns, ...]:
    """Returns the `turns` of each of `DecoderConfig.places`; places with equal frequencies share their arrays."""
    by_rotation = {rotation: turns(config, positions, rotation) for rotation in dict.fromkeys(config.rotations)}
    return tuple(by_rotation[rotation] for rotation in config.rotations)


def rotate(x: Array, by: Turns, pairs: str) -> Array:
    """Applies rotary positions to `x` `[B, T, heads, K]`: rotates each pair of coordinates by its angle.

    The computation is in float32, and the result has the dtype of `x`. `pairs` is a value of
    `DecoderConfig.rope_pairs`.
    """
    x32 = x.astype(jnp.float32)
    if pairs == "halves":
        first, second = jnp.split(x32, 2, axis=-1)
    else:
        first, second = x32[..., 0::2], x32[..., 1::2]
    # Checkpoint formats disagree on which coordinates form a pair. The rotation of a pair is the same in all of them.
    turned = (first * by.cosine - second * by.sine, second * by.cosine + first * by.sine)
    out = jnp.concatenate(turned, axis=-1) if pairs == "halves" else jnp.stack(turned, axis=-1).reshape(x.shape)
    return out.astype(x.dtype)


def rotate_columns(x: Array, cosine: Array, sine: Array, size: int) -> Array:
    """Applies rotary positions, as `rotate` does for pairs of "halves", to heads side by side.

    `x` is `[B, T, heads * K]`, `size` is `K`, and `cosine` and `sine` are those of `Turns.columns`.
    """
    x32, half = x.astype(jnp.float32), size // 2
    is_first = jnp.arange(x.shape[-1]) % size < half
    other = jnp.where(is_first, jnp.roll(x32, -half, -1), jnp.roll(x32, half, -1))
    return (x32 * cosine + other * sine).astype(x.dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """Returns `cap · tanh(x / cap)`, or `x` if `cap` is `None`."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def dense(config: DecoderConfig, features: int, bias: bool = False) -> Dense:
    """Returns a layer that computes `x @ kernel`, and adds a bias if `bias` is true."""
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    return Dense(features, config.dtype, use_bias=bias, kernel_init=init)


def scaled(config: DecoderConfig, embedded: Array) -> Array:
    """Returns embeddings `[B, T, E]` times `embedding_scale`, the input of the first layer."""
    # The scale is rounded to the dtype of computation, as in Gemma's published code: √3584 is 59.75 in bfloat16.
    return embedded * jnp.asarray(config.embedding_scale, embedded.dtype)


def norm(config: DecoderConfig) -> RMSNorm:
    """Returns an RMS norm with the configuration's offset and epsilon."""
    return RMSNorm(config.norm_epsilon, config.dtype, config.norm_offset)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `number` is the index of the layer, on which the sizes depend.

    If the parameters hold one `qkv` kernel instead of three (`layers.fuse`), one matrix product computes the queries,
    keys and values.
    """

    config: DecoderConfig
    number: int = 0

    def setup(self) -> None:
        """Declares the kernels, separate and fused, and the norms of queries and keys."""
        c, self.sizes = self.config, self.config.layer(self.number)
        # The separate kernels and the fused one are all declared, because Flax creates only those that a call uses.
        keys = self.sizes.kv_heads * self.sizes.head_dim
        self.widths = (c.num_heads * self.sizes.head_dim, keys, keys)
        self.query, self.key, self.value = (dense(c, width, c.qkv_bias) for width in self.widths)
        self.qkv = dense(c, sum(self.widths), c.qkv_bias)
        self.out = dense(c, c.d_model)
        if c.qk_norm:
            self.query_norm, self.key_norm = norm(c), norm(c)

    def project(self, x: Array, by: Turns) -> tuple[Array, KeysValues | None]:
        """Returns queries `[B * n, g * T, K]` (scaled and rotated), keys and values, computed from `x` `[B, T, E]`.

        Keys and values are `None` if the layer has none.
        """
        states = self._projected(x, by, self._split, HEADS)
        return states[0], None if len(states) == 1 else (states[1], states[2])

    def _projected(self, x: Array, by: Turns, split: Callable[..., tuple[Array, ...]], layout: P) -> tuple[Array, ...]:
        """Multiplies `x` by the layer's query, key and value kernels; returns the results of `split` on the products.

        `split` runs on each device's columns, and its results have this layout on the mesh.
        """
        # If all rows share the angles (whole sequences from position 0), their first axis is 1 and cannot be sharded.
        turned = P(DATA if by.cosine.shape[0] > 1 else None)
        # The scales of the norms are the same for all heads, so every device holds them.
        scales = [part.scale(self.sizes.head_dim) for part in self._norms]
        shared, layouts = (by.cosine, by.sine, *scales), (turned, turned, *(P() for _ in scales))
        names = self.sizes.projections
        results = (layout,) * (1 if names == ("query",) else 3)
        if self.has_variable("params", "qkv"):
            return local(partial(self._split_fused, split), (COLUMNS, *layouts), results)(self.qkv(x), *shared)
        columns: Any = (COLUMNS,) * len(names)
        return local(split, (columns, *layouts), results)(tuple(getattr(self, name)(x) for name in names), *shared)

    @property
    def _norms(self) -> tuple[RMSNorm, ...]:
        """The norms of queries and of keys, if the layer has them."""
        norms = (self.query_norm, self.key_norm) if self.config.qk_norm else ()
        return norms[: len(self.sizes.projections)]

    def _split_fused(self, split: Callable[..., tuple[Array, ...]], x: Array, *shared: Array) -> tuple[Array, ...]:
        # The columns on each device hold its share of the queries, then of the keys, then of the values
        # (`interleave_fused`).
        first, second = (sum(self.widths[:count]) // shards() for count in (1, 2))
        return split(tuple(jnp.split(x, (first, second), axis=-1)), *shared)

    def _split(self, projected: tuple[Array, ...], *shared: Array) -> tuple[Array, ...]:
        """Returns the queries and, if the layer has them, the keys and values as a cache holds them.

        `projected` are the products with the kernels; `shared` are the cosines, the sines and the norms' scales.
        """
        query, *rest = self._turned(projected, *shared)
        return self._grouped(query), *(self._cached(*rest) if rest else ())

    def _columns(self, projected: tuple[Array, ...], *shared: Array) -> tuple[Array, ...]:
        """Returns what `_split` returns, but in the order of tokens, `[B, T, heads * K]`."""
        return tuple(x.reshape(*x.shape[:2], -1) for x in self._turned(projected, *shared))

    def _turned(self, projected: tuple[Array, ...], cosine: Array, sine: Array, *scales: Array) -> list[Array]:
        """Returns queries `[B, T, N, K]` and, if the layer has them, keys and values, normalized and rotated."""
        c, by = self.config, Turns(cosine, sine)
        parts = [part.reshape(*part.shape[:2], -1, self.sizes.head_dim) for part in projected]
        value = parts[-1]  # without a kernel of values, these are the keys before their norm
        # The norms come before the rotation: their scales differ by coordinate, so the order changes the result.
        for number, (part, scale) in enumerate(zip(self._norms, scales, strict=True)):
            parts[number] = part.normalized(parts[number], scale)
        query = rotate(parts[0] * jnp.asarray(c.scale, parts[0].dtype), by, c.rope_pairs)
        if len(parts) == 1:
            return [query]
        if c.value_norm:
            value = normalized(value, c.norm_epsilon).astype(value.dtype)
        return [query, rotate(parts[1], by, c.rope_pairs), value]

    def _grouped(self, query: Array) -> Array:
        """Returns the queries `[B, T, N, K]` grouped by key-value head, `[B * n, g * T, K]`."""
        # [B, T, n, g, K] -> [B, n, g, T, K]: the g query heads that share a key head become neighbours. One matrix
        # product per key head then serves all of them, and keys are never repeated.
        rows, new, _, size = query.shape
        heads = self.sizes.kv_heads // shards()
        query = query.reshape(rows, new, heads, -1, size).transpose(0, 2, 3, 1, 4)
        return query.reshape(rows * heads, -1, size)

    def _cached(self, key: Array, value: Array) -> KeysValues:
        """Returns keys and values `[B, S, n, K]` or `[B, S, n * K]` in the layouts of `DecoderCache`."""
        (rows, slots), size = key.shape[:2], self.sizes.head_dim
        key, value = (x.reshape(rows, slots, -1, size) for x in (key, value))
        key = key.transpose(0, 2, 3, 1).reshape(-1, size, slots)
        return key, value.transpose(0, 2, 1, 3).reshape(-1, slots, size)

    def queries(self, x: Array) -> Array:
        """Returns the queries of cross-attention `[B * n, g * T, K]`, scaled and not rotated."""

        # Positions of encoder and decoder are not comparable, so neither queries nor keys rotate.
        def split(query: Array) -> Array:
            heads = query.reshape(*query.shape[:2], -1, self.sizes.head_dim)
            return self._grouped(heads * jnp.asarray(self.config.scale, query.dtype))

        return local(split, (COLUMNS,), HEADS)(self.query(x))

    def keys_values(self, x: Array) -> KeysValues:
        """Returns the keys and values of the encoder's output `[B, N, E]`, not rotated."""
        if self.config.merged_attention:
            # The kernels and norms are those of the decoder's tokens; position 0 rotates nothing.
            projected = self.project(x, turns(self.config, jnp.zeros((1, 1), jnp.int32)))[1]
            assert projected is not None
            return projected
        return local(self._cached, (COLUMNS, COLUMNS), (HEADS, HEADS))(self.key(x), self.value(x))

    def in_cache(self, x: Array, by: Turns, slots: Slots, mask: Array) -> tuple[Array, KeysValues]:
        """Writes the keys and values of `x` `[B, T, E]` into a cache, and attends to the cache, in one kernel.

        Returns the attention's output `[B, T, E]`, and the cache's keys and values (`Slots.write`).
        """
        mixed, written = self.mixed(self._new_columns(x, by), slots, mask)
        return self.out(mixed), written

    def mixed(self, columns: tuple[Array, ...], slots: Slots, mask: Array) -> tuple[Array, KeysValues]:
        """Returns a block's attention to a cache before the output projection, `[B, T, N K]`, and the cache.

        `columns` are the block's projections (`Slots.attend`).
        """
        return slots.attend(columns, _bias(mask), **self._kernel_sizes)

    def link(self, norm: Norm, by: Turns) -> Link:
        """Returns the product with the fused `qkv` kernel as a link of a chain; it computes `_turned_columns`."""
        assert by.columns is not None
        rotation = Rotation(*by.columns, self.sizes.head_dim, self.config.scale, self.widths[0] // shards())
        return self.qkv.link(norm=norm, rotation=rotation)

    def _new_columns(self, x: Array, by: Turns) -> tuple[Array, ...]:
        """Returns the attention kernel's input: queries, keys and values, in one array side by side or in three."""
        if by.columns is None or not self.has_variable("params", "qkv"):
            return self._projected(x, by, self._columns, COLUMNS)
        rows = P(DATA if by.cosine.shape[0] > 1 else None)
        return (local(self._turned_columns, (COLUMNS, rows, rows), COLUMNS)(self.qkv(x), *by.columns),)

    def _turned_columns(self, fused: Array, cosine: Array, sine: Array) -> Array:
        """Returns the products `[B, T, (N + 2 n) K]` with the `qkv` kernel, whose queries are scaled and rotated."""
        is_query = jnp.arange(fused.shape[-1]) < self.widths[0] // shards()
        scale = jnp.where(is_query, jnp.asarray(self.config.scale, fused.dtype), jnp.ones((), fused.dtype))
        return rotate_columns(fused * scale, cosine, sine, self.sizes.head_dim)

    @property
    def _kernel_sizes(self) -> dict[str, Any]:
        heads = self.config.num_heads // shards()
        return {"query_heads": heads, "size": self.sizes.head_dim, "cap": self.config.attention_cap}

    def of_encoder(self, source: Array | KeysValues, real: Array, tokens: int) -> tuple[KeysValues, Array]:
        """Returns the encoder's keys and values, and which of them `tokens` tokens see, bool `[B, T, N]` (`Cross`)."""
        keys_values = source if isinstance(source, tuple) else self.keys_values(source)
        # Every token sees the same encoder tokens, but chunks of attention need a mask with an axis of tokens.
        return keys_values, jnp.broadcast_to(real[:, None], (real.shape[0], tokens, real.shape[1]))

    def merged(self, queries: Array, attended: KeysValues, mask: Array, cross: Cross) -> Array:
        """Returns the output of one attention to the slots of `mask` and to all of the encoder's tokens."""
        encoded, real = self.of_encoder(*cross, mask.shape[1])
        # Windows hide the decoder's tokens only: transformers never cuts the encoder's part of the mask.
        mask = jnp.broadcast_to(mask, (len(real), *mask.shape[1:]))
        return self(queries, jnp.concatenate([mask, real], axis=-1), attended, encoded)

    def __call__(self, queries: Array, mask: Array, *parts: KeysValues) -> Array:
        """Returns the attention's output `[B, T, E]`; `mask` bool `[B or 1, T, S]` is true for visible slots.

        The slots are those of all `parts`, one part after the other.
        """
        seen = P(DATA if mask.shape[0] > 1 else None)
        return self.out(local(self._attend, (HEADS, seen, HEADS), COLUMNS)(queries, mask, parts))

    def _attend(self, queries: Array, mask: Array, parts: tuple[KeysValues, ...]) -> Array:
        """Returns each token's weighted sum of the values, `[B, T, N K]`."""
        c, new, sizes = self.config, mask.shape[1], self.sizes

        def mix(part: Array, seen: Array) -> Array:
            return attend(c, sizes, part.reshape(queries.shape[0], -1, sizes.head_dim), parts, seen)

        # Chunks of tokens bound the attention logits to [B, N, CHUNK, S]. Only prefill feeds more tokens than a chunk.
        if new <= CHUNK:
            mixed = mix(queries, mask)
        else:
            by_token = queries.reshape(queries.shape[0], -1, new, sizes.head_dim)
            mixed = in_chunks(mix, CHUNK, new, 3, (by_token, 2), (mask, 1))
        rows = mixed.transpose(0, 3, 1, 2, 4)
        return rows.reshape(*rows.shape[:2], -1)


def _bias(mask: Array) -> Array:
    """Returns the bias float32 `[B or 1, 1, T, S]` that masks slots, from a mask `[B or 1, T, S]`, or from a bias."""
    return jnp.where(mask, 0.0, MASKED)[:, None] if mask.dtype == bool else mask


def attend(c: DecoderConfig, sizes: LayerSizes, queries: Array, parts: tuple[KeysValues, ...], mask: Array) -> Array:
    """Returns each query's weighted sum of the values, `[B, n, g, T, K]`, in a layer of these sizes.

    `queries` are those of `Attention.project`; `parts` and `mask` are those of `Attention.__call__`.
    """
    new, slots = mask.shape[1:]
    # The sum over head_dim, the cap and the softmax use float32, because in bfloat16 close logits would become equal.
    products = [jnp.einsum("nqk,nks->nqs", queries, keys, preferred_element_type=jnp.float32) for keys, _ in parts]
    # The logits of the parts are joined, not their keys, because every call would then copy the cache's keys.
    logits = jnp.concatenate(products, axis=-1)
    # The cap is applied before the mask. After the mask, it would limit masked logits to about -50, and masked slots
    # would get weight.
    logits = soft_cap(logits, c.attention_cap)
    logits = logits.reshape(-1, sizes.kv_heads // shards(), c.num_heads // sizes.kv_heads, new, slots)
    logits = jnp.where(mask[:, None, None], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(parts[0][1].dtype).reshape(*queries.shape[:2], slots)
    ends = tuple(accumulate(values.shape[-2] for _, values in parts))
    shares = jnp.split(weights, ends[:-1], axis=-1)
    sums = [jnp.einsum("nqs,nsk->nqk", share, values) for share, (_, values) in zip(shares, parts, strict=True)]
    return reduce(jnp.add, sums).reshape(*logits.shape[:4], sizes.head_dim)


class FeedForward(nn.Module):
    """Feed-forward layer with GeGLU (tanh approximation) or SwiGLU units."""

    config: DecoderConfig
    number: int = 0

    def setup(self) -> None:
        """Declares the kernels of the gate and the units, separate and fused, and of the output."""
        c, units = self.config, self.config.layer(self.number).d_ff
        self.wi_0, self.wi_1, self.wi_01 = dense(c, units), dense(c, units), dense(c, 2 * units)
        self.wo = dense(c, c.d_model)

    def __call__(self, x: Array, _: bool = False) -> Array:
        """Returns the layer's output for `x`, both `[B, T, E]`; the flag is for `MixtureOfExperts` only."""
        return self.wo(gated_units(self, x, activation(self.config)))

    def links(self, norm: Norm, post: Norm | None) -> tuple[Link, Link]:
        """Returns the layer's matrix products as links of a fused chain (`product_chains.Link`).

        The chain reads the residual stream through `norm`, and adds the layer's output to the same stream.
        """
        return self.wi_01.link(norm=norm, gate=activation(self.config)), self.wo.link(adds=True, post=post)


class Beside(NamedTuple):
    """Inputs of a layer in addition to the hidden states of its tokens; `None` in models without them.

    Attributes:
        cross: the encoder's output or its keys and values, if the model has an encoder.
        shared: the keys and values of an earlier layer, if the layer has none.
        layer_input: `[B, T, I]`, the layer's part of `LayerInputs`.
    """

    cross: Cross | None = None
    shared: KeysValues | None = None
    layer_input: Any = None


ALONE = Beside()


class LayerInputs(nn.Module):
    """Additional inputs of the layers, one for each layer and token.

    Each is the sum of a separate embedding of the token for this layer and a projection of the token's usual embedding.
    """

    config: DecoderConfig

    def setup(self) -> None:
        """Creates the layers' embedding, the projection of the usual embedding, and the projection's norm."""
        c = self.config
        width = c.num_layers * (c.layer_input or 0)
        self.embedder = Embed(c.num_embeddings, width, c.dtype)
        self.projection, self.norm = dense(c, width), norm(c)

    def __call__(self, tokens: Array, embedded: Array) -> Array:
        """Returns the layers' inputs `[B, T, L, I]`, from tokens `[B, T]` and their embeddings `[B, T, E]`.

        The parameters of an early exit are those of the whole model, so `L` is then the whole model's depth.
        """
        width = self.config.layer_input
        # The factors are rounded to the dtype of computation, as `scaled` rounds `embedding_scale`.
        looked_up = self.embedder(tokens) * jnp.asarray(math.sqrt(width or 0), embedded.dtype)
        projected = self.projection(embedded) * jnp.asarray(self.config.d_model**-0.5, embedded.dtype)
        projected, looked_up = (x.reshape(*x.shape[:2], -1, width) for x in (projected, looked_up))
        # The variance of a sum of two independent parts is the sum of their variances. √0.5 restores that of one part.
        return (self.norm(projected) + looked_up) * jnp.asarray(math.sqrt(0.5), embedded.dtype)


class OutputScale(nn.Module):
    """Product with a stored number, which training does not change."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns `x` times the stored number."""
        scale = self.param("scale", nn.initializers.ones_init(), (1,))
        return x * jax.lax.stop_gradient(scale).astype(x.dtype)


class DecoderLayer(nn.Module):
    """Decoder layer: attention, then feed-forward, each with a norm before it (in Gemma 2 also after it).

    If the model has an encoder, cross-attention comes between attention and feed-forward, or attention reads the
    encoder's output too (`DecoderConfig.merged_attention`). In Gemma 4's small sizes, a gated product with the layer's
    additional input follows (`LayerInputs`). In Gemma 4's size with experts, a mixture of experts is parallel to the
    feed-forward: both read the same state, each through a separate norm.
    """

    config: DecoderConfig
    number: int = 0

    @property
    def sparse(self) -> bool:
        """Whether the feed-forward is a mixture of experts."""
        return self.config.sparse[self.number]

    @property
    def parallel(self) -> bool:
        """Whether the layer has a mixture of experts in parallel to a dense feed-forward."""
        return self.config.parallel(self.number)

    def setup(self) -> None:
        """Creates the parts that the configuration asks for."""
        c = self.config
        self.pre_self_attention_layer_norm, self.pre_mlp_layer_norm = norm(c), norm(c)
        if c.post_norms:
            self.post_self_attention_layer_norm, self.post_mlp_layer_norm = norm(c), norm(c)
        self.self_attention = Attention(c, self.number)
        self.mlp = MixtureOfExperts(c) if self.sparse and not self.parallel else FeedForward(c, self.number)
        if self.parallel:
            self.mixture, self.post_dense_layer_norm = MixtureOfExperts(c), norm(c)
            self.pre_mixture_layer_norm, self.post_mixture_layer_norm = norm(c), norm(c)
        if c.has_cross_attention:
            self.encoder_decoder_attention, self.pre_cross_attention_layer_norm = Attention(c), norm(c)
            if c.post_norms:
                self.post_cross_attention_layer_norm = norm(c)
        if c.layer_input:
            self.layer_input_gate, self.layer_input_out = dense(c, c.layer_input), dense(c, c.d_model)
            self.post_layer_input_layer_norm = norm(c)
        if c.output_scale:
            self.output = OutputScale()

    def __call__(
        self, x: Array, by: Turns, mask: Array, slots: Slots | None, fixed: bool = False, beside: Beside = ALONE
    ) -> tuple[Array, KeysValues]:
        """Applies the layer to `x` `[B, T, E]`; returns its output, and the keys and values that it attended to.

        If `slots` is given, the keys and values of `x` are first written into this cache, and the layer attends to all
        its slots. The returned keys and values are then those of the whole cache (`Slots.write`). If `fixed` is true,
        no gradients of the parameters are needed. `beside` holds the layer's inputs in addition to `x`.
        """
        if slots is not None and self.fits_kernels(self.variables["params"], x, by, slots, beside):
            return self._in_kernels(x, by, mask, slots)
        return self.from_input(self.pre_self_attention_layer_norm(x), x, by, mask, slots, fixed, beside)

    @nn.nowrap
    def fits_kernels(self, params: Params, x: Array, by: Turns, slots: Slots, beside: Beside) -> bool:
        """Returns whether TPU kernels can compute the layer: its attention, and its products with norms and sums."""
        c, sizes = self.config, self.config.layer(self.number)
        usual = not (self.sparse or self.parallel or c.qkv_bias or c.has_cross_attention or c.layer_input)
        attends = beside.cross is None and slots.fits(x.shape[1], query_heads=c.num_heads)
        if not (platforms.uses_kernels() and usual and attends and by.columns is not None):
            return False
        # The kernels need the fused matrices that `layers.fuse` prepares.
        fused = "qkv" in params["self_attention"] and "wi_01" in params["mlp"]
        inputs = c.d_model, c.num_heads * sizes.head_dim // shards(), sizes.d_ff // shards(), by.columns[0].shape[-1]
        return fused and computes_around(params, x, inputs)

    @nn.nowrap
    def _in_kernels(self, x: Array, by: Turns, mask: Array, slots: Slots) -> tuple[Array, KeysValues]:
        """Applies the layer with a cache, as a call does, in three kernels (on a mesh, five)."""
        c, attention = self.config, self.self_attention
        # The norms are not applied here: a kernel computes a norm together with the product or the sum that follows it.
        first, last = self.pre_self_attention_layer_norm.in_kernel(), self.pre_mlp_layer_norm.in_kernel()
        # A post-norm reads a layer's complete output, so on a mesh it follows the sum over devices.
        posts: tuple[Norm | None, ...] = (None, None)
        if c.post_norms:
            posts = self.post_self_attention_layer_norm.in_kernel(), self.post_mlp_layer_norm.in_kernel()
        _, columns = chain(x, [attention.link(first, by)], c.dtype)
        mixed, written = attention.mixed((columns,), slots, mask)
        links = [attention.out.link(adds=True, post=posts[0]), *self.mlp.links(last, posts[1])]
        x = chain(mixed, links, c.dtype, x)[0]
        return self.output(x) if c.output_scale else x, written

    @nn.nowrap
    def from_input(
        self,
        inputs: Array,
        x: Array,
        by: Turns,
        mask: Array,
        slots: Slots | None,
        fixed: bool = False,
        beside: Beside = ALONE,
    ) -> tuple[Array, KeysValues]:
        """Applies the layer as a call does, but computes queries, keys and values from `inputs` `[B, T, …]`.

        A call passes the normalized `x` as `inputs`; an EAGLE-3 head passes embeddings and states.
        """
        c = self.config
        y, written = self._to_self(inputs, by, mask, slots, beside)
        x = x + (self.post_self_attention_layer_norm(y) if c.post_norms else y)
        if c.has_cross_attention and beside.cross is not None:
            y = self._crossed(self.pre_cross_attention_layer_norm(x), *beside.cross)
            x = x + (self.post_cross_attention_layer_norm(y) if c.post_norms else y)
        y = self.mlp(self.pre_mlp_layer_norm(x), fixed)
        if self.parallel:
            # The router reads the state itself, because it has a separate norm.
            mixed = self.mixture(self.pre_mixture_layer_norm(x), fixed, state=x)
            y = self.post_dense_layer_norm(y) + self.post_mixture_layer_norm(mixed)
        x = x + (self.post_mlp_layer_norm(y) if c.post_norms else y)
        if c.layer_input:
            y = self.layer_input_out(activation(c)(self.layer_input_gate(x)) * beside.layer_input)
            x = x + self.post_layer_input_layer_norm(y)
        return self.output(x) if c.output_scale else x, written

    def _to_self(
        self, inputs: Array, by: Turns, mask: Array, slots: Slots | None, beside: Beside
    ) -> tuple[Array, KeysValues]:
        """Returns the self-attention's output, and the keys and values that were written or are shared."""
        merged = self.config.merged_attention and beside.cross is not None
        heads = self.config.num_heads
        if slots is not None and not merged and slots.fits(inputs.shape[1], query_heads=heads):
            return self.self_attention.in_cache(inputs, by, slots, mask)
        # The write comes before attention, because each token of a block sees itself and the block's earlier tokens.
        queries, projected = self.self_attention.project(inputs, by)
        written: Any = beside.shared if projected is None else projected
        attended = written
        if slots is not None:
            written = slots.write(written)
            attended = slots.attended(written)
        if merged and beside.cross is not None:
            return self.self_attention.merged(queries, attended, mask, beside.cross), written
        return self.self_attention(queries, mask, attended), written

    def _crossed(self, x: Array, source: Array | KeysValues, real: Array) -> Array:
        attention = self.encoder_decoder_attention
        keys_values, mask = attention.of_encoder(source, real, x.shape[1])
        return attention(attention.queries(x), mask, keys_values)


class Stack(nn.Module):
    """Stack of all decoder layers, the last norm and, if the embedding is not tied, the output layer.

    If `remat` is true, gradients recompute each layer instead of keeping its intermediate values.
    """

    config: DecoderConfig
    remat: bool = False
    last_norm: ClassVar[str] = "decoder_norm"

    def setup(self) -> None:
        """Creates the layers, or the stack of their parameters, the last norm and the output layer."""
        c = self.config
        if c.scanned:
            state, angle = jnp.zeros((1, 1, c.d_model), c.dtype), jnp.zeros((1, 1, 1, c.head_dim // 2))
            inputs: tuple[Any, ...] = state, Turns(angle, angle), jnp.ones((1, 1, 1), bool), None
            if c.encoder is not None:
                inputs += (False, Beside((jnp.zeros((1, 1, c.encoder.d_model), c.dtype), jnp.ones((1, 1), bool))))
            self.stack = stack_of(self, self._scanned_layer(), c.num_layers, *inputs)
        else:
            layer = recomputed_layer(DecoderLayer, self.remat, static_argnums=(5,))
            self.layers = [layer(c, number) for number in range(c.num_layers)]
        # The name of the parameter says whose norm it is, as in T5X.
        setattr(self, self.last_norm, norm(c))
        if not c.tied:
            self.logits_dense = Dense(c.num_embeddings, c.dtype, wide=True)

    def cross(self, encoded: Array) -> tuple[KeysValues, ...]:
        """Returns each layer's keys and values of the encoder's output, as in a cache (`Encoded`)."""
        layer = DecoderLayer(self.config, parent=None, name=STACK)
        part = "self_attention" if self.config.merged_attention else "encoder_decoder_attention"
        return cross_keys_values(self, layer, self.config.num_layers, encoded, part)

    def __call__(
        self,
        x: Array,
        by: tuple[Turns, ...],
        masks: tuple[Array, ...],
        slots: tuple[Slots, ...] | None,
        fixed: bool = False,
        encoded: Encoded | None = None,
        layer_inputs: Array | None = None,
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Returns the normalized hidden states `[B, T, E]`, and the keys and values that each layer attended to.

        `by`, `masks` and `slots` have one entry for each layer with a cache, as have the returned keys and values. If
        the layers run in a scan, all of these have one entry for each place in a group of layers (`models.stacks`). If
        `fixed` is true, no gradients of the parameters are needed, and a scan reads the parameters in place.
        `layer_inputs` are those of `LayerInputs`.
        """
        if slots is not None:
            by = self._by_columns(by, slots, x.shape[1])
        if self.config.scanned:
            x, attended = self._scan(x, by, masks, slots, fixed, encoded)
        else:
            x, attended = self._unrolled(x, by, masks, slots, fixed, encoded, layer_inputs)
        return getattr(self, self.last_norm)(x), attended

    @nn.nowrap
    def _by_columns(self, by: tuple[Turns, ...], slots: tuple[Slots, ...], new: int) -> tuple[Turns, ...]:
        """Returns the turns, with `columns` where the kernel reads the fused products of a block of `new` tokens."""
        c = self.config
        # The norm of a single head needs the heads on an axis of their own, which a fused product does not have.
        if c.qk_norm or c.value_norm or c.rope_pairs != "halves":
            return by
        heads = [(sizes.kv_heads // shards(), c.num_heads // shards()) for sizes in map(c.layer, range(len(by)))]
        return tuple(
            with_columns(turns, queries + keys, keys) if place.fits(new) else turns
            for turns, place, (keys, queries) in zip(by, slots, heads, strict=not c.scanned)
        )

    @nn.nowrap
    def _scanned_layer(self) -> DecoderLayer:
        """Returns the module of every layer of a scan; it gets the parameters of one layer at each call."""
        return DecoderLayer(self.config, parent=None, name=STACK)

    @nn.nowrap
    def _unrolled(
        self,
        x: Array,
        by: tuple[Turns, ...],
        masks: tuple[Array, ...],
        slots: tuple[Slots, ...] | None,
        fixed: bool,
        encoded: Encoded | None,
        layer_inputs: Array | None,
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Applies one layer after the other to `x`, and stores their outputs in `EXITS`."""
        attended: list[KeysValues] = []
        for number, source in enumerate(self.config.sources):
            # The keys and values that a layer shares are in the cache already, with those of this block.
            shares = source < number
            here = None if shares or slots is None else slots[source]
            beside = Beside(
                cross=None if encoded is None else _of_layer(encoded, number),
                shared=attended[source] if shares else None,
                layer_input=None if layer_inputs is None else layer_inputs[:, :, number],
            )
            # A layer has the kind of its source, so the source's turns and mask are right for both.
            x, keys_values = self.layers[number](x, by[source], masks[source], here, fixed, beside)
            # The states are stored before the last norm, because an early exit applies the last norm itself
            # (`exit_logits`).
            self.sow(EXITS, "hidden", x)
            if not shares:
                attended.append(keys_values)
        return x, tuple(attended)

    @nn.nowrap
    def _scan(
        self,
        x: Array,
        by: tuple[Turns, ...],
        masks: tuple[Array, ...],
        slots: tuple[Slots, ...] | None,
        fixed: bool,
        encoded: Encoded | None,
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Applies all layers to `x` in a loop over their stacked parameters, which writes the caches in place."""
        c, recorded = self.config, self.is_mutable_collection(EXITS)
        layer = self._scanned_layer()
        tiled = tiled_scales(self.stack) if fixed and slots is not None and platforms.uses_kernels() else None
        if slots is not None and encoded is None:
            # The biases are computed before the loop, which would otherwise compute them in every iteration.
            biases = jax.lax.optimization_barrier(tuple(map(_bias, masks)))
            fit = [place.fits(x.shape[1], query_heads=c.num_heads) for place in slots]
            masks = tuple(bias if fits else mask for fits, bias, mask in zip(fit, biases, masks, strict=True))

        def body(carry: Any, params: Params, place: int, number: Any) -> tuple[Any, Any]:
            x, caches = carry
            here = None
            if slots is not None:
                here = slots[place]._replace(keys=caches[place][0], values=caches[place][1], layer=number // c.period)
            # A slice of the stack would copy all experts of the layer, although a block uses only a few of them.
            if fixed and layer.sparse:
                params = in_place(params, self.stack, number)
            beside = ALONE if encoded is None else Beside(_of_layer(encoded, number, stacked=True))
            if tiled is not None and here is not None and layer.fits_kernels(params, x, by[place], here, beside):
                params = in_stack(params, tiled, number)
            x, written = layer.apply({"params": params}, x, by[place], masks[place], here, fixed, beside)
            output = x if recorded else None
            if slots is None:
                return (x, caches), (output, written)
            # `written` holds the caches of all layers of the place, so it replaces the carried ones. If it were an
            # output, the scan would keep it once for each group.
            return (x, (*caches[:place], written, *caches[place + 1 :])), (output, None)

        caches = tuple((place.keys, place.values) for place in slots or ())
        body = recomputed(body, self.remat)
        (x, caches), outputs = over_layers(body, (x, caches), self.stack, c.num_layers, c.period, fixed=fixed)
        for state in in_order(tuple(state for state, _ in outputs), c.num_layers) if recorded else ():
            self.sow(EXITS, "hidden", state)
        return x, caches if slots is not None else tuple(written for _, written in outputs)


def _of_layer(encoded: Encoded, number: Any, stacked: bool = False) -> Cross:
    """Returns what the cross-attention of layer `number` reads."""
    # Keys and values are computed once, in prefill; training has no cache, so each layer computes its own.
    source = encoded.source
    if isinstance(source, tuple):
        return (layer_at(source[0], number) if stacked else source[number]), encoded.real
    return source, encoded.real


class Encoder(Stack):
    """Encoder: a stack of layers that see tokens on both sides, and an embedding unless it shares the decoder's."""

    last_norm: ClassVar[str] = "encoder_norm"

    def setup(self) -> None:
        """Creates the layers, the last norm and the embedding."""
        super().setup()
        c = self.config
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype)

    def embed(self, tokens: Array) -> Array:
        """Returns the input of the first layer, `[B, N, E]`, by the encoder's separate embedding."""
        return scaled(self.config, self.token_embedder(tokens))

    def encode(self, embedded: Array, real: Array, fixed: bool = False) -> Array:
        """Returns the normalized states `[B, N, E]` of `embedded` tokens; `real` `[B, N]` is false for padding.

        If `fixed` is true, no gradients of the parameters are needed (`stacks.over_layers`).
        """
        c, positions = self.config, jnp.arange(embedded.shape[1])
        seen = {window: near(c, positions, window) & real[:, None] for window in dict.fromkeys(c.windows)}
        masks = tuple(seen[window] for window in c.places)
        return self(embedded, turns_by_place(c, positions[None]), masks, None, fixed)[0]


def near(c: DecoderConfig, positions: Array, window: int | None) -> Array:
    """Returns which of the positions `[N]` each position sees in an encoder layer with this window, bool `[N, N]`.

    If the window is `None`, each position sees all of them.
    """
    back = positions[:, None] - positions
    if window is None:
        return jnp.ones_like(back, bool)
    # A centered window counts all visible tokens; if it is even, one more token after the current one than before it.
    # Any other window counts the tokens on each side, as transformers 5 does. Gemma's own code and transformers 4 leave
    # out the farthest token on each side.
    behind, ahead = ((window - 1) // 2, window // 2) if c.centered_window else (window, window)
    return (back <= behind) & (-back <= ahead)
