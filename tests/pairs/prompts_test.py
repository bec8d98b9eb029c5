"""Tests of converting texts to the ids that models read, and outputs to texts that continue the prompts."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.models.decoder import tiny
from speccascade_jax.pairs.pair import for_target
from speccascade_jax.pairs.prompts import make_prompt, stop_ids, text_ids
from tests.support import tiny_decoders, tokenizer_files

BOS, EOS = 1, 2


@dataclass(frozen=True)
class Encoding:
    """The attributes of an encoder-decoder that prompts read."""

    vocab_size: int
    is_encoder_decoder: bool = True
    config: object = None


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return load_vocabulary(tokenizer_files.llama2c(tmp_path_factory.mktemp("vocabulary") / "tok.bin"))


@pytest.fixture(scope="module")
def pair(vocabulary) -> sc.Pair:
    """Returns a pair that continues BOS with "Once", each word of "Once upon a time" with the next, "time" with BOS."""
    logits = np.zeros((vocabulary.vocab_size, vocabulary.vocab_size), np.float32)
    words = [BOS, *vocabulary.encode("Once upon a time"), BOS]
    assert [vocabulary.piece(word) for word in words[1:-1]] == ["▁", "Once", "▁upon", "▁a", "▁time"]
    logits[words[:-1], words[1:]] = 20.0
    return sc.Pair(target=sc.TableLM(logits), draft=sc.TableLM(logits), vocabulary=vocabulary)


@pytest.fixture(scope="module")
def encoding(vocabulary) -> sc.Pair:
    model = sc.BoundModel(params=(), model=Encoding(vocabulary.vocab_size))
    return sc.Pair(target=model, draft=model, vocabulary=vocabulary)


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory) -> sc.Pair:
    vocabulary = load_vocabulary(tokenizer_files.byte_level(tmp_path_factory.mktemp("qwen")))
    model = sc.FakeLM(vocabulary.vocab_size)
    return sc.Pair(target=model, draft=model, vocabulary=vocabulary)


def test_decoder_prompts_begin_with_bos_and_have_no_eos(pair, encoding, vocabulary, without_bos):
    ids = vocabulary.encode("a time")
    assert text_ids(pair, "a time") == [BOS, *ids]
    assert text_ids(encoding, "a time") == [*ids, EOS]
    assert text_ids(without_bos, "a time") == without_bos.vocabulary.encode("a time")


def test_a_t5gemmas_prompts_are_those_of_a_decoder(vocabulary):
    """Its encoder's input begins with BOS; encoder and decoder each have the configuration's positions."""
    config = dataclasses.replace(tiny("t5gemma_s_s", vocab_size=vocabulary.vocab_size), max_length=16)
    gemma = for_target(vocabulary, Path("none"), config)
    model = sc.BoundModel(params=(), model=Encoding(vocabulary.vocab_size, config=config))
    pair = sc.Pair(target=model, draft=model, vocabulary=gemma)
    assert text_ids(pair, "a time") == [BOS, *vocabulary.encode("a time")] and vocabulary.ends_inputs
    prompt = make_prompt(pair, [[5] * 16], max_new_tokens=15)
    assert prompt.tokens.tolist() == [[2]] and prompt.encoder_length.tolist() == [16]
    for read, written in ((17, 1), (3, 16)):
        with pytest.raises(ValueError, match=f"{read} tokens and max_new_tokens is {written}: one of them more than"):
            make_prompt(pair, [[5] * read], max_new_tokens=written)


def test_an_empty_text_becomes_one_special_id(pair, encoding, without_bos):
    qwen = without_bos.vocabulary
    assert qwen.piece(qwen.eos_id) == "<|endoftext|>"
    assert [text_ids(source, "") for source in (pair, encoding, without_bos)] == [[BOS], [EOS], [qwen.eos_id]]
    prompt = make_prompt(pair, ["", "a"])
    assert prompt.length.tolist() == [1, 1 + len(pair.vocabulary.encode("a"))] and (prompt.tokens[:, 0] == BOS).all()


def test_special_ids_are_kept_when_a_prompt_is_cut(pair, encoding, without_bos):
    ids, qwen = pair.vocabulary.encode("Once upon a time"), without_bos.vocabulary.encode("Once upon a time")

    def end(ids, room):
        return ids[max(0, len(ids) - room) :]

    assert len(ids) > 3 and len(qwen) > 3
    assert text_ids(pair, "Once upon a time", 3) == [BOS, *ids[:2]]
    assert text_ids(pair, "Once upon a time", 3, end) == [BOS, *ids[-2:]]
    assert text_ids(encoding, "Once upon a time", 3) == [*ids[:2], EOS]
    assert text_ids(encoding, "Once upon a time", 3, end) == [*ids[-2:], EOS]
    assert text_ids(without_bos, "Once upon a time", 3, end) == qwen[-3:]
    assert text_ids(pair, "Once upon a time", 99, end) == [BOS, *ids]


def test_the_encoder_reads_the_text_and_the_decoder_a_start_token(encoding, vocabulary):
    prompt = make_prompt(encoding, "a")
    assert prompt.tokens.tolist() == [[0]] and prompt.length.tolist() == [1]
    ids = [*vocabulary.encode("a"), EOS]
    assert prompt.encoder_tokens[0, : len(ids)].tolist() == ids


def test_encoders_start_and_pad_as_their_configuration_says(vocabulary):
    config = SimpleNamespace(start_id=3, pad_id=1)
    model = sc.BoundModel(params=(), model=Encoding(vocabulary.vocab_size, config=config))
    pair = sc.Pair(target=model, draft=model, vocabulary=vocabulary)
    prompt = make_prompt(pair, np.array([[5, 0, 7, 0, 1], [1, 1, 5, 0, 2], [1, 1, 1, 1, 1]]))
    assert prompt.tokens.tolist() == [[3]] * 3 and prompt.encoder_length.tolist() == [4, 3, 1]
    assert prompt.encoder_tokens[:, :4].tolist() == [[5, 0, 7, 0], [5, 0, 2, 0], [1, 0, 0, 0]]


def test_a_text_that_contains_the_begin_or_end_token_gets_no_second_one(tmp_path):
    """Chat templates begin with BOS (llama-cpp-python#1501); a T5's prompt may end with "</s>"."""
    vocabulary = load_vocabulary(tokenizer_files.metaspace(tmp_path))
    model = sc.FakeLM(vocabulary.vocab_size)
    pair, once = sc.Pair(target=model, draft=model, vocabulary=vocabulary), vocabulary.encode("Once")
    assert text_ids(pair, "<s>Once") == text_ids(pair, "Once") == [BOS, *once]
    assert text_ids(pair, "<s>Once", 2) == [BOS, *once[:1]] and text_ids(pair, "<s><s>Once") == [BOS, BOS, *once]
    model = sc.BoundModel(params=(), model=Encoding(vocabulary.vocab_size))
    pair = sc.Pair(target=model, draft=model, vocabulary=vocabulary)
    assert text_ids(pair, "Once</s>") == text_ids(pair, "Once") == [*once, EOS]


@pytest.mark.parametrize(("rows", "said"), [
    ([[2, 2, 2, 70], [70, 71, 72, 73]], "prompt 0 begins with id 2, which looks like padding"),
    (np.array([[1, 70, 71, 72], [2, 1, 70, 71]]), "prompt 1 begins with id 2"),
    ([[1, 70, 71, 72], [1, 70, 2, 2]], "prompt 1 ends with id 2"),
])  # fmt: skip
def test_padded_ids_cause_a_warning(pair, rows, said):
    with pytest.warns(UserWarning, match=f"{said}.*give lists of ids without padding"):
        make_prompt(pair, rows)
    bare = sc.Pair(target=sc.FakeLM(99), draft=sc.FakeLM(99))
    with pytest.warns(UserWarning, match="prompt 1 begins with id 0"):
        make_prompt(bare, [[7, 8, 9], [0, 0, 9]])


@pytest.mark.filterwarnings("error")
def test_ids_without_padding_give_no_warning(pair):
    for rows in (
        [[1, 70, 70], [1, 71, 72]],
        [[70, 70, 71], [71, 72, 72]],
        [[2, 70], [70, 2, 2]],
        [[2, 2, 70]],
        ["a", "b"],
    ):
        make_prompt(pair, rows)


def test_a_pair_without_a_vocabulary_rejects_text():
    model = sc.FakeLM(7)
    with pytest.raises(ValueError, match="this pair has no vocabulary: give token ids, or a Pair with vocabulary=…"):
        text_ids(sc.Pair(target=model, draft=model), "a")


@pytest.mark.parametrize(("prompts", "message"), [
    (None, "prompts=None are not prompts: give texts, or integer ids"),
    (5, "prompts=5 are not prompts"),
    (np.int64(5), "5.* are not prompts"),
    ({"a"}, "prompts={'a'} are not prompts"),
    ((text for text in "ab"), "prompts=<generator .* are not prompts"),
    (["a", [1, 2]], r"prompts mix 'a' and \[1, 2\]: give texts only, or lists of ids only"),
    ([[1, 2], "a"], r"prompts mix \[1, 2\] and 'a': give texts only"),
    ([1, [1, 2]], r"prompts mix 1 and \[1, 2\]"),
    (["a", None], "prompts mix 'a' and None"),
    ([None], "dtype object: give texts, or integer ids"),
    ([[1, None]], "prompt 0 holds None, which is not a token id"),
    ([[1], ["5"]], "prompt 1 holds '5', which is not a token id"),
    ([[1, 1.5]], "prompt 0 holds 1.5, which is not a token id"),
    ([[float("nan")]], "prompt 0 holds nan, which is not a token id"),
    ([[1], [2**40]], "prompt 1 holds id 1099511627776, outside the vocabulary"),
    (np.array([[1, 2**32 + 1]]), "prompt 0 holds id 4294967297, outside the vocabulary"),
    (["a", "b\ud83d"], r"prompt 1 holds '\\ud83d' at character 1, half of a surrogate pair: remove it"),
    ("\udc00", r"prompt 0 holds '\\udc00' at character 0"),
    (np.array([[1], [-1]]), "prompt 1 holds id -1, outside the vocabulary"),
])  # fmt: skip
def test_invalid_prompts_are_rejected(pair, prompts, message):
    with pytest.raises(ValueError, match=message):
        make_prompt(pair, prompts)


def test_prompts_may_be_any_kind_of_sequence(pair):
    ids = text_ids(pair, "a")
    for prompts in (
        ["a", "a"],
        ("a", "a"),
        np.array(["a", "a"]),
        [ids, np.array(ids)],
        [np.array(ids), np.array(ids, np.int64)],
        np.array([ids, ids]),
        [ids] * 2,
    ):
        assert make_prompt(pair, prompts).length.tolist() == [len(ids)] * 2
    for prompts in (ids, tuple(ids), np.array(ids), "a"):
        assert make_prompt(pair, prompts).tokens[0, : len(ids)].tolist() == ids


def test_stop_strings_of_one_token_become_stop_ids(pair, without_bos, tmp_path):
    strings = ["\n", "<|im_end|>", "\nQ:"]
    newline = {"llama2c": pair.vocabulary.encode("\n")[-1:], "byte_level": without_bos.vocabulary.encode("\n")}
    ends = without_bos.vocabulary.encode("<|im_end|>")
    assert len(newline["byte_level"]) == len(ends) == 1
    assert stop_ids(pair.vocabulary, strings) == [BOS, EOS, *newline["llama2c"]]
    assert stop_ids(without_bos.vocabulary, strings) == [
        *without_bos.vocabulary.stop_ids,
        *newline["byte_level"],
        *ends,
    ]
    merged = load_vocabulary(tokenizer_files.metaspace(tmp_path))
    assert stop_ids(merged, ["\n"]) == [*merged.stop_ids, merged.encode("\n")[-1]]
    assert stop_ids(pair.vocabulary, ["upon"]) == [BOS, EOS]  # The token with these letters begins with a space.


# --- through the engine

SETTINGS = {"max_new_tokens": 8, "block_size": 2}
PROMPTS = ["", "Once", "Once upon", "a"]


def test_prompt_and_output_text_join_correctly(pair):
    out = sc.decode(pair, PROMPTS, **SETTINGS)
    assert [prompt + text for prompt, text in zip(PROMPTS, out.texts, strict=True)] == [
        "Once upon a time", "Once upon a time", "Once upon a time", "a time"
    ]  # fmt: skip
    assert [int(row[n - 1]) for row, n in zip(out.tokens, out.lengths, strict=True)] == [BOS] * 4  # BOS ends a row


def test_streamed_texts_continue_the_prompt(pair):
    for prompt, rest in (("", "Once upon a time"), ("Once", " upon a time")):
        assert "".join(token.text for token in sc.stream(pair, prompt, **SETTINGS)) == rest


def test_the_text_of_an_output_without_its_prompt_has_no_leading_space(pair):
    out = sc.decode(pair, ["Once"] * 4, **SETTINGS)
    assert sc.api.collect(pair, out.generation).texts[0] == "upon a time" != out.texts[0]


def test_prompt_and_output_must_fit_the_positions_of_both_models():
    long, short = (dataclasses.replace(tiny("llama2_7b"), max_length=size) for size in (64, 40))
    pair = sc.Pair(tiny_decoders.bound(long), tiny_decoders.bound(short))
    assert pair.max_length == 40 and sc.Pair(sc.TableLM(np.eye(3)), sc.TableLM(np.eye(3))).max_length is None
    assert make_prompt(pair, [[1] * 10, [1] * 30], max_new_tokens=10).length.tolist() == [10, 30]
    for call in (sc.decode, sc.stream):
        with pytest.raises(ValueError, match="prompt 0 has 31 tokens and max_new_tokens is 10: .* the 40 positions"):
            call(pair, [[1] * 31], max_new_tokens=10)
