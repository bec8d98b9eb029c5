"""Drafts without a network: a table of bigrams, and the continuation of the longest match in the context.

Each is a `LanguageModel`, so it can draft alone, be the lowest level of a hierarchy, or verify in the middle of one. A
copied token has a one-hot distribution. Sources: Globerson et al. (2025), section 5 and appendix D, which takes both
from cascade speculative drafting (Chen et al., 2023), where the second is called max-gram.
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
"""Markers for an entry without a token, and for an entry before the first token."""


@flax.struct.dataclass
class GramCache:
    """Cache of `Grams`.

    `source` int32 `[B, N]` holds the encoder's tokens, -1 where padded; `tokens` is int32 `[B, S]`, `length` int32
    `[B]`.
    """

    source: Array
    tokens: Array
    length: Array


@dataclass(frozen=True)
class Grams(LengthCached[GramCache]):
    """A model that copies the token after the longest earlier match of the last tokens, or else reads a bigram table.

    Parameters: `{}`, or `{"next": int32 [V, K], "logits": float32 [V, K]}`, which hold the `K` most likely successors
    of each token (-inf if there are fewer). Without a match and without a table all tokens are equally likely. Draft
    with the stop policy "confidence" then, which ends the block at such a token.

    Attributes:
        vocab_size: `V`.
        longest: the largest number of last tokens to match; 0: bigrams alone. The longest match wins; among matches of
            equal length the decoder's tokens win over the encoder's, and the latest wins.
        is_encoder_decoder: whether prompts go to an encoder, whose input is then searched too.
    """

    vocab_size: int
    longest: int = 8
    is_encoder_decoder: bool = False

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> GramCache:
        """Stores the prompt and the encoder's input; the last token of each row's prompt does not count as consumed."""
        rows, width = prompt.tokens.shape
        source = jnp.full((rows, 1), _NONE)
        # Padding of the encoder's input must match nothing.
        if prompt.encoder_tokens is not None:
            source = jnp.where(prompt.encoder_real, prompt.encoder_tokens, _NONE)
        tokens = jnp.pad(prompt.tokens, [(0, 0), (0, max_len - width)], constant_values=_NONE)
        return GramCache(source, tokens, prompt.length - 1)

    def extend(self, params: Params, cache: GramCache, tokens: Array) -> tuple[LMOutput, GramCache]:
        """Returns the logits `[B, T, V]` after each of `tokens` `[B, T]`.

        They allow one token alone if a match was found; otherwise they are a row of the bigram table.
        """
        # All tokens are written first; each then searches no further than its own end.
        cache = GramCache(cache.source, write_slots(cache.tokens, tokens, cache.length, axis=1), cache.length)
        ends = cache.length[:, None] + jnp.arange(1, tokens.shape[1] + 1)[None]
        logits = self._unmatched(params, tokens)
        if self.longest:
            successor, matched = jax.vmap(jax.vmap(self._matched, (None, None, 0)))(cache.source, cache.tokens, ends)
            # A copied token has probability 1 and all others 0, whatever the table says.
            copied = jnp.where(jnp.arange(self.vocab_size) == successor[..., None], 0.0, -jnp.inf)
            logits = jnp.where(matched[..., None], copied, logits)
        return LMOutput(logits), replace(cache, length=cache.length + tokens.shape[1])

    def _unmatched(self, params: Params, tokens: Array) -> Array:
        if not params:
            return jnp.zeros((*tokens.shape, self.vocab_size))
        successors, logits = params["next"][tokens], params["logits"][tokens]
        rows, times = jnp.indices(tokens.shape)
        empty = jnp.full((*tokens.shape, self.vocab_size), -jnp.inf)
        # `max`, not `set`: a table row with fewer than K successors pads itself with tokens of logit -inf, which may
        # repeat a real successor.
        return empty.at[rows[..., None], times[..., None], successors].max(logits)

    def _matched(self, source: Array, tokens: Array, end: Array) -> tuple[Array, Array]:
        """Returns the token after the best match of the end of `tokens[:end]`, and whether there is a match.

        `tokens` is `[S]`.
        """
        last = jnp.where(end > jnp.arange(self.longest), tokens[end - 1 - jnp.arange(self.longest)], _OUTSIDE)
        # A match must end before `end - 1`: only then is the token after it known.
        context_lengths = jnp.where(jnp.arange(len(tokens)) < end - 1, _agreement(tokens, last), 0)
        followed = jnp.append(source[1:], _NONE) != _NONE
        source_lengths = jnp.where(followed, _agreement(source, last), 0)
        lengths = jnp.concatenate([source_lengths, context_lengths])
        successors = jnp.concatenate([jnp.append(source[1:], _NONE), jnp.append(tokens[1:], _NONE)])
        # `argmax` returns the first maximum; on the reversed array it is the latest, and the encoder's matches lose.
        best = len(lengths) - 1 - jnp.argmax(lengths[::-1])
        return successors[best], lengths[best] > 0


def _agreement(tokens: Array, last: Array) -> Array:
    """Returns, for each index of `tokens` `[S]`, the length of the match that ends there with `last` `[n]`.

    `last` holds the latest token first.
    """
    agree, match_lengths = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    # `agree` stays true only while every later token agreed too, so the sum is the length of the match.
    for back in range(last.shape[0]):
        shifted = jnp.concatenate([jnp.full((back,), _OUTSIDE), tokens])[: len(tokens)]
        agree &= (shifted == last[back]) & (shifted >= 0)
        match_lengths += agree
    return match_lengths


def prompt_lookup(vocab_size: int, longest: int = 8, *, encoder_decoder: bool = False) -> BoundModel:
    """Returns a bound model that copies from the context; without a match all tokens are equally likely (`Grams`)."""
    return BoundModel(params={}, model=Grams(vocab_size, longest, encoder_decoder))


def max_gram(table: Params, vocab_size: int, longest: int = 8, *, encoder_decoder: bool = False) -> BoundModel:
    """Returns a bound model that copies from the context, or else reads a table of bigrams (`count_bigrams`).

    Raises:
        ValueError: the table does not belong to this vocabulary.
    """
    _check(table, vocab_size)
    params = {"next": jnp.asarray(table["next"], jnp.int32), "logits": jnp.asarray(table["logits"], jnp.float32)}
    return BoundModel(params=params, model=Grams(vocab_size, longest, encoder_decoder))


def bigrams(table: Params, vocab_size: int, *, encoder_decoder: bool = False) -> BoundModel:
    """Returns a bound model that reads a table of bigrams (`count_bigrams`)."""
    return max_gram(table, vocab_size, 0, encoder_decoder=encoder_decoder)


def count_bigrams(sequences: Iterable[Sequence[int]], vocab_size: int, most: int = 64) -> dict[str, np.ndarray]:
    """Counts bigrams and returns the table that `Grams` reads.

    Args:
        sequences: sequences of token ids, including the start token of decoding and the end token.
        vocab_size: `V`, number of vocabulary entries.
        most: `K`, at least 1: number of successors kept per token, the most frequent ones. A token without successors
            gets the successors that are most frequent after any token.

    Raises:
        ValueError: an id is outside the vocabulary, there is nothing to count, or `most` is below 1.
    """
    whole("most", most, 1)
    pairs, counts = _pairs(sequences, vocab_size)
    if not len(pairs):
        raise ValueError("there are no bigrams to count: give sequences of at least two tokens")
    first, second = pairs // vocab_size, pairs % vocab_size
    common = _most_common(second, counts, most, vocab_size)
    successors, logits = (np.tile(row, (vocab_size, 1)) for row in common)
    # Sorted by token, then by descending count: `rank` is a successor's index among those of its token.
    order = np.lexsort((second, -counts, first))
    first, second, counts = first[order], second[order], counts[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    # Rows of counted tokens drop the common successors; an unused entry keeps its token but has no probability.
    logits[first] = -np.inf
    kept = rank < successors.shape[1]
    successors[first[kept], rank[kept]], logits[first[kept], rank[kept]] = second[kept], np.log(counts[kept])
    return {"next": successors.astype(np.int32), "logits": logits.astype(np.float32)}


def _most_common(successors: np.ndarray, weights: np.ndarray, most: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `most` frequent of the weighted `successors` and the logs of their summed weights (-inf for 0)."""
    followed = np.bincount(successors, weights=weights, minlength=size)
    common = np.argsort(-followed, kind="stable")[:most]
    with np.errstate(divide="ignore"):
        return common, np.log(followed[common])


def _pairs(sequences: Iterable[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct bigrams as codes `a V + b` with their counts, without an array of `V × V`."""
    codes = []
    for sequence in sequences:
        ids = np.asarray(sequence, np.int64)
        if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
            raise ValueError(f"token {wrong[0]} is outside a vocabulary of {vocab_size}: use the pair's own vocabulary")
        codes.append(ids[:-1] * vocab_size + ids[1:])
    return np.unique(np.concatenate([np.zeros(0, np.int64), *codes]), return_counts=True)


def widened(table: Params, counted: int, vocab_size: int) -> Params:
    """Extends a table of `counted` ids with rows for a model's further ids up to `vocab_size`, such as T5's sentinels.

    The table never drafts these ids. Their rows hold the successors that are most frequent in the table, like the rows
    of ids without successors.

    Raises:
        ValueError: the table does not have `counted` ids.
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
            f"the table of bigrams has shapes {shapes}, but a vocabulary of {vocab_size} needs [V, K] for both: "
            f"count it with the pair's own vocabulary"
        )
    # The maximum of a row that holds a NaN is NaN, so one test finds NaN, infinity and rows of -inf.
    successors, largest = np.asarray(table["next"]), np.asarray(table["logits"]).max(-1)
    if len(wrong := successors[(successors < 0) | (successors >= vocab_size)]):
        raise ValueError(
            f"the table of bigrams has token {wrong[0]}, outside a vocabulary of {vocab_size}: count it again"
        )
    if not np.isfinite(largest).all():
        row = int(np.argmin(np.isfinite(largest)))
        raise ValueError(f"the table of bigrams has NaN, infinite or no logits after token {row}: count it again")
