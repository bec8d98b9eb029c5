r"""Outputs without the thinking of models that write it before an answer.

Thinking stands in channels: `<think> … </think>` (Qwen 3, DeepSeek-R1, SmolLM3), `[THINK] … [/THINK]` (Magistral),
`<|channel> … <channel|>` (Gemma 4), and every message of gpt-oss that is not in its channel "final". The rules:

* A channel is cut with its marks. The rest of the output is the answer, even between two channels.
* A channel that is not closed extends to the end: an output that ends within its thinking has an empty answer.
* A closing mark without an opening one closes a channel that began with the output.
* If the prompt ends with an opening mark, as templates of DeepSeek-R1 write it, the output begins within the channel.
"""

import re
from collections.abc import Sequence

from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary, added_texts

CHANNELS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""The opening and the closing mark of each kind of channel."""
_NAMED = re.compile(r"\0[^\0]*\0")
_TAIL = 16  # the number of ids at the end of a prompt that may spell an opening mark


def _mark(text: str) -> str:
    """Returns a pattern of a mark, which may be a control piece (between NULs, see `_spelt`) or plain text."""
    return rf"\0?{re.escape(text)}\0?"


_OTHER_MESSAGE = re.compile(
    rf"{_mark('<|channel|>')}(?!final).*?(?:{_mark('<|end|>')}|{_mark('<|call|>')}|{_mark('<|return|>')}|\Z)", re.DOTALL
)
_HEADERS = re.compile(
    rf"{_mark('<|start|>')}[^<\0]*|{_mark('<|channel|>')}final[^<\0]*{_mark('<|message|>')}|{_mark('<|end|>')}"
)


def answer(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> str:
    """Returns the text of an output without its thinking, by the rules of this module.

    Args:
        vocabulary: decodes the ids; the marks may be control pieces, which have no text.
        ids: the output.
        after: the ids of the prompt, as in `TextVocabulary.decode`.
    """
    text, before = _spelt(vocabulary, ids, after), _end(vocabulary, after)
    for opening, closing in CHANNELS:
        start, end = _mark(opening), _mark(closing)
        if re.search(rf"{start}\s*\Z", before):
            text = opening + text
        text = re.sub(rf"\A(?:(?!{start}).)*?{end}", "", text, flags=re.DOTALL)
        text = re.sub(rf"{start}.*?(?:{end}|\Z)", "", text, flags=re.DOTALL)
    if "<|channel|>" in text:
        text = _HEADERS.sub("", _OTHER_MESSAGE.sub("", text))
    return _NAMED.sub("", text)


def _spelt(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> str:
    """Returns the text of ids; it has the names of pieces without text, between NULs."""
    hidden: frozenset[int] = getattr(vocabulary, "specials", frozenset())
    texts = zip(ids, added_texts(vocabulary, ids, after), strict=True)
    return "".join(f"\0{vocabulary.piece(n)}\0" if n in hidden else text.replace("\0", "") for n, text in texts)


def _end(vocabulary: TextVocabulary, prompt: Ids) -> str:
    """Returns the text of the last ids of a prompt, at most from the last stop id on."""
    tail = list(map(int, prompt[-_TAIL:]))
    stops = [place for place, token in enumerate(tail) if token in vocabulary.stop_ids]
    return _spelt(vocabulary, tail[stops[-1] + 1 if stops else 0 :])
