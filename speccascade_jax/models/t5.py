"""T5: its layers, the Flax module for training, and the cached `LanguageModel` that decodes with the same layers.

Parameter names and shapes are T5X's. Decoding multiplies float32 arrays in full precision on every device
(`CachedModel`). The module, and therefore training, uses JAX's current precision.

Sources: T5 (Raffel et al., 2020), T5 1.1's gated feed-forward (Shazeer, 2020).

Shape letters: those of `core/types.py`, and here `H` is the number of heads, `K` is head_dim and `E` is d_model. Keys
are always `[B * H, K, S]` and values `[B * H, S, K]`. With these layouts a block of tokens costs little more than one
token on a CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import DraftedBlock
from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, LMOutput, Params, Prompt, real_tokens
from speccascade_jax.models import resident_draft, t5_blocks
from speccascade_jax.models.cache import KVCache, causal_slots_mask, empty_slots, put_branch
from speccascade_jax.models.chains import chain, computes_around, in_stack, tiled_scales
from speccascade_jax.models.decode_attention import tiled
from speccascade_jax.models.layers import (
    EXITS,
    MASKED,
    CachedModel,
    KeysValues,
    RMSNorm,
    Slots,
    cross_keys_values,
    gated_units,
    in_chunks,
    mean_state,
    split_axes,
)
from speccascade_jax.models.product_chains import Link
from speccascade_jax.models.products import Dense, Embed, real_entries
from speccascade_jax.models.sharding import BIAS, COLUMNS, HEADS, ROWS, Mesh, local, shards, under
from speccascade_jax.models.stacks import STACK, in_order, over_layers, recomputed, recomputed_layer, stack_of
from speccascade_jax.models.t5_config import T5Config
from speccascade_jax.models.triton_products import Norm
from speccascade_jax.runtime import platforms

__all__ = ["EXITS", "T5", "T5Config", "T5Module", "teacher_forced_logits"]

CHUNK = 256
"""Largest number of tokens whose attention is computed at once; with dropout, all tokens are computed at once."""
Biases: TypeAlias = tuple[Array, ...]
"""Terms added to attention logits, each `[B or 1, H or 1, T or 1, S]`."""
BiasOf: TypeAlias = Callable[[Callable[[np.ndarray], Array]], Array]
"""Function from a layer's `RelativeBias` to the sum of its bias and the mask, `[B or 1, H, T, S]`."""

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_bias_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


def relative_buckets(distance: np.ndarray, bidirectional: bool, buckets: int, max_distance: int) -> np.ndarray:
    """Returns T5's bucket of each `distance` (key position minus query position), int32 of the same shape.

    Half of the buckets hold one distance each. The widths of the others grow logarithmically up to `max_distance`. If
    `bidirectional`, the lower half of the buckets is for keys up to the query, and the upper half for keys after the
    query (T5, section 2.1).
    """
    distance = np.asarray(distance)
    offset = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        away = np.abs(distance)
    else:
        away = np.maximum(-distance, 0)
    exact = buckets // 2
    # The epsilon is T5X's. It puts a distance on the bound between two buckets into the upper one despite rounding (for
    # example distance 16 with 8 exact buckets and the largest distance 128).
    ratio = np.log(np.maximum(away, 1) / exact + np.finfo(np.float32).eps) / math.log(max_distance / exact)
    large = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    buckets_of: np.ndarray = (offset + np.where(away < exact, away, large)).astype(np.int32)
    return buckets_of


class RelativeBias(nn.Module):
    """Learned bias of attention logits for each bucket of relative positions; `rel_embedding` is `[H, buckets]`.

    The encoder and the decoder have one each, or each of their layers has one (`T5Config.layer_biases`).
    """

    config: T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, distance: np.ndarray) -> Array:
        """Returns the bias float32 `[H, *distance.shape]` for each `distance` (key position minus query position)."""
        c = self.config
        table = self.param("rel_embedding", _bias_init, (c.num_heads, c.relative_buckets))
        bucket_ids = relative_buckets(distance, self.bidirectional, c.relative_buckets, c.relative_max_distance)
        return jnp.take(table.astype(jnp.float32), bucket_ids, axis=1)


def norm(config: T5Config) -> RMSNorm:
    """Returns T5's layer norm, which is a root mean square norm without mean or bias."""
    return RMSNorm(config.layer_norm_epsilon, config.dtype)


def dense(config: T5Config, features: int, divisor: float = 1.0) -> Dense:
    """Returns a layer that computes `x @ kernel` without a bias; its initial kernel is divided by `divisor`."""

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        return _kernel_init(key, shape, dtype) / divisor

    return Dense(features, config.dtype, kernel_init=init)


def dropout(config: T5Config) -> nn.Dropout:
    """Returns T5X's dropout, which uses the same mask at all positions (in attention: for all queries)."""
    return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))


class Attention(nn.Module):
    """Multi-head attention with kernels `[E, H * K]`; the initial query kernel is scaled instead of the queries.

    If the parameters hold one `qkv` kernel instead of three (`layers.fuse`), one matrix product computes the queries,
    keys and values of self-attention.
    """

    config: T5Config

    def setup(self) -> None:
        c = self.config
        width = c.num_heads * c.head_dim
        # T5 divides the initial query kernel by sqrt(head_dim), instead of dividing the logits.
        self.query = dense(c, width, math.sqrt(c.head_dim))
        self.key = dense(c, width)
        self.value = dense(c, width)
        self.qkv = dense(c, 3 * width)
        self.out = dense(c, c.d_model)
        self.drop = dropout(c)

    def _heads(self, x: Array) -> Array:
        """Splits `x` `[B, T, H * K]` into heads, `[B * H, T, K]`."""
        return local(self._split, (COLUMNS,), HEADS)(x)

    def _split(self, x: Array) -> Array:
        split = x.reshape(*x.shape[:-1], -1, self.config.head_dim).transpose(0, 2, 1, 3)
        return split.reshape(-1, *split.shape[2:])

    def _split_each(self, x: Array) -> tuple[Array, ...]:
        """Splits `x` `[B, T, 3 H * K]` into queries, keys and values, each split into heads `[B * H, T, K]`."""
        return tuple(map(self._split, jnp.split(x, 3, axis=-1)))

    def queries(self, x: Array) -> Array:
        """Returns the queries `[B * H, T, K]` computed from `x` `[B, T, E]`."""
        return self._heads(self.query(x))

    def keys_values(self, x: Array) -> KeysValues:
        """Returns the keys `[B * H, K, S]` and values `[B * H, S, K]` computed from `x` `[B, S, E]`."""
        return self._heads(self.key(x)).transpose(0, 2, 1), self._heads(self.value(x))

    def project(self, x: Array) -> tuple[Array, KeysValues]:
        """Returns the queries, keys and values of self-attention, all computed from `x` `[B, T, E]`."""
        if not self.has_variable("params", "qkv"):
            return self.queries(x), self.keys_values(x)
        query, key, value = local(self._split_each, (COLUMNS,), (HEADS,) * 3)(self.qkv(x))
        return query, (key.transpose(0, 2, 1), value)

    def __call__(self, queries: Array, keys_values: KeysValues, biases: Biases, deterministic: bool) -> Array:
        """Returns the attention's output `[B, T, E]`; `biases` are added to the logits and include the mask."""
        # Chunks need a first bias with an axis of tokens. The bias of cross-attention is the same for all tokens, so
        # cross-attention is not computed in chunks.
        long = deterministic and queries.shape[1] > CHUNK and biases[0].shape[2] > 1
        attend: Callable[..., Array] = self._attend_in_chunks if long else self._attend
        kept = () if deterministic else (self._kept(queries, keys_values),)
        extra = (*kept, *biases)
        specs = (HEADS, HEADS, HEADS, *map(split_axes, extra))
        mixed = local(partial(attend, drops=bool(kept)), specs, COLUMNS)(queries, *keys_values, *extra)
        return self.out(mixed)

    def in_cache(self, x: Array, slots: Slots, bias: Array) -> tuple[Array, KeysValues]:
        """Writes the keys and values of `x` `[B, T, E]` into a cache, and attends to the cache, in one kernel.

        Returns the attention's output `[B, T, E]`, and the cache's keys and values (`Slots.write`).
        """
        names = ("qkv",) if self.has_variable("params", "qkv") else ("query", "key", "value")
        # The products stay float32, because the kernel rounds them. Rounding before it would be one more operation.
        mixed, written = self.mixed(tuple(getattr(self, name)(x, wide=True) for name in names), slots, bias)
        return self.out(mixed), written

    def to_fixed(self, x: Array, fixed: Slots, bias: Array) -> Array:
        """Returns the attention's output `[B, T, E]` for `x` `[B, T, E]` and fixed keys and values, in one kernel."""
        return self.out(self.mixed((self.query(x, wide=True),), fixed, bias)[0])

    def mixed(self, columns: tuple[Array, ...], slots: Slots, bias: Array) -> tuple[Array, KeysValues]:
        """Returns a block's attention to a cache before the output projection, `[B, T, H * K]`, and the cache.

        `columns` are the block's projections (`Slots.attend`).
        """
        return slots.attend(columns, bias, **self._kernel_sizes)

    @property
    def _kernel_sizes(self) -> dict[str, int]:
        return {"query_heads": self.config.num_heads // shards(), "size": self.config.head_dim}

    def _kept(self, queries: Array, keys_values: KeysValues) -> Array:
        """Returns dropout's factors for the attention weights, `[B, H, 1, S]`: 0 if dropped, otherwise above 1."""
        # The factors are drawn for all devices at once. Inside `local`, every device would draw those of the first
        # device.
        heads, slots = self.config.num_heads, keys_values[1].shape[1]
        ones = jnp.ones((queries.shape[0] // heads, heads, 1, slots), keys_values[1].dtype)
        kept: Array = self.drop(ones, deterministic=False)
        return kept

    def _attend_in_chunks(
        self, queries: Array, keys: Array, values: Array, bias: Array, *biases: Array, drops: bool
    ) -> Array:
        """Computes `_attend` in chunks of `CHUNK` tokens; only the first bias has an axis of tokens."""

        def attend(part: Array, part_bias: Array) -> Array:
            return self._attend(part, keys, values, part_bias, *biases, drops=drops)

        return in_chunks(attend, CHUNK, queries.shape[1], 1, (queries, 1), (bias, 2))

    def _attend(self, queries: Array, keys: Array, values: Array, *extra: Array, drops: bool) -> Array:
        """Returns each token's weighted sum of the values, `[B, T, H * K]`.

        `extra` holds the biases; if `drops`, dropout's factors (`_kept`) come before them.
        """
        heads, biases = self.config.num_heads // shards(), extra[int(drops) :]
        logits = jnp.einsum("ntk,nks->nts", queries, keys).astype(jnp.float32)
        # Logits are float32 before the biases are added, because a sum in bfloat16 would round them.
        logits = sum(biases, logits.reshape(-1, heads, *logits.shape[1:]))
        weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
        if drops:
            weights *= extra[0]
        mixed = jnp.einsum("nts,nsk->ntk", weights.reshape(-1, *weights.shape[2:]), values)
        rows = mixed.reshape(-1, heads, *mixed.shape[1:]).transpose(0, 2, 1, 3)
        return rows.reshape(*rows.shape[:2], -1)


class FeedForward(nn.Module):
    """Feed-forward layer with units gated by GELU (T5 1.1) or with ReLU units (T5 1.0)."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        # The fused kernel and the separate ones are all declared, because Flax creates only those that a call uses.
        self.wi_01 = dense(c, 2 * c.d_ff)
        if c.gated:
            self.wi_0, self.wi_1 = dense(c, c.d_ff), dense(c, c.d_ff)
        else:
            self.wi = dense(c, c.d_ff)
        self.wo = dense(c, c.d_model)
        self.drop = dropout(c)

    def __call__(self, x: Array, deterministic: bool) -> Array:
        return self.wo(self.drop(self._inner(x), deterministic=deterministic))

    def links(self, norm: Norm) -> tuple[Link, Link]:
        """Returns the layer's matrix products as links of a fused chain (`product_chains.Link`).

        The chain reads the residual stream through `norm`, and adds the layer's output to the same stream.
        """
        return self.wi_01.link(norm=norm, gate=nn.gelu), self.wo.link(adds=True)

    def _inner(self, x: Array) -> Array:
        if not self.config.gated:
            return nn.relu(self.wi(x))
        return gated_units(self, x, nn.gelu)


class EncoderLayer(nn.Module):
    """Encoder layer: self-attention, then feed-forward, each with a norm before it and a residual sum after it."""

    config: T5Config

    def setup(self) -> None:
        self.pre_attention_layer_norm = norm(self.config)
        self.attention = Attention(self.config)
        self.pre_mlp_layer_norm = norm(self.config)
        self.mlp = FeedForward(self.config)
        self.drop = dropout(self.config)
        if self.config.layer_biases:
            self.relpos_bias = RelativeBias(self.config, bidirectional=True)

    def __call__(self, x: Array, biases: Biases, deterministic: bool) -> Array:
        if self.config.layer_biases:
            biases = (self.relpos_bias(_distances(x.shape[1]))[None], *biases)
        y = self.pre_attention_layer_norm(x)
        y = self.attention(*self.attention.project(y), biases, deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
        x += self.drop(y, deterministic=deterministic)
        return x


class DecoderLayer(nn.Module):
    """Decoder layer: self-attention, cross-attention, then feed-forward, each with a norm and a residual sum.

    Self-attention reads a cache if there is one, and otherwise the layer's own input.
    """

    config: T5Config

    def setup(self) -> None:
        self.pre_self_attention_layer_norm = norm(self.config)
        self.self_attention = Attention(self.config)
        self.pre_cross_attention_layer_norm = norm(self.config)
        self.encoder_decoder_attention = Attention(self.config)
        self.pre_mlp_layer_norm = norm(self.config)
        self.mlp = FeedForward(self.config)
        self.drop = dropout(self.config)
        if self.config.layer_biases:
            self.relpos_bias = RelativeBias(self.config, bidirectional=False)

    def __call__(
        self,
        x: Array,
        bias: Array | BiasOf,
        cross: Slots | Array,
        cross_bias: Array,
        slots: Slots | None,
        deterministic: bool,
    ) -> tuple[Array, KeysValues]:
        """Applies the layer to `x` `[B, T, E]`; returns its output, and the keys and values of the self-attention.

        `bias` `[B or 1, H, T, S]` includes the mask, or is the function that computes it from the layer's table.
        `cross` holds the cross-attention's keys and values or, without a cache, is the encoder's output `[B, N, E]`.
        If `slots` is given, the keys and values of `x` are first written into this cache, and the layer attends to all
        its slots. The returned keys and values are then those of the whole cache (`Slots.write`).
        """
        if callable(bias):
            bias = bias(self.relpos_bias)
        params = self.variables.get("params", {})
        if isinstance(slots, Slots) and isinstance(cross, Slots) and self.fits_kernels(params, x, slots, cross):
            return self._in_kernels(x, bias, cross, cross_bias, slots)
        y, written = self._to_self(self.pre_self_attention_layer_norm(x), bias, slots, deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self._to_encoder(self.pre_cross_attention_layer_norm(x), cross, cross_bias, deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
        return x + self.drop(y, deterministic=deterministic), written

    @nn.nowrap
    def fits_kernels(self, params: Params, x: Array, slots: Slots, cross: Slots) -> bool:
        """Returns whether kernels can compute the layer: its attention, and its products with norms and sums."""
        c, new = self.config, x.shape[1]
        # The kernels need the fused matrices that `layers.fuse` prepares.
        sizes = c.d_model, c.num_heads * c.head_dim // shards(), c.d_ff // shards()
        fused = "qkv" in params["self_attention"] and "wi_01" in params["mlp"]
        fits = slots.fits(new) and cross.fits(new, written=False)
        return c.gated and fused and fits and computes_around(params, x, sizes)

    def _in_kernels(
        self, x: Array, bias: Array, cross: Slots, cross_bias: Array, slots: Slots
    ) -> tuple[Array, KeysValues]:
        """Applies the layer with a cache, as a call does, in five kernels (on GPUs, in eight)."""
        norms = (self.pre_self_attention_layer_norm, self.pre_cross_attention_layer_norm, self.pre_mlp_layer_norm)
        # The norms are not applied here: a kernel computes each norm together with the product after it.
        first, second, last = (norm.in_kernel() for norm in norms)
        to_self, to_encoder, dtype = self.self_attention, self.encoder_decoder_attention, self.config.dtype
        _, columns = chain(x, [to_self.qkv.link(norm=first)], dtype)
        mixed, written = to_self.mixed((columns,), slots, bias)
        x, query = chain(mixed, [to_self.out.link(adds=True), to_encoder.query.link(norm=second)], dtype, x)
        mixed, _ = to_encoder.mixed((query,), cross, cross_bias)
        return chain(mixed, [to_encoder.out.link(adds=True), *self.mlp.links(last)], dtype, x)[0], written

    def _to_self(self, x: Array, bias: Array, slots: Slots | None, deterministic: bool) -> tuple[Array, KeysValues]:
        """Returns the self-attention's output, and the keys and values."""
        if slots is not None and slots.fits(x.shape[1]):
            return self.self_attention.in_cache(x, slots, bias)
        # The write comes before attention, because each token of a block sees itself and the block's earlier tokens.
        queries, written = self.self_attention.project(x)
        attended = written
        if slots is not None:
            written = slots.write(written)
            attended = slots.attended(written)
        return self.self_attention(queries, attended, (bias,), deterministic), written

    def _to_encoder(self, x: Array, cross: Slots | Array, bias: Array, deterministic: bool) -> Array:
        """Returns the cross-attention's output."""
        attention = self.encoder_decoder_attention
        if isinstance(cross, Slots):
            if cross.fits(x.shape[1], written=False):
                return attention.to_fixed(x, cross, bias)
            keys_values = cross.attended((cross.keys, cross.values))
        else:
            keys_values = attention.keys_values(cross)
        return attention(attention.queries(x), keys_values, (bias,), deterministic)


@flax.struct.dataclass
class T5Static:
    """Arrays that `prefill` computes once and decoding never changes.

    The first axis of every array is the row, or row times head in `cross`.

    Attributes:
        cross: per layer, the cross-attention's keys `[B * H, K, N]` and values `[B * H, N, K]`; if the layers run in a
            scan, one pair for all layers, `[L, B * H, …]`.
        cross_bias: `[B, 1, 1, N]`, 0 at real encoder tokens and very negative at padding.
        bias: `[B, H, 2S - 1]`, the relative bias for each distance (key minus query position) from `-(S - 1)` to
            `S - 1`; `None` if each layer has its own, which every call computes.
        summary: `[B, E]`, mean of the encoder's output over real tokens.
    """

    cross: tuple[KeysValues, ...]
    cross_bias: Array
    bias: Array | None
    summary: Array


def _distances(length: int) -> np.ndarray:
    """Returns the distance (key position minus query position) for each query and key, `[length, length]`."""
    return np.arange(length)[None, :] - np.arange(length)[:, None]


def _by_distance(table: Callable[[np.ndarray], Array], rows: int, slots: int) -> Array:
    """Returns the bias `[B, H, 2S - 1]` for each distance that a query and a key in a cache of `S` slots may have."""
    bias = table(np.arange(1 - slots, slots))
    # Each row has its own copy of the bias, because the first axis of every array of a cache is the row.
    return jnp.broadcast_to(bias, (rows, *bias.shape))


def _sequence_bias(table: Callable[[np.ndarray], Array], length: int) -> Array:
    """Returns the sum of relative bias and causal mask, `[1, H, T, T]`, for a whole sequence of `length` tokens."""
    # NumPy arrays are used, so that the mask and the distances are constants of the compiled program.
    causal = np.tril(np.ones((length, length), bool))
    return jnp.where(causal, table(_distances(length)), MASKED)[None]


def _padding_bias(real: Array) -> Array:
    """Returns the bias float32 `[B, 1, 1, N]` that masks the encoder's padding; `real` bool `[B, N]` is false there."""
    return jnp.where(real, 0.0, MASKED)[:, None, None, :]


def _block_bias(by_distance: Array, length: Array, new: int, slots: int) -> Array:
    """Returns the sum of relative bias and causal mask, `[B, H, T, S]`, for a block of `new` tokens fed at `length`.

    The bias of a query at position `p` for slot `s` depends on `s - p` only. Each row therefore takes one contiguous
    slice of `by_distance` (whose index `S - 1` is distance 0), and each query of the block a shifted part of it.
    """

    def window(row: Array, row_length: Array) -> Array:
        # The slice begins with the distance from the block's last token to slot 0. This index is not negative, because
        # the block fits into the cache; `dynamic_slice` would shift a slice that does not fit, without an error.
        return jax.lax.dynamic_slice_in_dim(row, slots - row_length - new, slots + new - 1, axis=-1)

    # Each row takes one slice, because a gather for each query and slot would be slow on a CPU.
    windows = local(jax.vmap(window), (BIAS, ROWS), BIAS)(by_distance, length)
    shifted = [windows[..., new - 1 - t : new - 1 - t + slots] for t in range(new)]
    mask = causal_slots_mask(length, new, slots)[:, None]
    return jnp.where(mask, jnp.stack(shifted, axis=2), MASKED)


def _branch_bias(by_distance: Array, start: Array, branch: Branch, slots: int) -> Array:
    """Returns the sum of relative bias and mask for the fed entries of a draft tree, `[B, H, T, S]`.

    The tree's first entry is in slot `start` `[B]`. `by_distance` is as in `_block_bias`.
    """
    deepest = max(branch.own)

    def window(row: Array, row_start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, slots - 1 - row_start - deepest, slots + deepest, axis=-1)

    windows = local(jax.vmap(window), (BIAS, ROWS), BIAS)(by_distance, start)
    shifted = jnp.stack([windows[..., deepest - depth : deepest - depth + slots] for depth in branch.own], axis=2)
    committed = (jnp.arange(slots)[None] < start[:, None])[:, None, None]
    # The distance between two entries of the tree is the difference of their depths, whatever slots they are in.
    distances = np.array(branch.depths)[None] - np.array(branch.own)[:, None]
    tree_bias = jnp.where(np.array(branch.sees), by_distance[..., slots - 1 + distances], MASKED)
    return put_branch(jnp.where(committed, shifted, MASKED), tree_bias, start)


class Encoder(nn.Module):
    """Encoder: a stack of bidirectional layers over embedded tokens, and a last norm.

    If `remat` is true, gradients recompute each layer instead of keeping its intermediate values.
    """

    config: T5Config
    remat: bool = False

    def setup(self) -> None:
        c = self.config
        if not c.layer_biases:
            self.relpos_bias = RelativeBias(c, bidirectional=True)
        if c.scanned:
            no_bias = jnp.zeros((1, 1, 1, 1))
            self.stack = stack_of(
                self, _detached(EncoderLayer, c), c.num_encoder_layers, _one_state(c), (no_bias,), True
            )
        else:
            layer = recomputed_layer(EncoderLayer, self.remat, (3,))
            self.layers = [layer(c) for _ in range(c.num_encoder_layers)]
        self.encoder_norm = norm(c)
        self.drop = dropout(c)

    def __call__(self, x: Array, padding_bias: Array, deterministic: bool) -> Array:
        # The biases [1, H, N, N] and [B, 1, 1, N] stay separate, because their sum would be an array [B, H, N, N].
        shared = () if self.config.layer_biases else (self.relpos_bias(_distances(x.shape[1]))[None],)
        biases = (*shared, padding_bias)
        x = self.drop(x, deterministic=deterministic)
        if self.config.scanned:
            x = self._scan(x, biases, deterministic)
        else:
            for layer in self.layers:
                x = layer(x, biases, deterministic)
        x = self.drop(self.encoder_norm(x), deterministic=deterministic)
        return x

    @nn.nowrap
    def _scan(self, x: Array, biases: Biases, deterministic: bool) -> Array:
        """Applies all layers to `x` in a loop over their stacked parameters."""
        layer, key = _detached(EncoderLayer, self.config), _dropout_key(self, deterministic)

        def body(x: Array, params: Params, _: int, number: Any) -> tuple[Array, None]:
            return layer.apply({"params": params}, x, biases, deterministic, rngs=_dropout_of(key, number)), None

        return over_layers(recomputed(body, self.remat), x, self.stack, self.config.num_encoder_layers)[0]


def _detached(layer: type[Any], config: T5Config) -> Any:
    """Returns a layer that is not a part of a module, for a loop that applies it to stacked parameters."""
    return layer(config, parent=None, name=STACK)


def _one_state(config: T5Config) -> Array:
    """Returns a state `[1, 1, E]`, from which the shapes of a layer's parameters follow."""
    return jnp.zeros((1, 1, config.d_model), config.dtype)


def _dropout_key(module: nn.Module, deterministic: bool) -> Array | None:
    """Returns the random key from which all layers of a scan derive their dropout keys; `None` without dropout."""
    return module.make_rng("dropout") if not deterministic and module.has_rng("dropout") else None


def _dropout_of(key: Array | None, layer: Any) -> dict[str, Array]:
    """Returns the random key of one layer's dropout, in the form of Flax's argument `rngs`."""
    # All layers of a scan run the same program, so with equal keys they would drop the same units.
    return {} if key is None else {"dropout": jax.random.fold_in(key, layer)}


class Decoder(nn.Module):
    """Decoder: a stack of causal layers with cross-attention, a last norm and, if not tied, the output layer.

    If `remat` is true, gradients recompute each layer instead of keeping its intermediate values.
    """

    config: T5Config
    remat: bool = False

    def setup(self) -> None:
        c = self.config
        if not c.layer_biases:
            self.relpos_bias = RelativeBias(c, bidirectional=False)
        if c.scanned:
            state, no_bias = _one_state(c), jnp.zeros((1, 1, 1, 1))
            bias = partial(_sequence_bias, length=1) if c.layer_biases else no_bias
            self.stack = stack_of(
                self, _detached(DecoderLayer, c), c.num_decoder_layers, state, bias, state, no_bias, None, True
            )
        else:
            layer = recomputed_layer(DecoderLayer, self.remat, (6,))
            self.layers = [layer(c) for _ in range(c.num_decoder_layers)]
        self.decoder_norm = norm(c)
        self.drop = dropout(c)
        if not c.tied:
            self.logits_dense = Dense(c.num_embeddings, c.dtype, wide=True)

    def cross(self, encoded: Array) -> tuple[KeysValues, ...]:
        """Returns each layer's cross-attention keys and values, computed from the encoder's output `[B, N, E]`.

        If the layers run in a scan, there is one pair for all layers, `[L, B * H, …]`.
        """
        layer = _detached(DecoderLayer, self.config)
        return cross_keys_values(self, layer, self.config.num_decoder_layers, encoded)

    def __call__(
        self,
        x: Array,
        bias: Array | BiasOf,
        cross: tuple[KeysValues, ...] | Array,
        cross_bias: Array,
        cache: KVCache | None,
        deterministic: bool,
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Returns the normalized hidden states `[B, T, E]`, and the keys and values of each layer's self-attention.

        `bias` is that of every layer (`DecoderLayer`). `cross` is the result of `cross` or, without a cache, the
        encoder's output `[B, N, E]`. If the layers run in a scan, the keys and values are those of the cache, and there
        are none without a cache.
        """
        x = self.drop(x, deterministic=deterministic)
        apply = self._scan if self.config.scanned else self._unrolled
        x, attended = apply(x, bias, cross, cross_bias, cache, deterministic)
        return self.drop(self.decoder_norm(x), deterministic=deterministic), attended

    @nn.nowrap
    def _unrolled(
        self, x: Array, bias: Array | BiasOf, cross: Any, cross_bias: Array, cache: KVCache | None, deterministic: bool
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Applies one layer after the other to `x`, and stores their outputs in `EXITS`."""
        attended = []
        for i, layer in enumerate(self.layers):
            slots = None if cache is None else Slots(cache.keys[i], cache.values[i], cache.length)
            source = Slots(cross[i][0], cross[i][1], cache.length) if cache is not None else cross
            y, keys_values = layer(x, bias, source, cross_bias, slots, deterministic)
            x = y if deterministic else self._sometimes(i, x, y)
            # The states are stored before the last norm, because an early exit applies the last norm itself
            # (`exit_logits`).
            self.sow(EXITS, "hidden", x)
            attended.append(keys_values)
        return x, tuple(attended)

    @nn.nowrap
    def _scan(
        self, x: Array, bias: Array | BiasOf, cross: Any, cross_bias: Array, cache: KVCache | None, deterministic: bool
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Applies all layers to `x` in a loop over their stacked parameters, which writes the caches in place."""
        c, recorded = self.config, self.is_mutable_collection(EXITS)
        layer, key = _detached(DecoderLayer, c), _dropout_key(self, deterministic)

        def body(carry: Any, params: Params, _: int, number: Any) -> tuple[Any, Array | None]:
            x, caches = carry
            slots = None if cache is None else Slots(caches[0][0], caches[0][1], cache.length, layer=number)
            source = cross if cache is None else Slots(cross[0][0], cross[0][1], cache.length, layer=number)
            rngs = _dropout_of(key, number)
            if whole is not None and slots is not None and layer.fits_kernels(params, x, slots, source):
                params = in_stack(params, whole, number)
            y, written = layer.apply({"params": params}, x, bias, source, cross_bias, slots, deterministic, rngs=rngs)
            x = y if deterministic else self._sometimes(number, x, y, rngs.get("dropout"))
            return (x, (written,) if caches else ()), x if recorded else None

        whole = tiled_scales(self.stack) if cache is not None and platforms.uses_kernels() else None
        caches = () if cache is None else tuple(zip(cache.keys, cache.values, strict=True))
        body, depth = recomputed(body, self.remat), c.num_decoder_layers
        (x, caches), states = over_layers(body, (x, caches), self.stack, depth, fixed=cache is not None)
        for state in in_order(states, depth) if recorded else ():
            self.sow(EXITS, "hidden", state)
        return x, caches

    def _sometimes(self, i: Any, before: Array, after: Array, key: Array | None = None) -> Array:
        """Skips layer `i` in randomly chosen rows: returns the layer's input there and its output elsewhere.

        Higher layers are skipped more often (LayerSkip, section 4.1). In a scan, `key` is the layer's random key.
        """
        c = self.config
        if not c.layer_dropout:
            return after
        rate = c.layer_dropout * (2 ** (i / max(1, c.num_decoder_layers - 1)) - 1)
        # The first layer's rate is 0. In a scan, `i` is traced, so the draw is made, and with rate 0 it keeps all rows.
        if isinstance(i, int) and not i:
            return after
        # In a scan, dropout inside the layer uses `key`, so the skip is drawn with another key, derived from it.
        key = self.make_rng("dropout") if key is None else jax.random.fold_in(key, c.num_decoder_layers)
        kept = jax.random.bernoulli(key, 1 - rate, (len(after), 1, 1))
        # Unlike dropout, the result is not rescaled: the input of a skipped layer is a valid input of the next layer.
        return jnp.where(kept, after, before)


class T5Module(nn.Module):
    """Flax module of a T5 with T5X's parameter tree.

    `apply({"params": p}, encoder_tokens, decoder_input_tokens, deterministic=False, rngs={"dropout": k})` returns
    logits for training. With `mutable=[EXITS]` it also returns the layers' states, from which `exit_logits` computes
    logits. `T5` calls the other methods for decoding. If `remat` is true, gradients recompute each layer instead of
    keeping its intermediate values.
    """

    config: T5Config
    remat: bool = False

    def setup(self) -> None:
        """Creates the shared embedding, the encoder and the decoder."""
        c = self.config
        init = nn.initializers.normal(stddev=1.0)
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype, embedding_init=init)
        self.encoder = Encoder(c, self.remat)
        self.decoder = Decoder(c, self.remat)

    def __call__(
        self,
        encoder_tokens: Array,
        decoder_input_tokens: Array,
        deterministic: bool = True,
        encoder_real: Array | None = None,
    ) -> Array:
        """Returns the logits after each token, float32 `[B, T, num_embeddings]`; padding of the vocabulary has -inf.

        Args:
            encoder_tokens: int32 `[B, N]`, right-padded with 0; padding is masked.
            decoder_input_tokens: int32 `[B, T]`, the start token and then the targets without their last token. The
                caller's loss must ignore positions after the targets.
            deterministic: whether dropout is off.
            encoder_real: bool `[B, N]`, which of `encoder_tokens` are not padding; `None`: all up to the last nonzero.
        """
        real = real_tokens(encoder_tokens) if encoder_real is None else encoder_real
        encoded = self.encode(encoder_tokens, real, deterministic)
        return self.decode(encoded, real, decoder_input_tokens, deterministic)

    def encode(self, encoder_tokens: Array, real: Array, deterministic: bool = True) -> Array:
        """Returns the encoder's output `[B, N, E]`; `real` bool `[B, N]` is true for tokens that are not padding."""
        return self.encoder(self.token_embedder(encoder_tokens), _padding_bias(real), deterministic)

    def decode(self, encoded: Array, real: Array, decoder_input_tokens: Array, deterministic: bool = True) -> Array:
        """Returns the logits that `__call__` returns, computed from the encoder's output `[B, N, E]`."""
        # The function is wrapped as a pytree, because a layer that gradients recompute accepts only pytrees and static
        # arguments.
        bias_of = jax.tree_util.Partial(partial(_sequence_bias, length=decoder_input_tokens.shape[1]))
        bias = bias_of if self.config.layer_biases else bias_of(self.decoder.relpos_bias)
        x = self.token_embedder(decoder_input_tokens)
        hidden, _ = self.decoder(x, bias, encoded, _padding_bias(real), None, deterministic)
        return self.logits(hidden)

    def embed(self, tokens: Array) -> Array:
        """Returns the input of the decoder's first layer, which is the tokens' embeddings `[B, T, E]`."""
        return self.token_embedder(tokens)

    def logits(self, hidden: Array) -> Array:
        """Returns float32 logits `[B, T, num_embeddings]` of normalized hidden states; vocabulary padding has -inf."""
        c = self.config
        # T5 1.0 scales hidden states before a tied output layer, because embeddings have norms of about sqrt(d_model).
        if c.tied:
            logits = self.token_embedder.attend(hidden * c.d_model**-0.5)
        else:
            logits = self.decoder.logits_dense(hidden)
        return real_entries(logits, c.vocab_size)

    def exit_logits(self, hidden: Array) -> Array:
        """Returns an early exit's logits: applies the last norm and the output layer to `hidden` `[B, T, E]`."""
        return self.logits(self.decoder.decoder_norm(hidden))

    def start(self, encoder_tokens: Array, real: Array, slots: int) -> T5Static:
        """Runs the encoder, and returns the arrays that stay fixed while a cache of `slots` slots is filled."""
        rows, encoded = encoder_tokens.shape[0], self.encode(encoder_tokens, real)
        return T5Static(
            cross=self.decoder.cross(encoded),
            cross_bias=_padding_bias(real),
            bias=None if self.config.layer_biases else _by_distance(self.decoder.relpos_bias, rows, slots),
            summary=mean_state(encoded, real),
        )

    def extend(self, cache: KVCache, tokens: Array, branch: Branch | None = None) -> tuple[LMOutput, KVCache]:
        """Feeds a block of tokens, or entries of a draft tree, to the decoder (`T5.extend`, `T5.extend_branch`)."""
        static: T5Static = cache.static
        (rows, new), slots = tokens.shape, self._slots(cache)
        see: Callable[[Array], Array] = partial(_block_bias, length=cache.length, new=new, slots=slots)
        if branch is not None:
            see = partial(_branch_bias, start=cache.length - branch.num_cached, branch=branch, slots=slots)
        # If each layer has a bias table, every call computes the biases: the tables are small, but the cached biases of
        # all layers would not be.
        bias = see(static.bias) if static.bias is not None else lambda table: see(_by_distance(table, rows, slots))
        x = self.token_embedder(tokens)
        hidden, attended = self.decoder(x, bias, static.cross, static.cross_bias, cache, True)
        keys, values = tuple(k for k, _ in attended), tuple(v for _, v in attended)
        cache = replace(cache, keys=keys, values=values, length=cache.length + new)
        return LMOutput(self.logits(hidden), hidden), cache

    @nn.nowrap
    def _slots(self, cache: KVCache) -> int:
        """Returns the number of slots of a cache; any number, if an early exit without layers has no cache."""
        return int(cache.values[0].shape[-2]) if cache.values else 1


@dataclass(frozen=True)
class T5(CachedModel[KVCache]):
    """A T5 that implements `LanguageModel`; its parameters are those of `T5Module`."""

    config: T5Config
    mesh: Mesh | None = field(default=None, repr=False, kw_only=True)
    is_encoder_decoder: ClassVar[bool] = True  # The encoder reads the prompt; decoding starts from `config.start_id`.

    @property
    def module(self) -> T5Module:
        """The Flax module that the configuration describes."""
        return T5Module(self.config)

    def _prefilled(
        self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None, layers: tuple[int, ...]
    ) -> tuple[KVCache, Array | None]:
        if prompt.encoder_tokens is None:
            raise ValueError("the prompt has no encoder_tokens: give the encoder's input there")
        rows, width = prompt.tokens.shape
        if max_len < width:
            raise ValueError(f"max_len is {max_len}, but the decoder context has {width} tokens: raise max_len")
        c, max_len = self.config, tiled(max_len)
        static = self._apply(params, prompt.encoder_tokens, prompt.encoder_real, max_len, method="start")
        with under(self.mesh):
            depth = c.num_decoder_layers
            sizes, counts = ((max_len,), (depth,)) if c.scanned else ((max_len,) * depth, None)
            keys, values = empty_slots(rows * c.num_heads, c.head_dim, sizes, c.dtype, counts)
        cache = KVCache(keys, values, jnp.zeros((rows,), jnp.int32), static)
        states = None
        # The last token of the decoder's context stays pending, and decoding feeds it with the first block. Shorter
        # rows are also fed padding here, which the rollback below drops.
        if width > 1:
            fed = prompt.tokens[:, :-1]
            (_, cache), states = self._apply_reading(params, fed, layers, cache, fed, method="extend")
        return self.rollback(cache, prompt.length - 1), states

    def can_draft(self, params: Params, cache: KVCache, turns: int) -> bool:
        """Returns whether one kernel drafts blocks of `turns` tokens (`t5_blocks`)."""
        return self.mesh is None and t5_blocks.can_draft(self.config, params, cache, turns)

    def draft(
        self,
        params: Params,
        cache: KVCache,
        tokens: Array,
        missed: Array,
        uniforms: Array,
        temperature: Array,
        turns: int,
    ) -> DraftedBlock:
        """Drafts a block in one kernel (`core.protocols.BlockModel`)."""
        slots = cache.values[0].shape[-2]
        # In a row without a missed token, the bias's last query may lie beyond the cache. The row does not feed it.
        first = jnp.minimum(cache.length, slots - turns - 1)
        bias = _block_bias(cache.static.bias, first, turns + 1, slots)
        kernel = t5_blocks.kernel_of(self.config, cache, turns)
        caches = resident_draft.Caches(cache.keys, cache.values, *zip(*cache.static.cross, strict=True))
        feed = resident_draft.Feed(
            cache.length, missed, tokens, uniforms, temperature, bias, first, cache.static.cross_bias
        )
        logits, drawn, caches = kernel(t5_blocks.weights_of(self.config, params), caches, feed)
        return DraftedBlock(logits, drawn, replace(cache, keys=caches.keys, values=caches.values))

    def prompt_features(self, cache: KVCache) -> Array:
        """Returns the mean `[B, E]` of the encoder's output over real tokens (docs/methods.md, section 8)."""
        summary: Array = cache.static.summary
        return summary


def teacher_forced_logits(model: T5, params: Params, encoder_tokens: Array, decoder_input_tokens: Array) -> Array:
    """Returns the logits after every token of `decoder_input_tokens` `[B, T]`, computed in one pass.

    The logits are float32 `[B, T, num_embeddings]`.
    """
    logits: Array = model._apply(params, encoder_tokens, decoder_input_tokens, method="__call__")
    return logits
