"""Decoder-only models (Gemma, Llama, Mistral, Qwen, SmolLM3): Flax module and the cached `LanguageModel`.

T5Gemma is an encoder-decoder of the same layers: its encoder's layers see tokens on both sides, and its decoder's
layers also have cross-attention. In T5Gemma 2, self-attention reads the encoder's output instead.

A local layer attends to a window of recent positions and caches them in a ring buffer of `window + max_rollback + 1`
slots. A global layer attends to all positions and caches all of them. A layer without keys and values attends to those
of an earlier layer (`DecoderConfig.sources`) and has no cache.

Shape letters: those of `core/types.py`, and here `N` is the number of query heads, `n` of key-value heads,
`g = N / n`, `K` is head_dim, `E` is d_model and `I` is layer_input. Keys are `[B * n, K, S]`, values `[B * n, S, K]`.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, LMOutput, Params, Prompt, real_tokens
from speccascade_jax.models.cache import empty_slots, put_branch
from speccascade_jax.models.decode_attention import tiled
from speccascade_jax.models.decoder_config import (
    DecoderConfig,
    RopeScaling,
    parameter_shapes,
)
from speccascade_jax.models.decoder_presets import PRESETS, tiny
from speccascade_jax.models.decoder_stack import Encoded, Encoder, LayerInputs, Stack, scaled, soft_cap, turns_by_place
from speccascade_jax.models.layers import (
    CachedModel,
    KeysValues,
    Slots,
    mean_state,
)
from speccascade_jax.models.products import Embed, real_entries
from speccascade_jax.models.sharding import HEADS, ROWS, STACKED_HEADS, Mesh, local, under
from speccascade_jax.models.stacks import layer_at

__all__ = ["PRESETS", "DecoderCache", "DecoderConfig", "DecoderLM", "DecoderModule", "RopeScaling", "parameter_shapes"]
__all__ += ["teacher_forced_logits", "tiny"]


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
        encoded: the encoder's keys and values; `None` without an encoder.

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
    slot_positions = _positions(cache.length, slots) if cache.rings[place] else jnp.arange(slots)[None]
    return (keys, values), _sees(cache.length[:, None] - 1, slot_positions, window)


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
        return self.logits(self.states(decoder_tokens, encoded=Encoded(self._encode(tokens, real), real))[0])

    def _encode(self, tokens: Array, real: Array, fixed: bool = False) -> Array:
        """Returns the encoder's output `[B, N, E]` (`Encoder.encode`)."""
        embed = self.embed if self.config.shared_embedding else self.encoder.embed
        return self.encoder.encode(embed(tokens), real, fixed)

    def start(self, tokens: Array, real: Array) -> tuple[Encoded, Array]:
        """Runs the encoder; returns its output as a cache holds it, and the output's mean over real tokens `[B, E]`."""
        states = self._encode(tokens, real, True)
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

        `more` are further arguments of the stack of layers.
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
        # The block's last token overwrites the slot of the position that is `S` before its own. That position must lie
        # outside the window of the block's first token.
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
        rings, sizes = tuple(size < max_len for size in sizes), tuple(map(tiled, sizes))
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
        return DecoderCache(keys, values, consumed, summary, rings, encoded), states

    def _empty(self, rows: int, sizes: tuple[int, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Returns zeros for the keys and values of each layer with a cache; `sizes` are their numbers of slots."""
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
