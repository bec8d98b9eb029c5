"""EAGLE-3 heads: small draft models that read a target's hidden states (Li et al., 2025, https://arxiv.org/abs/2503.01840).

A head has one decoder layer, seldom more. For the token at position `t` it reads the token's embedding and a state of
position `t − 1`, and predicts the token at `t + 1`. After committed tokens, this state is fused from the target's
states after several layers. After drafted tokens, which the target has not read, it is the head's own output.

So the cache of a head has one entry per token, as a target's has. Entries of committed tokens come from the target's
states, and those of drafted tokens last for one round: after verification, `read` writes the entries of kept tokens
again. The first token has no state before it. Only the first token itself sees its entry.

The output layer has only the tokens of the draft vocabulary. All other tokens get the logit -inf, so `q` is exactly the
distribution from which tokens are drawn.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, BoundModel, LMOutput, Params, Prompt
from speccascade_jax.models.cache import empty_slots
from speccascade_jax.models.decoder import DecoderModule
from speccascade_jax.models.decoder_config import DecoderConfig, parameter_shapes
from speccascade_jax.models.decoder_stack import ALONE, Beside, DecoderLayer, Turns, dense, norm
from speccascade_jax.models.layers import CachedModel, KeysValues, Slots
from speccascade_jax.models.products import Dense, Embed
from speccascade_jax.models.sharding import Mesh, under

FUSED_STATES = 3
"""Number of the target's layers that a head reads if its configuration names none."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """Sizes and options of an EAGLE-3 head; those of its layers are fields of `DecoderConfig`.

    Attributes:
        draft_vocab_size: number of tokens that the output layer has logits for.
        target_ids: the target's id of each of these tokens; empty if both vocabularies are equal.
        target_width: width of the target's hidden states.
        layers: the target's layers whose states are read, as in `LayeredModel`; empty before `Eagle3.attached`.
        norm_before_residual: whether the residual stream of the first layer begins with the normalized state.
        norm_before_fc: whether the joined states of all layers have a norm before they are fused.
        fc_norm: whether the states of each layer have a norm before they are joined.
        norm_output: whether the head's own states, which later steps read, are normalized.
        has_embedding: whether the head stores an embedding; otherwise it uses the target's.

    Raises:
        ValueError: as for `DecoderConfig`, or `target_ids` does not hold `draft_vocab_size` different ids of the
            target.
    """

    draft_vocab_size: int
    target_ids: tuple[int, ...] = field(default=(), repr=False)
    target_width: int
    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_embedding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # A configuration from JSON holds lists.
        object.__setattr__(self, "target_ids", tuple(self.target_ids))
        object.__setattr__(self, "layers", tuple(self.layers))
        ids = self.target_ids or range(self.draft_vocab_size)
        if len(set(ids)) != self.draft_vocab_size or min(ids) < 0 or max(ids) >= self.num_embeddings:
            raise ValueError(
                f"the draft vocabulary of {self.draft_vocab_size} tokens maps to {len(set(ids))} different ids from "
                f"{min(ids)} to {max(ids)}: it needs as many different ids from 0 to {self.num_embeddings - 1}"
            )

    def __repr__(self) -> str:
        # There may be tens of thousands of ids, so the text holds only their hash. Fingerprints hash this text.
        digest = hashlib.blake2b(json.dumps(self.target_ids).encode(), digest_size=8).hexdigest()
        return f"Eagle3Config(target_ids={digest}, {super().__repr__().removeprefix('DecoderConfig(')}"

    @property
    def fused(self) -> int:
        """Number of the target's layers whose states are read."""
        return len(self.layers) or FUSED_STATES


def eagle3_shapes(c: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter that a head stores, by its name."""
    shapes = parameter_shapes(c)
    for name in ("query", "key", "value"):  # the first layer reads a token's embedding and a state
        shapes[f"decoder/layers_0/self_attention/{name}/kernel"] = (
            2 * c.d_model,
            shapes[f"decoder/layers_0/self_attention/{name}/kernel"][1],
        )
    shapes["decoder/layers_0/hidden_norm/scale"] = (c.d_model,)
    shapes["decoder/logits_dense/kernel"] = (c.d_model, c.draft_vocab_size)
    shapes["decoder/fc/kernel"] = (c.fused * c.target_width, c.d_model)
    if c.norm_before_fc:
        shapes["decoder/input_norm/scale"] = (c.fused * c.target_width,)
    if c.fc_norm:
        shapes |= {f"decoder/fc_norm_{i}/scale": (c.target_width,) for i in range(c.fused)}
    if not c.has_embedding:
        del shapes["token_embedder/embedding"]
    return shapes


@flax.struct.dataclass
class HeadCache:
    """Immutable cache of a head: keys and values as in `DecoderCache`, and the states that the next tokens read.

    Attributes:
        keys: per layer `[B * n, K, S]`; values: per layer `[B * n, S, K]`. Slot `t` is for the token at position `t`.
        length: int32 `[B]`, the number of tokens that each row has consumed.
        states: `[B, W, E]`. Between rounds and while a block is drafted, `W` is 1: the state before the next token.
            While a tree is drafted, they are the head's states after the `W` entries that it was fed.
        rings: False for every layer (static).
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array
    states: Array
    rings: tuple[bool, ...] = flax.struct.field(pytree_node=False)


class FirstLayer(DecoderLayer):
    """A head's first decoder layer, whose attention reads a token's embedding and a state, each with its own norm."""

    def setup(self) -> None:
        """Creates the layer's parts."""
        super().setup()
        self.hidden_norm = norm(self.config)

    def __call__(
        self, x: Array, by: Turns, mask: Array, slots: Slots | None, fixed: bool = False, beside: Beside = ALONE
    ) -> tuple[Array, KeysValues]:
        """Applies the layer to `x` `[B, T, 2 * E]`, the embeddings and the states; returns as `DecoderLayer` does."""
        c: Any = self.config
        embedded, states = jnp.split(x, 2, axis=-1)
        normalized = self.hidden_norm(states)
        inputs = jnp.concatenate([self.pre_self_attention_layer_norm(embedded), normalized], axis=-1)
        # The residual stream carries the state only. A token's embedding reaches it through attention.
        return self.from_input(inputs, normalized if c.norm_before_residual else states, by, mask, slots, fixed, beside)


class HeadStack(nn.Module):
    """Fusion of the target's states, the decoder layers, the last norm and the output layer of a head."""

    config: Eagle3Config

    def setup(self) -> None:
        """Creates the parts."""
        c = self.config
        self.fc = dense(c, c.d_model)
        if c.norm_before_fc:
            self.input_norm = norm(c)
        if c.fc_norm:
            self.fc_norm = [norm(c) for _ in range(c.fused)]
        self.layers = [FirstLayer(c), *(DecoderLayer(c) for _ in range(c.num_layers - 1))]
        self.decoder_norm = norm(c)
        self.logits_dense = Dense(c.draft_vocab_size, c.dtype, wide=True)

    def __call__(
        self, x: Array, by: tuple[Turns, ...], masks: tuple[Array, ...], slots: tuple[Slots, ...], fixed: bool
    ) -> tuple[Array, tuple[KeysValues, ...]]:
        """Returns the head's states `[B, T, E]`, and the keys and values of each layer, for `x` `[B, T, 2 * E]`."""
        attended = []
        for layer, turned, mask, place in zip(self.layers, by, masks, slots, strict=True):
            x, keys_values = layer(x, turned, _without_first(mask), place)
            attended.append(keys_values)
        # The output layer needs normalized states, so the last norm is applied exactly once: here or in `logits`.
        return self.decoder_norm(x) if self.config.norm_output else x, tuple(attended)

    def fuse(self, hidden: Array) -> Array:
        """Returns one state `[B, T, E]` for the target's states `[B, T, L, D]` after several layers."""
        if self.config.fc_norm:
            hidden = jnp.stack([part(hidden[:, :, i]) for i, part in enumerate(self.fc_norm)], axis=2)
        joined = hidden.reshape(*hidden.shape[:2], -1)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def logits(self, states: Array) -> Array:
        """Returns the logits `[B, T, draft_vocab_size]` that belong to the head's states."""
        return self.logits_dense(states if self.config.norm_output else self.decoder_norm(states))


def _without_first(mask: Array) -> Array:
    """Returns the mask `[B, T, S]` without slot 0, except for the token in slot 0, which sees no other slot."""
    # A softmax over no visible slot would weigh all slots alike, so the first token keeps its slot.
    alone = mask.sum(-1, keepdims=True) == 1
    return mask & (alone | (jnp.arange(mask.shape[-1]) > 0))


class Eagle3Module(DecoderModule):
    """Flax module of a head; its masks, positions and cache writes are those of `DecoderModule`."""

    config: Eagle3Config

    def setup(self) -> None:
        """Creates the embedding and the stack."""
        c = self.config
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype)
        self.decoder: Any = HeadStack(c)

    def fuse(self, hidden: Array) -> Array:
        """Returns one state `[B, T, E]` for the target's states `[B, T, L, D]`."""
        fused: Array = self.decoder.fuse(hidden)
        return fused

    def feed(self, cache: HeadCache, tokens: Array, states: Array) -> HeadCache:
        """Feeds tokens `[B, T]`, each with the state `[B, T, E]` before it; the cache keeps its own `states`."""
        inputs = jnp.concatenate([self.embed(tokens), states], axis=-1)
        fed: HeadCache = self.extend_inputs(cache, inputs)[1]
        return fed

    def extend(self, cache: Any, tokens: Array, branch: Branch | None = None) -> tuple[LMOutput, Any]:
        """Feeds one token, or entries of a tree, after the states in the cache, which the new states then replace."""
        # A tree's entry 0 is fed alone, and its state replaces the one before it. From then on column `i` of the states
        # is that of entry `i`, so the number of an entry's parent is the column of the state that the entry reads.
        before = jnp.asarray((0,) if branch is None else branch.parents)
        inputs = jnp.concatenate([self.embed(tokens), cache.states[:, before]], axis=-1)
        out, after = self.extend_inputs(cache, inputs, branch)
        new: Any = out.hidden
        return out, replace(after, states=new if branch is None else jnp.concatenate([cache.states, new], axis=1))

    def logits(self, hidden: Array) -> Array:
        """Returns float32 logits `[B, T, vocab_size]`, -inf for tokens outside the draft vocabulary."""
        c, logits = self.config, self.decoder.logits(hidden)
        ids = jnp.asarray(c.target_ids or range(c.draft_vocab_size), jnp.int32)
        blank = jnp.full((*logits.shape[:-1], c.vocab_size), -jnp.inf, logits.dtype)
        # Ids of the vocabulary's padding are dropped, as in every other model.
        return blank.at[..., ids].set(logits, mode="drop")


@dataclass(frozen=True)
class Eagle3(CachedModel[HeadCache]):
    """An EAGLE-3 head, a `TargetHead`: a draft model of one target, whose hidden states it reads.

    Examples:
        >>> from speccascade_jax.models.eagle3 import Eagle3, Eagle3Config
        >>> sizes = {"d_model": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "d_ff": 16, "num_layers": 1}
        >>> config = Eagle3Config(vocab_size=9, num_embeddings=9, draft_vocab_size=3, target_ids=(0, 4, 8),
        ...                       target_width=8, layers=(1, 2, 4), **sizes)
        >>> Eagle3(config).reads
        (1, 2, 4)
    """

    config: Eagle3Config
    mesh: Mesh | None = field(default=None, repr=False, kw_only=True)
    is_encoder_decoder: ClassVar[bool] = False

    @property
    def module(self) -> Eagle3Module:
        """The Flax module that the configuration describes."""
        return Eagle3Module(self.config)

    @property
    def reads(self) -> tuple[int, ...]:
        """The target's layers whose states the head reads."""
        return self.config.layers

    @property
    def about(self) -> str:
        """Description of the tokens that the head drafts, and of the target's states that it reads."""
        c = self.config
        layers = f"layers {', '.join(map(str, c.layers))}" if c.layers else f"{c.fused} layers"
        return (
            f"an EAGLE-3 head, which drafts {c.draft_vocab_size:,} of a target's {c.num_embeddings:,} tokens, from "
            f"states of width {c.target_width:,} after {layers}"
        )

    def attached(self, params: Params, target: BoundModel) -> BoundModel:
        """Returns the head for a target: with the layers that it reads, and the target's embedding if it has none.

        Raises:
            ValueError: the head does not fit the target; the message names both sizes.
        """
        c, of = self.config, target.model.config
        # The layers of EAGLE-3's published heads: one near the input, the middle one, and one near the output.
        config = replace(c, layers=c.layers or tuple(sorted((2, of.num_layers // 2, of.num_layers - 3))))
        # The length for which a head was trained limits its agreement with the target, but not the output.
        head = replace(self, config=replace(config, max_length=max(c.max_length, of.max_length)))
        head.check(target)
        borrowed = {} if c.has_embedding else {"token_embedder": target.params["token_embedder"]}
        return BoundModel(params={**params, **borrowed}, model=head)

    def check(self, target: BoundModel) -> None:
        """Raises a `ValueError` if the head does not fit the target; the message names both sizes."""
        c, of = self.config, target.model.config
        depth = of.num_layers
        if c.target_width != of.d_model:
            raise ValueError(
                f"the EAGLE-3 head reads hidden states of width {c.target_width}, but the target's have width "
                f"{of.d_model}: {_OTHER}"
            )
        if c.num_embeddings != of.num_embeddings:
            raise ValueError(
                f"the EAGLE-3 head belongs to a target with {c.num_embeddings} rows of embeddings, but the target has "
                f"{of.num_embeddings}: {_OTHER}"
            )
        if not c.layers or not all(0 <= layer <= depth for layer in c.layers):
            raise ValueError(
                f"the EAGLE-3 head reads the layers {c.layers} of its target, but the target has layers 0 to {depth}: "
                f"{_OTHER}"
            )
        if not c.has_embedding and c.d_model != of.d_model:
            raise ValueError(
                f"the EAGLE-3 head stores no embedding, and its width {c.d_model} is not the target's {of.d_model}, so "
                f"it cannot use the target's: {_OTHER}"
            )

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> HeadCache:
        """Raises a `ValueError`, because a head cannot generate without its target."""
        raise ValueError(
            "an EAGLE-3 head drafts from the hidden states of its target, and only for this target: use it as a draft; "
            "it cannot generate alone, verify drafts, be the setting `tail`, or have block_size='auto'"
        )

    def begin(self, params: Params, prompt: Prompt, hidden: Array, max_len: int) -> HeadCache:
        """Returns the cache that has consumed `prompt.length - 1` tokens of each row.

        Args:
            params: the module's parameters.
            prompt: `[B, P]`.
            hidden: the target's states along the prompt, `[B, P, L, D]` (`Start.hidden`).
            max_len: number of cache slots.
        """
        c, (rows, width), consumed = self.config, prompt.tokens.shape, prompt.length - 1
        with under(self.mesh):
            keys, values = empty_slots(rows * c.num_kv_heads, c.head_dim, [max_len] * c.num_layers, c.dtype)
        blank = jnp.zeros((rows, 1, c.d_model), c.dtype)
        cache = HeadCache(keys, values, jnp.zeros_like(consumed), blank, (False,) * c.num_layers)
        if width == 1:
            return cache
        # entry `t` is the state before the token at position `t`; there is none before the first token
        before = jnp.concatenate([blank, self._apply(params, hidden[:, :-1], method="fuse")], axis=1)
        return self._fed(params, cache, prompt.tokens[:, :-1], before, consumed)

    def read(
        self, params: Params, cache: HeadCache, tokens: Array, hidden: Array, length: Array, active: Array
    ) -> HeadCache:
        """Returns the cache after a round, with the entries of the kept tokens recomputed from the target's states.

        Args:
            params: the module's parameters.
            cache: the cache after drafting.
            tokens: int32 `[B, G]`, the block; the first ones are the tokens that were kept.
            hidden: the target's states `[B, G + 1, L, D]` (`Outcome.hidden`).
            length: int32 `[B, 2]`, the rows' lengths before and after the round.
            active: bool `[B]`, the rows that took part; other rows keep their entries.
        """
        # The entry of the token that was pending stays, because drafting wrote it from a state of the target. The last
        # new token is pending now: the next round reads it, so the entries end one token before the row does.
        begin, end = jnp.where(active[:, None], length - jnp.asarray([0, 1]), cache.length[:, None]).T
        states = self._apply(params, hidden, method="fuse")
        fed = self._fed(params, self.rollback(cache, begin), tokens, states, end)
        return replace(fed, states=jnp.where(active[:, None, None], fed.states, cache.states))

    def _fed(self, params: Params, cache: HeadCache, tokens: Array, states: Array, end: Array) -> HeadCache:
        """Feeds `tokens` `[B, T]` until each row has consumed `end` tokens; `states` `[B, T + 1, E]` precede them."""
        # Shapes cannot depend on how many tokens a row kept, so each row is fed all of them. Entries from `end` on are
        # hidden until later tokens overwrite them.
        fed = self.rollback(self._apply(params, cache, tokens, states[:, :-1], method="feed"), end)
        next_state = (end - cache.length)[:, None, None]
        return replace(fed, states=jnp.take_along_axis(states, next_state, axis=1))


_OTHER = "choose the head that was trained for this target"
