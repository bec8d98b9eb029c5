"""Tests of llama2.c's tokenizer files: the order of merges, bytes for text without a piece, spaces of continuations."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speccascade_jax.data.vocabularies.llama2c import Llama2cVocabulary
from tests.support import tokenizer_files


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Llama2cVocabulary:
    return Llama2cVocabulary(tokenizer_files.llama2c(tmp_path_factory.mktemp("small") / "tok.bin"))


def looped(vocabulary: Llama2cVocabulary, text: str) -> list[int]:
    """Runs the loop of llama2.c's `encode`, pair by pair."""
    names = [piece.text for piece in vocabulary._table]
    ids = []
    for character in (" " if text else "") + text:
        spelt = character.encode()
        ids += [names.index(spelt)] if spelt in names else [byte + 3 for byte in spelt]
    while True:
        best_score, best = -1e10, None
        for position in range(len(ids) - 1):
            joined = names[ids[position]] + names[ids[position + 1]]
            if joined in names and vocabulary._table[names.index(joined)].score > best_score:
                best_score, best = vocabulary._table[names.index(joined)].score, (position, names.index(joined))
        if best is None:
            return ids
        ids[best[0] : best[0] + 2] = [best[1]]


@given(
    text=st.text("abc ", max_size=14),
    scores=st.lists(st.sampled_from([-3.0, -2.0, 0.0, 5.0, -2e10]), min_size=9, max_size=9),
)
@example(text="a", scores=[-2e10] * 9)
def test_pieces_are_merged_as_in_llama2c(tmp_path_factory, text, scores):
    names = ["ab", "bc", "abc", " a", "aa", "ca", "bca", " ab", "aaa"]
    # "c" has no piece, so it is spelt in bytes
    pieces = dict.fromkeys(" ab", -1.0) | dict(zip(names, scores, strict=True))
    path = tmp_path_factory.getbasetemp() / "merged.bin"
    vocabulary = Llama2cVocabulary(tokenizer_files.llama2c(path, pieces))
    assert vocabulary.encode(text) == looped(vocabulary, text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_a_leading_space_is_dropped_only_after_bos(small):
    ids = small.encode("Once upon")
    upon = ids[-1:]
    assert small.piece(upon[0]) == "▁upon"
    texts = [small.decode(upon, after=after) for after in ((), [1], ids[:1], [*ids, 2])]
    assert texts == ["upon", "upon", " upon", "upon"]


def test_special_ids_end_an_output(small):
    assert (small.bos_id, small.eos_id, small.stop_ids) == (1, 2, (1, 2))
    ids = small.encode("a time")
    assert small.decode([*ids, 1, *ids]) == small.decode([*ids, 2, *ids]) == "a time"
    assert small.decode([1, *ids, 9999, -1]) == "a time"  # the BOS of a prompt does not end an output


def test_invalid_utf8_bytes_are_replaced(small):
    assert small.decode([*small.encode("a"), 0xE9 + 3, 0x9B + 3]) == "a�"


def test_pieces_are_written_as_in_sentencepiece(small):
    table = small.piece_table()
    assert table[:4] == ["<unk>", "<s>", "</s>", "<0x00>"] and len(table) == small.vocab_size
    assert "▁upon" in table and not any(" " in piece for piece in table)


def damaged(content: bytes) -> dict[str, bytes]:
    return {
        "cut short": content[:-1],
        "empty": b"",
        "only a header": content[:4],
        "a longer piece than the header allows": struct.pack("<i", 3) + content[4:],
        "a model": struct.pack("<7i", 64, 172, 5, 8, 4, 512, 512) + bytes(1000),
        "no bytes": struct.pack("<ifi", 6, 0.0, 6) + b"<unk>x",
        "a piece of negative length": content + struct.pack("<fi", 0.0, -1),
    }


@pytest.mark.parametrize("kind", damaged(b""))
def test_other_files_are_rejected(tmp_path, kind):
    path = tokenizer_files.llama2c(tmp_path / "tok.bin")
    path.write_bytes(damaged(path.read_bytes())[kind])
    with pytest.raises(ValueError, match="tok.bin is not a tokenizer of llama2.c"):
        Llama2cVocabulary(path)
