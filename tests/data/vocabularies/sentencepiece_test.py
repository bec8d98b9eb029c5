"""Tests of the wrapper of sentencepiece, and of training vocabularies with it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.data.vocabularies import load
from speccascade_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary
from speccascade_jax.evaluation.studies.spec_bench.answering import get_conversation
from speccascade_jax.pairs.prompts import stop_ids
from tests.support import tokenizer_files


@pytest.fixture(scope="module")
def trained() -> bytes:
    return load.train(tokenizer_files.SENTENCES, 296)


@pytest.fixture
def vocabulary(trained, tmp_path) -> load.Vocabulary:
    path = tmp_path / "vocabulary.model"
    path.write_bytes(trained)
    return load.Vocabulary(path)


def test_training_is_deterministic(trained):
    assert load.train(tokenizer_files.SENTENCES, 296) == trained


def test_trained_vocabularies_have_the_special_ids_of_t5(vocabulary):
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.vocab_size == 296


def test_pieces_preserve_ids_that_text_does_not_preserve(vocabulary):
    # every special and byte piece, and a word cut into its letters
    ids = [*range(vocabulary.vocab_size), *(vocabulary.encode(letter)[-1] for letter in "Tom")]
    assert vocabulary.ids_of_pieces(vocabulary.pieces(ids)) == ids
    assert vocabulary.encode(vocabulary.decode(ids)) != ids
    assert vocabulary.ids_of_pieces(vocabulary.pieces([])) == []


def test_a_piece_of_another_vocabulary_is_rejected(vocabulary):
    with pytest.raises(ValueError, match="'▁zyklop' is not a piece of vocabulary"):
        vocabulary.ids_of_pieces(vocabulary.pieces(vocabulary.encode("Tom")) + " ▁zyklop")


def test_ids_of_joined_texts_equal_the_joined_ids(vocabulary):
    joined = vocabulary.encode(" ".join(tokenizer_files.SENTENCES[:4]))
    assert joined == [token for text in tokenizer_files.SENTENCES[:4] for token in vocabulary.encode(text)]


def test_decoding_stops_at_eos_and_skips_padding(vocabulary):
    ids = vocabulary.encode("Tom sees nothing.")
    assert vocabulary.decode([0, *ids, 1, *ids]) == "Tom sees nothing."
    assert vocabulary.decode([*ids, 0, 0, 9999]) == "Tom sees nothing."


def test_vocabularies_with_equal_content_are_equal(vocabulary, trained, tmp_path):
    (tmp_path / "copy.model").write_bytes(trained)
    (tmp_path / "other.model").write_bytes(load.train(tokenizer_files.SENTENCES, 293))
    copy, different = (load.Vocabulary(tmp_path / name) for name in ("copy.model", "other.model"))
    assert vocabulary == copy and hash(vocabulary) == hash(copy)
    assert vocabulary != different


def test_missing_and_damaged_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="train_vocab"):
        load.Vocabulary(tmp_path / "absent.model")
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(ValueError, match="text.model is not a sentencepiece model"):
        load.Vocabulary(tmp_path / "text.model")
    with pytest.raises(ValueError, match=r"training needs \(0, 1, 2\)"):
        load.Vocabulary(tokenizer_files.llama(tmp_path))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> SentencePieceVocabulary:
    return SentencePieceVocabulary(tokenizer_files.llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> SentencePieceVocabulary:
    return SentencePieceVocabulary(tokenizer_files.gemma(tmp_path_factory.mktemp("gemma")))


def test_special_ids_come_from_the_file(llama, gemma, vocabulary):
    special_ids = [(v.bos_id, v.eos_id, v.unk_id, v.stop_ids) for v in (llama, gemma, vocabulary)]
    assert special_ids == [(1, 2, 0, (2,)), (2, 1, 3, (1,)), (None, 1, 2, (1,))]
    assert [v.specials for v in (llama, gemma)] == [{1, 2}, {0, 1, 2}]


def test_a_leading_space_is_dropped_only_at_the_beginning_of_a_text(llama, gemma):
    sees = llama.encode("Tom sees")[-1:]
    assert [llama.decode([1, *sees]), llama.decode(sees, after=[1])] == ["sees", "sees"]
    assert llama.decode(sees, after=llama.encode("Tom")) == " sees"
    assert gemma.decode(gemma.encode(" sees")) == " sees"  # its space is the text's own, not a prefix


def test_names_of_control_pieces_in_a_text_are_read_as_control_pieces(llama, gemma):
    assert llama.encode("Tom</s>Tom sees") == [*llama.encode("Tom"), 2, *llama.encode("Tom sees")]
    assert llama.encode("Tom </s><s>Tom") == [*llama.encode("Tom "), 2, 1, *llama.encode("Tom")]
    assert gemma.encode("<s>Tom<pad></s>") == [2, *gemma.encode("Tom"), 0, 1]
    turns = get_conversation("vicuna").prompt(["Tom", "Mary"], ["sees"])
    first, second = llama.encode("USER: Tom ASSISTANT: sees"), llama.encode("USER: Mary ASSISTANT:")
    assert llama.encode(turns) == [*first, llama.eos_id, *second]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@given(texts=st.lists(st.text("Tom s</>é雪\n", max_size=8), min_size=1, max_size=4), data=st.data())
def test_names_of_control_pieces_do_not_change_the_rest_of_the_text(llama, gemma, kind, texts, data):
    vocabulary = {"llama": llama, "gemma": gemma}[kind]
    texts = [text.replace("<s>", "").replace("</s>", "") for text in texts]
    ids = vocabulary._pieces.encode(texts[0])
    written = texts[0]
    for text in texts[1:]:
        control = data.draw(st.sampled_from(sorted(vocabulary.specials)))
        written += vocabulary.piece(control) + text
        ids += [control, *vocabulary._pieces.encode(text)]
    assert vocabulary.encode(written) == ids


def test_names_of_control_pieces_are_plain_text_in_t5_files(vocabulary):
    same = SentencePieceVocabulary(vocabulary.path)
    for text in ("Tom</s>Mary", "<pad> Tom"):
        assert vocabulary.encode(text) == same.encode(text) == list(vocabulary._pieces.encode(text))
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_stop_strings_may_be_byte_pieces_or_control_pieces(llama):
    byte = llama.piece_table().index("<0x0A>")
    assert stop_ids(llama, ["\n"]) == [2, byte] and stop_ids(llama, ["</s>", "\nTom", "\n\n", ""]) == [2]


def test_special_ids_have_no_text(llama):
    ids = llama.encode("Tom sees")
    assert llama.decode([1, *ids[:1], 1, *ids[1:], 2, *ids]) == "Tom sees"


def beside(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return SentencePieceVocabulary(folder / "tokenizer.model")


CHATML = {"<|im_end|>": 370, "<|im_start|>": 371}


def test_pieces_that_neighbouring_files_add_belong_to_the_vocabulary(tmp_path):
    """Reads ChatML's additions to a Llama, as in llama.cpp#7271; ids as of transformers' `added_tokens.json`."""
    plain = SentencePieceVocabulary(tokenizer_files.llama(tmp_path))
    decoder = {"370": {"content": "<|im_end|>", "special": True}, "372": {"content": "{", "special": False},
               "373": {"content": "<|user|>", "special": True, "rstrip": True}}  # fmt: skip
    named = {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder, "additional_special_tokens": ["<|im_start|>"]}
    chat = beside(tmp_path, added_tokens=CHATML, tokenizer_config=named)
    assert (chat.vocab_size, chat.eos_id, chat.stop_ids, chat.bos_id) == (374, 370, (370,), 1)
    assert chat.fingerprint != plain.fingerprint and chat.piece_table()[369:] == [
        plain.piece(369),
        *CHATML,
        "{",
        "<|user|>",
    ]
    tom, sees = plain.encode("Tom"), plain.encode("sees")
    assert chat.encode("<|im_start|>Tom<|im_end|>sees") == [371, *tom, 370, *sees]
    assert chat.encode("Tom{sees<|user|> \nTom") == [*tom, 372, *sees, 373, *tom]
    assert chat.decode([371, *tom, 372, *sees, 370, *tom]) == "Tom{ sees"
    assert chat.controls >= {1, 2, 370, 371, 372, 373} and 372 not in chat.specials


def test_only_the_beginning_has_a_prefix_where_the_files_say_so(tmp_path):
    """`"legacy": false` of transformers: no space is put before the text after a special piece (llama.cpp#7094)."""
    old = SentencePieceVocabulary(tokenizer_files.llama(tmp_path))
    new = beside(tmp_path, tokenizer_config={"legacy": False})
    text = "Tom<s>Tom</s> sees"
    tom, sees = old.encode("Tom"), old.encode("sees")
    assert old.encode(text) == [*tom, 1, *tom, 2, *old.encode(" sees")]
    ids = new.encode(text)
    assert "".join(map(new.piece, ids)) == "▁Tom<s>Tom</s>▁sees" and ids[-len(sees) :] == sees
    assert new != old and new.encode("Tom sees") == old.encode("Tom sees")


def test_legacy_changes_nothing_in_a_vocabulary_without_a_prefix(tmp_path):
    plain = SentencePieceVocabulary(tokenizer_files.gemma(tmp_path))
    assert beside(tmp_path, tokenizer_config={"legacy": False}) == plain


@pytest.mark.parametrize(("files", "bos", "stops"), [
    # Gemma 2's chat models
    ({"generation_config": {"eos_token_id": [2, 5]}, "config": {"eos_token_id": 7}}, 1, (2, 5)),
    ({"config": {"eos_token_id": 7}}, 1, (2, 7)),
    ({"tokenizer_config": {"add_bos_token": False, "bos_token": "<s>"}}, None, (2,)),  # Yi's models
    ({"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}, "config": {"eos_token_id": 2}}, 1, (2,)),
])  # fmt: skip
def test_neighbouring_files_determine_begin_and_end_tokens(tmp_path, files, bos, stops):
    plain = SentencePieceVocabulary(tokenizer_files.llama(tmp_path))
    vocabulary = beside(tmp_path, **files)
    assert (vocabulary.bos_id, vocabulary.stop_ids) == (bos, stops)
    # what was measured with this vocabulary before stays found, if it encodes and ends texts as before
    assert (vocabulary == plain) == ((bos, stops) == (1, (2,)))


def test_sentinels_of_t5_are_pieces_if_the_model_has_entries_for_them(vocabulary, llama):
    """Compares ids and text with transformers' and seqio's vocabularies of T5 (transformers#4021, llama.cpp#8938)."""
    whole = vocabulary.with_sentinels(296 + 100)
    assert vocabulary.with_sentinels(395) is vocabulary and llama.with_sentinels(1000) is llama
    assert whole.with_sentinels(1000) is whole and whole == vocabulary and whole.vocab_size == 396
    ids = whole.encode("Tom <extra_id_0> the house <extra_id_12>.")
    tom, rest, dot = vocabulary.encode("Tom"), vocabulary.encode("the house"), vocabulary.encode(".")
    assert ids == [*tom, 395, *rest, 383, *dot]
    assert whole.decode(ids) == "Tom<extra_id_0> the house<extra_id_12>" + vocabulary.decode(dot, after=tom)
    assert load.first_difference(vocabulary, whole) is None


def test_a_vocabulary_without_an_end_of_sequence_is_rejected(tmp_path):
    path = tokenizer_files.sentencepiece(tmp_path, eos_id=-1)
    with pytest.raises(ValueError, match="tokenizer.model defines the end of sequence: add eos_token in"):
        SentencePieceVocabulary(path)
