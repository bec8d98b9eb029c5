"""Tests of reading Gemma 4's assistants: names, sizes and ids, and refusals in one line."""

import dataclasses

import numpy as np
import pytest

import speccascade_jax as sc
from experiments import describe
from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import converting, load, native, reading
from speccascade_jax.models.gemma4_assistant import Assistant
from speccascade_jax.storage.errors import CheckpointError
from tests.support import gemma4_assistant_files as files
from tests.support import huggingface_files

ORDER = "masked_embedding.token_ordering"


def test_an_assistant_is_read_in_every_dtype(tmp_path, capsys):
    """Compares values with the stored ones; ids stay whole numbers, and all else is cast."""
    stored = files.tensors()
    folder = files.write(tmp_path / "assistant", arrays=stored)
    model, params = load(folder)
    assert isinstance(model, Assistant) and model.config.kinds == ("local", "global")
    assert [model.config.layer(n)[:2] for n in (0, 1)] == [files.TARGET.layer(n)[:2] for n in (0, 1)]
    np.testing.assert_array_equal(params["decoder"]["clusters"]["ids"], stored[ORDER])
    pre, first = params["decoder"]["pre_projection"]["kernel"], params["decoder"]["layers_0"]
    np.testing.assert_array_equal(pre, stored["pre_projection.weight"].T)
    np.testing.assert_array_equal(first["mlp"]["wo"]["kernel"], stored["model.layers.0.mlp.down_proj.weight"].T)
    halves = load(folder, dtype="bfloat16", prepared=True)[1]
    assert halves["decoder"]["clusters"]["ids"].dtype == np.int32
    checkpoints.save(tmp_path / "saved", model, params)
    again, same = load(tmp_path / "saved")
    assert again == model
    np.testing.assert_array_equal(same["decoder"]["clusters"]["ids"], stored[ORDER])
    assert describe.main([str(folder)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a Gemma 4 assistant, which draws from 10 of 97 tokens and has no cache" in printed


def test_ids_stay_whole_numbers_in_every_saved_dtype(tmp_path):
    """Uses 600 tokens, because bfloat16 has no numbers for most ids above 256."""
    rng, rows = np.random.default_rng(0), 600
    names = ("model.embed_tokens.weight", "masked_embedding.centroids.weight")
    arrays = {name: rng.normal(size=(rows, files.WIDTH)).astype(np.float32) for name in names}
    arrays = files.tensors() | arrays | {ORDER: rng.permutation(rows)}
    folder = files.write(tmp_path / "a", files.entries({"vocab_size": rows}, num_centroids=rows), arrays)
    model, params = load(folder)
    for dtype in native.SAVED_DTYPES:
        saved, converted = tmp_path / dtype, tmp_path / f"{dtype}-converted"
        checkpoints.save(saved, model, params, dtype)
        stored = reading.find(saved)
        assert converting.default_dtype(stored) == ("float32" if dtype == "int8" else dtype)
        converting.convert(stored, converted, dtype)
        for path in (saved, converted):
            ids = load(path, dtype="bfloat16")[1]["decoder"]["clusters"]["ids"]
            assert ids.dtype == np.int32
            np.testing.assert_array_equal(ids, arrays[ORDER])
    params["decoder"]["clusters"]["ids"] = np.zeros(rows, np.int32)
    checkpoints.save(tmp_path / "twice", model, params)
    with pytest.raises(CheckpointError, match="decoder/clusters/ids is int32 .600., but must hold each of the 600 ids"):
        load(tmp_path / "twice")


@pytest.mark.parametrize(("text", "changes", "said"), [
    ((), {"tie_word_embeddings": False}, "tie_word_embeddings is False, but only True"),
    ((), {"num_centroids": 5}, "num_centroids is 5, but must divide the 97 entries"),
    ((), {"centroid_intermediate_top_k": 98}, "active_centroids is 98: give a number from 1 to 97"),
    ((), {"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama', but only 'gemma4_text'"),
    ({"enable_moe_block": True}, {}, "text_config.enable_moe_block is True, but only False"),
    ({"num_kv_shared_layers": 1}, {}, "num_kv_shared_layers is 1, but only 2 or 0"),
    ({"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97}, {}, "size_per_layer_input is 6: give 0"),
])  # fmt: skip
def test_unsupported_options_are_refused(tmp_path, text, changes, said):
    with pytest.raises(CheckpointError, match=said):
        load(files.write(tmp_path, files.entries(text, **changes)))


@pytest.mark.parametrize(("change", "said"), [
    ({ORDER: np.zeros(97, np.int64)}, "token_ordering is int64 .97., but must hold each of the 97 ids"),
    ({ORDER: None}, "token_ordering"),
    ({"masked_embedding.centroids.weight": None}, "masked_embedding.centroids.weight"),
    ({"model.layers.1.self_attn.q_proj.weight": np.zeros((4, 12), np.float32)}, r"q_proj.weight has shape \[4, 12\]"),
])  # fmt: skip
def test_wrong_arrays_are_refused(tmp_path, change, said):
    arrays = {name: array for name, array in (files.tensors() | change).items() if array is not None}
    with pytest.raises(CheckpointError, match=said):
        load(files.write(tmp_path, arrays=arrays))


def test_an_assistant_of_another_target_is_refused(tmp_path):
    """Expects the refusal before weights are read: those of the assistants' folders do not fit their configurations."""
    target = files.write_target(tmp_path / "target")
    other = huggingface_files.write(
        tmp_path / "llama", huggingface_files.entries("llama2"),
        huggingface_files.tensors("llama2", huggingface_files.random_parameters("llama2")),
    )  # fmt: skip
    with pytest.raises(ValueError, match="reads the cache of a Gemma 4, but the target is another model: choose"):
        sc.Pair.load(other, files.write(tmp_path / "assistant"))
    model, params = load(tmp_path / "assistant")
    bound, large = sc.BoundModel(params=params, model=model), load(target)
    wide = sc.BoundModel(params=large[1], model=large[0])
    for change, said in (
        ({"target_width": 31}, "reads hidden states of width 31, but the target's have width 32"),
        ({"head_dim": 4}, "local layers read 2 key-value heads of width 4, but the target's have 2 of width 8"),
        ({"window": 7}, "has a window of 7 positions, but the target's is 6"),
    ):
        changed = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
        with pytest.raises(ValueError, match=said):
            changed.attached(params, wide)
    with pytest.raises(ValueError, match="drafts only for the target that it was loaded with"):
        sc.Pair(target=wide, draft=bound)
