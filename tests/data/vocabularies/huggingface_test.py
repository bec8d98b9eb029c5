"""Tests of `tokenizer.json` files of both kinds, and of special ids from files in the same folder."""

from __future__ import annotations

import json
import sys

import pytest

from speccascade_jax.data.vocabularies.huggingface import HuggingFaceVocabulary
from tests.support import tokenizer_files

pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")
WRITERS = {"byte-level": tokenizer_files.byte_level, "metaspace": tokenizer_files.metaspace}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, HuggingFaceVocabulary]:
    return {kind: HuggingFaceVocabulary(write(tmp_path_factory.mktemp(kind))) for kind, write in WRITERS.items()}


def test_special_ids_are_read_by_name(made):
    qwen, llama = made["byte-level"], made["metaspace"]
    assert (qwen.bos_id, qwen.piece(qwen.eos_id), qwen.stop_ids) == (None, "<|endoftext|>", (qwen.eos_id,))
    assert (llama.bos_id, llama.eos_id, llama.stop_ids) == (1, 2, (2,))
    assert llama.decode([1, *llama.encode("the"), 2, 70]) == "the"


def test_names_take_precedence_over_ids_and_every_eos_id_ends_an_output(tmp_path):
    names = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
    numbers = {"config": {"bos_token_id": 0, "eos_token_id": 5}, "generation_config": {"eos_token_id": [316, 317]}}
    vocabulary = HuggingFaceVocabulary(tokenizer_files.byte_level(tmp_path, tokenizer_config=names, **numbers))
    assert vocabulary.piece_table()[316:] == ["<|endoftext|>", "<|im_end|>", "<|begin|>"]
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.stop_ids) == (None, 317, (317, 316))


@pytest.mark.parametrize(("beside", "expected"), [
    ({"config": {"bos_token_id": 318, "eos_token_id": 316}}, (318, 316, (316,))),
    ({"special_tokens_map": {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|im_end|>"}}, (318, 317, (317,))),
    ({"generation_config": {"eos_token_id": [317, 316]}, "config": {"eos_token_id": 3}}, (318, 317, (317, 316))),
    ({"tokenizer_config": {"bos_token": "<|begin|>", "add_bos_token": False, "eos_token": "<|im_end|>"}},
     (None, 317, (317,))),
    ({"tokenizer_config": {"bos_token": None, "eos_token": "<|endoftext|>"}, "config": {"bos_token_id": 316}},
     (318, 316, (316,))),
    ({"tokenizer_config": {"model_max_length": 9}, "config": {"eos_token_id": 316}}, (318, 316, (316,))),
    ({"front": "", "tokenizer_config": {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"},
      "config": {"bos_token_id": 318}}, (None, 317, (317,))),  # SmolLM2: it names a BOS that nothing puts before texts
    ({"front": "", "tokenizer_config": {"bos_token": "<|begin|>", "add_bos_token": True, "eos_token": "<|im_end|>"}},
     (318, 317, (317,))),
])  # fmt: skip
def test_special_ids_are_read_from_several_files(tmp_path, beside, expected):
    vocabulary = HuggingFaceVocabulary(tokenizer_files.byte_level(tmp_path, **beside))
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.stop_ids) == expected


@pytest.mark.parametrize(("beside", "message"), [
    ({"config": {"vocab_size": 9}}, "defines the end of sequence: add eos_token in tokenizer_config.json"),
    ({"tokenizer_config": {"eos_token": "<eos>"}}, "eos_token '<eos>' in the folder of .* is not one of its pieces"),
    ({"config": {"eos_token_id": 128001}}, "eos_token_id 128001 in the folder of .* is not one of its pieces"),
    ({"tokenizer_config": {"bos_token": "<s>", "add_bos_token": True}}, "bos_token '<s>' in the folder of .*"),
    ({"front": "<|begin|> <|begin|>", "config": {"eos_token_id": 316}}, "puts 2 pieces before a text: only one"),
    ({"added_tokens": {"<new>": 400}, "config": {"eos_token_id": 316}},
     "gives '<new>' the id 400, but tokenizer.json 319: the files belong to different models"),
    ({"added_tokens": {"<new>": 4_000_000_000}}, "an added piece in the folder of .* has id 4,000,000,000: copy"),
    ({"added_tokens": {"<new>": None}}, r"added_tokens.json\) has an invalid entry"),
    ({"config": [1]}, r"config.json is damaged \(not a JSON object, but \[1\]\)"),
    ({"config": {"eos_token_id": {"a": 1}}}, r"in the folder of .*tokenizer.json \(config.json\) has an invalid entry"),
    ({"tokenizer_config": {"eos_token": {"x": 1}}}, r"tokenizer_config.json\) has an invalid entry"),
])  # fmt: skip
def test_invalid_special_ids_are_rejected(tmp_path, beside, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceVocabulary(tokenizer_files.byte_level(tmp_path, **beside))


def test_vocabularies_are_equal_if_file_and_special_ids_are_equal(tmp_path):
    vocabularies = []
    for folder, name in (("one", "<|endoftext|>"), ("same", "<|endoftext|>"), ("other", "<|im_end|>")):
        (tmp_path / folder).mkdir()
        path = tokenizer_files.byte_level(tmp_path / folder, tokenizer_config={"eos_token": name})
        vocabularies.append(HuggingFaceVocabulary(path))
    original, same, different = vocabularies
    assert original == same and hash(original) == hash(same) and original != different


def test_other_files_are_rejected(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ValueError, match=r'tokenizer.json is not a tokenizer.json \(JSON with a "model"'):
        HuggingFaceVocabulary(path)


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = tokenizer_files.byte_level(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'speccascade_jax\[huggingface\]'"):
        HuggingFaceVocabulary(path)
