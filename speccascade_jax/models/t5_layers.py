"""T5's layers with T5X's parameter names, shared by the teacher-forced and the cached path.

Sources: T5 (Raffel et al., 2020), T5 1.1's gated feed-forward (Shazeer, 2020). Shape letters as in
`core/protocols.py`, plus `H` heads, `K` head_dim, `E` d_model. Keys are `[B * H, K, S]`, values
`[B * H, S, K]` everywhere: with these layouts a block costs little more than a step on CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.checks import check_sizes
from speccascade_jax.core.types import Array
from speccascade_jax.models.layers import KeysValues, RMSNorm, Slots, in_chunks
from speccascade_jax.models.products import Dense
from speccascade_jax.models.sharding import COLUMNS, HEADS, P, local, shards
from speccascade_jax.runtime.mesh import AXES

CHUNK = 256
"""Tokens of a prompt that attend at once, without dropout: training holds the logits of all."""
Biases: TypeAlias = tuple[Array, ...]
"""What is added to logits, each `[B or 1, H or 1, T or 1, S]`."""

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_bias_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


@dataclass(frozen=True)
class T5Config:
    """Sizes and options of a T5 model (hashable: it is a static argument of jit).

    Attributes:
        vocab_size: real vocabulary entries; num_embeddings: rows of the embedding, padding included.
        relative_buckets, relative_max_distance: of the relative position bias.
        gated: `wi_0`, `wi_1` with tanh-approximate GELU (T5 1.1); otherwise one `wi` with ReLU (T5 1.0).
        tied: logits through the embedding, scaled by `d_model ** -0.5`; otherwise `logits_dense`.
        layer_dropout: how often training leaves out the last decoder layer for a row, the others less (`T5Module`);
            like `dropout_rate` without meaning to what decodes, and no part of the representation that fingerprints
            read.
        dtype: computation dtype; parameters in another dtype are cast where used. Norms, softmax and
            logits are float32 always.
    """

    vocab_size: int
    num_embeddings: int
    d_model: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_encoder_layers: int
    num_decoder_layers: int
    relative_buckets: int = 32
    relative_max_distance: int = 128
    gated: bool = True
    tied: bool = False
    dropout_rate: float = 0.0
    layer_dropout: float = field(default=0.0, repr=False, kw_only=True)
    layer_norm_epsilon: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes(self, "num_decoder_layers", "num_encoder_layers")
        if not 0 <= self.layer_dropout < 1:
            raise ValueError(f"layer_dropout is {self.layer_dropout}: a share of the rows, in [0, 1)")


def relative_buckets(distance: np.ndarray, bidirectional: bool, buckets: int, max_distance: int) -> np.ndarray:
    """T5's bucket of each `distance` (key position minus query position), int32 of the same shape.

    Half of the buckets are exact, the rest grow logarithmically up to `max_distance`; looking both
    ways, the upper half of all buckets is for keys after the query (T5, section 2.1).
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
    # The epsilon keeps exact powers (distance 16 of 8 exact, 128 at most) on the upper side.
    ratio = np.log(np.maximum(away, 1) / exact + np.finfo(np.float32).eps) / math.log(max_distance / exact)
    large = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    return (offset + np.where(away < exact, away, large)).astype(np.int32)


class RelativeBias(nn.Module):
    """The learnt bias of attention logits by bucketed relative position; `rel_embedding` `[H, buckets]`."""

    config: T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, distance: np.ndarray) -> Array:
        """float32 `[H, *distance.shape]` for `distance` = key position minus query position."""
        c = self.config
        table = self.param("rel_embedding", _bias_init, (c.num_heads, c.relative_buckets))
        found = relative_buckets(distance, self.bidirectional, c.relative_buckets, c.relative_max_distance)
        return jnp.take(table.astype(jnp.float32), found, axis=1)


def norm(config: T5Config) -> RMSNorm:
    """T5's layer norm: root mean square, no mean, no bias."""
    return RMSNorm(config.layer_norm_epsilon, config.dtype)


def dense(config: T5Config, features: int, divisor: float = 1.0) -> Dense:
    """A product `x @ kernel` without bias; the initial kernel is divided by `divisor`."""

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        return _kernel_init(key, shape, dtype) / divisor

    return Dense(features, config.dtype, kernel_init=init)


def dropout(config: T5Config) -> nn.Dropout:
    """T5X's dropout: one mask for all positions (queries, in attention)."""
    return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))


def _spread(bias: Array) -> P:
    """Which axes of a bias lie along a mesh's."""
    return P(*(name if size > 1 else None for name, size in zip(AXES, bias.shape, strict=False)))


class Attention(nn.Module):
    """Multi-head attention with 2-D kernels; queries are not scaled (the initial kernel is).

    Where the parameters hold one `qkv` kernel instead of three (`fuse`), self-attention projects in one product.
    """

    config: T5Config

    def setup(self) -> None:
        c = self.config
        width = c.num_heads * c.head_dim
        self.query = dense(c, width, math.sqrt(c.head_dim))
        self.key = dense(c, width)
        self.value = dense(c, width)
        self.qkv = dense(c, 3 * width)
        self.out = dense(c, c.d_model)
        self.drop = dropout(c)

    def _heads(self, x: Array) -> Array:
        """`[B * H, T, K]` of `x` `[B, T, H * K]`."""
        return local(self._split, (COLUMNS,), HEADS)(x)

    def _split(self, x: Array) -> Array:
        split = x.reshape(*x.shape[:-1], -1, self.config.head_dim).transpose(0, 2, 1, 3)
        return split.reshape(-1, *split.shape[2:])

    def _split_each(self, x: Array) -> tuple[Array, ...]:
        """Of `x` `[B, T, 3 H * K]`, queries, keys and values side by side."""
        return tuple(map(self._split, jnp.split(x, 3, axis=-1)))

    def queries(self, x: Array) -> Array:
        """Queries `[B * H, T, K]` of `x` `[B, T, E]`."""
        return self._heads(self.query(x))

    def keys_values(self, x: Array) -> KeysValues:
        """Keys `[B * H, K, S]` and values `[B * H, S, K]` of `x` `[B, S, E]`."""
        return self._heads(self.key(x)).transpose(0, 2, 1), self._heads(self.value(x))

    def project(self, x: Array) -> tuple[Array, KeysValues]:
        """Queries, keys and values of one `x`: self-attention's."""
        if not self.has_variable("params", "qkv"):
            return self.queries(x), self.keys_values(x)
        query, key, value = local(self._split_each, (COLUMNS,), (HEADS,) * 3)(self.qkv(x))
        return query, (key.transpose(0, 2, 1), value)

    def __call__(self, queries: Array, keys_values: KeysValues, biases: Biases, deterministic: bool) -> Array:
        """Attention of `queries` over `S` slots, `[B, T, E]`; `biases` mask too."""
        long = deterministic and queries.shape[1] > CHUNK and biases[0].shape[2] > 1
        attend: Callable[..., Array] = self._attend_in_chunks if long else self._attend
        specs = (HEADS, HEADS, HEADS, *map(_spread, biases))
        mixed = local(partial(attend, deterministic=deterministic), specs, COLUMNS)(queries, *keys_values, *biases)
        return self.out(mixed)

    def _attend_in_chunks(
        self, queries: Array, keys: Array, values: Array, bias: Array, *biases: Array, deterministic: bool
    ) -> Array:
        """`_attend` in chunks; the first bias is by token."""

        def attend(part: Array, own: Array) -> Array:
            return self._attend(part, keys, values, own, *biases, deterministic=deterministic)

        return in_chunks(attend, CHUNK, queries.shape[1], 1, (queries, 1), (bias, 2))

    def _attend(self, queries: Array, keys: Array, values: Array, *biases: Array, deterministic: bool) -> Array:
        """What each token mixes from the values, `[B, T, H * K]`."""
        heads = self.config.num_heads // shards()
        logits = jnp.einsum("ntk,nks->nts", queries, keys).astype(jnp.float32)
        logits = sum(biases, logits.reshape(-1, heads, *logits.shape[1:]))
        weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
        weights = self.drop(weights, deterministic=deterministic)
        mixed = jnp.einsum("nts,nsk->ntk", weights.reshape(-1, *weights.shape[2:]), values)
        rows = mixed.reshape(-1, heads, *mixed.shape[1:]).transpose(0, 2, 1, 3)
        return rows.reshape(*rows.shape[:2], -1)


class FeedForward(nn.Module):
    """GELU-gated (T5 1.1) or ReLU (T5 1.0) feed-forward."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        self.wi_01 = dense(c, 2 * c.d_ff)
        if c.gated:
            self.wi_0, self.wi_1 = dense(c, c.d_ff), dense(c, c.d_ff)
        else:
            self.wi = dense(c, c.d_ff)
        self.wo = dense(c, c.d_model)
        self.drop = dropout(c)

    def __call__(self, x: Array, deterministic: bool) -> Array:
        return self.wo(self.drop(self._inner(x), deterministic=deterministic))

    def _inner(self, x: Array) -> Array:
        if not self.config.gated:
            return nn.relu(self.wi(x))
        if self.has_variable("params", "wi_01"):
            return local(self._both, (COLUMNS,), COLUMNS)(self.wi_01(x))
        return self._opened(self.wi_0(x), self.wi_1(x))

    def _both(self, x: Array) -> Array:
        return self._opened(*jnp.split(x, 2, axis=-1))

    def _opened(self, gate: Array, linear: Array) -> Array:
        return nn.gelu(gate, approximate=True) * linear


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each pre-normed and added to the residual."""

    config: T5Config

    def setup(self) -> None:
        self.pre_attention_layer_norm = norm(self.config)
        self.attention = Attention(self.config)
        self.pre_mlp_layer_norm = norm(self.config)
        self.mlp = FeedForward(self.config)
        self.drop = dropout(self.config)

    def __call__(self, x: Array, biases: Biases, deterministic: bool) -> Array:
        y = self.pre_attention_layer_norm(x)
        y = self.attention(*self.attention.project(y), biases, deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
        return x + self.drop(y, deterministic=deterministic)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, over a cache or over the block itself."""

    config: T5Config

    def setup(self) -> None:
        self.pre_self_attention_layer_norm = norm(self.config)
        self.self_attention = Attention(self.config)
        self.pre_cross_attention_layer_norm = norm(self.config)
        self.encoder_decoder_attention = Attention(self.config)
        self.pre_mlp_layer_norm = norm(self.config)
        self.mlp = FeedForward(self.config)
        self.drop = dropout(self.config)

    def __call__(
        self,
        x: Array,
        bias: Array,
        cross: KeysValues,
        cross_bias: Array,
        slots: Slots | None,
        deterministic: bool,
    ) -> tuple[Array, KeysValues]:
        """One layer over `x` `[B, T, E]`; returns it and the keys and values attended.

        With `slots`, the block's keys and values are written into them first.
        """
        y = self.pre_self_attention_layer_norm(x)
        queries, own = self.self_attention.project(y)
        if slots is not None:
            own = slots.write(own)
        x = x + self.drop(self.self_attention(queries, own, (bias,), deterministic), deterministic=deterministic)
        y = self.encoder_decoder_attention.queries(self.pre_cross_attention_layer_norm(x))
        y = self.encoder_decoder_attention(y, cross, (cross_bias,), deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
        return x + self.drop(y, deterministic=deterministic), own
