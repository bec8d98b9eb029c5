"""Language models without a network, for tests and examples: `TableLM` and `FakeLM`.

`TableLM` reads next-token logits from a table row of the last token, so its distributions can be computed by hand. A
token's row also serves as the token's embedding and as its hidden state after every layer.

`FakeLM` draws next-token logits from a hash of the whole prefix. Slot `i` of its cache holds the hash of the first `i`
tokens. An error such as a missing rollback, a stale slot or a token fed twice therefore changes its distributions
completely instead of slightly.
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, BoundModel, LMOutput, Params, Prompt
from speccascade_jax.models.cache import LengthCached, move_slots


@dataclass(frozen=True)
class Table:
    """The model of `TableLM`; its parameters are the logits `[V, V]`, its cache the number of consumed tokens."""

    vocab_size: int

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Array:
        """Returns the cache, which is the number of consumed tokens, int32 `[B]`."""
        return prompt.length - 1

    def extend(self, params: Params, cache: Array, tokens: Array) -> tuple[LMOutput, Array]:
        """Feeds `tokens`; the logits and the hidden state after `tokens[b, t]` are row `tokens[b, t]` of the table."""
        return LMOutput(logits=params[tokens], hidden=params[tokens]), cache + tokens.shape[1]

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[Array, Array]:
        """Returns the cache, and the consumed tokens' rows of the table as the states of all `layers`."""
        cache = self.prefill(params, prompt, max_len, max_rollback)
        consumed = jnp.arange(prompt.tokens.shape[1])[None] < cache[:, None]
        return cache, self._rows(jnp.where(consumed[..., None], params[prompt.tokens], 0.0), layers)

    def extend_layers(
        self, params: Params, cache: Array, tokens: Array, layers: tuple[int, ...], branch: Branch | None = None
    ) -> tuple[LMOutput, Array]:
        """Feeds `tokens`; a token's row of the table is its state after every layer."""
        out, cache = self.extend(params, cache, tokens)
        return out._replace(layer_states=self._rows(params[tokens], layers)), cache

    def _rows(self, states: Array, layers: tuple[int, ...]) -> Array:
        return jnp.stack([states] * len(layers), axis=2)

    def embed(self, params: Params, tokens: Array) -> Array:
        """Returns the embeddings of `tokens`, which are their rows of the table."""
        rows: Array = params[tokens]
        return rows

    def unembed(self, params: Params, states: Array) -> Array:
        """Returns the states unchanged, because a row of the table holds logits."""
        return states

    def extend_branch(self, params: Params, cache: Array, tokens: Array, branch: Branch) -> tuple[LMOutput, Array]:
        """Feeds entries of a draft tree as `extend` feeds a block, because logits depend on the last token alone."""
        return self.extend(params, cache, tokens)

    def keep(self, cache: Array, start: Array, entries: Array) -> Array:
        """Returns the cache unchanged, because it has no slots."""
        return cache

    def rollback(self, cache: Array, length: Array) -> Array:
        """Returns `length`, which is the whole cache."""
        return length

    def consumed(self, cache: Array) -> Array:
        """Returns the cache itself, the number of consumed tokens."""
        return cache


def TableLM(logits: Any) -> BoundModel:  # noqa: N802 - users read it as the name of a model
    """Returns a bigram model that reads its logits from a table.

    Args:
        logits: `[V, V]`; row `i` holds the next-token logits after token `i`.

    Returns:
        A `BoundModel` whose parameters are the table, float32 `[V, V]`.

    Raises:
        ValueError: the logits are not a square matrix.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> draft, target = (sc.TableLM(np.log([[share, 1 - share], [0.5, 0.5]])) for share in (0.6, 0.9))
        >>> pair = sc.Pair(target=target, draft=draft)
        >>> print(np.exp(pair.target.params).round(2))  # row i: the distribution after token i
        [[0.9 0.1]
         [0.5 0.5]]
    """
    table = jnp.asarray(logits, jnp.float32)
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(f"TableLM needs logits of shape [V, V], got {table.shape}")
    return BoundModel(params=table, model=Table(vocab_size=table.shape[0]))


@flax.struct.dataclass
class FakeCache:
    """Cache of `Fake`.

    Attributes:
        keys: uint32 `[B, S + 1]`; slot `i` holds the hash of the row's first `i` tokens.
        length: int32 `[B]`, the number of consumed tokens.
    """

    keys: Array
    length: Array


@dataclass(frozen=True)
class Fake(LengthCached[FakeCache]):
    """A model whose next-token logits are drawn from the hash of the whole prefix.

    Attributes:
        vocab_size: `V`.
        noise: weight of the part of the logits that depends on `seed`. With 0, models of all seeds are equal.
        seed: random seed of that part.
        sharpness: factor of the logits, whose magnitude is at most `sharpness * (1 + noise)`.
    """

    vocab_size: int
    noise: float = 0.0
    seed: int = 0
    sharpness: float = 4.0

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> FakeCache:
        """Hashes the encoder's tokens into the first key, then feeds the prompt except its last token."""
        rows = prompt.tokens.shape[0]
        base = jnp.full((rows,), 0x9E3779B9, jnp.uint32)
        if prompt.encoder_tokens is not None:
            base = _fold_along(base, prompt.encoder_tokens, skip=~prompt.encoder_real)[:, -1]
        # There is one slot more than tokens, because slot 0 holds the key before the first token.
        keys = jnp.zeros((rows, max_len + 1), jnp.uint32).at[:, 0].set(base)
        cache = FakeCache(keys=keys, length=jnp.zeros((rows,), jnp.int32))
        if prompt.tokens.shape[1] > 1:
            _, cache = self.extend(params, cache, prompt.tokens[:, :-1])
        # Shorter rows were also fed their padding, which the rollback drops.
        return self.rollback(cache, prompt.length - 1)

    def extend(self, params: Params, cache: FakeCache, tokens: Array) -> tuple[LMOutput, FakeCache]:
        """Feeds `tokens` `[B, T]`: hashes each token into its prefix's key, and draws logits from the resulting key."""
        start = jnp.take_along_axis(cache.keys, cache.length[:, None], axis=1)[:, 0]
        folded = _fold_along(start, tokens)
        keys = write_slots(cache.keys, folded, cache.length + 1, axis=1)
        return LMOutput(logits=self._logits(folded)), FakeCache(keys, cache.length + tokens.shape[1])

    def extend_branch(
        self, params: Params, cache: FakeCache, tokens: Array, branch: Branch
    ) -> tuple[LMOutput, FakeCache]:
        """Feeds entries of a draft tree: hashes each token into the key of its parent entry."""
        # The cache already holds the tree's first `num_cached` entries, in the last slots before the current length.
        base = cache.length - branch.num_cached
        node_keys = [
            jnp.take_along_axis(cache.keys, (base + 1 + n)[:, None], axis=1)[:, 0] for n in range(branch.num_cached)
        ]
        start = jnp.take_along_axis(cache.keys, base[:, None], axis=1)[:, 0]
        # An entry sees its ancestors and itself, in order, so the second-to-last entry that it sees is its parent.
        for n, sees in enumerate(branch.sees):
            path = [entry for entry, seen in enumerate(sees) if seen][:-1]
            node_keys.append(_fold(node_keys[path[-1]] if path else start, tokens[:, n]))
        folded = jnp.stack(node_keys[branch.num_cached :], axis=1)
        keys = write_slots(cache.keys, folded, cache.length + 1, axis=1)
        return LMOutput(logits=self._logits(folded)), FakeCache(keys, cache.length + tokens.shape[1])

    def keep(self, cache: FakeCache, start: Array, entries: Array) -> FakeCache:
        """Moves the keys of an accepted path of a tree to consecutive slots; the length does not change."""
        # Slots are shifted by one, because slot i + 1 belongs to token i.
        return replace(cache, keys=move_slots(cache.keys, start + 1, entries, axis=1))

    def _logits(self, keys: Array) -> Array:
        entries = jnp.arange(self.vocab_size, dtype=jnp.uint32)
        # The logits are the sum of a part that all models share and a part that depends on the seed.
        shared = _unit(_fold(keys[..., None], entries))
        private = _unit(_fold(keys[..., None] ^ jnp.uint32(self.seed * 2654435761 % 2**32), entries))
        return self.sharpness * (shared + self.noise * private)


def FakeLM(vocab_size: int, *, noise: float = 0.0, seed: int = 0) -> BoundModel:  # noqa: N802
    """Returns a model whose next-token logits are drawn from a hash of the whole prefix.

    The logits are between -4 (1 + noise) and 4 (1 + noise).

    Args:
        vocab_size: `V`.
        noise: weight of the part of the logits that depends on `seed`. With 0, models of all seeds are equal.
        seed: random seed of that part.

    Returns:
        A `BoundModel` without parameters.

    Examples:
        >>> import speccascade_jax as sc
        >>> sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        Pair('custom': target=BoundModel(Fake, 0 parameters), draft=BoundModel(Fake, 0 parameters))
    """
    return BoundModel(params=(), model=Fake(vocab_size=vocab_size, noise=noise, seed=seed))


def _fold(keys: Array, data: Array) -> Array:
    """Hashes each entry of `keys` with an entry of `data`; each input bit can change every bit of the result."""
    x: Array = keys * jnp.uint32(0x85EBCA6B) + (data + 1).astype(jnp.uint32) * jnp.uint32(0xC2B2AE35)
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return x ^ (x >> 15)


def _unit(keys: Array) -> Array:
    """Maps uint32 keys to float32 in [-1, 1)."""
    # Only 24 bits are used, as many as a float32 significand has, so the conversion is exact.
    return (keys >> 8).astype(jnp.float32) * 2.0**-23 - 1.0


def _fold_along(start: Array, tokens: Array, skip: Array | None = None) -> Array:
    """Hashes `tokens` `[B, T]` one by one into the keys `start` `[B]`; returns the keys after each token.

    The result is uint32 `[B, T]`. Tokens where `skip`, bool `[B, T]`, is true are omitted.
    """
    skip = jnp.zeros(tokens.shape, bool) if skip is None else skip

    def fold(keys: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        # A skipped token leaves the key unchanged, so that padding never changes the distributions.
        keys = jnp.where(column[1], keys, _fold(keys, column[0]))
        return keys, keys

    return jax.lax.scan(fold, start, (tokens.T, skip.T))[1].T
