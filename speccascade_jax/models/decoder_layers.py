"""Layers of the decoder-only family, shared by the teacher-forced and the cached path.

Sources: RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), gated feed-forward (Shazeer, 2020),
grouped-query attention (Ainslie et al., 2023), soft caps, windows and post-norms (Gemma Team, 2024). Shape letters as
in `core/protocols.py`, plus `N` query heads, `n` key-value heads, `g = N / n`, `K` head_dim, `E` d_model. Keys are
`[B * n, K, S]`, values `[B * n, S, K]`.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.layers import EXITS, MASKED, KeysValues, RMSNorm, Slots, in_chunks
from speccascade_jax.models.products import Dense
from speccascade_jax.models.sharding import COLUMNS, HEADS, P, local, shards
from speccascade_jax.runtime.mesh import DATA

CHUNK = 256
"""Tokens that attend at once."""


class Turns(NamedTuple):
    """Cosines and sines of the rotary angles, float32 `[B or 1, T, 1, K / 2]`."""

    cosine: Array
    sine: Array


def turns(config: DecoderConfig, positions: Array) -> Turns:
    """The rotary angles at `positions` int32 `[B or 1, T]`."""
    angles = positions[..., None, None].astype(jnp.float32) * config.frequencies()
    return Turns(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Array, by: Turns, pairs: str) -> Array:
    """`x` `[B, T, heads, K]` with its pairs of coordinates turned, in float32 and back."""
    x32 = x.astype(jnp.float32)
    if pairs == "halves":
        first, second = jnp.split(x32, 2, axis=-1)
    else:
        first, second = x32[..., 0::2], x32[..., 1::2]
    turned = (first * by.cosine - second * by.sine, second * by.cosine + first * by.sine)
    out = jnp.concatenate(turned, axis=-1) if pairs == "halves" else jnp.stack(turned, axis=-1).reshape(x.shape)
    return out.astype(x.dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """`cap · tanh(x / cap)`; `x` without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def dense(config: DecoderConfig, features: int, bias: bool = False) -> Dense:
    """A product `x @ kernel`."""
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    return Dense(features, config.dtype, use_bias=bias, kernel_init=init)


def norm(config: DecoderConfig) -> RMSNorm:
    """The family's norm with this model's offset and epsilon."""
    return RMSNorm(config.norm_epsilon, config.dtype, config.norm_offset)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Where the parameters hold one `qkv` kernel instead of three (`layers.fuse`), they are projected in one product.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.widths = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim)
        self.query, self.key, self.value = (dense(c, width, c.qkv_bias) for width in self.widths)
        self.qkv = dense(c, sum(self.widths), c.qkv_bias)
        self.out = dense(c, c.d_model)

    def project(self, x: Array, by: Turns) -> tuple[Array, KeysValues]:
        """Queries `[B * n, g * T, K]` (scaled and rotated), keys and values of `x` `[B, T, E]`."""
        turned = P(DATA if by.cosine.shape[0] > 1 else None)
        if self.has_variable("params", "qkv"):
            split = local(self._split_fused, (COLUMNS, turned, turned), (HEADS,) * 3)
            query, key, value = split(self.qkv(x), *by)
        else:
            split = local(self._split, (COLUMNS, COLUMNS, COLUMNS, turned, turned), (HEADS,) * 3)
            query, key, value = split(self.query(x), self.key(x), self.value(x), *by)
        return query, (key, value)

    def _split_fused(self, x: Array, cosine: Array, sine: Array) -> tuple[Array, Array, Array]:
        first, second = (sum(self.widths[:count]) // shards() for count in (1, 2))
        query, key, value = jnp.split(x, (first, second), axis=-1)
        return self._split(query, key, value, cosine, sine)

    def _split(self, query: Array, key: Array, value: Array, cosine: Array, sine: Array) -> tuple[Array, Array, Array]:
        c, (rows, new, _), by = self.config, query.shape, Turns(cosine, sine)
        heads = c.num_kv_heads // shards()
        query, key, value = (part.reshape(rows, new, -1, c.head_dim) for part in (query, key, value))
        query = rotate(query * jnp.asarray(c.scale, query.dtype), by, c.rope_pairs)
        query = query.reshape(rows, new, heads, -1, c.head_dim).transpose(0, 2, 3, 1, 4)
        key = rotate(key, by, c.rope_pairs).transpose(0, 2, 3, 1)
        return (
            query.reshape(rows * heads, -1, c.head_dim),
            key.reshape(-1, c.head_dim, new),
            value.transpose(0, 2, 1, 3).reshape(-1, new, c.head_dim),
        )

    def __call__(self, queries: Array, keys_values: KeysValues, mask: Array) -> Array:
        """Attention over `S` slots, `[B, T, E]`; `mask` bool `[B or 1, T, S]` says what each token sees."""
        seen = P(DATA if mask.shape[0] > 1 else None)
        return self.out(local(self._attend, (HEADS, HEADS, HEADS, seen), COLUMNS)(queries, *keys_values, mask))

    def _attend(self, queries: Array, keys: Array, values: Array, mask: Array) -> Array:
        """What each token mixes from the values, `[B, T, N K]`."""
        new = mask.shape[1]
        mixed = (attend if new <= CHUNK else attend_in_chunks)(self.config, queries, (keys, values), mask)
        rows = mixed.transpose(0, 3, 1, 2, 4)
        return rows.reshape(*rows.shape[:2], -1)


def attend(c: DecoderConfig, queries: Array, keys_values: KeysValues, mask: Array) -> Array:
    """What each query mixes from the values, `[B, n, g, T, K]`; arguments as in `Attention`."""
    keys, values = keys_values
    new, slots = mask.shape[1:]
    logits = jnp.einsum("nqk,nks->nqs", queries, keys, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, c.attention_cap)
    logits = logits.reshape(-1, c.num_kv_heads // shards(), c.num_heads // c.num_kv_heads, new, slots)
    logits = jnp.where(mask[:, None, None], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype).reshape(*queries.shape[:2], slots)
    return jnp.einsum("nqs,nsk->nqk", weights, values).reshape(*logits.shape[:4], c.head_dim)


def attend_in_chunks(c: DecoderConfig, queries: Array, keys_values: KeysValues, mask: Array) -> Array:
    """`attend`, a chunk of the tokens after the other."""
    new = mask.shape[1]
    by_token = queries.reshape(queries.shape[0], -1, new, c.head_dim)

    def one(part: Array, seen: Array) -> Array:
        return attend(c, part.reshape(queries.shape[0], -1, c.head_dim), keys_values, seen)

    return in_chunks(one, CHUNK, new, 3, (by_token, 2), (mask, 1))


class FeedForward(nn.Module):
    """GeGLU (tanh approximation) or SwiGLU."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.wi_0, self.wi_1, self.wi_01 = dense(c, c.d_ff), dense(c, c.d_ff), dense(c, 2 * c.d_ff)
        self.wo = dense(c, c.d_model)

    def __call__(self, x: Array) -> Array:
        if self.has_variable("params", "wi_01"):
            return self.wo(local(self._both, (COLUMNS,), COLUMNS)(self.wi_01(x)))
        return self.wo(self._opened(self.wi_0(x), self.wi_1(x)))

    def _both(self, x: Array) -> Array:
        return self._opened(*jnp.split(x, 2, axis=-1))

    def _opened(self, gate: Array, linear: Array) -> Array:
        return (nn.gelu(gate, approximate=True) if self.config.activation == "gelu" else nn.silu(gate)) * linear


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each pre-normed, with post-norms where the model has them, added to the residual."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.pre_self_attention_layer_norm, self.pre_mlp_layer_norm = norm(c), norm(c)
        if c.post_norms:
            self.post_self_attention_layer_norm, self.post_mlp_layer_norm = norm(c), norm(c)
        self.self_attention, self.mlp = Attention(c), FeedForward(c)

    def __call__(self, x: Array, by: Turns, mask: Array, slots: Slots | None) -> tuple[Array, KeysValues]:
        """One layer over `x` `[B, T, E]`; returns it and the keys and values attended.

        With `slots`, the block's keys and values are written into them first.
        """
        queries, own = self.self_attention.project(self.pre_self_attention_layer_norm(x), by)
        if slots is not None:
            own = slots.write(own)
        y = self.self_attention(queries, own, mask)
        x = x + (self.post_self_attention_layer_norm(y) if self.config.post_norms else y)
        y = self.mlp(self.pre_mlp_layer_norm(x))
        return x + (self.post_mlp_layer_norm(y) if self.config.post_norms else y), own


class Stack(nn.Module):
    """The layers, the last norm and, where it is not tied, the output layer."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.layers = [DecoderLayer(c) for _ in range(c.num_layers)]
        self.decoder_norm = norm(c)
        if not c.tied:
            self.logits_dense = Dense(c.num_embeddings, c.dtype, wide=True)

    def __call__(
        self, x: Array, by: Turns, masks: tuple[Array, ...], slots: tuple[Slots | None, ...]
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Normed hidden states `[B, T, E]` and per layer the keys and values attended."""
        attended = []
        for layer, mask, place in zip(self.layers, masks, slots, strict=True):
            x, own = layer(x, by, mask, place)
            self.sow(EXITS, "hidden", x)
            attended.append(own)
        return self.decoder_norm(x), tuple(attended)
