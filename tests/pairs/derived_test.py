"""Tests of derived drafts (exits, lookups, tables of bigrams) in every argument that accepts a draft's path."""

from types import SimpleNamespace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.early_exit import EarlyExit
from speccascade_jax.models.ngrams import Grams, count_bigrams
from speccascade_jax.pairs.derived import derive, save_bigrams
from speccascade_jax.storage import archives
from speccascade_jax.storage.errors import CheckpointError
from tests.support import tiny_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def table(folder):
    vocabulary = load.Vocabulary(folder / "vocabulary.model")
    save_bigrams(folder / "bigrams.npz", count_bigrams([[0, 5, 7, 1], [0, 5, 1]], vocabulary.vocab_size), vocabulary)
    return folder / "bigrams.npz"


def test_a_pair_accepts_names_of_derived_drafts(folder, table):
    words = {"zero": "exit:0", "copies": "lookup:3", "counts": f"bigrams:{table}", "both": f"max_gram:{table}"}
    pair = sc.load_pair(folder, others=words)
    drafts = {name: pair.model(name).model for name in words}
    assert drafts["zero"] == EarlyExit(pair.target.model, 0)
    size = pair.target.model.vocab_size
    assert drafts["copies"] == Grams(size, 3, True) and drafts["counts"] == Grams(size, 0, True)
    assert drafts["both"] == Grams(size, 8, True) and set(pair.model("both").params) == {"next", "logits"}


@pytest.mark.laws
def test_derived_drafts_work_in_one_stack_and_keep_the_greedy_output(folder, table):
    pair = sc.load_pair(folder, others={"zero": "exit:0", "both": f"max_gram:{table}"})
    level = sc.Level(model="zero", budget=3, block_size=2, drafters=("both",))
    settings = {"max_new_tokens": 12}
    out = sc.decode(pair, ["Tom is here."], drafters=(level,), **settings)
    alone = sc.decode(pair, ["Tom is here."], method="autoregressive", **settings)
    np.testing.assert_array_equal(out.tokens, alone.tokens)


def test_the_main_draft_may_be_derived(folder):
    pair = sc.Pair.load(folder / "target", "exit:1", folder / "vocabulary.model")
    assert pair.draft.model.layer == 1
    assert pair.draft.params["token_embedder"]["embedding"] is pair.target.params["token_embedder"]["embedding"]


def test_invalid_names_of_derived_drafts_are_rejected(folder, table):
    for word, error, message in (
        ("exit:7", ValueError, "no exit at layer 7"),
        ("exit:two", ValueError, "'exit:two' has no number: write exit:2"),
        ("lookup:²", ValueError, "'lookup:²' has no number: write lookup:2"),
        ("lookup:0", ValueError, "'lookup:0' must match 1 to 128 tokens: write lookup:8"),
        ("lookup:129", ValueError, "'lookup:129' must match 1 to 128 tokens"),
        ("bigrams:nowhere.npz", FileNotFoundError, "table of bigrams 'nowhere.npz' does not exist"),
    ):
        with pytest.raises(error, match=message):
            sc.load_pair(folder, others={"odd": word})
    with pytest.raises(ValueError, match="counted with another vocabulary"):
        derive(f"bigrams:{table}", sc.load_pair(folder).target, SimpleNamespace(fingerprint="another"))


@pytest.mark.laws
def test_a_model_may_have_more_ids_than_the_vocabulary_of_the_bigrams(tmp_path):
    """Checks models with more entries than the vocabulary has pieces, such as T5's 32,100 over 32,000 (sentinels)."""
    folder = tiny_pair.write(tmp_path, more=3)
    vocabulary = load.Vocabulary(folder / "vocabulary.model")
    path = folder / "bigrams.npz"
    save_bigrams(path, count_bigrams([[0, 5, 7, 1], [0, 5, 1]], vocabulary.vocab_size), vocabulary)
    pair = sc.load_pair(folder, others={"counts": f"bigrams:{path}", "both": f"max_gram:{path}"})
    assert pair.model("counts").model.vocab_size == vocabulary.vocab_size + 3 == pair.target.model.vocab_size
    settings = {"max_new_tokens": 8, "temperature": 0.0}
    alone = sc.decode(pair, ["Tom is here."], method="autoregressive", **settings)
    for name in ("counts", "both"):
        out = sc.decode(pair, ["Tom is here."], drafters=(name,), **settings)
        np.testing.assert_array_equal(out.tokens, alone.tokens)


def _damage(path, kind):
    content = path.read_bytes()
    if kind == "next":
        key, arrays = archives.read(path)
        archives.write(path, key, {"logits": arrays["logits"]})
        return
    flipped = bytes([*content[:200], content[200] ^ 1, *content[201:]])
    path.write_bytes({"cut": content[: len(content) // 2], "none": b"", "text": b"a b\n", "bit": flipped}[kind])


@pytest.mark.parametrize("kind", ["next", "cut", "none", "text", "bit"])
def test_the_error_for_a_damaged_table_is_one_line_with_its_name(folder, table, tmp_path, kind):
    path = tmp_path / "damaged.npz"
    path.write_bytes(table.read_bytes())
    _damage(path, kind)
    with pytest.raises(CheckpointError, match="experiments.count_bigrams|the pair's own vocabulary") as caught:
        sc.load_pair(folder, others={"odd": f"bigrams:{path}"})
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
