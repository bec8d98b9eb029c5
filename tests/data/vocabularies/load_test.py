"""Tests of detecting a vocabulary's kind, of the search in folders, and of comparing two vocabularies."""

from __future__ import annotations

import json
import shutil

import pytest

from speccascade_jax.data import directory
from speccascade_jax.data.vocabularies import load
from speccascade_jax.data.vocabularies.load import candidates, first_difference, load_vocabulary
from speccascade_jax.pairs.pair import PAIRS_DIRECTORY
from tests.support import memory, tokenizer_files


@pytest.fixture(scope="module")
def trained() -> bytes:
    return load.train(tokenizer_files.texts(), 340)


def test_the_kind_is_detected_from_the_content_not_the_name(trained, tmp_path):
    (tmp_path / "a").write_bytes(trained)
    tokenizer_files.llama2c(tmp_path / "b")
    tokenizer_files.byte_level(tmp_path).rename(tmp_path / "c")
    kinds = {name: type(load_vocabulary(tmp_path / name)).__name__ for name in "abc"}
    assert kinds == {"a": "SentencePieceVocabulary", "b": "Llama2cVocabulary", "c": "HuggingFaceVocabulary"}


def test_a_folder_is_searched_in_order(trained, tmp_path):
    tokenizer_files.llama2c(tmp_path / "tok.bin")
    (tmp_path / "model.bin").write_bytes(bytes(range(256)) * 9)  # files of weights may have the same ending
    assert load_vocabulary(tmp_path).path == tmp_path / "tok.bin"
    for name in ("vocabulary.model", "spiece.model", "tokenizer.model"):
        (tmp_path / name).write_bytes(trained)
        assert load_vocabulary(tmp_path).path == tmp_path / name
    tokenizer_files.metaspace(tmp_path)
    assert load_vocabulary(tmp_path).path == tmp_path / "tokenizer.json"
    # the vocabulary in the file's folder is found
    assert candidates(tmp_path / "model.bin") == [tmp_path / "tokenizer.json"]


def test_a_file_that_is_not_a_vocabulary_is_rejected(tmp_path):
    looked_for = "tokenizer.json, tokenizer.model, spiece.model, vocabulary.model, or one tokenizer of llama2.c"
    for path in (tmp_path, tmp_path / "absent.model"):
        with pytest.raises(FileNotFoundError, match=f"no vocabulary found at {path}: it must hold {looked_for}"):
            load_vocabulary(path)
    for name in ("vocab.json", "merges.txt"):  # PaddleNLP#3749
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"do not say how .* write tokenizer.json with transformers: AutoTok"):
        load_vocabulary(tmp_path)
    for content in (b"", b"[1, 2]", b"text"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match="file is not a vocabulary: it is neither JSON with a model"):
            load_vocabulary(tmp_path / "file")
    for name in ("one.bin", "two.bin"):
        tokenizer_files.llama2c(tmp_path / name)
    with pytest.raises(ValueError, match=r"several tokenizers of llama2.c \(one.bin, two.bin\): give the path of the"):
        load_vocabulary(tmp_path)


def _llama2c(folder, name, **pieces):
    return load_vocabulary(tokenizer_files.llama2c(folder / name, {"a": -1.0, " a": -2.0} | pieces))


def test_differences_are_reported_in_the_order_piece_size(tmp_path):
    original, same = (_llama2c(tmp_path, name, b=-1.0, c=-1.0) for name in ("one", "same"))
    assert first_difference(original, same) is None
    # vocabularies with equal pieces do not differ
    assert first_difference(original, _llama2c(tmp_path, "scores", b=-5.0, c=-1.0)) is None
    difference = first_difference(original, _llama2c(tmp_path, "two", x=-1.0, y=-1.0))
    assert difference == f"id 261 is 'b' in {tmp_path}/one and 'x' in {tmp_path}/two"
    longer = _llama2c(tmp_path, "longer", b=-1.0, c=-1.0, d=-1.0)
    assert first_difference(original, longer) == f"{tmp_path}/one has 263 pieces and {tmp_path}/longer 264"
    assert first_difference(longer, original) == f"{tmp_path}/longer has 264 pieces and {tmp_path}/one 263"


def test_control_pieces_may_differ_in_name_and_number_and_special_ids_too(tmp_path):
    """Compares a base model's vocabulary with that of a model trained for chats (vllm#10913, llama.cpp#3812)."""
    files = {}
    for name, eos in (
        ("base", "<|endoftext|>"),
        ("chat", "<|im_end|>"),
        ("renamed", "<|eot|>"),
        ("text", "<|im_end|>"),
    ):
        (tmp_path / name).mkdir()
        files[name] = tokenizer_files.byte_level(tmp_path / name, tokenizer_config={"eos_token": eos})
    renamed = files["renamed"].read_text().replace("<|im_end|>", "<|eot|>")
    files["renamed"].write_text(renamed)
    (tmp_path / "renamed" / "added_tokens.json").write_text('{"<tool>": 319}')
    table = json.loads(files["text"].read_text())
    token = table["model"]["vocab"]["es"]
    table["model"]["vocab"] = {"xq" if n == token else name: n for name, n in table["model"]["vocab"].items()}
    table["model"]["merges"] = []
    files["text"].write_text(json.dumps(table))
    base, chat, renamed, text = map(load_vocabulary, files.values())
    assert first_difference(base, chat) is first_difference(chat, renamed) is first_difference(renamed, base) is None
    assert first_difference(chat, text) == f"id {token} is 'es' in {files['chat']} and 'xq' in {files['text']}"


def test_vocabularies_of_different_kinds_with_equal_pieces_do_not_differ(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")
    theirs = load_vocabulary(tokenizer_files.metaspace(tmp_path))
    pieces = {name.replace("▁", " "): -1.0 for name in theirs.piece_table()[259:]}
    ours = load_vocabulary(tokenizer_files.llama2c(tmp_path / "tok.bin", pieces))
    assert first_difference(ours, theirs) is None


def test_sentinels_beyond_the_shorter_vocabulary_do_not_count_as_a_difference(tmp_path):
    plain = _llama2c(tmp_path, "plain")
    sentinels = _llama2c(tmp_path, "sentinels", **{f"<extra_id_{n}>": 0.0 for n in (1, 0)})
    assert first_difference(plain, sentinels) is None and first_difference(sentinels, plain) is None
    longer = _llama2c(tmp_path, "another", **{"<extra_id_0>": 0.0, "b": 0.0})
    assert first_difference(plain, longer) == f"{plain.path} has 261 pieces and {longer.path} 263"


@pytest.mark.parametrize(("name", "size", "special"), [
    ("maxtext_default_32k.model", 32768, (1, 2)),
    ("hf_fixture_bytefallback_2k.model", 2000, (1, 2)),
    ("opennmt_sample_1k.sp.model", 1000, (1, 2)),
    ("seqio_test_26piece.sentencepiece.model", 26, (None, 1)),
])  # fmt: skip
def test_real_sentencepiece_files_are_read(name, size, special):
    try:
        vocabulary = load_vocabulary(directory.require("vocab", name))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert (vocabulary.vocab_size, (vocabulary.bos_id, vocabulary.eos_id), vocabulary.stop_ids) == (
        size,
        special,
        special[1:],
    )
    assert len(vocabulary.piece_table()) == size and first_difference(vocabulary, vocabulary) is None


def test_the_shipped_vocabularies_have_digests(tmp_path):
    for folder in PAIRS_DIRECTORY.iterdir():
        for name in ("vocabulary.model", "checksums.json"):
            shutil.copy(folder / name, tmp_path / name)
        load.load_vocabulary(tmp_path)
        (tmp_path / "vocabulary.model").write_bytes((tmp_path / "vocabulary.model").read_bytes() + b"\0")
        with pytest.raises(ValueError, match=r"vocabulary\.model is damaged"):
            load.load_vocabulary(tmp_path)


def test_a_piece_id_beyond_the_file_size_is_rejected(tmp_path):
    path = tokenizer_files.byte_level(tmp_path)
    table = json.loads(path.read_text())
    table["added_tokens"][0]["id"] = table["model"]["vocab"]["!"] = 4_000_000_000
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"tokenizer\.json .*(too few for 4,000,000,001 pieces|is not a tokenizer)"):
        load.load_vocabulary(path)


def test_a_large_file_of_another_format_is_rejected_without_reading_it_all(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\1\0\0\0" + bytes(8 * 500_000))
    assert load.candidates(tmp_path) == []
    assert memory.peak(lambda: load.candidates(tmp_path)) < 1_000_000
