"""Gemma 4's assistants: draft models that have queries only, and read their target's cache (Gemma Team, 2026).

An assistant has a few of Gemma 4's layers without keys and values. Each attends to the keys and values of the target's
last layer of its kind, local or global. Its input is the embedding of a token in the target's table, joined with a
state. The first token of a block is the pending one, and the state is the target's last hidden state before it. The
assistant's output gives the state for the next token. All tokens of a block are read at the position of the pending
token, and see the committed tokens before it, so an assistant writes no cache.

Its output layer may have *centroids*, one for each cluster of tokens. Only the tokens of the clusters with the largest
logits get logits. All other tokens get -inf, so `q` is exactly the distribution from which tokens are drawn.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import full_precision
from speccascade_jax.core.protocols import Target
from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, BoundModel, LMOutput, Params, Prompt
from speccascade_jax.models.decoder import DecoderCache, DecoderLM, last_layer
from speccascade_jax.models.decoder_config import DecoderConfig, LayerSizes, parameter_shapes
from speccascade_jax.models.decoder_stack import Beside, DecoderLayer, Turns, dense, norm, turns
from speccascade_jax.models.layers import KeysValues
from speccascade_jax.models.products import Dense, Embed, real_entries
from speccascade_jax.models.sharding import under


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(DecoderConfig):
    """Sizes and options of an assistant; those of its layers are fields of `DecoderConfig`.

    Attributes:
        target_width: width of the target's hidden states.
        num_centroids: number of clusters of tokens, all of one size; `None`: all tokens get logits.
        active_centroids: number of clusters whose tokens get logits.

    Raises:
        ValueError: as `DecoderConfig`, and if the clusters do not divide the vocabulary.
    """

    target_width: int
    num_centroids: int | None = None
    active_centroids: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        clusters = self.num_centroids
        if clusters is not None and (clusters < 1 or self.num_embeddings % clusters):
            raise ValueError(
                f"num_centroids is {clusters}, but must divide the {self.num_embeddings} entries of the vocabulary: "
                "give a divisor"
            )
        if clusters is not None and not 1 <= self.active_centroids <= clusters:
            raise ValueError(f"active_centroids is {self.active_centroids}: give a number from 1 to {clusters}")

    def __repr__(self) -> str:
        return super().__repr__().replace("DecoderConfig", "AssistantConfig", 1)

    @property
    def alike(self) -> bool:
        """False, because the layers never run in a scan."""
        return False

    def layer(self, number: int) -> LayerSizes:
        """Returns the sizes of a layer, whose keys and values are the target's."""
        return super().layer(number)._replace(projections=("query",))


def assistant_shapes(c: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter that an assistant stores, by its name."""
    shapes = parameter_shapes(c)
    shapes["decoder/pre_projection/kernel"] = (2 * c.target_width, c.d_model)
    shapes["decoder/post_projection/kernel"] = (c.d_model, c.target_width)
    if c.num_centroids is not None:
        shapes["decoder/centroids/kernel"] = (c.d_model, c.num_centroids)
        shapes["decoder/clusters/ids"] = (c.num_embeddings,)
    return shapes


class Shared(NamedTuple):
    """Arguments of the layers of one kind, which come from the target's cache.

    Attributes:
        by: the turns of the pending token's position, `[B, 1, 1, K / 2]`.
        mask: bool `[B, T, S]`, the slots that each token sees.
        keys_values: the target's keys and values.
    """

    by: Turns
    mask: Array
    keys_values: KeysValues


def shared_with(c: AssistantConfig, of: DecoderConfig, cache: DecoderCache, new: int) -> dict[str, Shared]:
    """Returns, for each kind of layer, its arguments from the target's cache when `new` draft tokens are read."""
    shared = {}
    for kind in dict.fromkeys(c.kinds):
        # A local layer sees one position more than the window. The token's own position is not one of them.
        window = None if c.window is None or kind != "local" else c.window + 1
        keys_values, seen = last_layer(of, cache, kind, window)
        rotation = "global" if kind == "local" and c.local_rope_base is None else kind
        # The target has consumed all tokens before the pending one, so its length is the pending token's position.
        by = turns(c, cache.length[:, None], rotation)
        # All tokens of a block or a tree see the same slots, because none of them is written.
        shared[kind] = Shared(by, jnp.broadcast_to(seen, (seen.shape[0], new, seen.shape[2])), keys_values)
    return shared


class Clusters(nn.Module):
    """Table of the vocabulary's ids, ordered by cluster."""

    entries: int

    @nn.compact
    def __call__(self, chosen: Array, clusters: int) -> Array:
        """Returns the ids `[B, T, A]` in the chosen clusters `[B, T, k]`."""
        ids = self.param("ids", lambda _: jnp.arange(self.entries, dtype=jnp.int32))
        # All clusters have one size (`AssistantConfig`), so each row of the reshaped ids is a cluster. The cast is for
        # programs that are compiled from shapes alone (`memory_estimate.abstract`), whose parameters are all floats.
        return ids.astype(jnp.int32).reshape(clusters, -1)[chosen].reshape(*chosen.shape[:2], -1)


class AssistantStack(nn.Module):
    """Projections from and to the target's width, the layers, the last norm and the centroids of an assistant."""

    config: AssistantConfig

    def setup(self) -> None:
        """Creates the projections, the layers, the last norm and, if there are any, the centroids."""
        c = self.config
        self.pre_projection, self.post_projection = dense(c, c.d_model), dense(c, c.target_width)
        self.layers = [DecoderLayer(c, number) for number in range(c.num_layers)]
        self.decoder_norm = norm(c)
        if c.num_centroids is not None:
            self.centroids, self.clusters = Dense(c.num_centroids, c.dtype, wide=True), Clusters(c.num_embeddings)

    def __call__(self, inputs: Array, shared: dict[str, Shared]) -> tuple[Array, Array]:
        """Returns the normalized hidden states `[B, T, E]`, and the next tokens' states `[B, T, D]`."""
        x = self.pre_projection(inputs)
        for layer, kind in zip(self.layers, self.config.kinds, strict=True):
            by, mask, keys_values = shared[kind]
            # A layer without slots writes nothing, so a draft cannot change the target's cache.
            x = layer(x, by, mask, None, beside=Beside(shared=keys_values))[0]
        hidden = self.decoder_norm(x)
        return hidden, self.post_projection(hidden)

    def candidates(self, hidden: Array) -> Array:
        """Returns the ids `[B, T, A]` of the tokens that get logits after hidden states `[B, T, E]`."""
        c: Any = self.config
        chosen = jax.lax.top_k(self.centroids(hidden), c.active_centroids)[1]
        ids: Array = self.clusters(chosen, c.num_centroids)
        return ids


class AssistantModule(nn.Module):
    """Flax module of an assistant."""

    config: AssistantConfig

    def setup(self) -> None:
        """Creates the embedding, which computes logits only, and the stack."""
        c = self.config
        self.token_embedder = Embed(c.num_embeddings, c.d_model, c.dtype)
        self.decoder = AssistantStack(c)

    def __call__(self, inputs: Array, shared: dict[str, Shared]) -> tuple[LMOutput, Array]:
        """Returns the output for `inputs` `[B, T, 2 D]`, embeddings and states, and the next states `[B, T, D]`."""
        hidden, states = self.decoder(inputs, shared)
        return LMOutput(self.logits(hidden), hidden), states

    def logits(self, hidden: Array) -> Array:
        """Returns float32 logits `[B, T, vocab_size]` of normalized hidden states; -inf for all but the candidates."""
        c = self.config
        if c.num_centroids is None:
            return real_entries(self.token_embedder.attend(hidden), c.vocab_size)
        ids = self.decoder.candidates(hidden)
        # Other tokens keep -inf. transformers gives them the smallest logit minus 1, which depends on the whole batch.
        # Only the candidates' rows are read, some 4,000 of 262,144.
        products = jnp.einsum("bte,btae->bta", hidden, self.token_embedder(ids), preferred_element_type=jnp.float32)
        blank = jnp.full((*hidden.shape[:2], c.num_embeddings), -jnp.inf, products.dtype)
        # A token is in one cluster only, so no id occurs twice, and the order of the writes does not matter.
        return real_entries(jnp.put_along_axis(blank, ids, products, axis=-1, inplace=False), c.vocab_size)


@flax.struct.dataclass
class AssistantCache:
    """State of the assistant while it drafts a block or a tree; keys and values are in the target's cache.

    Attributes:
        length: int32 `[B]`, the number of tokens that each row has read, committed and drafted.
        states: `[B, W, D]`. While a block is drafted, `W` is 1: the state before the next token. While a tree is
            drafted, they are the states after the `W` entries that were fed.
    """

    length: Array
    states: Array


Weights = tuple[Params, Target]
"""Argument `params` of `Assistant.extend`: the assistant's parameters, and the target whose cache it reads."""


@dataclass(frozen=True)
class Assistant(DecoderLM):
    """An assistant of Gemma 4 (`drafters.assistant`); `of` is its target, or `None` until `attached` sets it.

    Examples:
        >>> from speccascade_jax.models.gemma4_assistant import Assistant, AssistantConfig
        >>> sizes = {"d_model": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "d_ff": 16, "num_layers": 1}
        >>> config = AssistantConfig(vocab_size=12, num_embeddings=12, target_width=16, tied=True, num_centroids=4,
        ...                          active_centroids=2, **sizes)
        >>> config.num_embeddings // config.num_centroids * config.active_centroids  # tokens with logits
        6
    """

    config: AssistantConfig
    of: Any = field(default=None, repr=False, kw_only=True)

    @property
    def module(self) -> Any:
        """The Flax module that the configuration describes."""
        return AssistantModule(self.config)

    @property
    def about(self) -> str:
        """Description of the tokens that the assistant draws from, and of its target."""
        c = self.config
        size = c.num_embeddings if c.num_centroids is None else c.num_embeddings // c.num_centroids * c.active_centroids
        return (
            f"a Gemma 4 assistant, which draws from {size:,} of {c.num_embeddings:,} tokens and has no cache; it reads "
            f"that of a target of width {c.target_width:,}"
        )

    def attached(self, params: Params, target: BoundModel) -> BoundModel:
        """Returns the assistant for a target, whose cache and embedding it reads.

        Raises:
            ValueError: the assistant does not fit the target; the message names both sizes.
        """
        # Beyond the length for which it was trained, an assistant agrees less often with the target, but the output
        # stays correct. So the target's `max_length` replaces a smaller one of the assistant.
        config = replace(self.config, max_length=max(self.config.max_length, target.model.config.max_length))
        fitted = replace(self, config=config, of=target.model)
        fitted.check(target)
        return BoundModel(params=params, model=fitted)

    def check(self, target: BoundModel) -> None:
        """Raises a `ValueError` if the assistant does not fit the target; the message names both sizes."""
        if self.of != target.model:
            raise ValueError("a Gemma 4 assistant drafts only for the target that it was loaded with (Pair.load)")
        c, of = self.config, target.model.config
        if not of.value_norm:
            raise ValueError(
                f"a Gemma 4 assistant reads the cache of a Gemma 4, but the target is another model: {_OTHER}"
            )
        if c.target_width != of.d_model:
            raise ValueError(
                f"the Gemma 4 assistant reads hidden states of width {c.target_width}, but the target's have width "
                f"{of.d_model}: {_OTHER}"
            )
        # Only these layers of the target have a cache to read; later layers share their keys and values.
        of_kinds = of.kinds[: of.num_caches]
        for number, kind in enumerate(c.kinds):
            if kind not in of_kinds:
                raise ValueError(f"the Gemma 4 assistant has {kind} layers, but the target has none: {_OTHER}")
            mine, theirs = c.layer(number), of.layer(of_kinds.index(kind))
            # Only key-value heads must agree. The numbers of query heads and of hidden units may differ.
            if mine[:2] != theirs[:2]:
                raise ValueError(
                    f"the Gemma 4 assistant's {kind} layers read {mine.kv_heads} key-value heads of width "
                    f"{mine.head_dim}, but the target's have {theirs.kv_heads} of width {theirs.head_dim}: {_OTHER}"
                )
        # After the longest rollback, the target's ring buffers hold its window and one position more, which is all that
        # the assistant's local layers may see (`shared_with`).
        if "local" in c.kinds and c.window > of.window:
            raise ValueError(
                f"the Gemma 4 assistant has a window of {c.window} positions, but the target's is {of.window}: {_OTHER}"
            )
        # The cache on a mesh holds the heads of each device, so a model that reads it must be split in the same way.
        if self.mesh != target.model.mesh:
            raise ValueError(
                "the Gemma 4 assistant reads its target's cache, so devices must split it as they split the target: "
                "leave out draft_whole"
            )

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> DecoderCache:
        """Raises a `ValueError`, because an assistant cannot generate without its target."""
        raise ValueError(
            "a Gemma 4 assistant drafts from the cache of its target, and only for this target: use it as a draft; it "
            "cannot generate alone, verify drafts, be the setting `tail`, or have block_size='auto'"
        )

    def extend(self, params: Weights, cache: Any, tokens: Array) -> tuple[LMOutput, Any]:
        """Reads one token `[B, 1]` of a block; returns the output for it, and the cache with the state after it."""
        out, states = self._read(params, tokens, cache.states)
        return out, AssistantCache(cache.length + 1, states)

    def extend_branch(self, params: Weights, cache: Any, tokens: Array, branch: Branch) -> tuple[LMOutput, Any]:
        """Reads entries of a draft tree, `tokens` `[B, T]`, each with the state of its parent."""
        out, states = self._read(params, tokens, cache.states[:, jnp.asarray(branch.parents)])
        return out, AssistantCache(cache.length + tokens.shape[1], jnp.concatenate([cache.states, states], axis=1))

    def _read(self, params: Weights, tokens: Array, states: Array) -> tuple[LMOutput, Array]:
        weights, target = params
        # The target scales these embeddings by its own `embedding_scale`, as it does for its first layer.
        inputs = jnp.concatenate([self.of.embed(target.params, tokens), states], axis=-1)
        with full_precision(self.config.dtype), under(self.mesh):
            shared = shared_with(self.config, self.of.config, target.cache, tokens.shape[1])
            read: tuple[LMOutput, Array] = self.module.apply({"params": weights}, inputs, shared)
        return read


_OTHER = "choose the assistant that was trained for this target"
