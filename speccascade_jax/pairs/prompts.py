"""Conversion of texts or token ids to a `Prompt`, right-padded to a bucket's width and checked before compilation."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.arrays import bucket, right_pad
from speccascade_jax.core.checks import check_text
from speccascade_jax.core.names import shown
from speccascade_jax.core.types import Prompt
from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary
from speccascade_jax.pairs.pair import Pair


def make_prompt(pair: Pair, prompts: Any, *, min_length: int = 1, max_new_tokens: int = 0) -> Prompt:
    """Converts texts or ids to a `Prompt`, right-padded to a length of `core.arrays.bucket` to limit compilations.

    Its arrays are on the host; a compiled program moves them to the device with its other arguments. A caller that
    passes the same prompt many times should put it on the device once.

    `text_ids` turns texts into ids; ids stay as they are. For encoder-decoder models they are the encoder's input,
    without padding at their ends, and decoding starts from the target's start token.

    Args:
        pair: determines the architecture and the vocabulary.
        prompts: texts, `[B, P]` ids, or a list of lists of ids; one flat list of ids is one prompt.
        min_length: pad to this many tokens at least, so that several calls share a bucket.
        max_new_tokens: number of tokens to generate after the prompts.

    Returns:
        A `Prompt`: `tokens` int32 `[B, P]` with the ids of a decoder-only model, or `encoder_tokens` int32 `[B, N]`
        and `tokens` `[B, 1]` of an encoder-decoder.

    Raises:
        ValueError: there are no prompts, texts and ids are mixed, texts have no vocabulary, an id is outside it, a
            prompt is empty or too long, or a prompt and its output are longer than the models support.

    Examples:
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import make_prompt
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        >>> prompt = make_prompt(pair, [[1, 2], [3]])
        >>> prompt.tokens.shape, prompt.tokens[:, :3].tolist(), prompt.length.tolist()
        ((2, 8), [[1, 2, 0], [3, 0, 0]], [2, 1])
    """
    rows = _ids(pair, prompts)
    config = getattr(pair.target.model, "config", None)
    if pair.encoder_decoder:
        rows = [_unpadded(row, getattr(config, "pad_id", 0)) for row in rows]
    elif not _are_texts(prompts):
        _warn_of_padding(pair, rows)
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    _check_lengths(pair, lengths, longest, max_new_tokens)
    _check_ids(rows, pair.target.model.vocab_size)
    padded: Any = right_pad(rows, bucket(max(min_length, longest)))
    read: Any = np.array(lengths, np.int32)
    if pair.encoder_decoder:
        start: Any = np.full((len(rows), 1), getattr(config, "start_id", 0), np.int32)
        return Prompt(start, np.ones_like(start[:, 0]), padded, read)
    return Prompt(padded, read)


def _unpadded(row: Sequence[int], pad_id: int) -> Sequence[int]:
    """Returns an encoder's ids without padding before or after them, as tokenizers write it; one id stays."""
    begin, end = 0, len(row)
    while begin < end - 1 and row[begin] == pad_id:
        begin += 1
    while begin < end - 1 and row[end - 1] == pad_id:
        end -= 1
    return row[begin:end]


def _warn_of_padding(pair: Pair, rows: Sequence[Sequence[int]]) -> None:
    """Warns if rows of one length look padded: some begin, or end, with a control piece, and others do not.

    Without a vocabulary, any id counts that is there twice.
    """
    if len(rows) < 2 or not rows[0] or len({len(row) for row in rows}) > 1:
        return
    controls, bos_id = (getattr(pair.vocabulary, name, None) for name in ("controls", "bos_id"))
    for place, verb in ((0, "begins"), (-1, "ends")):
        for number, row in enumerate(rows):
            token, twice = row[place], row[place] == row[1 if place == 0 else -2] if len(row) > 1 else False
            padding = twice if controls is None else token in controls and (twice or token != bos_id)
            if padding and any(other[place] != token for other in rows):
                warnings.warn(
                    f"prompt {number} {verb} with id {token}, as padding does, which is read as part of the prompt: "
                    "give lists of ids without padding",
                    stacklevel=3,
                )
                return


def _check_lengths(pair: Pair, lengths: list[int], longest: int, max_new_tokens: int) -> None:
    if 0 in lengths:
        raise ValueError(f"prompt {lengths.index(0)} is empty; give at least one token")
    if too_long := excess(pair, longest, max_new_tokens):
        raise ValueError(
            f"prompt {lengths.index(longest)} has {too_long}; shorten it, lower max_new_tokens, or raise the limit: "
            f"Pair.max_prompt_length, or max_length in a model's config if the model supports more positions"
        )


def _check_ids(rows: Sequence[Sequence[int]], size: int) -> None:
    for number, row in enumerate(rows):
        if min(row) < 0 or max(row) >= size:
            token = next(int(token) for token in row if not 0 <= token < size)
            raise ValueError(f"prompt {number} holds id {token}, outside the vocabulary of {size} (0 … {size - 1})")


def excess(pair: Pair, tokens: int, max_new_tokens: int) -> str | None:
    """Describes the limit that a prompt of `tokens` tokens plus `max_new_tokens` exceeds; returns `None` if it fits.

    The caller names the remedy, because its settings depend on the caller.
    """
    if tokens > pair.max_prompt_length:
        return f"{tokens} tokens, over the limit of {pair.max_prompt_length}"
    if pair.max_length is not None and tokens + max_new_tokens > pair.max_length:
        return (
            f"{tokens} tokens and max_new_tokens is {max_new_tokens}: together more than the {pair.max_length} "
            f"positions that the pair's models support"
        )
    return None


def _ids(pair: Pair, prompts: Any) -> Sequence[Sequence[int]]:
    """Returns the ids of each row, as integers."""
    if isinstance(prompts, str):
        prompts = [prompts]
    array = bool(getattr(prompts, "ndim", 0))
    if array and (values := np.asarray(prompts)).dtype.kind in "OU":
        array, prompts = False, values.tolist()
    if not array and not isinstance(prompts, Sequence):
        raise ValueError(f"prompts={prompts!r:.80} are not prompts: give texts, or integer ids [B, P]")
    if len(prompts) == 0:
        raise ValueError("no prompts: give at least one")
    kinds = [] if array else [_kind(prompt) for prompt in prompts]
    if odd := next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None):
        raise ValueError(
            f"prompts hold {prompts[0]!r:.60} and {prompts[odd]!r:.60}: give texts only, or lists of ids only"
        )
    if "text" in kinds:
        for number, text in enumerate(prompts):
            check_text(f"prompt {number}", text)
        return [text_ids(pair, text) for text in prompts]
    if array or "one id" in kinds:
        table = np.atleast_2d(np.asarray(prompts))
        if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
            raise ValueError(
                f"prompts have shape {table.shape} and dtype {table.dtype}: give texts, or integer ids [B, P]"
            )
        rows: list[list[int]] = table.tolist()
        return rows
    for number, row in enumerate(prompts):
        for token in row:
            if not _is_whole(token):
                raise ValueError(f"prompt {number} holds {token!r:.60}, which is not a token id")
    return prompts


def _are_texts(prompts: Any) -> bool:
    return isinstance(prompts, str) or isinstance(prompts[0], str)


def _kind(prompt: Any) -> str:
    if isinstance(prompt, Mapping):
        raise ValueError(f"{prompt!r:.60} is no prompt: give the text of the tokenizer's chat template, or its ids")
    if isinstance(prompt, str):
        return "text"
    return "ids" if isinstance(prompt, Sequence) or np.ndim(prompt) else "one id"


def _is_whole(token: Any) -> bool:
    try:
        return bool(token == int(token))
    except (TypeError, ValueError, OverflowError):  # Not a number, NaN, infinity.
        return False


def text_ids(
    pair: Pair, text: str, longest: int | None = None, cut: Callable[[list[int], int], list[int]] | None = None
) -> list[int]:
    """Returns the ids that a pair's models read for a text.

    Encoder-decoder models read the text and the end of sequence. Decoder-only models continue the text: they read the
    beginning of sequence, if the vocabulary has one, and the text without an end. A text that names its beginning or
    its end itself, as chat templates do, gets no second one. An empty text becomes the beginning of sequence alone. If
    the vocabulary has none, it becomes the end of sequence, which such vocabularies put between documents (Qwen's
    `<|endoftext|>`).

    Args:
        pair: the models and their vocabulary.
        text: the text to encode.
        longest: largest number of ids, special ones included; special ids are never cut.
        cut: function that shortens a text's ids to a number (`Task.cut`); by default it keeps the beginning. For
            few-shot prompts it keeps the end, which holds the question.

    Raises:
        ValueError: the pair has no vocabulary.
    """
    vocabulary = pair.vocabulary
    if vocabulary is None:
        raise ValueError("this pair has no vocabulary: give token ids, or a Pair with vocabulary=…")
    check_text("the prompt", text)
    ids, bos, eos = vocabulary.encode(text), vocabulary.bos_id, vocabulary.eos_id
    begin, end = ([], [eos]) if pair.encoder_decoder else ([] if bos is None else [bos], [])
    # Taken out and put back, so that a cut text keeps them.
    ids = ids[len(begin) :] if begin and ids[:1] == begin else ids
    ids = ids[:-1] if end and ids[-1:] == end else ids
    if longest is not None:
        room = longest - len(begin) - len(end)
        ids = cut(ids, room) if cut else ids[:room]
    return [*begin, *ids, *end] or [eos]


def stop_ids(vocabulary: TextVocabulary, strings: Iterable[str]) -> list[int]:
    r"""Returns the vocabulary's stop ids, then the ids of those strings that are a single token.

    Strings of several tokens, such as "\nQuestion:", take effect only when the text is cut afterwards. This can also
    happen to strings of one token: vocabularies with merges have further tokens that contain them (".\n\n"), and a
    model that writes such a token does not stop there.
    """
    before, string_ids = vocabulary.encode("a"), []
    for text in strings:
        check_text("a stop string", text)
        last = vocabulary.encode(text)[-1:]
        # A special piece has a name but no text, and the name of a byte piece is not its text.
        if last and text in (vocabulary.piece(last[0]), vocabulary.decode(last, after=before)):
            string_ids += last
    return list(dict.fromkeys([*vocabulary.stop_ids, *string_ids]))


def decoder_context(prompt: Prompt) -> list[Ids]:
    """Returns the ids that precede each row's output in the decoder, without padding."""
    rows, lengths = (np.asarray(array).tolist() for array in (prompt.tokens, prompt.length))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def checked_stop_ids(pair: Pair, stop_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the ids that end a row: the given ones, or the vocabulary's, or none without a vocabulary.

    Raises:
        ValueError: a value is not an id, or is outside the vocabulary.
    """
    if stop_ids is None:
        return () if pair.vocabulary is None else tuple(int(stop) for stop in pair.vocabulary.stop_ids)
    size, ids = pair.target.model.vocab_size, np.atleast_1d(np.asarray(stop_ids)).tolist()
    if not all(_is_whole(stop) for stop in ids):
        raise ValueError(f"stop_ids={shown(stop_ids)} are not ids: give whole numbers below {size}")
    for stop in ids:
        if not 0 <= stop < size:
            raise ValueError(f"stop id {stop} is outside the vocabulary of {size}; ids are whole numbers below {size}")
    return tuple(int(stop) for stop in ids)
