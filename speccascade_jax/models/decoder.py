"""Decoder-only models (Gemma 2, Llama, Qwen 2.5): the linen module, and the cached `LanguageModel` of its layers.

Local layers of a model with a window keep `window + rollback + 1` slots in a ring; global ones keep all positions.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, LMOutput, Params, Prompt
from speccascade_jax.models.cache import empty_slots, put_branch
from speccascade_jax.models.decoder_config import PRESETS, DecoderConfig, RopeScaling, parameter_shapes, tiny
from speccascade_jax.models.decoder_layers import Stack, soft_cap, turns
from speccascade_jax.models.layers import CachedModel, KeysValues, Slots
from speccascade_jax.models.products import Embed
from speccascade_jax.models.sharding import HEADS, ROWS, Mesh, local, under

__all__ = ["PRESETS", "DecoderCache", "DecoderConfig", "DecoderLM", "DecoderModule", "RopeScaling", "parameter_shapes"]
__all__ += ["teacher_forced_logits", "tiny"]


@flax.struct.dataclass
class DecoderCache:
    """Keys and values of every layer, functional, with one length per row.

    Attributes:
        keys: per layer `[B * n, K, S]`; values: per layer `[B * n, S, K]`; `S` is smaller in rings.
        length: int32 `[B]`. Slots of positions at or beyond it are masked, never trusted.
        summary: `[B, E]`, the hidden state of the last token that prefill consumed; zero where it consumed none.
        rings: per layer, whether position `p` lies in slot `p mod S` (static). A slot's position follows from the
            length alone, so that here too a rollback only sets the length.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array
    summary: Array
    rings: tuple[bool, ...] = flax.struct.field(pytree_node=False)


def _positions(end: Array, slots: int) -> Array:
    """int32 `[B, S]`: what each slot of a ring holds when positions below `end` `[B]` are there; negative: nothing."""
    last = end[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def _sees(queries: Array, held: Array, window: int | None) -> Array:
    """bool `[B or 1, T, S]`: whether positions `queries` `[B or 1, T]` see positions `held` `[B or 1, S]`."""
    back = queries[:, :, None] - held[:, None]
    seen = (back >= 0) & (held >= 0)[:, None]
    return seen if window is None else seen & (back < window)


def _branch_seen(cache: DecoderCache, branch: Branch, window: int | None, slots: int, ring: bool) -> Array:
    """What each entry of a tree that is fed sees of a layer's slots, bool `[B, T, S]`.

    Raises:
        ValueError: a ring, whose slots are positions; a tree's are not.
    """
    if ring:
        raise ValueError("drafts that branch need whole caches: prefill with max_rollback=None")
    base, depths = cache.length - branch.held, jnp.array(branch.depths)
    own = _sees(jnp.array(branch.own)[None], depths[None], window) & jnp.array(branch.sees)[None]
    held = jnp.arange(slots)[None]
    committed = _sees(base[:, None] + jnp.array(branch.own)[None], held, window) & (held < base[:, None])[:, None]
    return put_branch(committed, own, base)


class DecoderModule(nn.Module):
    """The stack with its embedding; `apply({"params": p}, tokens)` gives training logits, `DecoderLM` the rest."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype)
        self.decoder = Stack(c)

    def __call__(self, tokens: Array) -> Array:
        """Teacher-forced logits, float32 `[B, T, num_embeddings]`, padded vocabulary at -inf.

        Args:
            tokens: int32 `[B, T]` from position 0 on; what stands right of a token does not reach it.
        """
        return self.logits(self.states(tokens)[0])

    def states(self, tokens: Array) -> tuple[Array, tuple[KeysValues, ...]]:
        """Normed hidden states `[B, T, E]` of whole sequences and per layer their keys and values."""
        c, at = self.config, jnp.arange(tokens.shape[1])[None]
        seen = {window: _sees(at, at, window) for window in dict.fromkeys(c.windows)}
        masks = tuple(seen[window] for window in c.windows)
        return self.decoder(self.embed(tokens), turns(c, at), masks, (None,) * c.num_layers)

    def extend(self, cache: DecoderCache, tokens: Array, branch: Branch | None = None) -> tuple[LMOutput, DecoderCache]:
        """Feed a block, or entries of a tree, to the cached decoder (see `DecoderLM.extend`, `extend_branch`)."""
        c, new = self.config, tokens.shape[1]
        at = cache.length[:, None] + jnp.arange(new)[None]
        if branch is not None:
            at = (cache.length - branch.held)[:, None] + jnp.array(branch.own)[None]
        sizes = [values.shape[1] for values in cache.values]
        layout = list(zip(c.windows, sizes, cache.rings, strict=True))
        see = partial(self._seen, cache, at) if branch is None else partial(_branch_seen, cache, branch)
        seen = {key: see(*key) for key in dict.fromkeys(layout)}
        slots = tuple(
            Slots(keys, values, cache.length, ring)
            for keys, values, ring in zip(cache.keys, cache.values, cache.rings, strict=True)
        )
        masks = tuple(seen[key] for key in layout)
        hidden, attended = self.decoder(self.embed(tokens), turns(c, at), masks, slots)
        keys, values = tuple(k for k, _ in attended), tuple(v for _, v in attended)
        cache = replace(cache, keys=keys, values=values, length=cache.length + new)
        return LMOutput(self.logits(hidden), hidden), cache

    def _seen(self, cache: DecoderCache, at: Array, window: int | None, slots: int, ring: bool) -> Array:
        """What each token of a block sees of a layer's slots, bool `[B, T, S]`."""
        if not ring:
            return _sees(at, jnp.arange(slots)[None], window)
        new = at.shape[1]
        if window is not None and new > slots - window + 1:
            raise ValueError(
                f"a block of {new} tokens does not fit the ring of {slots} slots behind a window of {window}: "
                f"prefill with max_rollback={new - 1} or more"
            )
        return _sees(at, _positions(cache.length + new, slots), window)

    def embed(self, tokens: Array) -> Array:
        """Returns what the first layer reads, `[B, T, E]`: embeddings times the family's scale."""
        embedded = self.token_embedder(tokens)
        return embedded * jnp.asarray(self.config.embedding_scale, embedded.dtype)

    def logits(self, hidden: Array) -> Array:
        """float32 logits `[B, T, num_embeddings]` of normed hidden states, padded entries at -inf."""
        c = self.config
        logits = self.token_embedder.attend(hidden) if c.tied else self.decoder.logits_dense(hidden)
        logits = soft_cap(logits, c.output_cap)
        if c.num_embeddings == c.vocab_size:
            return logits
        return jnp.where(jnp.arange(c.num_embeddings) < c.vocab_size, logits, -jnp.inf)

    def exit_logits(self, hidden: Array) -> Array:
        """Returns the logits of a layer's output `[B, T, E]`: the last norm and the model's own head."""
        return self.logits(self.decoder.decoder_norm(hidden))


@dataclass(frozen=True)
class DecoderLM(CachedModel[DecoderCache]):
    """A decoder-only model as the engine's `LanguageModel`. Parameters are `DecoderModule`'s.

    `extend` raises a ValueError for a block longer than a ring allows.
    """

    config: DecoderConfig
    mesh: Mesh | None = field(default=None, repr=False, kw_only=True)
    is_encoder_decoder: ClassVar[bool] = False  # prompts are the beginning of what is decoded

    @property
    def module(self) -> DecoderModule:
        return DecoderModule(self.config)

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> DecoderCache:
        """Consume all but the last token of each row.

        Args:
            prompt: `[B, P]`, right-padded.
            max_len: slots of a global layer.
            max_rollback: how far behind what was fed the length may ever be set back; a local layer then keeps
                `window + max_rollback + 1` slots. `None`: it keeps all, and any rollback is right.

        Raises:
            ValueError: `max_len` slots can't hold the prompt, or the prompt has encoder tokens.
        """
        return self._prefilled(params, prompt, max_len, max_rollback, ())[0]

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[DecoderCache, Array]:
        """Prefills; returns the states `[B, P, L, E]` of what was consumed too (`LayeredModel`)."""
        cache, states = self._prefilled(params, prompt, max_len, max_rollback, layers)
        return cache, self._by_position(prompt, states, layers)

    def _prefilled(
        self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None, layers: tuple[int, ...]
    ) -> tuple[DecoderCache, Array | None]:
        c, (rows, width) = self.config, prompt.tokens.shape
        if prompt.encoder_tokens is not None:
            raise ValueError("the prompt has encoder_tokens, but a decoder-only model has no encoder: give tokens")
        if max_len < width:
            raise ValueError(f"max_len is {max_len}, but the prompt has {width} tokens: raise max_len")
        sizes = self.slots(max_len, max_rollback)
        consumed, states = prompt.length - 1, None
        if width == 1:
            with under(self.mesh):
                keys, values = empty_slots(rows * c.num_kv_heads, c.head_dim, sizes, c.dtype)
            summary = jnp.zeros((rows, c.d_model), c.dtype)
        else:
            fed = prompt.tokens[:, :-1]
            (hidden, own), states = self._apply_reading(params, fed, layers, fed, method="states")
            last = jnp.maximum(consumed - 1, 0)[:, None, None]
            summary = jnp.where(consumed[:, None] > 0, jnp.take_along_axis(hidden, last, axis=1)[:, 0], 0.0)
            with under(self.mesh):
                keys = tuple(_placed(k, size, consumed, 2) for (k, _), size in zip(own, sizes, strict=True))
                values = tuple(_placed(v, size, consumed, 1) for (_, v), size in zip(own, sizes, strict=True))
        return DecoderCache(keys, values, consumed, summary, tuple(size < max_len for size in sizes)), states

    def slots(self, max_len: int, max_rollback: int | None) -> tuple[int, ...]:
        """Per layer, how many slots its cache has (METHODS section 2 on windowed caches)."""
        spare = max_len if max_rollback is None else max_rollback + 1
        return tuple(max_len if window is None else min(max_len, window + spare) for window in self.config.windows)

    def prompt_features(self, cache: DecoderCache) -> Array:
        """`[B, E]`: the hidden state of the last token that prefill consumed, the prompt's last but one; else zeros.

        METHODS section 8 reads that of the last one, which is fed with the first block: to have it before something is
        drafted would take a target call of its own.
        """
        return cache.summary


def _placed(states: Array, slots: int, consumed: Array, axis: int) -> Array:
    """The keys or values of a prompt, position by position along `axis`, as a cache of `slots` slots."""
    return local(partial(_placed_here, slots=slots, axis=axis), (HEADS, ROWS), HEADS)(states, consumed)


def _placed_here(states: Array, consumed: Array, slots: int, axis: int) -> Array:
    width = states.shape[axis]
    if width <= slots:
        return jnp.pad(states, [(0, slots - width) if a == axis else (0, 0) for a in range(states.ndim)])
    # more positions than slots: each row keeps its last ones, where a ring expects them
    held = jnp.repeat(_positions(consumed, slots), states.shape[0] // consumed.shape[0], axis=0)
    index = jnp.clip(held, 0, width - 1)[:, None, :] if axis == 2 else jnp.clip(held, 0, width - 1)[:, :, None]
    return jnp.take_along_axis(states, index, axis=axis)


def teacher_forced_logits(model: DecoderLM, params: Params, tokens: Array) -> Array:
    """Logits of every position of `tokens` `[B, T]` in one pass, float32 `[B, T, num_embeddings]`."""
    return model._apply(params, tokens, method="__call__")
