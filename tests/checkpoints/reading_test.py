"""Telling formats apart, steps, vocabulary, shapes and values."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from speccascade_jax.checkpoints import CheckpointError, describe, load, reading, save

KEY = "decoder/layers_1/mlp/wo/kernel"


def test_path_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: give a directory written by save"):
        load(tmp_path / "nowhere")


def test_nothing_recognisable(tmp_path):
    with pytest.raises(CheckpointError, match=r"looked for config.json and params/.*; found nothing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"name": "something else"}')
    (tmp_path / "model.npz").write_text("")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: .*found config.json, model.npz"):
        load(tmp_path)


def test_temporary_directories(t5x, arrays):
    path = t5x(arrays)
    writing = path.rename(path.with_name("checkpoint_7.tmp-1700000000"))
    with pytest.raises(CheckpointError, match=r"tmp-1700000000 is being written .*wait until it is renamed"):
        load(writing)
    with pytest.raises(CheckpointError, match=r"found only checkpoint_7.tmp-1700000000, still being written"):
        load(writing.parent)


def test_newest_step_by_number(t5x, arrays):
    t5x(arrays, step=900)
    t5x({n: a + 1 for n, a in arrays.items()}, step=1000)
    parent = t5x({n: a + 2 for n, a in arrays.items()}, step=20).parent
    _, params = load(parent)
    np.testing.assert_array_equal(params["token_embedder"]["embedding"], arrays["token_embedder/embedding"] + 1)


def test_incomplete_newest_step_is_passed_over_with_a_warning(t5x, arrays):
    t5x(arrays, step=10)
    newest = t5x({n: a + 1 for n, a in arrays.items()}, step=20)
    shutil.rmtree(newest / "target.decoder.layers_1.mlp.wo.kernel")
    with pytest.warns(UserWarning, match=rf"checkpoint_20 is incomplete.*{KEY}.*; checkpoint_10 is loaded instead"):
        _, params = load(newest.parent)
    np.testing.assert_array_equal(params["token_embedder"]["embedding"], arrays["token_embedder/embedding"])
    shutil.rmtree(newest.parent / "checkpoint_10")
    with pytest.raises(CheckpointError, match=r"checkpoint_20 is incomplete"):
        load(newest.parent)


def test_vocabulary_can_be_overridden(t5x, arrays, model):
    path = t5x(arrays)
    loaded, _ = load(path, vocab_size=20)
    assert loaded.config == dataclasses.replace(model.config, vocab_size=20)
    with pytest.raises(ValueError, match=r"vocab_size is 25, but .*checkpoint_7 has 24 embedding rows"):
        load(path, vocab_size=25)


def test_bad_dtype(t5x, arrays):
    path = t5x(arrays)
    with pytest.raises(ValueError, match=r"dtype is 'int4': choose one of float32, bfloat16"):
        load(path, dtype="int4")
    with pytest.raises(ValueError, match=r"dtype is 'int8', which is a form for decoding: load it with prepared=True"):
        load(path, dtype="int8")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(t5x, arrays, value):
    arrays[KEY][2, 3] = value
    with pytest.raises(
        CheckpointError, match=rf"checkpoint_7: values of 1 array are not finite \({KEY}: 1 of 80 values"
    ):
        load(t5x(arrays))


def test_wrong_shape_is_named(t5x, arrays):
    arrays[KEY] = np.zeros((11, 8), np.float32)
    with pytest.raises(
        CheckpointError, match=rf"checkpoint_7: 1 array of a wrong shape .*{KEY} is \[11, 8\], but .*\[10, 8\]"
    ):
        load(t5x(arrays))


def test_heads_that_do_not_divide(t5x, arrays):
    arrays["encoder/relpos_bias/rel_embedding"] = np.zeros((5, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"attention/query/kernel has 6 columns, which the 5 heads"):
        load(t5x(arrays))


def test_array_that_is_not_a_matrix(t5x, arrays):
    arrays["encoder/layers_0/attention/query/kernel"] = np.zeros((8, 2, 3), np.float32)
    with pytest.raises(CheckpointError, match=r"query/kernel has shape \[8, 2, 3\], but a T5 has a matrix there"):
        load(t5x(arrays))


@pytest.mark.parametrize("name", [KEY, "encoder/relpos_bias/rel_embedding", "encoder/layers_1/mlp/wi_0/kernel"])
def test_tree_without_an_array(t5x, arrays, name):
    del arrays[name]
    with pytest.raises(CheckpointError, match=rf"checkpoint_7 is incomplete: 1 of \d+ arrays are missing \({name}\)"):
        load(t5x(arrays))


def test_unknown_architectures(t5x, arrays):
    decoder = {n: a for n, a in arrays.items() if not n.startswith("encoder")}
    with pytest.raises(CheckpointError, match=r"unknown architecture: a T5 has token_embedder.*here are decoder/"):
        load(t5x(decoder, step=1))
    with pytest.raises(CheckpointError, match=r"unknown architecture: .*no place for the arrays decoder/adapter/bias"):
        load(t5x(arrays | {"decoder/adapter/bias": np.zeros(3, np.float32)}, step=2))


def test_describe(t5x, arrays, tmp_path, model, params):
    count = sum(a.size for a in arrays.values())
    text = describe(t5x(arrays))
    assert "T5X native, version 3" in text
    assert f"parameters: {count:,} in {len(arrays)} arrays, float32" in text
    save(tmp_path / "mine", model, params, "bfloat16")
    text = describe(tmp_path / "mine")
    assert "format: speccascade_jax, format 1" in text
    assert "bfloat16" in text
    assert "fingerprint: " in text


def test_a_checkpoint_that_a_device_has_no_room_for_is_refused(t5x, arrays):
    """By what one device holds of it, before an array is read."""
    stored = reading.find(t5x(arrays))
    size = 4 * sum(array.size for array in arrays.values())
    reading._check_room(stored, "float32", (1, 1), size)
    reading._check_room(stored, "bfloat16", (1, 1), size // 2)
    reading._check_room(stored, "float32", (1, 2), int(0.6 * size))
    reading._check_room(stored, "float32", (1, 1), None)
    with pytest.raises(
        ValueError, match=r"takes .* GB on each device of mesh=\(2, 1\), which has .*: spread it over more"
    ):
        reading._check_room(stored, "float32", (2, 1), int(0.6 * size))


@pytest.mark.parametrize("given", [{"dtype": "int8", "prepared": True}, {}])
def test_a_mesh_takes_prepared_parameters_in_16_or_32_bits(given, t5x, arrays):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    with pytest.raises(ValueError, match=r"mesh=\(1, 1\) takes prepared parameters in 16 or 32 bits: leave int8"):
        load(t5x(arrays), mesh=mesh, **given)
