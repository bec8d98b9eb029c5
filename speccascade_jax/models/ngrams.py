"""Draft models without a network: a table of bigrams, and a search for the last tokens earlier in the context.

The search finds the longest earlier match of the last tokens and proposes the token that followed it. Both drafts are
`LanguageModel`s, so they can draft alone or at any level of a hierarchy. A token copied from a match has probability 1.
Sources: Globerson et al. (2025), section 5 and appendix D; cascade speculative drafting (Chen et al., 2023), which
introduced both drafts and calls the search max-gram.
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
"""Markers in arrays of tokens: an entry without a token (padding), and an entry before the first token."""


@flax.struct.dataclass
class GramCache:
    """Cache of `Grams`.

    Attributes:
        source: int32 `[B, N]`, the encoder's tokens, -1 where padded.
        tokens: int32 `[B, S]`, the decoder's tokens.
        length: int32 `[B]`, the number of consumed tokens.
    """

    source: Array
    tokens: Array
    length: Array


@dataclass(frozen=True)
class Grams(LengthCached[GramCache]):
    """A model that copies the token after the longest earlier match of the last tokens, or else reads a bigram table.

    The parameters are the bigram table `{"next": int32 [V, K], "logits": float32 [V, K]}`, or `{}` without a table. The
    table holds the `K` most likely successors of each token; logits are -inf if a token has fewer. Without a match and
    without a table, all tokens are equally likely. The stop policy "confidence" then ends the block, so use it if there
    is no table.

    Attributes:
        vocab_size: `V`.
        longest: the largest number of last tokens to match; 0 reads bigrams only. The longest match is chosen. Among
            matches of equal length, matches in the decoder's tokens come before matches in the encoder's, and later
            matches before earlier ones.
        is_encoder_decoder: whether prompts go to an encoder, whose input is then searched too.
    """

    vocab_size: int
    longest: int = 8
    is_encoder_decoder: bool = False

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> GramCache:
        """Returns a cache with the prompt and the encoder's input; each prompt's last token counts as not consumed."""
        rows, width = prompt.tokens.shape
        source = jnp.full((rows, 1), _NONE)
        # Padding gets a marker instead of its id 0, so that it never matches a token.
        if prompt.encoder_tokens is not None:
            source = jnp.where(prompt.encoder_real, prompt.encoder_tokens, _NONE)
        tokens = jnp.pad(prompt.tokens, [(0, 0), (0, max_len - width)], constant_values=_NONE)
        return GramCache(source, tokens, prompt.length - 1)

    def extend(self, params: Params, cache: GramCache, tokens: Array) -> tuple[LMOutput, GramCache]:
        """Feeds `tokens` `[B, T]`; returns the logits `[B, T, V]` after each token, and the cache.

        If there is a match, the logits allow the copied token only; otherwise they are a row of the bigram table.
        """
        # All tokens of the block are written first. The search for each token ignores the tokens after it.
        cache = GramCache(cache.source, write_slots(cache.tokens, tokens, cache.length, axis=1), cache.length)
        ends = cache.length[:, None] + jnp.arange(1, tokens.shape[1] + 1)[None]
        logits = self._unmatched(params, tokens)
        if self.longest:
            successor, matched = jax.vmap(jax.vmap(self._matched, (None, None, 0)))(cache.source, cache.tokens, ends)
            # If there is a match, the copied token has probability 1, and the table is ignored.
            copied = jnp.where(jnp.arange(self.vocab_size) == successor[..., None], 0.0, -jnp.inf)
            logits = jnp.where(matched[..., None], copied, logits)
        return LMOutput(logits), replace(cache, length=cache.length + tokens.shape[1])

    def _unmatched(self, params: Params, tokens: Array) -> Array:
        if not params:
            return jnp.zeros((*tokens.shape, self.vocab_size))
        successors, logits = params["next"][tokens], params["logits"][tokens]
        rows, times = jnp.indices(tokens.shape)
        empty = jnp.full((*tokens.shape, self.vocab_size), -jnp.inf)
        # `max` is used instead of `set`: a row with fewer than K successors is padded with tokens of logit -inf.
        # The padding may repeat a real successor, whose logit must stay.
        return empty.at[rows[..., None], times[..., None], successors].max(logits)

    def _matched(self, source: Array, tokens: Array, end: Array) -> tuple[Array, Array]:
        """Returns the token after the best earlier match of the last tokens, and whether there is a match.

        The last tokens are the end of `tokens[:end]`; `tokens` is `[S]`. The encoder's tokens `source` `[N]` are
        searched too.
        """
        last = jnp.where(end > jnp.arange(self.longest), tokens[end - 1 - jnp.arange(self.longest)], _OUTSIDE)
        # A match must end before position `end - 1`, so that the token after it is known.
        context_lengths = jnp.where(jnp.arange(len(tokens)) < end - 1, _agreement(tokens, last), 0)
        followed = jnp.append(source[1:], _NONE) != _NONE
        source_lengths = jnp.where(followed, _agreement(source, last), 0)
        lengths = jnp.concatenate([source_lengths, context_lengths])
        successors = jnp.concatenate([jnp.append(source[1:], _NONE), jnp.append(tokens[1:], _NONE)])
        # `argmax` returns the first maximum. On the reversed array this is the latest match, and the decoder's matches
        # come before the encoder's.
        best = len(lengths) - 1 - jnp.argmax(lengths[::-1])
        return successors[best], lengths[best] > 0


def _agreement(tokens: Array, last: Array) -> Array:
    """Returns, for each index of `tokens` `[S]`, how many tokens up to this index agree with the last tokens.

    `last` `[n]` holds the last tokens, the latest first.
    """
    agree, match_lengths = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    # At each step back, `agree` stays true only if all later tokens agreed too, so its sum is the length of the match.
    for back in range(last.shape[0]):
        shifted = jnp.concatenate([jnp.full((back,), _OUTSIDE), tokens])[: len(tokens)]
        agree &= (shifted == last[back]) & (shifted >= 0)
        match_lengths += agree
    return match_lengths


def prompt_lookup(vocab_size: int, longest: int = 8, *, encoder_decoder: bool = False) -> BoundModel:
    """Returns a `Grams` model that copies from the context; without a match, all tokens are equally likely."""
    return BoundModel(params={}, model=Grams(vocab_size, longest, encoder_decoder))


def max_gram(table: Params, vocab_size: int, longest: int = 8, *, encoder_decoder: bool = False) -> BoundModel:
    """Returns a `Grams` model that copies from the context; without a match, it reads a bigram table.

    Raises:
        ValueError: the table, which `count_bigrams` returns, does not fit this vocabulary.
    """
    _check(table, vocab_size)
    params = {"next": jnp.asarray(table["next"], jnp.int32), "logits": jnp.asarray(table["logits"], jnp.float32)}
    return BoundModel(params=params, model=Grams(vocab_size, longest, encoder_decoder))


def bigrams(table: Params, vocab_size: int, *, encoder_decoder: bool = False) -> BoundModel:
    """Returns a `Grams` model that only reads a bigram table, which `count_bigrams` returns."""
    return max_gram(table, vocab_size, 0, encoder_decoder=encoder_decoder)


def count_bigrams(sequences: Iterable[Sequence[int]], vocab_size: int, most: int = 64) -> dict[str, np.ndarray]:
    """Counts the bigrams in sequences of token ids, and returns the table that `Grams` reads.

    Args:
        sequences: sequences of token ids, including the start token of decoding and the end token.
        vocab_size: `V`, number of vocabulary entries.
        most: `K`, at least 1, the number of successors that are kept for each token: the most frequent ones. A token
            without successors gets the tokens that are most frequent as successors of any token.

    Raises:
        ValueError: an id is outside the vocabulary, no sequence has two tokens, or `most` is below 1.
    """
    whole("most", most, 1)
    pairs, counts = _pairs(sequences, vocab_size)
    if not len(pairs):
        raise ValueError("there are no bigrams to count: give sequences of at least two tokens")
    first, second = pairs // vocab_size, pairs % vocab_size
    common = _most_common(second, counts, most, vocab_size)
    successors, logits = (np.tile(row, (vocab_size, 1)) for row in common)
    # Bigrams are sorted by first token, then by descending count. `rank` is a bigram's index among those of its first
    # token.
    order = np.lexsort((second, -counts, first))
    first, second, counts = first[order], second[order], counts[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    # All rows start with the most common successors. Rows of tokens with bigrams get their own successors instead. An
    # entry of such a row that stays unused has probability 0.
    logits[first] = -np.inf
    kept = rank < successors.shape[1]
    successors[first[kept], rank[kept]], logits[first[kept], rank[kept]] = second[kept], np.log(counts[kept])
    return {"next": successors.astype(np.int32), "logits": logits.astype(np.float32)}


def _most_common(successors: np.ndarray, weights: np.ndarray, most: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `most` tokens with the largest summed weights in `successors`, and the logs of these sums."""
    followed = np.bincount(successors, weights=weights, minlength=size)
    common = np.argsort(-followed, kind="stable")[:most]
    with np.errstate(divide="ignore"):
        return common, np.log(followed[common])


def _pairs(sequences: Iterable[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct bigrams `(a, b)` as codes `a V + b`, and their counts; needs no array of `V × V`."""
    codes = []
    for sequence in sequences:
        ids = np.asarray(sequence, np.int64)
        if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
            raise ValueError(f"token {wrong[0]} is outside a vocabulary of {vocab_size}: use the pair's own vocabulary")
        codes.append(ids[:-1] * vocab_size + ids[1:])
    return np.unique(np.concatenate([np.zeros(0, np.int64), *codes]), return_counts=True)


def widened(table: Params, counted: int, vocab_size: int) -> Params:
    """Returns a bigram table with rows added for ids from `counted` up to `vocab_size`, such as T5's sentinels.

    The added rows hold the successors that are most frequent in the whole table, like the rows of ids without
    successors. The table never proposes an added id.

    Raises:
        ValueError: the table does not have `counted` rows.
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
            f"the bigram table has shapes {shapes}, but both 'next' and 'logits' must be [{vocab_size}, K], K >= 1: "
            "count the bigrams again with the pair's own vocabulary"
        )
    # A row that holds a NaN has the maximum NaN, so one test of the maxima finds NaN, infinity and rows of -inf.
    successors, largest = np.asarray(table["next"]), np.asarray(table["logits"]).max(-1)
    if len(wrong := successors[(successors < 0) | (successors >= vocab_size)]):
        raise ValueError(
            f"the table of bigrams has token {wrong[0]}, outside a vocabulary of {vocab_size}: count it again"
        )
    if not np.isfinite(largest).all():
        row = int(np.argmin(np.isfinite(largest)))
        raise ValueError(f"the table of bigrams has NaN, infinite or no logits after token {row}: count it again")
