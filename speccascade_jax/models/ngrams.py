"""Drafts that are no network: a table of bigrams, and the continuation of the longest match in the context.

Both are language models like any other (`LanguageModel`), so they draft alone, stand at the bottom of a hierarchy, or
verify in the middle of one. A copied token has a one-hot law. Sources: paper 4, section 5 and appendix D, which takes
them from cascade speculative drafting (Chen et al., 2023), where the second is called max-gram.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.checks import whole
from speccascade_jax.core.types import Array, BoundModel, LMOutput, Params, Prompt
from speccascade_jax.models.cache import LengthCached

_NONE, _OUTSIDE = -1, -2
"""No token here; before the first one."""


@flax.struct.dataclass
class GramCache:
    """`source` int32 `[B, N]`: the encoder's tokens, -1 where padded; `tokens` int32 `[B, S]`; `length` int32 `[B]`."""

    source: Array
    tokens: Array
    length: Array


@dataclass(frozen=True)
class Grams(LengthCached[GramCache]):
    """Copies what followed the longest earlier match of the last tokens; without a match, the table of bigrams.

    Parameters: `{}`, or `{"next": int32 [V, K], "logits": float32 [V, K]}`, for each token its `K` likeliest
    successors (-inf where there are fewer). Where nothing matches and no table is there, all tokens are equally likely:
    draft with the stop policy "confidence" then, which ends the block there.

    Attributes:
        vocab_size: `V`.
        longest: the most last tokens that a match is looked for with; 0: bigrams alone. The longest match wins, of
            equal ones the latest, in the encoder's tokens only where the decoder has none as long.
        is_encoder_decoder: whether prompts go to an encoder; its input is searched too.
    """

    vocab_size: int
    longest: int = 8
    is_encoder_decoder: bool = False

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> GramCache:
        """Remembers all but each row's last context token, and the encoder's input."""
        rows, width = prompt.tokens.shape
        source = jnp.full((rows, 1), _NONE) if prompt.encoder_tokens is None else prompt.encoder_tokens
        source = jnp.where(source > 0, source, _NONE)
        tokens = jnp.pad(prompt.tokens, [(0, 0), (0, max_len - width)], constant_values=_NONE)
        return GramCache(source, tokens, prompt.length - 1)

    def extend(self, params: Params, cache: GramCache, tokens: Array) -> tuple[LMOutput, GramCache]:
        """Logits `[B, T, V]` after each of `tokens` `[B, T]`: a match's successor alone, or the table's row."""
        cache = GramCache(cache.source, write_slots(cache.tokens, tokens, cache.length, axis=1), cache.length)
        ends = cache.length[:, None] + jnp.arange(1, tokens.shape[1] + 1)[None]
        logits = self._unmatched(params, tokens)
        if self.longest:
            successor, matched = jax.vmap(jax.vmap(self._matched, (None, None, 0)))(cache.source, cache.tokens, ends)
            copied = jnp.where(jnp.arange(self.vocab_size) == successor[..., None], 0.0, -jnp.inf)
            logits = jnp.where(matched[..., None], copied, logits)
        return LMOutput(logits), replace(cache, length=cache.length + tokens.shape[1])

    def _unmatched(self, params: Params, tokens: Array) -> Array:
        if not params:
            return jnp.zeros((*tokens.shape, self.vocab_size))
        successors, logits = params["next"][tokens], params["logits"][tokens]
        rows, times = jnp.indices(tokens.shape)
        empty = jnp.full((*tokens.shape, self.vocab_size), -jnp.inf)
        return empty.at[rows[..., None], times[..., None], successors].max(logits)  # empty places hold -inf

    def _matched(self, source: Array, tokens: Array, end: Array) -> tuple[Array, Array]:
        """The token behind the best match of the last of the first `end` `tokens` `[S]`, and whether there is one."""
        last = jnp.where(end > jnp.arange(self.longest), tokens[end - 1 - jnp.arange(self.longest)], _OUTSIDE)
        own = jnp.where(jnp.arange(len(tokens)) < end - 1, _agreement(tokens, last), 0)  # what follows is known
        followed = jnp.append(source[1:], _NONE) != _NONE
        theirs = jnp.where(followed, _agreement(source, last), 0)
        lengths = jnp.concatenate([theirs, own])
        behind = jnp.concatenate([jnp.append(source[1:], _NONE), jnp.append(tokens[1:], _NONE)])
        best = len(lengths) - 1 - jnp.argmax(lengths[::-1])  # the latest of equal ones
        return behind[best], lengths[best] > 0


def _agreement(tokens: Array, last: Array) -> Array:
    """For each place of `tokens` `[S]`, how many tokens up to it are those of `last` `[n]`, the latest first."""
    agree, found = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    for back in range(last.shape[0]):
        shifted = jnp.concatenate([jnp.full((back,), _OUTSIDE), tokens])[: len(tokens)]
        agree &= (shifted == last[back]) & (shifted >= 0)
        found += agree
    return found


def prompt_lookup(vocab_size: int, longest: int = 8, *, encoder_decoder: bool = False) -> BoundModel:
    """A bound model that copies from the context, or knows nothing (see `Grams`)."""
    return BoundModel(params={}, model=Grams(vocab_size, longest, encoder_decoder))


def max_gram(table: Params, vocab_size: int, longest: int = 8, *, encoder_decoder: bool = False) -> BoundModel:
    """A bound model that copies from the context, or draws from a table of bigrams (`count_bigrams`).

    Raises:
        ValueError: no table of this vocabulary.
    """
    _check(table, vocab_size)
    params = {"next": jnp.asarray(table["next"], jnp.int32), "logits": jnp.asarray(table["logits"], jnp.float32)}
    return BoundModel(params=params, model=Grams(vocab_size, longest, encoder_decoder))


def bigrams(table: Params, vocab_size: int, *, encoder_decoder: bool = False) -> BoundModel:
    """A bound model that draws from a table of bigrams (`count_bigrams`)."""
    return max_gram(table, vocab_size, 0, encoder_decoder=encoder_decoder)


def count_bigrams(sequences: Iterable[Sequence[int]], vocab_size: int, most: int = 64) -> dict[str, np.ndarray]:
    """How often each token followed each other one, as `Grams` reads it.

    Args:
        sequences: of token ids, the one that decoding begins with and the end included.
        most: `K`, at least 1: successors kept of each token, the most frequent ones. A token that none followed has
            those that are most frequent behind any token.

    Raises:
        ValueError: an id outside the vocabulary, nothing to count, or nothing to keep.
    """
    whole("most", most, 1)
    pairs, counts = _pairs(sequences, vocab_size)
    if not len(pairs):
        raise ValueError("there are no bigrams to count: give sequences of at least two tokens")
    first, second = pairs // vocab_size, pairs % vocab_size
    common = _most_common(second, counts, most, vocab_size)
    successors, logits = (np.tile(row, (vocab_size, 1)) for row in common)
    order = np.lexsort((second, -counts, first))
    first, second, counts = first[order], second[order], counts[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    logits[first] = -np.inf
    kept = rank < successors.shape[1]
    successors[first[kept], rank[kept]], logits[first[kept], rank[kept]] = second[kept], np.log(counts[kept])
    return {"next": successors.astype(np.int32), "logits": logits.astype(np.float32)}


def _most_common(successors: np.ndarray, weights: np.ndarray, most: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The `most` frequent of `successors` of these weights, and the logs of their sums; -inf where that is 0."""
    followed = np.bincount(successors, weights=weights, minlength=size)
    common = np.argsort(-followed, kind="stable")[:most]
    with np.errstate(divide="ignore"):
        return common, np.log(followed[common])


def _pairs(sequences: Iterable[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bigrams `a V + b` that there are, and how often; nothing of `V × V` is ever held."""
    codes = []
    for sequence in sequences:
        ids = np.asarray(sequence, np.int64)
        if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
            raise ValueError(f"token {wrong[0]} is outside a vocabulary of {vocab_size}: count with the pair's own")
        codes.append(ids[:-1] * vocab_size + ids[1:])
    return np.unique(np.concatenate([np.zeros(0, np.int64), *codes]), return_counts=True)


def widened(table: Params, counted: int, vocab_size: int) -> Params:
    """A table of `counted` ids with rows for the further ids of a model of `vocab_size`, such as T5's sentinels.

    Nothing drafts them; behind them stands what is most frequent in the table, as behind ids that none followed.

    Raises:
        ValueError: no table of `counted` ids.
    """
    _check(table, counted)
    successors, logits = np.asarray(table["next"]), np.asarray(table["logits"], np.float64)
    weights, more = np.exp(logits - logits.max()), max(vocab_size - counted, 0)
    common = _most_common(successors.ravel(), weights.ravel(), successors.shape[1], counted)
    rows = zip(("next", "logits"), common, strict=True)
    return {name: np.concatenate([table[name], np.tile(row, (more, 1))]) for name, row in rows}


def _check(table: Params, vocab_size: int) -> None:
    shapes = {name: np.shape(table.get(name)) for name in ("next", "logits")}
    rows, *more = shapes["next"] or (0,)
    if len(set(shapes.values())) > 1 or rows != vocab_size or len(more) != 1 or not more[0]:
        raise ValueError(
            f"a table of bigrams of shapes {shapes} is not one of a vocabulary of {vocab_size}: [V, K] both; count it "
            f"with the pair's own vocabulary"
        )
    successors, largest = np.asarray(table["next"]), np.asarray(table["logits"]).max(-1)  # NaN of a row with a NaN
    if len(wrong := successors[(successors < 0) | (successors >= vocab_size)]):
        raise ValueError(
            f"a table of bigrams names token {wrong[0]}, outside a vocabulary of {vocab_size}: count it anew"
        )
    if not np.isfinite(largest).all():
        row = int(np.argmin(np.isfinite(largest)))
        raise ValueError(f"a table of bigrams has NaN, infinite or no logits behind token {row}: count it anew")
