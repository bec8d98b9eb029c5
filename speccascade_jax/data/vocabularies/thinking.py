r"""Removal of a model's thinking from its output. Thinking is the reasoning that some models write before the answer.

A channel is a section of an output between an opening and a closing mark. Thinking is a channel of one of these kinds:
`<think> … </think>` (Qwen 3, DeepSeek-R1, SmolLM3), `[THINK] … [/THINK]` (Magistral), `<|channel> … <channel|>`
(Gemma 4), and every message of gpt-oss that is not in its channel "final". The rules:

* Only marks that are pieces of the vocabulary count. If no piece is an opening mark, the texts `<think>` and
  `</think>` count as marks.
* A channel is removed together with its marks. The rest of the output is the answer, even between two channels.
* Blank lines between a channel and the first word of the answer are removed too, because many tasks end an answer at a
  blank line.
* A channel that is not closed extends to the end: an output that ends within its thinking has an empty answer.
* A closing mark without an opening one closes a channel that began with the output, or with the end of the channel
  before it. So nested channels are removed entirely.
* If the prompt ends with an opening mark, as templates of DeepSeek-R1 write it, the output begins within the channel.
"""

import re
from collections.abc import Sequence

from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary, added_texts

CHANNELS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""The opening and the closing mark of each kind of channel."""
_MESSAGE_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_MARKS = frozenset([*_MESSAGE_MARKS, *(mark for channel in CHANNELS for mark in channel)])
_END = r"(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)"
_OTHER_MESSAGE = re.compile(rf"<\|channel\|>(?!final).*?{_END}", re.DOTALL)
_HEADERS = re.compile(rf"<\|start\|>[^<]*|<\|channel\|>final.*?(?:<\|message\|>|\Z)|{_END}", re.DOTALL)
_OPEN_HEADER = re.compile(r"<\|channel\|>[^<]*(?:<\|message\|>)?\Z")
_BLANK_LINES = re.compile(r"\A\s*\n")
_TAIL = 16  # the number of ids at the end of a prompt that may spell an opening mark


def answer(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> str:
    """Returns the text of an output without its thinking, by the rules of this module.

    Args:
        vocabulary: decodes the ids; the marks may be control pieces, which have no text.
        ids: the output.
        after: the ids of the prompt, as in `TextVocabulary.decode`.
    """
    marks = _marks(vocabulary)
    text, before = _spelt(vocabulary, ids, after), _end(vocabulary, after).rstrip()
    for opening, closing in CHANNELS:
        if marks.issuperset((opening, closing)):
            text = _outside(opening + text if before.endswith(opening) else text, opening, closing)
    if "<|channel|>" in marks:
        text = _final_messages(text, before)
    for mark in _MARKS.intersection(vocabulary.piece(token) for token in ids if token in _hidden(vocabulary)):
        text = text.replace(mark, "")
    return text


def _marks(vocabulary: TextVocabulary) -> frozenset[str]:
    """Returns the marks that are pieces of a vocabulary; `<think>` and `</think>` if none of them opens a channel."""
    pieces = frozenset(mark for mark in _MARKS if mark in map(vocabulary.piece, vocabulary.encode(mark)))
    openings = {"<|channel|>", *(opening for opening, _ in CHANNELS)}
    return pieces if pieces & openings else frozenset(CHANNELS[0])


def _outside(text: str, opening: str, closing: str) -> str:
    """Returns the text outside all channels of one kind; removes leading blank lines if the text has such a channel."""
    first, *others = re.split(f"({re.escape(opening)}|{re.escape(closing)})", text)
    parts, inside = [first], False
    for mark, part in zip(others[::2], others[1::2], strict=True):
        if mark == closing and not inside:
            parts.pop()  # a closing mark without an opening one: the words before it are thinking too
        inside = mark == opening
        if not inside:
            parts.append(part)
    return _BLANK_LINES.sub("", "".join(parts)) if others else text


def _final_messages(text: str, before: str) -> str:
    """Returns the words of the messages in gpt-oss's channel "final"; `before` is the end of the prompt."""
    header = _OPEN_HEADER.search(before)
    text = header[0] + text if header else text
    return _HEADERS.sub("", _OTHER_MESSAGE.sub("", text)) if "<|channel|>" in text else text


def _spelt(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> str:
    """Returns the text of ids, in which marks that are control pieces are written by name."""
    texts, hidden = added_texts(vocabulary, ids, after), _hidden(vocabulary)
    names = (vocabulary.piece(token) if token in hidden else "" for token in ids)
    return "".join(name if name in _MARKS else text for name, text in zip(names, texts, strict=True))


def _hidden(vocabulary: TextVocabulary) -> frozenset[int]:
    specials: frozenset[int] = getattr(vocabulary, "specials", frozenset())
    return specials


def _end(vocabulary: TextVocabulary, prompt: Ids) -> str:
    """Returns the text of a prompt's last `_TAIL` ids, or only of those after the last stop id among them."""
    tail = list(map(int, prompt[-_TAIL:]))
    stops = [place for place, token in enumerate(tail) if token in vocabulary.stop_ids]
    return _spelt(vocabulary, tail[stops[-1] + 1 if stops else 0 :])
