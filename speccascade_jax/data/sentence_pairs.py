"""Functions that read sentence pairs, as texts or as token ids, and join several pairs into one."""

import math
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speccascade_jax.data import directory
from speccascade_jax.data.vocabularies.load import SentencePieceVocabulary, TextVocabulary
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.readers import lines, parsed

TextPair = tuple[str, str]
Columns = tuple[int | str, int | str]


class TokenPair(NamedTuple):
    """Token ids of a source and its target, both without EOS."""

    source: list[int]
    target: list[int]


def read_pairs(path: str | Path, columns: Columns = (0, 1)) -> list[TextPair]:
    """Reads the pairs of a file, gzipped or plain: `source<TAB>target` lines, or objects of a `.jsonl`.

    Args:
        path: an existing file, or a path inside the data directory.
        columns: the column numbers of source and target; (1, 0) swaps them. For a `.jsonl`, the
            names of the two fields.

    Raises:
        FileNotFoundError: the file is neither at `path` nor in the data directory.
        ValueError: a line is not in UTF-8, has not exactly one tab, or lacks a field (the message names the line's
            number); a gzip file is damaged.
    """
    path = expanded(path)
    file = path if path.is_file() else directory.require(*path.parts)
    if ".jsonl" in file.suffixes[-2:]:
        return [_fields(line, f"{file}:{number}", columns) for number, line in lines(file)]
    if set(columns) != {0, 1}:
        raise ValueError(
            f"{file} is tab-separated and cannot have columns={columns}: give (0, 1), or (1, 0) to swap the sides"
        )
    pairs = []
    for number, line in lines(file):
        fields = line.split("\t")
        if len(fields) != 2:
            raise ValueError(f"{file}:{number} has {len(fields)} columns; it must be source<TAB>target")
        pairs.append((fields[int(columns[0])], fields[int(columns[1])]))
    return pairs


def _fields(line: str, location: str, columns: Columns) -> TextPair:
    entry = parsed(line, location, "copy the file again")
    missing = [column for column in columns if column not in entry]
    if missing:
        raise ValueError(f"{location} has no field {missing[0]!r}; columns must name two of {', '.join(entry)}")
    source, target = (entry[str(column)] for column in columns)
    return source, target


def holds_pieces(path: str | Path) -> bool:
    """Returns whether a file's name (`….pieces[.gz]`) says that its columns are sentencepiece pieces, not texts."""
    return ".pieces" in Path(path).suffixes[-2:]


def read_tokens(
    path: str | Path, vocabulary: TextVocabulary, limit: int | None = None, columns: Columns = (0, 1)
) -> list[TokenPair]:
    """Returns the token ids of the first `limit` pairs of a file, whose columns are texts or pieces (`holds_pieces`).

    Raises:
        ValueError: the file holds pieces (`holds_pieces`), and the vocabulary is not a sentencepiece file. Other errors
            are those of `read_pairs`.
    """
    ids: Callable[[str], list[int]] = vocabulary.encode
    if holds_pieces(path):
        if not isinstance(vocabulary, SentencePieceVocabulary):
            remedy = "use a file of text, or a sentencepiece vocabulary"
            raise ValueError(f"{path} holds pieces, which {vocabulary!r} cannot read: {remedy}")
        ids = vocabulary.ids_of_pieces
    return [TokenPair(ids(source), ids(target)) for source, target in read_pairs(path, columns)[:limit]]


def group(
    pairs: Sequence[tuple[Sized, Sized]], max_joined: int, rng: np.random.Generator, max_length: float = math.inf
) -> list[list[int]]:
    """Returns a random partition of `pairs`, as lists of indices; each group has 1 to `max_joined` pairs.

    The pairs are texts or tokens. The size of a group is drawn uniformly. A group is closed early if the next pair
    would make its source or its target longer than `max_length` (EOS not counted).

    Raises:
        ValueError: a single pair is longer than `max_length`.
    """
    groups: list[list[int]] = []
    room, source_length, target_length = 0, 0, 0
    for index in rng.permutation(len(pairs)).tolist():
        source, target = map(len, pairs[index])
        if max(source, target) > max_length:
            raise ValueError(f"pair {index} has {max(source, target)} tokens; at most {max_length} fit: remove it")
        source_length, target_length = source_length + source, target_length + target
        if room == 0 or max(source_length, target_length) > max_length:
            groups.append([])
            room, source_length, target_length = int(rng.integers(1, max_joined + 1)), source, target
        groups[-1].append(index)
        room -= 1
    return groups


def join_texts(pairs: Sequence[TextPair], indices: Sequence[int]) -> TextPair:
    """Returns the pairs of one group as one pair, joined by spaces in the same order on both sides."""
    return " ".join(pairs[index][0] for index in indices), " ".join(pairs[index][1] for index in indices)


def join_tokens(pairs: Sequence[TokenPair], indices: Sequence[int]) -> TokenPair:
    """Joins the token pairs of one group, as `join_texts` joins texts.

    The result equals the tokens of the joined texts, because sentencepiece splits at spaces first and marks each word's
    start.
    """
    source = [token for index in indices for token in pairs[index].source]
    return TokenPair(source, [token for index in indices for token in pairs[index].target])
