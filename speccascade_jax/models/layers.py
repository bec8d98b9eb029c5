"""Layers that all model families share: the norm, cache slots, gated units, fused kernels and a model base class.

Shape letters: those of `core/types.py`, and here `n` is the number of heads whose keys are cached and `K` is head_dim.
Keys are always `[B * n, K, S]` and values `[B * n, S, K]`. With these layouts a block of tokens costs little more than
one token on a CPU.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.arrays import full_precision, write_slots
from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, LMOutput, Params, Prompt
from speccascade_jax.models import decode_attention
from speccascade_jax.models.cache import Held, LengthCached, move_slots, write_layer, write_ring
from speccascade_jax.models.products import pack
from speccascade_jax.models.sharding import (
    COLUMNS,
    HEADS,
    ROWS,
    STACKED_HEADS,
    P,
    interleave_fused,
    local,
    place,
    shards,
    under,
)
from speccascade_jax.models.stacks import layer_at, over_layers
from speccascade_jax.models.triton_products import Norm
from speccascade_jax.runtime.mesh import AXES, MODEL

KeysValues = tuple[Array, Array]

# The logit of a masked slot. It is finite, so that a query without visible slots attends to all slots equally instead
# of returning NaN.
MASKED = -1e10
EXITS = "exits"
"""Flax collection in which each decoder layer stores its output as `hidden`, if `apply` gets `mutable=[EXITS]`."""


class Slots(NamedTuple):
    """One layer's cache: keys `[B * n, K, S]`, values `[B * n, S, K]`, and the next position `start` `[B]`.

    If `ring` is true, the slots form a ring buffer: position `p` is in slot `p mod S`, and new positions overwrite the
    oldest. If the layers run in a scan, keys and values are stacks of layers, `[L, B * n, …]`, and `layer` is the index
    of this layer; otherwise it is `None`.
    """

    keys: Array
    values: Array
    start: Array
    ring: bool = False
    layer: Any = None

    def write(self, block: KeysValues) -> KeysValues:
        """Returns all keys and values after writing those of `block` at position `start` of each row.

        If the keys and values are stacks, the result holds those of all layers; `attended` selects this layer's.
        """
        if self.layer is not None:
            specs = (STACKED_HEADS, HEADS, ROWS, P())
            keys, values = (
                local(partial(write_layer, axis=axis, ring=self.ring), specs, STACKED_HEADS) for axis in (2, 1)
            )
            start, layer = self.start, jnp.asarray(self.layer, jnp.int32)
            return keys(self.keys, block[0], start, layer), values(self.values, block[1], start, layer)
        # Each device writes its own part of the arrays, in which the heads of each row are consecutive.
        put = write_ring if self.ring else write_slots
        keys, values = (local(partial(put, axis=axis), (HEADS, HEADS, ROWS), HEADS) for axis in (2, 1))
        return keys(self.keys, block[0], self.start), values(self.values, block[1], self.start)

    def fits(self, new: int, written: bool = True, query_heads: int | None = None) -> bool:
        """Returns whether one kernel can write and attend to a block of `new` tokens (`attend`).

        If `written` is false, the kernel only has to attend. `query_heads` is the number of query heads on all devices
        together; `None`: as many as there are key-value heads.
        """
        size, slots = self.keys.shape[-2:]
        groups = 1 if query_heads is None else query_heads // shards() // self._heads
        return decode_attention.fits(new, self._heads, size, slots, self.keys.dtype, written, groups)

    @property
    def _heads(self) -> int:
        """Number of key-value heads on a device."""
        return int(self.keys.shape[-3]) // self.start.shape[0] // shards()

    def attend(self, columns: tuple[Array, ...], bias: Array, **sizes: Any) -> tuple[Array, KeysValues]:
        """Returns the attention `[B, T, N * K]` of a block to the cache, and what `write` returns.

        `columns`, `bias` and `sizes` are those of `decode_attention.attend`.
        """
        cached = HEADS if self.layer is None else STACKED_HEADS
        layer = jnp.asarray(0 if self.layer is None else self.layer, jnp.int32)
        kernel = partial(_attend_columns, ring=self.ring, **sizes)
        specs = (cached, cached, ROWS, split_axes(bias), P(), *(COLUMNS,) * len(columns))
        mixed, keys, values = local(kernel, specs, (COLUMNS, cached, cached))(
            self.keys, self.values, self.start, bias, layer, *columns
        )
        return mixed, (keys, values)

    def attended(self, written: KeysValues) -> KeysValues:
        """Returns this layer's keys and values, from those that `write` returned."""
        if self.layer is None:
            return written
        keys, values = layer_at(written, self.layer)
        return keys, values


def _attend_columns(
    keys: Array, values: Array, start: Array, bias: Array, layer: Array, *columns: Array, **sizes: Any
) -> tuple[Array, Array, Array]:
    return decode_attention.attend(columns, keys, values, start, bias, layer, **sizes)


def split_axes(bias: Array) -> P:
    """Returns the layout of a bias `[B or 1, H or 1, …]` on the mesh: rows along `data`, and heads along `model`."""
    # An axis of size 1 is broadcast, so it is not split.
    return P(*(name if size > 1 else None for name, size in zip(AXES, bias.shape, strict=False)))


class RMSNorm(nn.Module):
    """Root mean square norm, without a mean or a bias; computed in float32 and multiplied by `offset + scale`."""

    epsilon: float
    dtype: str
    offset: float = 0.0

    def __call__(self, x: Array) -> Array:
        """Normalises the last axis; returns an array of the same shape, in `dtype`."""
        return self.normalized(x, self.scale(x.shape[-1]))

    @nn.compact
    def scale(self, size: int) -> Array:
        """Returns the parameter `scale`, `[size]`, which it creates if it does not exist."""
        # The initial `offset + scale` is 1 in every family.
        scale: Array = self.param("scale", nn.initializers.constant(1.0 - self.offset), (size,))
        return scale

    def in_kernel(self) -> Norm:
        """Returns the norm in the form that fused kernels read; the parameter `scale` must exist already."""
        return Norm(self.get_variable("params", "scale"), self.epsilon, self.offset)

    @nn.nowrap
    def normalized(self, x: Array, scale: Array) -> Array:
        """Normalises the last axis of `x` with this scale; reads no parameter, so it can run on parts of `x`."""
        scale = scale.astype(jnp.float32)
        return (normalized(x, self.epsilon) * (self.offset + scale if self.offset else scale)).astype(self.dtype)


def normalized(x: Array, epsilon: float) -> Array:
    """Divides `x` by its root mean square over the last axis; returns float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + epsilon)


def gated_units(module: nn.Module, x: Array, gate: Callable[[Array], Array]) -> Array:
    """Returns `gate(x wi_0) * x wi_1`, the hidden units of a feed-forward layer.

    If the parameters hold the fused kernel `wi_01` (`fuse`), one matrix product computes both factors.
    """

    # This runs on each device's columns, where the share of `wi_0` precedes the share of `wi_1` (`interleave_fused`).
    def open_gate(fused_units: Array) -> Any:
        first, second = jnp.split(fused_units, 2, axis=-1)
        return gate(first) * second

    fused = module.has_variable("params", "wi_01")
    # Without a mesh, `local` returns the function itself, which then splits the product of the whole fused kernel.
    whole = local(open_gate, (COLUMNS,), COLUMNS)
    units: Array = whole(module.wi_01(x)) if fused else gate(module.wi_0(x)) * module.wi_1(x)
    return units


def cross_keys_values(
    decoder: Any, layer: Any, depth: int, encoded: Array, part: str = "encoder_decoder_attention"
) -> tuple[KeysValues, ...]:
    """Returns each layer's cross-attention keys and values, computed from the encoder's output `[B, N, E]`.

    If the layers run in a scan, there is one pair for all layers, `[L, B * n, …]`.

    Args:
        decoder: the module, with separate `layers` or a `stack` of their parameters.
        layer: a layer module without a parent, which is applied to each layer's part of the stack.
        depth: the number of layers.
        encoded: the encoder's output.
        part: name of the layers' attention module that reads the encoder's output.
    """
    if not decoder.config.scanned:
        return tuple(getattr(layer, part).keys_values(encoded) for layer in decoder.layers)

    def project(module: Any) -> KeysValues:
        keys_values: KeysValues = getattr(module, part).keys_values(encoded)
        return keys_values

    def body(_: None, params: Params, place: int, number: Any) -> tuple[None, KeysValues]:
        return None, layer.apply({"params": params}, method=project)

    attention = {name: tree for name, tree in decoder.stack.items() if name == part}
    return over_layers(body, None, attention, depth, fixed=True)[1]


def mean_state(encoded: Array, real: Array) -> Array:
    """Returns the mean `[B, E]` of the encoder's output `[B, N, E]` over real tokens, bool `[B, N]`."""
    # The mean ignores padding, so that it does not depend on the other prompts of the batch.
    counted = real[..., None]
    return jnp.where(counted, encoded, 0.0).sum(1) / jnp.maximum(counted.sum(1), 1)


FUSED = {"qkv": ("query", "key", "value"), "wi_01": ("wi_0", "wi_1")}
"""The fused parameters by name, each with the parameters whose columns it joins, in order."""


def in_chunks(attend: Callable[..., Array], size: int, tokens: int, axis: int, *parts: tuple[Array, int]) -> Array:
    """Computes `attend(*arrays)` in chunks of `size` tokens, so that memory never holds all `T · S` attention logits.

    Args:
        attend: function of the arrays in `parts`, cut to `size` tokens each.
        size: number of tokens in a chunk.
        tokens: total number of tokens.
        axis: index of the result's axis of tokens.
        parts: pairs of an array and the index of its axis of tokens.
    """
    chunks = -(-tokens // size)
    # The arrays are padded to whole chunks, because a traced slice has a fixed size. The last line removes the padding.
    padded = [
        (
            jnp.pad(array, [(0, (chunks * size - tokens) * (number == part_axis)) for number in range(array.ndim)]),
            part_axis,
        )
        for array, part_axis in parts
    ]

    def one(chunk: Array) -> Array:
        return attend(
            *(jax.lax.dynamic_slice_in_dim(array, chunk * size, size, part_axis) for array, part_axis in padded)
        )

    # `map` computes one chunk after the other; `vmap` would hold the logits of all chunks in memory at once.
    mapped = jnp.moveaxis(jax.lax.map(one, jnp.arange(chunks)), 0, axis)
    joined = mapped.reshape(*mapped.shape[:axis], -1, *mapped.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, tokens, axis=axis)


def fused_names(names: Collection[str]) -> dict[str, list[str]]:
    """Returns the fused parameters that the parameters `names` can form: each name with its parts' names, in order."""
    fused = {}
    for name in names:
        *parents, part, leaf = name.split("/")
        for whole, parts in FUSED.items():
            part_names = ["/".join([*parents, sibling, leaf]) for sibling in parts]
            # Cross-attention's queries and keys have different inputs, so its kernels cannot be fused.
            is_self = "encoder_decoder_attention" not in parents[-1:]
            if part == parts[0] and is_self and all(sibling in names for sibling in part_names):
                fused["/".join([*parents, whole, leaf])] = part_names
    return fused


def fuse(params: Params, shards: int = 1) -> Params:
    """Returns the parameters with kernels that have the same input joined, so that one matrix product applies them.

    `query`, `key` and `value` of self-attention become `qkv`, and so do their biases; `wi_0` and `wi_1` become `wi_01`.
    Cross-attention is unchanged, because its queries and its keys have different inputs. Fused kernels make decoding
    on a CPU faster (docs/performance.md).

    Args:
        params: nested parameters of a model.
        shards: number of devices that the columns will be split over; each device holds its share of every kernel.
    """
    flat = flatten_dict(params, sep="/")
    for fused, parts in fused_names(flat).items():
        # `pop` removes the separate kernels; otherwise the result would hold every weight twice.
        flat[fused] = jnp.asarray(interleave_fused([np.asarray(flat.pop(part)) for part in parts], shards))
    return unflatten_dict(flat, sep="/")


class CachedModel(LengthCached[Held]):
    """Base class of `LanguageModel`s with a cache: frozen dataclasses that call the methods of a Flax module.

    A subclass defines `module` and `_prefilled`. Parameters are those of the module, in any float dtype. If their dtype
    differs from `config.dtype`, every call casts them, so cast them once before a decoding loop. Products of float32
    arrays have full float32 precision on every device (`full_precision`).

    Attributes:
        mesh: the devices that hold the parameters and caches (`sharding.place`); `None`: one device. The mesh does not
            change the model's outputs, so fingerprints ignore it.
    """

    config: Any
    mesh: Any = None

    @property
    def module(self) -> nn.Module:
        """The Flax module of the model.

        The module has the methods `extend(cache, tokens)`, `embed(tokens)` and `exit_logits(states)`. Its submodule
        `decoder` stores each layer's output in the collection `EXITS`.
        """
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of real vocabulary entries, padding excluded."""
        size: int = self.config.vocab_size
        return size

    def prepare(self, params: Params) -> Params:
        """Returns the parameters in the layout that decodes fastest (`fuse`, `pack`); the plain layout also works."""
        # Packed matrices are for a single CPU. On a mesh, matrices stay plain, because XLA must split them.
        if self.mesh is not None:
            shards = self.mesh.shape[MODEL]
            return place(fuse(params, shards), self.mesh)
        return pack(fuse(params), self.config)

    def _apply(self, params: Params, *args: Any, method: str) -> Any:
        with full_precision(self.config.dtype), under(self.mesh):
            return self.module.apply({"params": params}, *args, method=method)

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Held:
        """Feeds each row's prompt except its last token, and returns the cache; a T5 first encodes the encoder's input.

        Args:
            params: the module's parameters.
            prompt: `[B, P]`, right-padded.
            max_len: number of cache slots of a layer that attends to all positions.
            max_rollback: the largest number of tokens that a rollback may drop. Layers with a window then have
                `window + max_rollback + 1` slots. With `None` they have `max_len` slots, and any rollback is correct.

        Raises:
            ValueError: `max_len` slots cannot hold the prompt, the prompt has encoder tokens but the model has no
                encoder, or the model has an encoder but the prompt has no encoder tokens.
        """
        return self._prefilled(params, prompt, max_len, max_rollback, ())[0]

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[Held, Array]:
        """Returns the cache as `prefill` does, and the states of the consumed tokens after `layers`, `[B, P, L, E]`.

        The states of all other positions are zero (`LayeredModel`).
        """
        cache, states = self._prefilled(params, prompt, max_len, max_rollback, layers)
        return cache, self._by_position(prompt, states, layers)

    def _prefilled(
        self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None, layers: tuple[int, ...]
    ) -> tuple[Held, Array | None]:
        """Returns the cache, and the fed tokens' states after `layers`, `[B, P - 1, L, E]`.

        The states are `None` if no token was fed or no layer was named.
        """
        raise NotImplementedError

    def extend(self, params: Params, cache: Held, tokens: Array) -> tuple[LMOutput, Held]:
        """Feeds `tokens` int32 `[B, T]` after each row's consumed tokens; returns the output and the new cache.

        The output has `logits` float32 `[B, T, num_embeddings]`, and `hidden` `[B, T, E]` after the last norm. The
        caller must make sure that each row has `T` free slots.
        """
        fed: tuple[LMOutput, Held] = self._apply(params, cache, tokens, method="extend")
        return fed

    def extend_branch(self, params: Params, cache: Held, tokens: Array, branch: Branch) -> tuple[LMOutput, Held]:
        """Feeds entries of a draft tree, `tokens` `[B, T]`; each sees only the committed tokens and its own path."""
        fed: tuple[LMOutput, Held] = self._apply(params, cache, tokens, branch, method="extend")
        return fed

    def extend_layers(
        self, params: Params, cache: Held, tokens: Array, layers: tuple[int, ...], branch: Branch | None = None
    ) -> tuple[LMOutput, Held]:
        """Feeds `tokens` as `extend` or `extend_branch` does, and fills `LMOutput.layer_states` `[B, T, L, E]`.

        Raises:
            ValueError: the model does not have one of the layers.
        """
        fed = (cache, tokens) if branch is None else (cache, tokens, branch)
        (out, cache), states = self._apply_reading(params, tokens, layers, *fed, method="extend")
        return out._replace(layer_states=states), cache

    def _apply_reading(
        self, params: Params, tokens: Array, layers: tuple[int, ...], *args: Any, method: str
    ) -> tuple[Any, Array | None]:
        """Returns the result of `_apply`, and the states of `tokens` after `layers`, `[B, T, L, E]`.

        The states are `None` if `layers` is empty.
        """
        if not layers:
            return self._apply(params, *args, method=method), None
        with full_precision(self.config.dtype), under(self.mesh):
            result, sown = self.module.apply({"params": params}, *args, method=method, mutable=[EXITS])
        # States of layer 0 are the embeddings, which no layer stores. States of layer i are the i-th layer's output.
        states = (self.embed(params, tokens), *sown[EXITS]["decoder"]["hidden"])
        if missing := [layer for layer in layers if not 0 <= layer < len(states)]:
            raise ValueError(f"there is no layer {missing[0]}: the model's decoder has layers 0 to {len(states) - 1}")
        return result, jnp.stack([states[layer] for layer in layers], axis=2)

    def _by_position(self, prompt: Prompt, states: Array | None, layers: tuple[int, ...]) -> Array:
        """Pads the states `[B, P - 1, L, E]` of fed tokens to `[B, P, L, E]`; states of other positions are zero.

        `states` is `None` if no token was fed.
        """
        rows, width = prompt.tokens.shape
        if states is None:
            return jnp.zeros((rows, width, len(layers), self.config.d_model), self.config.dtype)
        # The states of a row's last token, which is not consumed, and of its padding are set to zero.
        consumed = jnp.arange(width)[None] < prompt.length[:, None] - 1
        padded = jnp.pad(states, [(0, 0), (0, 1), (0, 0), (0, 0)])
        return jnp.where(consumed[..., None, None], padded, jnp.zeros((), padded.dtype))

    def embed(self, params: Params, tokens: Array) -> Array:
        """Returns the first layer's input for `tokens` `[B, T]`, the embeddings `[B, T, E]`."""
        embedded: Array = self._apply(params, tokens, method="embed")
        return embedded

    def unembed(self, params: Params, states: Array) -> Array:
        """Applies the last norm and the output layer to states `[B, T, E]`; returns float32 logits `[B, T, V]`."""
        # The logits have no padding of the vocabulary, unlike those of `extend`, where padding has -inf.
        logits: Array = self._apply(params, states, method="exit_logits")
        return logits[..., : self.vocab_size]

    def keep(self, cache: Held, start: Array, entries: Array) -> Held:
        """Moves an accepted path of a draft tree to consecutive slots, so that the path is like an accepted block.

        Slot `start + j` receives the tree's entry `entries[:, j]`. Slots after the path hold meaningless values, and
        the length does not change.

        Args:
            cache: the cache that holds the tree's entries.
            start: int32 `[B]`, the slot of the tree's first entry.
            entries: int32 `[B, W]`, the path's entries in ascending order.
        """
        with under(self.mesh):
            stacked = self.config.scanned
            layout, moving = (STACKED_HEADS, _move_stack) if stacked else (HEADS, move_slots)
            keys, values = (local(partial(moving, axis=axis), (layout, ROWS, ROWS), layout) for axis in (2, 1))
            # Every layer moves the same entries, because all layers keep the same path.
            kept = tuple(keys(layer, start, entries) for layer in cache.keys)
            return replace(cache, keys=kept, values=tuple(values(layer, start, entries) for layer in cache.values))


def _move_stack(stack: Array, start: Array, entries: Array, axis: int) -> Array:
    """Moves entries as `move_slots` does, in every layer of a stack `[L, B * n, ...]`."""
    return jax.vmap(partial(move_slots, axis=axis), (0, None, None))(stack, start, entries)
