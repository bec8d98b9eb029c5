"""Decoder-only models (Gemma, Llama, Mistral, Qwen, SmolLM3): layers, Flax module and the cached `LanguageModel`.

T5Gemma is an encoder-decoder of the same layers: its encoder's layers see tokens on both sides, and its decoder's
layers also have cross-attention.

A local layer attends to a window of recent positions and caches them in a ring buffer of `window + max_rollback + 1`
slots. A global layer attends to all positions and caches all of them. A layer without keys and values attends to those
of an earlier layer (`DecoderConfig.sources`) and has no cache.

Sources: RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), gated feed-forward (Shazeer, 2020),
grouped-query attention (Ainslie et al., 2023), soft caps, windows and post-norms (Gemma Team, 2024), norms of queries
and keys (Qwen Team, 2025), layers without rotary positions (Yang et al., 2025), shared keys and values and
embeddings for each layer (Gemma Team, 2025 and 2026).

Shape letters: those of `core/types.py`, and here `N` is the number of query heads, `n` of key-value heads,
`g = N / n`, `K` is head_dim, `E` is d_model and `I` is layer_input. Keys are `[B * n, K, S]`, values `[B * n, S, K]`.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, LMOutput, Params, Prompt, real_tokens
from speccascade_jax.models.cache import empty_slots, put_branch
from speccascade_jax.models.decoder_config import (
    PRESETS,
    DecoderConfig,
    LayerSizes,
    RopeScaling,
    parameter_shapes,
    tiny,
)
from speccascade_jax.models.experts import MixtureOfExperts, activation, in_place
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
    normalized,
)
from speccascade_jax.models.products import Dense, Embed, real_entries
from speccascade_jax.models.sharding import COLUMNS, HEADS, ROWS, STACKED_HEADS, Mesh, P, local, shards, under
from speccascade_jax.models.stacks import STACK, in_order, layer_at, over_layers, recomputed, recomputed_layer, stack_of
from speccascade_jax.runtime.mesh import DATA

__all__ = ["PRESETS", "DecoderCache", "DecoderConfig", "DecoderLM", "DecoderModule", "RopeScaling", "parameter_shapes"]
__all__ += ["teacher_forced_logits", "tiny"]

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
    """Cosines and sines of the angles of rotary positions, float32 `[B or 1, T, 1, K / 2]`."""

    cosine: Array
    sine: Array


def turns(config: DecoderConfig, positions: Array, rotation: str = "global") -> Turns:
    """Returns the cosines and sines of the rotary angles at `positions` int32 `[B or 1, T]`.

    `rotation` is one of `DecoderConfig.rotations`.
    """
    # The angles are always float32, because bfloat16 has too few digits for those of late positions.
    angles = positions[..., None, None].astype(jnp.float32) * config.frequencies(rotation)
    return Turns(jnp.cos(angles), jnp.sin(angles))


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
    """Grouped-query attention with rotary positions; `number` is that of the layer, which its sizes depend on.

    If the parameters hold one `qkv` kernel instead of three (`layers.fuse`), one matrix product computes the queries,
    keys and values.
    """

    config: DecoderConfig
    number: int = 0

    def setup(self) -> None:
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
        # If all rows share the angles (whole sequences from position 0), their first axis is 1 and cannot be sharded.
        turned = P(DATA if by.cosine.shape[0] > 1 else None)
        # The scales of the norms are the same for all heads, so every device holds them.
        scales = [part.scale(self.sizes.head_dim) for part in self._norms]
        shared, layouts = (*by, *scales), (turned, turned, *(P() for _ in scales))
        names = self.sizes.projections
        heads = (HEADS,) * (1 if names == ("query",) else 3)
        if self.has_variable("params", "qkv"):
            states = local(self._split_fused, (COLUMNS, *layouts), heads)(self.qkv(x), *shared)
        else:
            columns: Any = (COLUMNS,) * len(names)
            split = local(self._split, (columns, *layouts), heads)
            states = split(tuple(getattr(self, name)(x) for name in names), *shared)
        return states[0], None if names == ("query",) else (states[1], states[2])

    @property
    def _norms(self) -> tuple[RMSNorm, ...]:
        """The norms of queries and of keys, if the layer has them."""
        norms = (self.query_norm, self.key_norm) if self.config.qk_norm else ()
        return norms[: len(self.sizes.projections)]

    def _split_fused(self, x: Array, *shared: Array) -> tuple[Array, ...]:
        # The columns on each device hold its share of the queries, then of the keys, then of the values
        # (`interleave_fused`).
        first, second = (sum(self.widths[:count]) // shards() for count in (1, 2))
        return self._split(tuple(jnp.split(x, (first, second), axis=-1)), *shared)

    def _split(self, projected: tuple[Array, ...], cosine: Array, sine: Array, *scales: Array) -> tuple[Array, ...]:
        """Returns the layer's queries and, if it has them, its keys and values, from products with its kernels."""
        c, by = self.config, Turns(cosine, sine)
        parts = [part.reshape(*part.shape[:2], -1, self.sizes.head_dim) for part in projected]
        value = parts[-1]  # without a kernel of values, these are the keys before their norm
        # The norms come before the rotation: their scales differ by coordinate, so the order changes the result.
        for number, (part, scale) in enumerate(zip(self._norms, scales, strict=True)):
            parts[number] = part.normalized(parts[number], scale)
        query = self._grouped(rotate(parts[0] * jnp.asarray(c.scale, parts[0].dtype), by, c.rope_pairs))
        if len(parts) == 1:
            return (query,)
        if c.value_norm:
            value = normalized(value, c.norm_epsilon).astype(value.dtype)
        return query, *self._cached(rotate(parts[1], by, c.rope_pairs), value)

    def _grouped(self, query: Array) -> Array:
        """Returns the queries `[B * n, g * T, K]` of heads `[B, T, N, K]`."""
        # [B, T, n, g, K] -> [B, n, g, T, K]: the g query heads that share a key head become neighbours. One matrix
        # product per key head then serves all of them, and keys are never repeated.
        rows, new, _, size = query.shape
        heads = self.sizes.kv_heads // shards()
        query = query.reshape(rows, new, heads, -1, size).transpose(0, 2, 3, 1, 4)
        return query.reshape(rows * heads, -1, size)

    def _cached(self, key: Array, value: Array) -> KeysValues:
        """Returns the keys `[B * n, K, S]` and values `[B * n, S, K]` of `[B, S, n, K]`, or of `[B, S, n * K]`."""
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
        """Returns the keys and values of cross-attention, not rotated, from the encoder's output `[B, N, E]`."""
        return local(self._cached, (COLUMNS, COLUMNS), (HEADS, HEADS))(self.key(x), self.value(x))

    def __call__(self, queries: Array, keys_values: KeysValues, mask: Array) -> Array:
        """Returns the attention's output `[B, T, E]`; `mask` bool `[B or 1, T, S]` is true for visible slots."""
        seen = P(DATA if mask.shape[0] > 1 else None)
        return self.out(local(self._attend, (HEADS, HEADS, HEADS, seen), COLUMNS)(queries, *keys_values, mask))

    def _attend(self, queries: Array, keys: Array, values: Array, mask: Array) -> Array:
        """Returns each token's weighted sum of the values, `[B, T, N K]`."""
        c, new, sizes = self.config, mask.shape[1], self.sizes

        def mix(part: Array, seen: Array) -> Array:
            return attend(c, sizes, part.reshape(queries.shape[0], -1, sizes.head_dim), (keys, values), seen)

        # Chunks of tokens bound the attention logits to [B, N, CHUNK, S]. Only prefill feeds more tokens than a chunk.
        if new <= CHUNK:
            mixed = mix(queries, mask)
        else:
            by_token = queries.reshape(queries.shape[0], -1, new, sizes.head_dim)
            mixed = in_chunks(mix, CHUNK, new, 3, (by_token, 2), (mask, 1))
        rows = mixed.transpose(0, 3, 1, 2, 4)
        return rows.reshape(*rows.shape[:2], -1)


def attend(c: DecoderConfig, sizes: LayerSizes, queries: Array, keys_values: KeysValues, mask: Array) -> Array:
    """Returns each query's weighted sum of the values, `[B, n, g, T, K]`, in a layer of these sizes.

    `queries` are those of `Attention.project`; `keys_values` and `mask` are those of `Attention.__call__`.
    """
    keys, values = keys_values
    new, slots = mask.shape[1:]
    # The sum over head_dim, the cap and the softmax use float32, because in bfloat16 close logits would become equal.
    logits = jnp.einsum("nqk,nks->nqs", queries, keys, preferred_element_type=jnp.float32)
    # The cap is applied before the mask. After the mask, it would limit masked logits to about -50, and masked slots
    # would get weight.
    logits = soft_cap(logits, c.attention_cap)
    logits = logits.reshape(-1, sizes.kv_heads // shards(), c.num_heads // sizes.kv_heads, new, slots)
    logits = jnp.where(mask[:, None, None], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype).reshape(*queries.shape[:2], slots)
    return jnp.einsum("nqs,nsk->nqk", weights, values).reshape(*logits.shape[:4], sizes.head_dim)


class FeedForward(nn.Module):
    """Feed-forward layer with GeGLU (tanh approximation) or SwiGLU units."""

    config: DecoderConfig
    number: int = 0

    def setup(self) -> None:
        c, units = self.config, self.config.layer(self.number).d_ff
        self.wi_0, self.wi_1, self.wi_01 = dense(c, units), dense(c, units), dense(c, 2 * units)
        self.wo = dense(c, c.d_model)

    def __call__(self, x: Array, _: bool = False) -> Array:
        return self.wo(gated_units(self, x, activation(self.config)))


class Beside(NamedTuple):
    """Inputs of a layer beside the state of its tokens, in the models that have them.

    Attributes:
        cross: what cross-attention reads, if the model has an encoder.
        shared: the keys and values of an earlier layer, if the layer has none.
        layer_input: `[B, T, I]`, the layer's own input (`LayerInputs`).
    """

    cross: Cross | None = None
    shared: KeysValues | None = None
    layer_input: Any = None


ALONE = Beside()


class LayerInputs(nn.Module):
    """Inputs that each layer reads beside its own: the token's embedding for the layer, and one of its embedding."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        width = c.num_layers * (c.layer_input or 0)
        self.embedder = Embed(c.num_embeddings, width, c.dtype)
        self.projection, self.norm = dense(c, width), norm(c)

    def __call__(self, tokens: Array, embedded: Array) -> Array:
        """Returns the layers' inputs `[B, T, L, I]`, from tokens `[B, T]` and their embeddings `[B, T, E]`.

        The parameters of an early exit are those of the whole model, so `L` is then the whole model's depth.
        """
        width = self.config.layer_input
        # The factors are rounded to the dtype of computation, like that of the embeddings.
        looked_up = self.embedder(tokens) * jnp.asarray(math.sqrt(width or 0), embedded.dtype)
        projected = self.projection(embedded) * jnp.asarray(self.config.d_model**-0.5, embedded.dtype)
        projected, looked_up = (x.reshape(*x.shape[:2], -1, width) for x in (projected, looked_up))
        # The sum of two independent parts has the variance of both together, so √0.5 keeps that of one part.
        return (self.norm(projected) + looked_up) * jnp.asarray(math.sqrt(0.5), embedded.dtype)


class OutputScale(nn.Module):
    """Product with a stored number, which training does not change."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones_init(), (1,))
        return x * jax.lax.stop_gradient(scale).astype(x.dtype)


class DecoderLayer(nn.Module):
    """Decoder layer: attention, then feed-forward, each with a norm before it (in Gemma 2 also after it).

    If the model has an encoder, cross-attention comes between attention and feed-forward. In Gemma 4's small sizes, a
    gated product with the layer's own input follows (`LayerInputs`).
    """

    config: DecoderConfig
    number: int = 0

    @property
    def sparse(self) -> bool:
        """Whether the feed-forward is a mixture of experts."""
        return self.config.sparse[self.number]

    def setup(self) -> None:
        c = self.config
        self.pre_self_attention_layer_norm, self.pre_mlp_layer_norm = norm(c), norm(c)
        if c.post_norms:
            self.post_self_attention_layer_norm, self.post_mlp_layer_norm = norm(c), norm(c)
        self.self_attention = Attention(c, self.number)
        self.mlp = MixtureOfExperts(c) if self.sparse else FeedForward(c, self.number)
        if c.encoder is not None:
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
        its slots. The result then has those of the whole cache (`Slots.write`). If `fixed` is true, no gradients of the
        parameters are needed. `beside` holds what the layer reads beside `x`.
        """
        return self.from_input(self.pre_self_attention_layer_norm(x), x, by, mask, slots, fixed, beside)

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
        """Applies the layer as a call does; queries, keys and values are computed from `inputs` `[B, T, …]`."""
        c = self.config
        # The write comes before attention, because each token of a block sees itself and the block's earlier tokens.
        queries, projected = self.self_attention.project(inputs, by)
        written: Any = beside.shared if projected is None else projected
        attended = written
        if slots is not None:
            written = slots.write(written)
            attended = slots.attended(written)
        y = self.self_attention(queries, attended, mask)
        x = x + (self.post_self_attention_layer_norm(y) if c.post_norms else y)
        if beside.cross is not None:
            y = self._crossed(self.pre_cross_attention_layer_norm(x), *beside.cross)
            x = x + (self.post_cross_attention_layer_norm(y) if c.post_norms else y)
        y = self.mlp(self.pre_mlp_layer_norm(x), fixed)
        x = x + (self.post_mlp_layer_norm(y) if c.post_norms else y)
        if c.layer_input:
            y = self.layer_input_out(activation(c)(self.layer_input_gate(x)) * beside.layer_input)
            x = x + self.post_layer_input_layer_norm(y)
        return self.output(x) if c.output_scale else x, written

    def _crossed(self, x: Array, source: Array | KeysValues, real: Array) -> Array:
        attention = self.encoder_decoder_attention
        keys_values = source if isinstance(source, tuple) else attention.keys_values(source)
        # Every token sees the same encoder tokens, but chunks of attention need a mask with an axis of tokens.
        mask = jnp.broadcast_to(real[:, None], (x.shape[0], x.shape[1], real.shape[1]))
        return attention(attention.queries(x), keys_values, mask)


class Stack(nn.Module):
    """Stack of all decoder layers, the last norm and, if the embedding is not tied, the output layer.

    If `remat` is true, gradients recompute each layer instead of keeping its intermediate values.
    """

    config: DecoderConfig
    remat: bool = False
    last_norm: ClassVar[str] = "decoder_norm"

    def setup(self) -> None:
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
        """Returns the keys and values of each layer's cross-attention, as in a cache (`Encoded`)."""
        layer = DecoderLayer(self.config, parent=None, name=STACK)
        return cross_keys_values(self, layer, self.config.num_layers, encoded)

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

        Each layer with a cache has its turns, mask and slots. If the layers run in a scan, these, keys and values have
        one entry for each place in a group of layers (`models.stacks`) instead of one for each layer. If `fixed` is
        true, no gradients of the parameters are needed, and a scan reads them in place. `layer_inputs` are those of
        `LayerInputs`.
        """
        if self.config.scanned:
            x, attended = self._scan(x, by, masks, slots, fixed, encoded)
        else:
            x, attended = self._unrolled(x, by, masks, slots, fixed, encoded, layer_inputs)
        return getattr(self, self.last_norm)(x), attended

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

        def body(carry: Any, params: Params, place: int, number: Any) -> tuple[Any, Any]:
            x, caches = carry
            here = None
            if slots is not None:
                here = slots[place]._replace(keys=caches[place][0], values=caches[place][1], layer=number // c.period)
            # A slice of the stack would copy all experts of the layer, of which a block uses a few.
            if fixed and layer.sparse:
                params = in_place(params, self.stack, number)
            beside = ALONE if encoded is None else Beside(_of_layer(encoded, number, stacked=True))
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
    """Encoder: an embedding of its own, and a stack of layers that see tokens on both sides."""

    last_norm: ClassVar[str] = "encoder_norm"

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype)

    def encode(self, tokens: Array, real: Array, fixed: bool = False) -> Array:
        """Returns the normalized states `[B, N, E]` of `tokens` `[B, N]`; `real` is false for padding, bool `[B, N]`.

        If `fixed` is true, no gradients of the parameters are needed (`stacks.over_layers`).
        """
        c, positions = self.config, jnp.arange(tokens.shape[1])
        # A local layer sees `window` tokens on either side, as in release 5 of transformers. Gemma's own code and
        # release 4 leave out the farthest of them.
        away = jnp.abs(positions[:, None] - positions)
        seen = {
            window: (away <= (len(positions) if window is None else window)) & real[:, None]
            for window in dict.fromkeys(c.windows)
        }
        masks = tuple(seen[window] for window in c.places)
        return self(scaled(c, self.token_embedder(tokens)), turns_by_place(c, positions[None]), masks, None, fixed)[0]


@flax.struct.dataclass
class DecoderCache:
    """Immutable attention cache of a decoder-only model: keys and values of every layer, with one length per row.

    Attributes:
        keys: per layer with a cache `[B * n, K, S]`; values: per layer `[B * n, S, K]`; `S` is smaller in ring buffers.
        length: int32 `[B]`, the number of tokens that each row has consumed. Slots of positions at or beyond the length
            hold meaningless values, which attention masks.
        summary: `[B, E]`, the hidden state of the last token that prefill consumed; zero if prefill consumed no token.
            With an encoder, it is the mean of the encoder's output over real tokens.
        rings: per layer, whether the slots form a ring buffer, where slot `p mod S` holds position `p` (static). The
            position in a slot follows from the length alone, so a rollback of a ring buffer only sets the length.
        encoded: the keys and values of cross-attention; `None` without an encoder.

    If the layers run in a scan, keys, values and rings have one entry for each place in a group of layers
    (`models.stacks`) instead of one for each layer, such as one for all local layers and one for all global ones. Keys
    are then `[L, B * n, K, S]`, with the layers of a place.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array
    summary: Array
    rings: tuple[bool, ...] = flax.struct.field(pytree_node=False)
    encoded: Encoded | None = None


def _positions(end: Array, slots: int) -> Array:
    """Returns the position that each ring slot holds, int32 `[B, S]`, once all positions below `end` `[B]` are written.

    A negative position marks an empty slot.
    """
    last = end[:, None] - 1
    # Slot s holds the largest position p <= last with p mod S = s, because later positions overwrite earlier ones.
    return last - (last - jnp.arange(slots)[None]) % slots


def _sees(queries: Array, slot_positions: Array, window: int | None) -> Array:
    """Returns bool `[B or 1, T, S]`: whether each position of `queries` may attend to each of `slot_positions`.

    `queries` is `[B or 1, T]`, and `slot_positions` is `[B or 1, S]`, negative for empty slots. Without a window, all
    earlier positions are visible.
    """
    back = queries[:, :, None] - slot_positions[:, None]
    seen = (back >= 0) & (slot_positions >= 0)[:, None]
    return seen if window is None else seen & (back < window)


def last_layer(config: DecoderConfig, cache: DecoderCache, kind: str, window: int | None) -> tuple[KeysValues, Array]:
    """Returns the keys and values of the last layer of a kind that has a cache, and which of its slots are visible.

    Args:
        config: the configuration of the cache's model.
        cache: the cache.
        kind: one of `KINDS`.
        window: number of positions that are visible, up to the last token that was consumed; `None` means all.

    Returns:
        Keys `[B * n, K, S]` and values `[B * n, S, K]`, and the visible slots, bool `[B, 1, S]`.
    """
    number = max(i for i, other in enumerate(config.kinds[: config.num_caches]) if other == kind)
    place, group = (number % config.period, number // config.period) if config.scanned else (number, None)
    keys, values = cache.keys[place], cache.values[place]
    if group is not None:
        keys, values = layer_at((keys, values), group)
    slots = values.shape[-2]
    held = _positions(cache.length, slots) if cache.rings[place] else jnp.arange(slots)[None]
    return (keys, values), _sees(cache.length[:, None] - 1, held, window)


def _branch_seen(cache: DecoderCache, branch: Branch, window: int | None, slots: int, ring: bool) -> Array:
    """Returns which slots of a layer each fed entry of a draft tree may attend to, bool `[B, T, S]`.

    Raises:
        ValueError: the layer's cache is a ring buffer. Its slots are found by position, but several entries of a tree
            have the same position.
    """
    if ring:
        raise ValueError("tree drafts need whole caches, not ring buffers: prefill with max_rollback=None")
    # The tree's first entry is in slot `base`. Earlier calls have fed the tree's first `num_cached` entries.
    base, depths = cache.length - branch.num_cached, jnp.array(branch.depths)
    tree_mask = _sees(jnp.array(branch.own)[None], depths[None], window) & jnp.array(branch.sees)[None]
    # A slot of a committed token has the token's position as its index. The position of a tree's entry is the base plus
    # the entry's depth, whatever slot the entry is in.
    index = jnp.arange(slots)[None]
    committed = _sees(base[:, None] + jnp.array(branch.own)[None], index, window) & (index < base[:, None])[:, None]
    return put_branch(committed, tree_mask, base)


class DecoderModule(nn.Module):
    """Flax module of a decoder-only model: the embedding and the stack of layers; T5Gemma also has an encoder.

    `apply({"params": p}, tokens)` returns logits for training; `DecoderLM` calls the other methods for decoding. If
    `remat` is true, gradients recompute each layer instead of keeping its intermediate values.
    """

    config: DecoderConfig
    remat: bool = False

    def setup(self) -> None:
        """Creates the embedding and the stack of layers."""
        c = self.config
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype)
        if c.layer_input:
            self.layer_inputs = LayerInputs(c)
        self.decoder = Stack(c, self.remat)
        if c.encoder is not None:
            self.encoder = Encoder(c.encoder, self.remat)

    def __call__(
        self, tokens: Array, decoder_tokens: Array | None = None, deterministic: bool = True, real: Array | None = None
    ) -> Array:
        """Returns the logits after each token, float32 `[B, T, num_embeddings]`; padding of the vocabulary has -inf.

        Args:
            tokens: int32 `[B, T]` from position 0 on. The logits after a token do not depend on later tokens. With an
                encoder, its tokens `[B, N]`, right-padded.
            decoder_tokens: with an encoder, the decoder's tokens `[B, T]`: the start token, then the targets without
                their last token.
            deterministic: not used, because the family has no dropout.
            real: bool `[B, N]`, which of the encoder's tokens are not padding; `None`: all up to the last nonzero.
        """
        if decoder_tokens is None:
            return self.logits(self.states(tokens)[0])
        real = real_tokens(tokens) if real is None else real
        return self.logits(self.states(decoder_tokens, encoded=Encoded(self.encoder.encode(tokens, real), real))[0])

    def start(self, tokens: Array, real: Array) -> tuple[Encoded, Array]:
        """Runs the encoder; returns what a cache holds of its output, and the mean `[B, E]` over real tokens."""
        states = self.encoder.encode(tokens, real, True)
        return Encoded(self.decoder.cross(states), real), mean_state(states, real)

    def states(
        self, tokens: Array, fixed: bool = False, encoded: Encoded | None = None
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Returns the normalized hidden states `[B, T, E]` of whole sequences, and each layer's keys and values.

        If `fixed` is true, no gradients of the parameters are needed (`stacks.over_layers`).
        """
        c, positions = self.config, jnp.arange(tokens.shape[1])[None]
        # Layers with the same window share one mask, because each mask is a [T, T] array.
        seen = {window: _sees(positions, positions, window) for window in dict.fromkeys(c.windows)}
        masks = tuple(seen[window] for window in c.places)
        embedded, layer_inputs = self._inputs(tokens)
        return self.decoder(embedded, turns_by_place(c, positions), masks, None, fixed, encoded, layer_inputs)

    def extend(self, cache: DecoderCache, tokens: Array, branch: Branch | None = None) -> tuple[LMOutput, DecoderCache]:
        """Feeds a block of tokens, or entries of a draft tree, to the decoder (`DecoderLM.extend`, `extend_branch`)."""
        embedded, layer_inputs = self._inputs(tokens)
        return self.extend_inputs(cache, embedded, branch, encoded=cache.encoded, layer_inputs=layer_inputs)

    @nn.nowrap
    def extend_inputs(
        self, cache: Any, inputs: Array, branch: Branch | None = None, **more: Any
    ) -> tuple[LMOutput, Any]:
        """Feeds the first layer's inputs `[B, T, …]` of a block or of a draft tree's entries, as `extend` does.

        The stack of layers also gets `more`.
        """
        c, new = self.config, inputs.shape[1]
        # Tokens of a block have consecutive positions. The position of a tree's entry follows from its depth, so
        # siblings have the same position.
        positions = cache.length[:, None] + jnp.arange(new)[None]
        if branch is not None:
            positions = (cache.length - branch.num_cached)[:, None] + jnp.array(branch.own)[None]
        sizes = [values.shape[-2] for values in cache.values]
        # The cache of an early exit may have more places than the exit's layers need, if the layers run in a scan.
        layout = list(zip(c.places, sizes, cache.rings, strict=not c.scanned))
        # Layers with the same window, number of slots and layout see the same slots, so they share one mask.
        see = partial(self._seen, cache, positions) if branch is None else partial(_branch_seen, cache, branch)
        seen = {key: see(*key) for key in dict.fromkeys(layout)}
        slots = tuple(
            Slots(keys, values, cache.length, ring)
            for keys, values, ring in zip(cache.keys, cache.values, cache.rings, strict=True)
        )
        masks = tuple(seen[key] for key in layout)
        by = turns_by_place(c, positions)
        hidden, attended = self.decoder(inputs, by, masks, slots, True, **more)
        keys, values = tuple(k for k, _ in attended), tuple(v for _, v in attended)
        cache = replace(cache, keys=keys, values=values, length=cache.length + new)
        return LMOutput(self.logits(hidden), hidden), cache

    def _seen(self, cache: DecoderCache, positions: Array, window: int | None, slots: int, ring: bool) -> Array:
        """Returns which slots of a layer each token of a block may attend to, bool `[B, T, S]`."""
        if not ring:
            return _sees(positions, jnp.arange(slots)[None], window)
        new = positions.shape[1]
        # The block's last token overwrites the slot of the position S before it. The block's first token must not need
        # that position any more.
        if window is not None and new > slots - window + 1:
            raise ValueError(
                f"a block of {new} tokens does not fit the ring of {slots} slots for a window of {window}: "
                f"prefill with max_rollback={new - 1} or more"
            )
        return _sees(positions, _positions(cache.length + new, slots), window)

    def _inputs(self, tokens: Array) -> tuple[Array, Array | None]:
        """Returns the tokens' embeddings `[B, T, E]`, and the inputs of each layer `[B, T, L, I]` if there are any."""
        embedded = self.embed(tokens)
        return embedded, self.layer_inputs(tokens, embedded) if self.config.layer_input else None

    def embed(self, tokens: Array) -> Array:
        """Returns the input of the first layer, `[B, T, E]`: the tokens' embeddings times `embedding_scale`."""
        return scaled(self.config, self.token_embedder(tokens))

    def logits(self, hidden: Array) -> Array:
        """Returns float32 logits `[B, T, num_embeddings]` of normalized hidden states; vocabulary padding has -inf."""
        c = self.config
        logits = self.token_embedder.attend(hidden) if c.tied else self.decoder.logits_dense(hidden)
        logits = soft_cap(logits, c.output_cap)
        return real_entries(logits, c.vocab_size)

    def exit_logits(self, hidden: Array) -> Array:
        """Returns an early exit's logits: applies the last norm and the output layer to `hidden` `[B, T, E]`."""
        return self.logits(self.decoder.decoder_norm(hidden))


@dataclass(frozen=True)
class DecoderLM(CachedModel[DecoderCache]):
    """A decoder-only model or a T5Gemma that implements `LanguageModel`; its parameters are those of `DecoderModule`.

    `extend` raises a ValueError if a block is too long for the ring buffers of the cache.
    """

    config: DecoderConfig
    mesh: Mesh | None = field(default=None, repr=False, kw_only=True)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt; otherwise the output continues the prompt in the same sequence."""
        return self.config.encoder is not None

    @property
    def module(self) -> DecoderModule:
        """The Flax module that the configuration describes."""
        return DecoderModule(self.config)

    def _prefilled(
        self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None, layers: tuple[int, ...]
    ) -> tuple[DecoderCache, Array | None]:
        c, (rows, width) = self.config, prompt.tokens.shape
        if c.encoder is None and prompt.encoder_tokens is not None:
            raise ValueError("the prompt has encoder_tokens, but a decoder-only model has no encoder: give tokens")
        if c.encoder is not None and prompt.encoder_tokens is None:
            raise ValueError("the prompt has no encoder_tokens: give the encoder's input there")
        if max_len < width:
            raise ValueError(f"max_len is {max_len}, but the prompt has {width} tokens: raise max_len")
        # Prefill does not consume the prompt's last token: it is pending, and decoding feeds it with the first block.
        sizes = self.slots(max_len, max_rollback)
        consumed, states, encoded = prompt.length - 1, None, None
        if c.encoder is not None:
            encoded, summary = self._apply(params, prompt.encoder_tokens, prompt.encoder_real, method="start")
        if width == 1:
            with under(self.mesh):
                keys, values = self._empty(rows, sizes)
            # The only token of each prompt is pending, so there is nothing to feed and no state to summarize.
            if encoded is None:  # an encoder's output has a summary already
                summary = jnp.zeros((rows, c.d_model), c.dtype)
        else:
            # The prompt is fed without a cache, which avoids reads of empty slots. Rows are padded on the right, so no
            # real token sees padding. Keys of padding get slots at or beyond the row's length, which attention masks.
            fed = prompt.tokens[:, :-1]
            inputs = (fed, True, encoded)
            (hidden, keys_values), states = self._apply_reading(params, fed, layers, *inputs, method="states")
            if encoded is None:
                last = jnp.maximum(consumed - 1, 0)[:, None, None]
                summary = jnp.where(consumed[:, None] > 0, jnp.take_along_axis(hidden, last, axis=1)[:, 0], 0.0)
            with under(self.mesh):
                put = partial(_placed, consumed=consumed, stacked=c.scanned)
                keys = tuple(put(k, size, axis=2) for (k, _), size in zip(keys_values, sizes, strict=True))
                values = tuple(put(v, size, axis=1) for (_, v), size in zip(keys_values, sizes, strict=True))
        return DecoderCache(keys, values, consumed, summary, tuple(size < max_len for size in sizes), encoded), states

    def _empty(self, rows: int, sizes: tuple[int, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Returns zeros for the keys and values of each layer with a cache, of `sizes` slots."""
        c = self.config
        keys: tuple[Array, ...] = ()
        values: tuple[Array, ...] = ()
        for number, size in enumerate(sizes):
            layer, counts = c.layer(number), c.counts[number : number + 1] if c.scanned else None
            new_keys, new_values = empty_slots(rows * layer.kv_heads, layer.head_dim, (size,), c.dtype, counts)
            keys, values = keys + new_keys, values + new_values
        return keys, values

    def slots(self, max_len: int, max_rollback: int | None) -> tuple[int, ...]:
        """Returns the number of slots of each layer with a cache (docs/methods.md, section 2: caches of windows).

        If the layers run in a scan, it returns one number for each place in a group of layers (`models.stacks`).
        """
        # After a rollback by `max_rollback` positions, the ring must still hold the whole window before the new length.
        spare = max_len if max_rollback is None else max_rollback + 1
        return tuple(max_len if window is None else min(max_len, window + spare) for window in self.config.places)

    def prompt_features(self, cache: DecoderCache) -> Array:
        """Returns the hidden state `[B, E]` of the prompt's second-to-last token, the last one that prefill consumes.

        With an encoder, it returns the mean of the encoder's output over real tokens. The result is zero for a prompt
        of one token. docs/methods.md, section 8 uses the state of the prompt's last token instead. That token is only
        fed with the first block, so its state before drafting would cost an extra call.
        """
        return cache.summary


def _placed(states: Array, slots: int, *, consumed: Array, axis: int, stacked: bool) -> Array:
    """Converts a prompt's keys or values, in the order of positions along `axis`, to a cache layer of `slots` slots.

    If `stacked` is true, `states` has an axis of layers before the others.
    """
    put, layout = partial(_placed_here, slots=slots, axis=axis), STACKED_HEADS if stacked else HEADS
    return local(jax.vmap(put, (0, None)) if stacked else put, (layout, ROWS), layout)(states, consumed)


def _placed_here(states: Array, consumed: Array, slots: int, axis: int) -> Array:
    width = states.shape[axis]
    if width <= slots:
        return jnp.pad(states, [(0, slots - width) if a == axis else (0, 0) for a in range(states.ndim)])
    # There are more positions than slots, so each row keeps its last positions, in the order of a ring buffer. Rows
    # differ in length, so each row gathers its own positions.
    position = jnp.repeat(_positions(consumed, slots), states.shape[0] // consumed.shape[0], axis=0)
    index = jnp.clip(position, 0, width - 1)[:, None, :] if axis == 2 else jnp.clip(position, 0, width - 1)[:, :, None]
    return jnp.take_along_axis(states, index, axis=axis)


def teacher_forced_logits(model: DecoderLM, params: Params, tokens: Array) -> Array:
    """Returns the logits after every token of `tokens` `[B, T]` in one pass, float32 `[B, T, num_embeddings]`."""
    logits: Array = model._apply(params, tokens, method="__call__")
    return logits
