"""A model whose next-token logits depend on the last token alone: laws can be computed by hand for it."""

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
