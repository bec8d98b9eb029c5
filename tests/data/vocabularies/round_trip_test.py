"""Tests of every kind of vocabulary: texts survive a round trip, continuations join, decoded text does not change."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.data import directory
from speccascade_jax.data.vocabularies import load, vocabulary
from speccascade_jax.data.vocabularies.vocabulary import added_texts
from speccascade_jax.storage import checksums
from tests.support import damage, tokenizer_files


def t5(folder):
    (folder / "vocabulary.model").write_bytes(load.train(tokenizer_files.SENTENCES, 296))
    return folder / "vocabulary.model"


def stories(folder):
    try:
        return directory.require("models", "stories260K", "tok512.bin")
    except FileNotFoundError as error:
        pytest.skip(str(error))


WRITERS = {
    "byte-level": tokenizer_files.byte_level,
    "metaspace": tokenizer_files.metaspace,
    "llama2.c": lambda folder: tokenizer_files.llama2c(folder / "tok.bin"),
    "stories": stories,
    "llama": tokenizer_files.llama,
    "gemma": tokenizer_files.gemma,
    "t5": t5,
}
CONTINUED = [kind for kind in WRITERS if kind != "t5"]  # T5's vocabulary removes repeated spaces


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns the vocabulary of a kind, read once."""
    known = {}

    def make(kind):
        if kind not in known:
            known[kind] = load.load_vocabulary(WRITERS[kind](tmp_path_factory.mktemp("vocabulary")))
        return known[kind]

    return make


@pytest.mark.parametrize("kind", CONTINUED)
# "▁" stands for a space, and names of special pieces, all in "<>", are read as these pieces
@given(
    text=st.text(max_size=30).filter(lambda text: not set("▁<\0") & set(text)) | st.text("aeOnt <0x41>\n", max_size=9)
)
def test_every_text_survives_a_round_trip(made, kind, text):
    vocabulary = made(kind)
    ids = vocabulary.encode(text)  # neither cut nor given a beginning by a post-processor
    assert vocabulary.decode(ids) == text
    assert not vocabulary.specials & set(ids)


def test_the_stories_vocabulary_gives_known_pieces(made):
    vocabulary = made("stories")
    pieces = [vocabulary.piece(token) for token in vocabulary.encode("Once upon a time")]
    assert vocabulary.vocab_size == 512 and pieces == ["▁Once", "▁upon", "▁a", "▁time"]


@pytest.mark.parametrize(
    "text", ["Das Kind trägt große Äpfel.", tokenizer_files.SENTENCES[0], "unseen: 日本, ☃ and Zyklop", ""]
)
def test_t5_text_without_unknown_pieces_survives_a_round_trip(made, text):
    ids = made("t5").encode(text)
    assert made("t5").decode(ids) == text and not {0, 1, 2} & set(ids)


@pytest.mark.parametrize("kind", CONTINUED)
@given(text=st.text("Tom sees the house Once upon é雪\n ", min_size=1, max_size=20), data=st.data())
def test_a_continuation_joins_the_text_before_it(made, kind, text, data):
    vocabulary = made(kind)
    ids = vocabulary.encode(text)
    cut = data.draw(st.integers(1, len(ids)))
    before = vocabulary.decode(ids[:cut])
    if not before.endswith("�"):  # only where the text before does not end in the middle of a character
        assert before + vocabulary.decode(ids[cut:], after=ids[:cut]) == text == vocabulary.decode(ids)


@functools.cache
def byte_ids(vocabulary):
    return [n for n, name in enumerate(vocabulary.piece_table()) if name in tokenizer_files.BYTES] or [0]


@pytest.mark.parametrize("kind", CONTINUED)
@given(data=st.data())
def test_decoded_text_does_not_change_when_more_ids_follow(made, kind, data):
    """Only replacement characters at the end may change: streams show a growing text."""
    vocabulary = made(kind)
    token = st.integers(0, vocabulary.vocab_size - 1) | st.sampled_from(byte_ids(vocabulary))
    ids = data.draw(st.lists(token.filter(lambda id: id not in vocabulary.stop_ids), max_size=12))
    texts = [vocabulary.decode(ids[:n], after=[vocabulary.encode("a")[-1]]) for n in range(len(ids) + 1)]
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before.rstrip("�"))


@pytest.mark.parametrize("kind", ["t5", "stories"])
@pytest.mark.parametrize("before", ["", "Ein Satz davor."])
def test_the_text_added_by_each_id_joins_to_the_whole_text(made, kind, before):
    """Includes characters that are spelt in bytes."""
    after = made(kind).encode(before)
    for text in ("Das Wetter war kalt.", "  two  spaces", "naïve 你好 🦊 ok", "a\nb", ""):
        ids = [*made(kind).encode(text), made(kind).eos_id]
        texts = added_texts(made(kind), ids, after)
        assert len(texts) == len(ids) and "".join(texts) == made(kind).decode(ids, after=after)
        assert texts == vocabulary._added(made(kind), ids, after, None)


@pytest.mark.parametrize("kind", ["t5", "stories"])
def test_the_text_added_by_arbitrary_ids_joins_to_the_decoded_text(made, kind):
    for ids in np.random.default_rng(0).integers(3, made(kind).vocab_size, size=(30, 25)).tolist():
        assert "".join(added_texts(made(kind), ids)) == made(kind).decode(ids)


def test_incremental_decoding_takes_linear_time(made):
    class Counting:
        lengths = []

        def decode(self, ids, after=()):
            self.lengths.append(len(ids))
            return made("t5").decode(ids, after=after)

    ids = made("t5").encode("Das Wetter war kalt. " * 20)
    assert "".join(added_texts(Counting(), ids)) == made("t5").decode(ids)
    assert sum(Counting.lengths) <= 4 * len(ids)


@pytest.mark.parametrize("kind", ["t5", "llama2.c", "byte-level"])
def test_a_flipped_bit_in_a_vocabulary_with_a_digest_is_detected(tmp_path, kind):
    path = WRITERS[kind](tmp_path)
    checksums.update(path)
    for _ in damage.flips(path, 60):
        with pytest.raises(ValueError, match=f"{path.name} is damaged: its bytes do not match checksums.json"):
            load.load_vocabulary(path)
    load.load_vocabulary(path)  # the restored file loads again
