"""Tests of pairs from any two checkpoints: vocabularies must be equal, and padding rows are never sampled."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import speccascade_jax as sc
from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.core.types import is_packed
from speccascade_jax.data import directory
from speccascade_jax.data.vocabularies import load
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.models.fingerprints import of_model
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.pairs import head_files
from speccascade_jax.pairs.prompts import checked_stop_ids
from speccascade_jax.runtime import products
from tests.support import conformance, text_pair, tiny_pair, tokenizer_files
from tests.support.acceptance_heads import head_for


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[int, Path]:
    """Returns number of rows -> a T5 on disk without padding; `vocabulary.model` has 340 pieces."""
    folder, paths = tmp_path_factory.mktemp("models"), {}
    for rows in (340, 344, 352):
        paths[rows] = _save(folder / str(rows), T5Config(rows, rows, 8, 1, 8, 8, 1, 1))
    (folder / "vocabulary.model").write_bytes(load.train(tokenizer_files.texts(), 340))
    return paths


def _save(path: Path, config: T5Config) -> Path:
    draws = np.random.default_rng(0)
    flat = {name: draws.normal(size=shape) / 4 for name, shape in expected_shapes(config).items()}
    checkpoints.save(path, T5(config), unflatten_dict(flat, sep="/"))
    return path


@pytest.fixture
def folders(models, tmp_path) -> tuple[Path, Path]:
    """Returns folders of a target and a draft with as many rows as pieces, for tests to put tokenizers into."""
    for name in ("target", "draft"):
        shutil.copytree(models[340], tmp_path / name)
    return tmp_path / "target", tmp_path / "draft"


@pytest.fixture(scope="module")
def vocabulary(models) -> Path:
    return models[340].parent / "vocabulary.model"


def test_a_pair_is_loaded_from_two_checkpoints_and_a_vocabulary(models, vocabulary):
    pair = sc.Pair.load(target=models[340], draft=models[340], vocabulary=vocabulary, max_prompt_length=40, name="two")
    assert (pair.name, pair.max_prompt_length, pair.encoder_decoder) == ("two", 40, True)
    assert pair.vocabulary == load.Vocabulary(vocabulary)


def test_a_pair_is_loaded_in_the_requested_dtype():
    pair = sc.load_pair("tatoeba_en_de", dtype="bfloat16")
    kinds = {leaf.dtype.name for bound in (pair.target, pair.draft) for leaf in jax.tree.leaves(bound.params)}
    assert kinds == {"bfloat16"} and pair.target.model.config.dtype == "float32"  # A CPU computes in float32.
    assert pair.vocabulary.vocab_size == pair.target.model.config.vocab_size == pair.draft.model.vocab_size
    assert pair.head is None  # The shipped head belongs to the float32 draft.
    with pytest.raises(ValueError, match="'tatoeba_en_de' has no acceptance head, .* one dtype only"):
        sc.decode(pair, ["Hello."], method="specdecpp", stop_threshold=0.5)


def test_a_pair_loads_the_head_in_its_folder_unless_it_belongs_to_another_draft(tmp_path):
    pair = sc.load_pair(tiny_pair.write(tmp_path))
    head_files.save(tmp_path / "acceptance_head.msgpack", head_for(pair))
    assert sc.load_pair(tmp_path).head.card.pair == tmp_path.name
    stale = head_for(pair)
    stale = dataclasses.replace(stale, card=dataclasses.replace(stale.card, draft_fingerprint="f00"))
    head_files.save(tmp_path / "acceptance_head.msgpack", stale)
    with pytest.warns(
        UserWarning, match="acceptance_head.msgpack is ignored: the acceptance head belongs to the draft f00"
    ):
        assert sc.load_pair(tmp_path).head is None
    (tmp_path / "acceptance_head.msgpack").write_bytes(b"no head")
    with pytest.raises(checkpoints.CheckpointError, match="acceptance_head.msgpack"):
        sc.load_pair(tmp_path)


def test_rows_without_a_piece_count_as_padding(models, vocabulary):
    pair = sc.Pair.load(models[352], models[344], vocabulary)
    assert [bound.model.vocab_size for bound in (pair.target, pair.draft)] == [340, 340]
    assert pair.target.model.config.num_embeddings == 352
    message = r"the draft's vocabulary has 344 entries and the target's 352: .*number of ids: Pair.load\(vocab_size=…\)"
    with pytest.raises(ValueError, match=message):
        sc.Pair.load(models[352], models[344])  # Without a vocabulary the padding is unknown.


def test_the_number_of_real_ids_can_be_set_for_pairs_without_a_vocabulary(models):
    pair = sc.Pair.load(models[352], models[344], vocab_size=340)
    assert [bound.model.vocab_size for bound in (pair.target, pair.draft)] == [340, 340]
    wide = sc.Pair.load(models[352], models[340], vocab_size=350)
    assert [(b.model.vocab_size, b.model.config.missing_rows) for b in (wide.target, wide.draft)] == [
        (350, 0),
        (350, 10),
    ]
    for sizes, message in (
        ((344, 352), "vocab_size is 350, but .*344 has 344 rows"),
        ((352, 352), "has 352 rows, but"),
    ):
        with pytest.raises(ValueError, match=message):
            sc.Pair.load(*(models[rows] for rows in sizes), vocab_size=350 if sizes[0] < 350 else 5)


def test_the_padding_recorded_in_a_checkpoint_is_used(vocabulary, tmp_path):
    """Checks a case like T5's 32,100 real of 32,128 rows, while the sentencepiece file has 32,000 pieces."""
    path = _save(tmp_path / "model", T5Config(345, 352, 8, 1, 8, 8, 1, 1))
    assert sc.Pair.load(path, path, vocabulary).target.model.vocab_size == 345


def _added(folder: Path, names: list[str], **files) -> None:
    """Writes pieces 340 and on beside the vocabulary of a folder, which becomes its `tokenizer.model`."""
    for name, content in {"added_tokens": {n: 340 + i for i, n in enumerate(names)}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(params=[(344, 340), (352, 344), (340, 340)], ids=str)
def lacking(request, models, vocabulary, tmp_path) -> sc.Pair:
    """Returns a pair whose draft lacks rows for the target's added pieces, or whose models both lack some."""
    folders = [shutil.copytree(models[n], tmp_path / name) for n, name in zip(request.param, "td", strict=True)]
    shutil.copy(vocabulary, folders[0] / "tokenizer.model")
    _added(folders[0], ["<|a|>", "<|b|>", "[PAD]"])
    pair = sc.Pair.load(*folders)
    assert pair.target.model.vocab_size == min(343, request.param[0])
    return pair


def test_a_model_may_lack_rows_for_pieces_that_were_only_added(lacking, tmp_path):
    sizes = [b.model.vocab_size for b in (lacking.target, lacking.draft)]
    assert sizes == [lacking.target.model.vocab_size] * 2 and lacking.vocabulary.vocab_size == 343
    _added(tmp_path / "t", ["<|a|>", "[END]"], generation_config={"eos_token_id": [1, 341]})
    if sizes[0] == 340:
        # such a draft could not write the end token
        with pytest.raises(ValueError, match="has 342 pieces, more than the 340 rows"):
            sc.Pair.load(tmp_path / "t", tmp_path / "d")


@pytest.mark.laws
def test_a_draft_with_fewer_embedding_rows_changes_no_token(lacking):
    prompts, settings = [[9, lacking.target.model.vocab_size - 1, 5, 1]], {"temperature": 0.0, "max_new_tokens": 12}
    alone = sc.decode(lacking, prompts, method="autoregressive", **settings)
    assert np.array_equal(sc.decode(lacking, prompts, block_size=3, **settings).tokens, alone.tokens)


def test_pieces_in_the_spare_embedding_rows_of_a_t5_belong_to_the_vocabulary(vocabulary, tmp_path):
    """Checks a case like "{" and "}" added as 32,100 and 32,101 of T5's 32,128 rows (transformers#14727)."""
    path = _save(tmp_path / "model", T5Config(341, 352, 8, 1, 8, 8, 1, 1))
    shutil.copy(vocabulary, path / "tokenizer.model")
    _added(path, ["{", "}", "\n"])
    pair = sc.Pair.load(path, path)
    assert pair.target.model.vocab_size == pair.draft.model.vocab_size == pair.vocabulary.vocab_size == 343
    assert pair.vocabulary.encode("{\n}") == [340, 342, 341]


def test_a_t5_with_embedding_rows_for_sentinels_has_sentinels(vocabulary, tmp_path):
    path = _save(tmp_path / "model", T5Config(464, 464, 8, 1, 8, 8, 1, 1))
    pair = sc.Pair.load(path, path, vocabulary)
    assert pair.vocabulary.vocab_size == pair.target.model.vocab_size == 440
    assert pair.vocabulary.encode("<extra_id_0>") == [439] and pair.vocabulary == load.Vocabulary(vocabulary)


def test_the_targets_stop_ids_end_outputs_in_whichever_folder_the_vocabulary_is(folders, vocabulary):
    (folders[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9, 999]}))
    (folders[1] / "generation_config.json").write_text(json.dumps({"eos_token_id": [8]}))
    pair = sc.Pair.load(*folders, vocabulary)
    assert pair.vocabulary.stop_ids == (1, 9) and pair.vocabulary == load.Vocabulary(vocabulary)
    assert pair.vocabulary.decode([20, 9, 20]) == pair.vocabulary.decode([20])
    assert checked_stop_ids(pair, None) == (1, 9)


@pytest.mark.parametrize("rows, message", [
    (300, "the text vocabulary has 340 pieces, more than the 300 rows of .*model"),
    (469, "has 469 rows, but the text vocabulary has only 340 pieces: 129 are too many for padding"),
])  # fmt: skip
def test_a_vocabulary_of_another_model_is_rejected_before_weights_are_read(
    tmp_path, vocabulary, models, monkeypatch, rows, message
):
    path = _save(tmp_path / "model", T5Config(rows, rows, 8, 1, 8, 8, 1, 1))
    monkeypatch.delattr(checkpoints, "load")
    with pytest.raises(ValueError, match=message):
        sc.Pair.load(models[344], path, vocabulary)


@pytest.mark.parametrize("sides", [(), (0,), (1,), (0, 1)])
def test_the_vocabulary_in_a_models_folder_is_used_and_a_pair_without_one_takes_ids(folders, vocabulary, sides):
    for side in sides:
        shutil.copy(vocabulary, folders[side] / "spiece.model")
    assert sc.Pair.load(*folders).vocabulary == (load.Vocabulary(vocabulary) if sides else None)


def _other(folder: Path) -> Path:
    """Writes a vocabulary with as many pieces, whose first piece after special and byte pieces differs."""
    texts = ["Some other words altogether, with zebras, quails and yaks. " * 3, *tokenizer_files.texts()[:60]]
    path = folder / "tokenizer.model"
    path.write_bytes(load.train(texts, 340))
    return path


def test_different_vocabularies_are_rejected_and_the_first_difference_is_named(folders, vocabulary):
    shutil.copy(vocabulary, folders[0] / "vocabulary.model")
    _other(folders[1])
    theirs = [load.load_vocabulary(folder).piece_table() for folder in folders]
    first = next(n for n, (piece, draft_piece) in enumerate(zip(*theirs, strict=True)) if piece != draft_piece)
    expected = f"the vocabularies differ: id {first} is {theirs[0][first]!r} in .*target.* and {theirs[1][first]!r} in"
    with pytest.raises(ValueError, match=expected):
        sc.Pair.load(*folders)


@pytest.mark.parametrize("side", [0, 1])
def test_a_given_vocabulary_is_compared_with_those_in_the_models_folders(folders, vocabulary, side):
    path = _other(folders[side])
    with pytest.raises(ValueError, match=f"the vocabularies differ: id .* in {vocabulary} and .* in {path}"):
        sc.Pair.load(*folders, vocabulary)


def test_one_of_several_vocabularies_can_be_chosen_by_path(folders, tmp_path):
    for name in ("one.bin", "two.bin"):
        tokenizer_files.llama2c(folders[0] / name)
    with pytest.raises(ValueError, match=r"several tokenizers of llama2.c \(one.bin, two.bin\): give the path of the"):
        sc.Pair.load(*folders)
    named = folders[0] / "two.bin"
    assert sc.Pair.load(*folders, named).vocabulary == load.load_vocabulary(named)
    tokenizer_files.llama2c(folders[1] / "tok.bin")
    assert sc.Pair.load(*folders).vocabulary.path == folders[1] / "tok.bin"


def test_vocabularies_are_compared_before_models_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: pytest.fail("loaded"))
    for name, pieces in (("target", {"a": 0.0}), ("draft", {"b": 0.0})):
        (tmp_path / name).mkdir()
        tokenizer_files.llama2c(tmp_path / name / "tok.bin", pieces)
    with pytest.raises(ValueError, match="id 259 is 'a' in .* and 'b' in"):
        sc.Pair.load(tmp_path / "target", tmp_path / "draft")


def test_the_error_names_a_missing_checkpoint_or_vocabulary(models, tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        sc.Pair.load(models[340], tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no vocabulary found at .*absent: it must hold tokenizer.json"):
        sc.Pair.load(models[340], models[340], tmp_path / "absent")


def test_a_draft_can_be_stored_in_fewer_bits_than_the_target(tmp_path):
    """Checks that the target's weights and the output of a lossless rule do not change."""
    path = tiny_pair.write(tmp_path)
    plain, light = sc.load_pair(path), sc.load_pair(path, draft_dtype="int8")
    kinds = [[leaf.dtype.name for leaf in jax.tree.leaves(b.params)] for b in (light.target, light.draft)]
    assert "int8" not in kinds[0] and "int8" in kinds[1]
    assert of_model(light.target) == of_model(plain.target) and of_model(light.draft) != of_model(plain.draft)
    named = sc.Pair.load(tmp_path / "target", tmp_path / "draft", tmp_path, draft_dtype="int8")
    assert of_model(named.draft) == of_model(light.draft)
    source = ModelPair(name=str(path), draft_dtype="int8")
    assert of_model(load_source(source).draft) == of_model(light.draft)
    settings = {"temperature": 0.0, "max_new_tokens": 8}
    alone = sc.decode(plain, ["Hello.", "a b"], method="autoregressive", **settings)
    lossless = sc.decode(light, ["Hello.", "a b"], method="spec_decode", block_size=3, **settings)
    assert np.array_equal(lossless.tokens, alone.tokens)


def _kinds(bound):
    return {leaf.dtype.name for leaf in jax.tree.leaves(bound.params)}


def test_a_draft_that_is_stored_in_8_bits_stays_in_8_bits_and_keeps_its_values_and_head(tmp_path, monkeypatch):
    path = tiny_pair.write(tmp_path, draft_dtype="int8")
    wide = sc.load_pair(path, draft_dtype=None)
    head_files.save(path / head_files.FILE, head_for(wide))
    pair, wide = sc.load_pair(path), sc.load_pair(path, draft_dtype=None)
    assert "int8" in _kinds(pair.draft) and "int8" not in _kinds(pair.target) | _kinds(wide.draft)
    leaves = [jax.tree.leaves(loaded.draft.params, is_leaf=is_packed) for loaded in (pair, wide)]
    assert all(np.array_equal(*map(np.asarray, values)) for values in zip(*leaves, strict=True))
    assert of_model(pair.draft) == of_model(wide.draft) and pair.head is not None and wide.head is not None
    assert pair.fingerprint == sc.load_pair(path, draft_dtype="int8").fingerprint != wide.fingerprint
    # other values, other devices, or slower products: the draft is as the target
    assert _kinds(sc.load_pair(path, dtype="bfloat16").draft) == {"bfloat16"}
    with pytest.raises(ValueError, match="draft_dtype=5 is not one of stored, float32, .*; None gives the target's"):
        sc.load_pair(path, draft_dtype=5)
    monkeypatch.setattr(products, "available", lambda: False)
    assert _kinds(sc.load_pair(path).draft) == {"float32"}


def test_two_models_of_llama2c_write_stories():
    """Decodes with a pair of decoder-only models, one of which has a tokenizer in its folder."""
    try:
        parts = [directory.require("models", *name) for name in (("stories260K",), ("llama2xs", "model.bin"))]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pair = sc.Pair.load(*parts)
    assert pair.vocabulary.path.name == "tok512.bin" and pair.target.model.vocab_size == 512
    out = sc.decode(pair, "Once upon", method="autoregressive", max_new_tokens=8)  # One model compiles faster than two.
    assert out.texts[0].startswith(" a time")


def test_models_of_different_kinds_are_rejected(models):
    t5 = sc.Pair.load(models[340], models[340]).target
    for target, draft, message in (
        (t5, sc.FakeLM(340), "the target is an encoder-decoder and the draft a decoder-only model"),
        (sc.FakeLM(340), t5, "the target is a decoder-only model and the draft an encoder-decoder"),
    ):
        with pytest.raises(ValueError, match=f"{message}: .*; choose two models of the same kind"):
            sc.Pair(target=target, draft=draft)


# --- load_pair


def test_the_tokenizer_may_be_in_the_pairs_folder_or_in_the_models_folders(folders, vocabulary):
    pair_folder = folders[0].parent
    for name, part in (("tokenizer.model", ""), ("spiece.model", "draft")):
        path = shutil.copy(vocabulary, pair_folder / part / name)
        pair = sc.load_pair(pair_folder)
        assert pair.vocabulary.path == Path(path) and pair.name == pair_folder.name
        Path(path).unlink()


@pytest.mark.parametrize("part", ["vocabulary.model", "target", "draft"])
def test_the_error_names_a_missing_part_of_a_pair(folders, vocabulary, part):
    folder = folders[0].parent
    if part == "vocabulary.model":
        needs = "vocabulary.model, target/ and draft/"
    else:
        shutil.copy(vocabulary, folder / "vocabulary.model")
        shutil.rmtree(folder / part)
        needs = "vocabulary.model"
    with pytest.raises(ValueError, match=f"lacks {part!r}; it needs {needs}"):
        sc.load_pair(folder)


# --- fingerprints: records' keys and heads depend on them, so their values must never change


def test_a_pairs_fingerprint_does_not_change_between_versions(tmp_path):
    pair = text_pair.make(tmp_path)
    digest = hashlib.blake2b(digest_size=16)
    for bound in (pair.target, pair.draft):
        digest.update(repr(bound.model).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params):
            array = np.asarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(pair.vocabulary.fingerprint.encode())
    assert pair.fingerprint == digest.hexdigest()


def test_models_with_one_different_weight_have_different_fingerprints(tmp_path):
    pair = text_pair.make(tmp_path)
    prints = [of_model(bound) for bound in (pair.target, pair.draft)]
    assert len({*prints, pair.fingerprint}) == 3
    nudged = pair.draft.replace(params=jax.tree.map(lambda leaf: np.asarray(leaf).copy(), pair.draft.params))
    jax.tree.leaves(nudged.params)[0].flat[0] += 1
    assert of_model(nudged) != prints[1] == of_model(pair.draft)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: sc.load_pair(None), "None is not a path: give a text or a Path"),
    (lambda: sc.load_pair(5), "5 is not a path: give"),
    (lambda: sc.Pair.load(None, "b"), "target=None is not a path: give"),
    (lambda: sc.Pair.load("a", "b", 5), "5 is not a path"),
    (lambda: sc.Pair.load("a", "b", others={"b": None}), "b=None is not a path"),
    (lambda: sc.load_pair("tatoeba_en_de", others="exit:1"), r"others='exit:1' is not a dictionary: write others=\{"),
    (lambda: sc.load_pair("tatoeba_en_de", others={"draft": "exit:1"}), "'draft', but a model of the pair has"),
    (lambda: sc.Pair.load("a", "b", others={"autoregressive": "exit:1"}), "'autoregressive', but this is a method"),
    (lambda: sc.Pair.load("a", "b", others={"a.b": "exit:1"}), "'a.b', but a dot separates module.NAME"),
    (lambda: ModelPair(name="a", others={"a.b": "exit:1"}), "'a.b', but a dot separates"),
    (lambda: sc.Pair.load("a", "b", draft_dtype=5), "draft_dtype=5 is not one of stored, float32, "),
    (lambda: sc.Pair.load("a", "b", name=5), "name=5 is not a name: give the text that stored results call the pair"),
    (lambda: sc.Pair.load("a", "b", name=" "), "name=' ' is not a name"),
    (lambda: sc.Pair(sc.FakeLM(8), sc.FakeLM(8), name=None), "name=None is not a name"),
    (lambda: sc.Pair.load("a", "b", dtype="int4"), "dtype='int4' is not one of float32, "),
])  # fmt: skip
def test_wrong_arguments_are_named_before_anything_is_read(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize("length", [-1, 0, None, 1.5])
def test_the_limit_of_prompts_is_a_number_of_tokens(length):
    pair = conformance.tabular_pair(*conformance.tables(5, seed=4))
    with pytest.raises(ValueError, match=f"max_prompt_length={length} is not a whole number >= 1"):
        dataclasses.replace(pair, max_prompt_length=length)
