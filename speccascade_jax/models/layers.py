"""What the families of models share: norm, a cache's slots, gates, kernels side by side, the cached model.

Shape letters as in `core/protocols.py`, plus `n` heads whose keys are cached, `K` head_dim. Keys are `[B * n, K, S]`,
values `[B * n, S, K]` everywhere: with these layouts a block costs little more than a step on CPU.
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
from speccascade_jax.models.cache import Held, LengthCached, move_slots, write_ring
from speccascade_jax.models.products import pack
from speccascade_jax.models.sharding import COLUMNS, HEADS, ROWS, interleave_fused, local, place, under
from speccascade_jax.runtime.mesh import MODEL

KeysValues = tuple[Array, Array]

# Finite, so that a query that sees nothing attends uniformly instead of giving NaN.
MASKED = -1e10
EXITS = "exits"
"""The collection in which a decoder leaves its layers' outputs, `hidden`, if asked (`mutable`)."""


class Slots(NamedTuple):
    """One layer's cache: keys `[B * n, K, S]`, values `[B * n, S, K]`, and where to write next, `start` `[B]`.

    In a `ring` position `p` lies in slot `p mod S`, and the oldest positions are overwritten.
    """

    keys: Array
    values: Array
    start: Array
    ring: bool = False

    def write(self, block: KeysValues) -> KeysValues:
        """The slots with `block` written at `start` of each row."""
        put = write_ring if self.ring else write_slots
        keys, values = (local(partial(put, axis=axis), (HEADS, HEADS, ROWS), HEADS) for axis in (2, 1))
        return keys(self.keys, block[0], self.start), values(self.values, block[1], self.start)


class RMSNorm(nn.Module):
    """Root mean square norm without mean and bias, computed in float32; multiplies by `offset + scale`."""

    epsilon: float
    dtype: str
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.constant(1.0 - self.offset)
        scale = self.param("scale", init, (x.shape[-1],)).astype(jnp.float32)
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + self.epsilon)
        return (x32 * inverse * (self.offset + scale if self.offset else scale)).astype(self.dtype)


def gated_units(module: nn.Module, x: Array, gate: Callable[[Array], Array]) -> Array:
    """Returns `gate(x wi_0) * x wi_1` of a feed-forward's products, which are one where parameters are fused."""

    def open_gate(both: Array) -> Any:
        first, second = jnp.split(both, 2, axis=-1)
        return gate(first) * second

    fused = module.has_variable("params", "wi_01")
    whole = local(open_gate, (COLUMNS,), COLUMNS)
    units: Array = whole(module.wi_01(x)) if fused else gate(module.wi_0(x)) * module.wi_1(x)
    return units


FUSED = {"qkv": ("query", "key", "value"), "wi_01": ("wi_0", "wi_1")}
"""Fused name -> the parameters that stand side by side in it, in order."""


def in_chunks(attend: Callable[..., Array], size: int, tokens: int, axis: int, *parts: tuple[Array, int]) -> Array:
    """`attend(*arrays)`, `size` of the `tokens` after the other: a long prompt's `T · S` logits are never all there.

    Args:
        axis: of the result, that of the tokens; parts: each array with that axis of it.
    """
    chunks = -(-tokens // size)
    padded = [
        (jnp.pad(array, [(0, (chunks * size - tokens) * (each == own)) for each in range(array.ndim)]), own)
        for array, own in parts
    ]

    def one(chunk: Array) -> Array:
        return attend(*(jax.lax.dynamic_slice_in_dim(array, chunk * size, size, own) for array, own in padded))

    found = jnp.moveaxis(jax.lax.map(one, jnp.arange(chunks)), 0, axis)
    joined = found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, tokens, axis=axis)


def fused_names(names: Collection[str]) -> dict[str, list[str]]:
    """Returns the name of each fused parameter that those of `names` make, with the names of its parts in order."""
    fused = {}
    for name in names:
        *parents, part, leaf = name.split("/")
        for whole, parts in FUSED.items():
            found = ["/".join([*parents, other, leaf]) for other in parts]
            is_self = "encoder_decoder_attention" not in parents[-1:]
            if part == parts[0] and is_self and all(other in names for other in found):
                fused["/".join([*parents, whole, leaf])] = found
    return fused


def fuse(params: Params, shards: int = 1) -> Params:
    """The parameters with kernels of one input side by side: one product reads them at full bandwidth.

    `query`, `key`, `value` of self-attentions become `qkv` (their biases too), `wi_0` and `wi_1` become `wi_01`;
    cross-attention keeps its own, since its queries and its keys have different inputs. A step on a CPU takes less time
    by it (docs/performance.md).

    Args:
        shards: into how many parts the columns will be split: each part has its share of every kernel side by side.
    """
    flat = flatten_dict(params, sep="/")
    for fused, parts in fused_names(flat).items():
        flat[fused] = jnp.asarray(interleave_fused([np.asarray(flat.pop(part)) for part in parts], shards))
    return unflatten_dict(flat, sep="/")


class CachedModel(LengthCached[Held]):
    """The base of cached `LanguageModel`s, frozen dataclasses over a linen module; a family adds `_prefilled`.

    Parameters are the module's, in any float dtype. Those whose dtype differs from `config.dtype` are cast at every
    call: cast them once before a decoding loop. Products of float32 have its precision on every device
    (`full_precision`).

    Attributes:
        mesh: the devices that its parameters and caches are spread over (`sharding.place`); `None`: one. It is no part
            of what the model is, and so of no fingerprint.
    """

    config: Any
    mesh: Any = None

    @property
    def module(self) -> nn.Module:
        """The linen module that holds the layers.

        It has methods `extend(cache, tokens)`, `embed(tokens)` and `exit_logits(states)`, and a stack called `decoder`
        that sows each layer's output in `EXITS`.
        """
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Real vocabulary entries, padding excluded."""
        size: int = self.config.vocab_size
        return size

    def prepare(self, params: Params) -> Params:
        """The parameters laid out for decoding (`fuse`, `pack`); done once, on loading. Both forms are understood."""
        if self.mesh is not None:
            shards = self.mesh.shape[MODEL]
            return place(fuse(params, shards), self.mesh)
        return pack(fuse(params), self.config)

    def _apply(self, params: Params, *args: Any, method: str) -> Any:
        with full_precision(self.config.dtype), under(self.mesh):
            return self.module.apply({"params": params}, *args, method=method)

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Held:
        """Consumes all but the last context token of each row, after encoding `prompt.encoder_tokens` in a T5.

        Args:
            prompt: `[B, P]`, right-padded.
            max_len: slots of a layer that sees all positions.
            max_rollback: how far behind what was fed the length may ever be set back; a local layer then keeps
                `window + max_rollback + 1` slots. `None`: it keeps all, and any rollback is right.

        Raises:
            ValueError: `max_len` slots can't hold the prompt, or it has encoder tokens and the model no encoder, or
                the other way round.
        """
        return self._prefilled(params, prompt, max_len, max_rollback, ())[0]

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[Held, Array]:
        """Prefills; returns the decoder's states `[B, P, L, E]` of what was consumed too (`LayeredModel`)."""
        cache, states = self._prefilled(params, prompt, max_len, max_rollback, layers)
        return cache, self._by_position(prompt, states, layers)

    def _prefilled(
        self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None, layers: tuple[int, ...]
    ) -> tuple[Held, Array | None]:
        """Returns the cache, and the states `[B, P - 1, L, E]` of what was fed; `None` where nothing was."""
        raise NotImplementedError

    def extend(self, params: Params, cache: Held, tokens: Array) -> tuple[LMOutput, Held]:
        """Feed `tokens` int32 `[B, T]` at each row's length; the caller guarantees `T` free slots a row.

        Returns `LMOutput(logits float32 [B, T, num_embeddings], hidden [B, T, E] after the final norm)`.
        """
        fed: tuple[LMOutput, Held] = self._apply(params, cache, tokens, method="extend")
        return fed

    def extend_branch(self, params: Params, cache: Held, tokens: Array, branch: Branch) -> tuple[LMOutput, Held]:
        """`extend` with entries of a tree, `tokens` `[B, T]`: each sees what is committed and its own path alone."""
        fed: tuple[LMOutput, Held] = self._apply(params, cache, tokens, branch, method="extend")
        return fed

    def extend_layers(
        self, params: Params, cache: Held, tokens: Array, layers: tuple[int, ...], branch: Branch | None = None
    ) -> tuple[LMOutput, Held]:
        """Feeds `tokens` as `extend` or `extend_branch` does, and fills `LMOutput.layer_states` `[B, T, L, E]`.

        Raises:
            ValueError: a layer that the model does not have.
        """
        fed = (cache, tokens) if branch is None else (cache, tokens, branch)
        (out, cache), states = self._apply_reading(params, tokens, layers, *fed, method="extend")
        return out._replace(layer_states=states), cache

    def _apply_reading(
        self, params: Params, tokens: Array, layers: tuple[int, ...], *args: Any, method: str
    ) -> tuple[Any, Array | None]:
        """Returns what `_apply` does, and the states `[B, T, L, E]` of `tokens`, `None` for no layers."""
        if not layers:
            return self._apply(params, *args, method=method), None
        with full_precision(self.config.dtype), under(self.mesh):
            result, sown = self.module.apply({"params": params}, *args, method=method, mutable=[EXITS])
        states = (self.embed(params, tokens), *sown[EXITS]["decoder"]["hidden"])
        if missing := [layer for layer in layers if not 0 <= layer < len(states)]:
            raise ValueError(f"there is no layer {missing[0]}: the model's decoder has layers 0 to {len(states) - 1}")
        return result, jnp.stack([states[layer] for layer in layers], axis=2)

    def _by_position(self, prompt: Prompt, states: Array | None, layers: tuple[int, ...]) -> Array:
        """Returns `[B, P, L, E]` of states `[B, P - 1, L, E]` (`None` for `P = 1`), zero where nothing is consumed."""
        rows, width = prompt.tokens.shape
        if states is None:
            return jnp.zeros((rows, width, len(layers), self.config.d_model), self.config.dtype)
        # rows are right-padded: behind `length - 1` stand states of padding
        consumed = jnp.arange(width)[None] < prompt.length[:, None] - 1
        padded = jnp.pad(states, [(0, 0), (0, 1), (0, 0), (0, 0)])
        return jnp.where(consumed[..., None, None], padded, jnp.zeros((), padded.dtype))

    def embed(self, params: Params, tokens: Array) -> Array:
        """Returns what the first layer reads of `tokens` `[B, T]`: states `[B, T, E]`."""
        embedded: Array = self._apply(params, tokens, method="embed")
        return embedded

    def unembed(self, params: Params, states: Array) -> Array:
        """Returns float32 logits `[B, T, V]` of states `[B, T, E]` after the last layer: its norm and output matrix."""
        logits: Array = self._apply(params, states, method="exit_logits")
        return logits[..., : self.vocab_size]

    def keep(self, cache: Held, start: Array, entries: Array) -> Held:
        """The cache with a path of a tree in one row: slot `start + j` of each row holds its entry `entries[:, j]`.

        Args:
            start: int32 `[B]`, where the tree's first entry lies; entries: int32 `[B, W]`, rising; what is behind the
                path is junk. The length is left as it is.
        """
        with under(self.mesh):
            keys, values = (local(partial(move_slots, axis=axis), (HEADS, ROWS, ROWS), HEADS) for axis in (2, 1))
            kept = tuple(keys(each, start, entries) for each in cache.keys)
            return replace(cache, keys=kept, values=tuple(values(each, start, entries) for each in cache.values))
