"""Texts or token ids as a `Prompt`: right-padded to a bucket's width, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from speccascade_jax.data.text_vocabulary import Ids
from speccascade_jax.models.base import Prompt, bucket, right_pad
from speccascade_jax.pair import Pair


def make_prompt(pair: Pair, prompts: Any, *, min_length: int = 1, max_new_tokens: int = 0) -> Prompt:
    """Texts or ids as a right-padded `Prompt` of a bucket's width (`models.base.bucket`; one compilation each).

    Texts become ids as `text_ids` says; ids are taken as they are. Encoder-decoder models get them as the encoder's
    input and start decoding from id 0.

    Args:
        pair: says which architecture and vocabulary.
        prompts: texts, `[B, P]` ids, or a list of lists of ids; one flat list of ids is one prompt.
        min_length: pad at least to this many tokens, so that several calls share a bucket.
        max_new_tokens: what is to be generated behind them.

    Raises:
        ValueError: no prompts, texts without a vocabulary, an id outside it, an empty or too long prompt, or one that
            with its output is longer than the models were made for.
    """
    ids, lengths = _ids(pair, prompts)
    if (lengths < 1).any():
        raise ValueError(f"prompt {int(np.argmax(lengths < 1))} is empty; give at least one token")
    if (lengths > pair.max_prompt_length).any():
        row = int(np.argmax(lengths > pair.max_prompt_length))
        raise ValueError(
            f"prompt {row} has {lengths[row]} tokens, over the limit of {pair.max_prompt_length}; shorten it, or raise "
            f"Pair.max_prompt_length"
        )
    _check_room(pair, lengths, max_new_tokens)
    outside = (ids < 0) | (ids >= pair.target.model.vocab_size)
    if outside.any():
        row, at = (int(i) for i in np.argwhere(outside)[0])
        size = pair.target.model.vocab_size
        raise ValueError(f"prompt {row} holds id {ids[row, at]}, outside the vocabulary of {size} (0 … {size - 1})")
    width = bucket(max(min_length, int(lengths.max())))
    padded = np.pad(ids, [(0, 0), (0, width - ids.shape[1])]).astype(np.int32)
    if pair.encoder_decoder:
        ones = np.ones((len(ids), 1), np.int32)
        return Prompt(*jax.device_put((np.zeros_like(ones), ones[:, 0], padded)))
    return Prompt(*jax.device_put((padded, lengths)))


def _check_room(pair: Pair, lengths: np.ndarray, max_new_tokens: int) -> None:
    row, limit = int(np.argmax(lengths)), pair.max_length
    if limit is not None and lengths[row] + max_new_tokens > limit:
        raise ValueError(
            f"prompt {row} has {lengths[row]} tokens and max_new_tokens is {max_new_tokens}: together more than the "
            f"{limit} positions that the pair's models were made for; lower one of them (or raise max_length in a "
            f"model's config, if it goes further)"
        )


def _ids(pair: Pair, prompts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Integer ids `[B, P]` and lengths int32 `[B]`."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if len(prompts) == 0:
        raise ValueError("no prompts: give at least one")
    if isinstance(prompts[0], str):
        prompts = [text_ids(pair, text) for text in prompts]
    elif hasattr(prompts, "ndim") or np.ndim(prompts[0]) == 0:
        table = np.atleast_2d(np.asarray(prompts))
        if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
            raise ValueError(
                f"prompts of shape {table.shape} and dtype {table.dtype}: give texts, or integer ids [B, P]"
            )
        return table, np.full((len(table),), table.shape[1], np.int32)
    for number, row in enumerate(prompts):
        if any(token != int(token) for token in row):
            raise ValueError(f"prompt {number} holds {next(t for t in row if t != int(t))}, which is no token id")
    lengths = np.array([len(row) for row in prompts], np.int32)
    return right_pad(prompts, max(1, int(lengths.max()))), lengths


def _beginning(ids: list[int], room: int) -> list[int]:
    return ids[:room]


def text_ids(
    pair: Pair, text: str, longest: int | None = None, cut: Callable[[list[int], int], list[int]] = _beginning
) -> list[int]:
    """The ids that a pair's models are given for a text.

    Encoder-decoder models read the text and the end of sequence. What decoder-only models write continues the text:
    they read the beginning of sequence, where the vocabulary has one, and the text without an end. An empty text is
    the beginning of sequence alone, or without one the end of sequence, which such vocabularies put between documents
    (Qwen's `<|endoftext|>`).

    Args:
        longest: ids at most, special ones included; these are never cut.
        cut: what is kept of a text's ids where there is room for fewer: `Task.cut`, which for few-shot prompts is the
            end, since the question stands there.

    Raises:
        ValueError: the pair has no vocabulary.
    """
    vocabulary = pair.vocabulary
    if vocabulary is None:
        raise ValueError("this pair has no vocabulary: give token ids, or a Pair with vocabulary=…")
    ids, bos, eos = vocabulary.encode(text), vocabulary.bos_id, vocabulary.eos_id
    begin, end = ([], [eos]) if pair.encoder_decoder else ([] if bos is None else [bos], [])
    if longest is not None:
        ids = cut(ids, longest - len(begin) - len(end))
    return [*begin, *ids, *end] or [eos]


def decoder_context(prompt: Prompt) -> list[Ids]:
    """Per row the ids before its output, without padding: what its text continues."""
    return [row[:length] for row, length in zip(np.asarray(prompt.tokens), np.asarray(prompt.length), strict=True)]
