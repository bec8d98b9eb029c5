"""A model whose next-token logits depend on the last token alone: laws can be computed by hand for it.

A token's row of the table is its embedding, its state after every layer and its logits.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, BoundModel, LMOutput, Params, Prompt


@dataclass(frozen=True)
class Table:
    """The language model behind `TableLM`; parameters are the logits `[V, V]`, the cache is a length."""

    vocab_size: int

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Array:
        return prompt.length - 1

    def extend(self, params: Params, cache: Array, tokens: Array) -> tuple[LMOutput, Array]:
        """Row `tokens[b, t]` of the table at every position; it is the hidden state too."""
        return LMOutput(logits=params[tokens], hidden=params[tokens]), cache + tokens.shape[1]

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[Array, Array]:
        """Returns the cache, and the rows of the tokens that it has consumed (`LayeredModel`)."""
        cache = self.prefill(params, prompt, max_len, max_rollback)
        consumed = jnp.arange(prompt.tokens.shape[1])[None] < cache[:, None]
        return cache, self._rows(jnp.where(consumed[..., None], params[prompt.tokens], 0.0), layers)

    def extend_layers(
        self, params: Params, cache: Array, tokens: Array, layers: tuple[int, ...], branch: Branch | None = None
    ) -> tuple[LMOutput, Array]:
        out, cache = self.extend(params, cache, tokens)
        return out._replace(layer_states=self._rows(params[tokens], layers)), cache

    def _rows(self, states: Array, layers: tuple[int, ...]) -> Array:
        return jnp.stack([states] * len(layers), axis=2)

    def embed(self, params: Params, tokens: Array) -> Array:
        return params[tokens]

    def unembed(self, params: Params, states: Array) -> Array:
        return states

    def extend_branch(self, params: Params, cache: Array, tokens: Array, branch: Branch) -> tuple[LMOutput, Array]:
        """As `extend`: no token sees another."""
        return self.extend(params, cache, tokens)

    def keep(self, cache: Array, start: Array, entries: Array) -> Array:
        return cache

    def rollback(self, cache: Array, length: Array) -> Array:
        return length

    def consumed(self, cache: Array) -> Array:
        return cache


def TableLM(logits: Any) -> BoundModel:  # noqa: N802 - reads as a model's name at the front door
    """A bound bigram model.

    Args:
        logits: `[V, V]`; row `i` holds the next-token logits after token `i`.

    Raises:
        ValueError: not a square matrix.
    """
    table = jnp.asarray(logits, jnp.float32)
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(f"TableLM needs logits of shape [V, V], got {table.shape}")
    return BoundModel(params=table, model=Table(vocab_size=table.shape[0]))
