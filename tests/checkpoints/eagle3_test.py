"""Tests of the reader of EAGLE-3 heads: both formats, what a head takes from its target, and refusals."""

import numpy as np
import pytest

import speccascade_jax as sc
from experiments import describe
from speccascade_jax import checkpoints
from tests.support import eagle3_files as files
from tests.support import huggingface_files


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return files.write_target(tmp_path_factory.mktemp("eagle3") / "target")


def without(name, **changes):
    return {key: array for key, array in files.tensors().items() if key != name} | changes


def test_both_formats_give_the_same_head(target, tmp_path):
    """The authors' files name no layers: the defaults are the second, the middle and the last but two."""
    pairs = [
        sc.Pair.load(target, files.write(tmp_path / "ours")),
        sc.Pair.load(target, files.write(tmp_path / "theirs", files.authors_entries(), files.tensors("midlayer"))),
    ]
    heads = [pair.draft for pair in pairs]
    assert [head.model.reads for head in heads] == [files.LAYERS, (1, 2, 2)]
    assert [head.model.config.norm_before_residual for head in heads] == [True, False]
    assert all(head.model.config.target_ids == files.DRAFTED for head in heads)
    np.testing.assert_array_equal(*(head.params["decoder"]["fc"]["kernel"] for head in heads))
    assert pairs[0].fingerprint != pairs[1].fingerprint
    bound = checkpoints.load(tmp_path / "ours")
    checkpoints.save(tmp_path / "saved", *bound)
    assert sc.Pair.load(target, tmp_path / "saved").fingerprint == pairs[0].fingerprint


def test_a_head_without_an_embedding_uses_the_targets(target, tmp_path):
    wide = {"embed_tokens.weight", "t2d"}
    arrays = {name: array for name, array in files.tensors(width=files.TARGET.d_model).items() if name not in wide}
    pair = sc.Pair.load(target, files.write(tmp_path / "head", files.entries(hidden_size=files.TARGET.d_model), arrays))
    assert pair.draft.params["token_embedder"] is pair.target.params["token_embedder"]
    model, params = checkpoints.load(tmp_path / "head")
    head = sc.BoundModel(params=params, model=model)
    with pytest.raises(ValueError, match="the draft lacks token_embedder, which its target lends it: load both with"):
        sc.Pair(target=pair.target, draft=head)
    with pytest.raises(ValueError, match="the draft is a head that reads a decoder-only target, but the target is a F"):
        sc.Pair(target=sc.FakeLM(files.TARGET.num_embeddings), draft=head)


def test_a_layer_without_a_model_type_is_a_llamas(tmp_path):
    entries = files.entries()
    del entries["transformer_layer_config"]["model_type"]
    assert not checkpoints.load(files.write(tmp_path, entries))[0].config.qk_norm


def test_a_head_is_described(tmp_path, capsys):
    folder = files.write(tmp_path / "head")
    assert checkpoints.describe(folder).startswith("format: EAGLE-3 head, speculators\nmodel: Eagle3Config(target_ids=")
    assert describe.main([str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "an EAGLE-3 head, which drafts 48 of a target's 97 tokens, from states of width 32 after layers" in shown


@pytest.mark.parametrize(("entries", "tensors", "message"), [
    ({}, without("d2t"), "the draft vocabulary has 48 tokens, but no tensor d2t maps them to the target's ids"),
    ({}, without("d2t", d2t=np.full(48, 90)), "maps to 48 different ids from 90 to 137: .* ids from 0 to 96"),
    ({}, without("d2t", d2t=-np.arange(48)), "of 48 tokens maps to 1 different ids from 0 to 0"),
    ({}, without("d2t", d2t=np.ones(48, np.float32)), r"d2t is float32 \[48\], but must be 48 integers"),
    ({"draft_vocab_size": 200}, None, r"d2t is int64 \[48\], but must be 200 integers"),
    ({}, without("fc.weight"), r"1 of 14 arrays are missing \(fc.weight\)"),
    ({}, without("", more=np.ones(3, np.float32)), r"no place for 1 array \(more\)"),
    ({"target_hidden_size": 16}, None, r"fc.weight has shape \[16, 96\], but the configuration needs \[16, 48\]"),
    ({"target_hidden_size": 48}, without("fc.weight", **{"fc.weight": np.ones((16, 144), np.float32)}),
     "reads hidden states of width 48, but the target's have width 32: choose the head"),
    ({"vocab_size": 120}, without("", **{"embed_tokens.weight": np.ones((120, 16), np.float32)}),
     "belongs to a target with 120 rows of embeddings, but the target has 97: choose the head"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, None, r"layers \(1, 2, 9\) of .* the target has layers 0 to 4"),
    ({"eagle_aux_hidden_state_layer_ids": "2"}, None, "layer_ids is '2': give a list of layers"),
    ({"speculators_model_type": "dflash"}, None, "speculators_model_type is 'dflash', but only 'eagle3' is supported"),
    ({"model_type": "gemma2"}, None, "layer_config.model_type is 'gemma2', but only 'llama' or 'qwen3' is supported"),
    ({}, without("embed_tokens.weight"), "stores no embedding, and its width 16 is not the target's 32"),
])  # fmt: skip
def test_heads_that_cannot_be_used_are_refused(target, tmp_path, entries, tensors, message):
    folder = files.write(tmp_path / "head", files.entries(**entries), tensors)
    with pytest.raises(ValueError, match=message) as error:
        sc.Pair.load(target, folder)
    assert "\n" not in str(error.value)


def test_a_target_that_is_no_decoder_is_refused(tmp_path):
    kind = "t5_1.1"
    arrays = huggingface_files.tensors(kind, huggingface_files.random_parameters(kind))
    target = huggingface_files.write(tmp_path / "t5", huggingface_files.entries(kind), arrays)
    with pytest.raises(ValueError, match="a decoder-only target, but the target is a T5: choose the head's"):
        sc.Pair.load(target, files.write(tmp_path / "head"))
