"""Tests of token ids of sentence pairs, from text and from pieces."""

import gzip
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from speccascade_jax.data import sentence_pairs
from speccascade_jax.data.sentence_pairs import read_tokens

PAIRS = [sentence_pairs.TokenPair([10 + number], [1000 + number]) for number in range(400)]


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


def test_group_sizes_are_spread_over_the_whole_range():
    groups = sentence_pairs.group(PAIRS, 4, np.random.default_rng(0))
    assert set(map(len, groups)) == {1, 2, 3, 4}
    assert min(Counter(map(len, groups)).values()) > 20


def test_texts_are_grouped_and_joined_in_step():
    pairs = [(f"a{i}", f"b{i}") for i in range(101)]
    groups = sentence_pairs.group(pairs, 4, np.random.default_rng(3))
    joined = [sentence_pairs.join_texts(pairs, members) for members in groups]
    assert [source.replace("a", "b") for source, _ in joined] == [target for _, target in joined]
    assert sorted(word for source, _ in joined for word in source.split()) == sorted(a for a, _ in pairs)
    same, other_seed = (sentence_pairs.group(pairs, 4, np.random.default_rng(seed)) for seed in (3, 4))
    assert groups == same != other_seed


def test_join_tokens_keeps_the_order():
    pairs = [sentence_pairs.TokenPair([5], [50, 51]), sentence_pairs.TokenPair([6, 7], [60])]
    assert sentence_pairs.join_tokens(pairs, [1, 0]) == sentence_pairs.TokenPair([6, 7, 5], [60, 50, 51])


def test_read_pairs_reads_plain_and_gzipped_files(tmp_path):
    text = "One.\tEins.\nTwo.\tZwei.\n"
    (tmp_path / "a.tsv").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "a.tsv.gz", "wt", encoding="utf-8") as out:
        out.write(text)
    wanted = [("One.", "Eins."), ("Two.", "Zwei.")]
    assert sentence_pairs.read_pairs(tmp_path / "a.tsv") == sentence_pairs.read_pairs(tmp_path / "a.tsv.gz") == wanted


def test_either_of_two_columns_or_any_field_of_json_lines_can_be_the_source(tmp_path):
    (tmp_path / "broken.tsv").write_text("One.\tEins.\nTwo.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken.tsv:2 has 1 columns"):
        sentence_pairs.read_pairs(tmp_path / "broken.tsv")
    (tmp_path / "a.tsv").write_text("One.\tEins.\n", encoding="utf-8")
    assert sentence_pairs.read_pairs(tmp_path / "a.tsv", (1, 0)) == [("Eins.", "One.")]
    with pytest.raises(ValueError, match=r"a.tsv is tab-separated and cannot have columns=\(0, 2\)"):
        sentence_pairs.read_pairs(tmp_path / "a.tsv", (0, 2))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as out:
        out.write('{"id": 3, "long": "A b c.", "short": "B."}\n')
    assert sentence_pairs.read_pairs(tmp_path / "b.jsonl.gz", ("long", "short")) == [("A b c.", "B.")]
    with pytest.raises(
        ValueError, match=r"b.jsonl.gz:1 has no field 'brief'; columns must name two of id, long, short"
    ):
        sentence_pairs.read_pairs(tmp_path / "b.jsonl.gz", ("long", "brief"))


def test_a_pair_that_is_too_long_for_a_group_is_refused():
    with pytest.raises(ValueError, match="9 tokens; at most 7 fit"):
        sentence_pairs.group([sentence_pairs.TokenPair([5] * 9, [5])], 4, np.random.default_rng(0), 7)
