"""The sentencepiece wrapper and its training."""

import pytest
import sentencepiece

from speccascade_jax.data import vocabularies

SENTENCES = [
    f"{subject} {verb} {thing}."
    for subject in ("Tom", "Mary", "She", "Er", "Das Kind", "We")
    for verb in ("sees", "wants", "kauft", "findet", "trägt")
    for thing in ("the house", "a little dog", "den Schlüssel", "große Äpfel", "nothing")
]


@pytest.fixture(scope="module")
def trained() -> bytes:
    return vocabularies.train(SENTENCES, 296)


@pytest.fixture
def vocabulary(trained, tmp_path) -> vocabularies.Vocabulary:
    path = tmp_path / "vocabulary.model"
    path.write_bytes(trained)
    return vocabularies.Vocabulary(path)


def test_training_is_deterministic(trained):
    assert vocabularies.train(SENTENCES, 296) == trained


def test_special_ids_are_those_of_t5(vocabulary):
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.vocab_size == 296


@pytest.mark.parametrize("text", [SENTENCES[0], "Das Kind trägt große Äpfel.", "unseen: 日本, ☃ and Zyklop", ""])
def test_text_survives_a_round_trip_without_unknown_pieces(vocabulary, text):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_pieces_keep_ids_that_text_does_not(vocabulary):
    # every special and byte piece, and a word cut into its letters
    ids = [*range(vocabulary.vocab_size), *(vocabulary.encode(letter)[-1] for letter in "Tom")]
    assert vocabulary.ids_of_pieces(vocabulary.pieces(ids)) == ids
    assert vocabulary.encode(vocabulary.decode(ids)) != ids
    assert vocabulary.ids_of_pieces(vocabulary.pieces([])) == []


def test_a_piece_of_another_vocabulary_is_named(vocabulary):
    with pytest.raises(ValueError, match="'▁zyklop' is no piece of vocabulary"):
        vocabulary.ids_of_pieces(vocabulary.pieces(vocabulary.encode("Tom")) + " ▁zyklop")


def test_ids_of_texts_joined_by_spaces_are_joined_ids(vocabulary):
    joined = vocabulary.encode(" ".join(SENTENCES[:4]))
    assert joined == [token for text in SENTENCES[:4] for token in vocabulary.encode(text)]


def test_decoding_stops_at_eos_and_skips_padding(vocabulary):
    ids = vocabulary.encode("Tom sees nothing.")
    assert vocabulary.decode([0, *ids, 1, *ids]) == "Tom sees nothing."
    assert vocabulary.decode([*ids, 0, 0, 9999]) == "Tom sees nothing."


def test_equality_is_by_content(vocabulary, trained, tmp_path):
    (tmp_path / "copy.model").write_bytes(trained)
    (tmp_path / "other.model").write_bytes(vocabularies.train(SENTENCES, 293))
    copy, other = (vocabularies.Vocabulary(tmp_path / name) for name in ("copy.model", "other.model"))
    assert vocabulary == copy and hash(vocabulary) == hash(copy)
    assert vocabulary != other


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="train_vocab"):
        vocabularies.Vocabulary(tmp_path / "absent.model")
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(ValueError, match="text.model is not a sentencepiece model"):
        vocabularies.Vocabulary(tmp_path / "text.model")


def test_other_special_ids_are_refused(tmp_path):
    prefix = str(tmp_path / "other")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_prefix=prefix, vocab_size=40, minloglevel=2
    )
    with pytest.raises(ValueError, match=r"\(0, 1, 2\) are needed"):
        vocabularies.Vocabulary(prefix + ".model")
