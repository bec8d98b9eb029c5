"""Conversion of texts or token ids to a padded `Prompt`, with checks that come before any compilation."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.arrays import bucket, right_pad
from speccascade_jax.core.checks import check_text
from speccascade_jax.core.names import shown
from speccascade_jax.core.types import Prompt
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary
from speccascade_jax.pairs.pair import Pair


def make_prompt(pair: Pair, prompts: Any, *, min_length: int = 1, max_new_tokens: int = 0) -> Prompt:
    """Converts texts or token ids to a `Prompt`.

    Prompts are padded on the right to one of a few widths (`core.arrays.bucket`), because each width needs a compiled
    program.
    Texts are encoded by `text_ids`. For encoder-decoder models, the ids are the encoder's input, from which padding at
    both ends is removed, and decoding starts from the target's start token.

    The arrays are on the host, and each call of a compiled program copies them to the device. A caller that passes the
    same prompt many times should put it on the device once.

    Args:
        pair: the pair, whose target determines the architecture, and whose vocabulary encodes texts.
        prompts: a text, a list of texts, an array of ids `[B, P]`, or a list of lists or arrays of ids; a flat list of
            ids is one prompt.
        min_length: smallest number of tokens to pad to, so that several calls can have the same width.
        max_new_tokens: number of tokens that will be generated after the prompts.

    Returns:
        A `Prompt`. For a decoder-only model, `tokens` int32 `[B, P]` holds the ids. For an encoder-decoder,
        `encoder_tokens` int32 `[B, N]` holds the ids, and `tokens` `[B, 1]` the start tokens.

    Raises:
        ValueError: there are no prompts, texts and ids are mixed, the pair has no vocabulary for texts, an id is
            outside the vocabulary, a prompt is empty or too long, or a prompt and its output together are longer than
            the models support.

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
    """Returns an encoder's input without the padding that a tokenizer put before or after it; keeps at least one id."""
    begin, end = 0, len(row)
    while begin < end - 1 and row[begin] == pad_id:
        begin += 1
    while begin < end - 1 and row[end - 1] == pad_id:
        end -= 1
    return row[begin:end]


def _warn_of_padding(pair: Pair, rows: Sequence[Sequence[int]]) -> None:
    """Warns if prompts look padded to equal lengths: some begin or end with a control token, and others do not.

    Without a vocabulary, control tokens are unknown. A prompt then looks padded if the id at its beginning or end is
    repeated.
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
                    f"prompt {number} {verb} with id {token}, which looks like padding but counts as a token of the "
                    "prompt: give lists of ids without padding",
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
    """Describes the limit that a prompt with its output exceeds; returns `None` if it exceeds no limit.

    The text names no remedy, because the remedy depends on the caller's settings.

    Args:
        pair: the pair, which has the limits.
        tokens: number of tokens of the prompt.
        max_new_tokens: number of tokens to generate.
    """
    if tokens > pair.max_prompt_length:
        return f"{tokens} tokens, over the limit of {pair.max_prompt_length}"
    # An encoder and a decoder each have these positions, and the decoder's first one holds the start token.
    positions = max(tokens, max_new_tokens + 1) if pair.encoder_decoder else tokens + max_new_tokens
    if pair.max_length is not None and positions > pair.max_length:
        together = "one of them" if pair.encoder_decoder else "together"
        return (
            f"{tokens} tokens and max_new_tokens is {max_new_tokens}: {together} more than the {pair.max_length} "
            f"positions that the pair's models support"
        )
    return None


def _ids(pair: Pair, prompts: Any) -> Sequence[Sequence[int]]:
    """Returns the token ids of each prompt; raises `ValueError` if `prompts` are neither texts nor integer ids."""
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
            f"prompts mix {prompts[0]!r:.60} and {prompts[odd]!r:.60}: give texts only, or lists of ids only"
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
    prompts = [row.tolist() if getattr(row, "ndim", 0) else row for row in prompts]
    for number, row in enumerate(prompts):
        for token in row:
            if not _is_whole(token):
                raise ValueError(f"prompt {number} holds {token!r:.60}, which is not a token id: give whole numbers")
    return prompts


def _are_texts(prompts: Any) -> bool:
    return isinstance(prompts, str) or isinstance(prompts[0], str)


def _kind(prompt: Any) -> str:
    if isinstance(prompt, Mapping):
        raise ValueError(f"{prompt!r:.60} is not a prompt: give conversations as messages=[…], or texts or ids")
    if isinstance(prompt, str):
        return "text"
    return "ids" if isinstance(prompt, Sequence) or np.ndim(prompt) else "one id"


def _is_whole(token: Any) -> bool:
    try:
        return bool(token == int(token))
    except (TypeError, ValueError, OverflowError):  # The value is not a number, or is NaN or infinite.
        return False


def text_ids(
    pair: Pair, text: str, longest: int | None = None, cut: Callable[[list[int], int], list[int]] | None = None
) -> list[int]:
    """Returns the token ids that a pair's models read for a text.

    For encoder-decoder models, the end-of-sequence token follows the text. Decoder-only models continue the text, so
    only the beginning-of-sequence token is added before the text, if the vocabulary has one. T5Gemma's encoder reads
    the same ids as a decoder-only model. A text that already begins or ends with the token, as chat templates write it,
    gets no second one.

    For decoder-only models, an empty text becomes the beginning-of-sequence token alone. If the vocabulary has none,
    the text becomes the end-of-sequence token, which such vocabularies put between documents (Qwen's `<|endoftext|>`).

    Args:
        pair: the models and their vocabulary.
        text: the text to encode.
        longest: largest number of ids, including the added tokens, which are never cut; `None` sets no limit.
        cut: function `(ids, number)` that shortens a text's ids (`Task.cut`). By default the first ids are kept. Tasks
            with few-shot prompts keep the last ids, which hold the question.

    Raises:
        ValueError: the pair has no vocabulary.
    """
    if pair.vocabulary is None:
        raise ValueError("this pair has no vocabulary: give token ids, or a Pair with vocabulary=…")
    return encode_prompt(pair.vocabulary, pair.encoder_decoder, text, longest, cut)


def encode_prompt(
    vocabulary: TextVocabulary,
    encoder_decoder: bool,
    text: str,
    longest: int | None = None,
    cut: Callable[[list[int], int], list[int]] | None = None,
) -> list[int]:
    """Returns the token ids of a prompt, as `text_ids` does for a pair; training uses it without a pair.

    Args:
        vocabulary: the vocabulary of the models.
        encoder_decoder: whether an encoder reads the prompt; otherwise the output continues it.
        text: the text to encode.
        longest: as in `text_ids`.
        cut: as in `text_ids`.
    """
    check_text("the prompt", text)
    ids, bos, eos = vocabulary.encode(text), vocabulary.bos_id, vocabulary.eos_id
    ends = encoder_decoder and getattr(vocabulary, "ends_inputs", True)
    begin, end = ([], [eos]) if ends else ([] if bos is None else [bos], [])
    # The beginning and the end are removed before the cut and added after it, so that a cut text keeps them.
    ids = ids[len(begin) :] if begin and ids[:1] == begin else ids
    ids = ids[:-1] if end and ids[-1:] == end else ids
    if longest is not None:
        room = longest - len(begin) - len(end)
        ids = cut(ids, room) if cut else ids[:room]
    return [*begin, *ids, *end] or [eos]


def example_ids(
    vocabulary: TextVocabulary, encoder_decoder: bool, task: Task, example: Example
) -> tuple[list[int], bool]:
    """Returns the token ids of an example's prompt, and whether the prompt was cut to the task's length.

    Decoding and training both call this function, so a model is trained on the prompts that it decodes.
    """
    was_cut = False

    def cut(ids: list[int], room: int) -> list[int]:
        nonlocal was_cut
        was_cut = len(ids) > room
        return task.cut(ids, room)

    prompt = task.build_prompt(example)
    check_text(f"{task.name}: the prompt of example {example.id}", prompt)
    ids = encode_prompt(vocabulary, encoder_decoder, prompt, task.max_input_length, cut)
    return ids, was_cut


def stop_ids(vocabulary: TextVocabulary, strings: Iterable[str]) -> list[int]:
    r"""Returns the vocabulary's stop ids, then the ids of the stop strings that are a single token.

    Strings of several tokens, such as "\nQuestion:", do not end a generation; the caller must cut the text at them
    afterwards. Even a string of one token may not end it: a vocabulary with merges has longer tokens that contain the
    string (".\n\n"), and a model that writes such a token does not stop.
    """
    before, string_ids = vocabulary.encode("a"), []
    for text in strings:
        check_text("a stop string", text)
        last = vocabulary.encode(text)[-1:]
        # A special piece has a name but no text, so its name is compared. The name of a byte piece differs from its
        # text, so the text is compared too.
        if last and text in (vocabulary.piece(last[0]), vocabulary.decode(last, after=before)):
            string_ids += last
    return list(dict.fromkeys([*vocabulary.stop_ids, *string_ids]))


def decoder_context(prompt: Prompt) -> list[Ids]:
    """Returns the ids that the decoder reads before each row's output, without padding."""
    rows, lengths = (np.asarray(array).tolist() for array in (prompt.tokens, prompt.length))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def checked_stop_ids(pair: Pair, stop_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the ids that end a row's output: `stop_ids` after a check, or else those of the pair's vocabulary.

    A pair without a vocabulary has no stop ids unless they are given.

    Raises:
        ValueError: a value is not an id, or the id is outside the vocabulary.
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
