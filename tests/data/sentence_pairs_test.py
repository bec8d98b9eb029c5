"""Token ids of sentence pairs, from text and from pieces."""

from types import SimpleNamespace

import pytest

from speccascade_jax.data.sentence_pairs import read_tokens


def test_pieces_need_a_sentencepiece_vocabulary(tmp_path):
    text, pieces = tmp_path / "pairs.tsv", tmp_path / "pairs.pieces"
    for file in (text, pieces):
        file.write_text("a b\tc d\n")
    vocabulary = SimpleNamespace(encode=lambda line: list(map(ord, line.split(" "))))
    assert read_tokens(text, vocabulary) == [([97, 98], [99, 100])]
    with pytest.raises(
        ValueError, match=r"pairs.pieces holds pieces, which .* cannot read: use a file of text, or a sentencep"
    ):
        read_tokens(pieces, vocabulary)
