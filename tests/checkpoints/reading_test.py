"""Tests of reading checkpoints: detection of formats, steps, vocabulary, shapes and values."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from speccascade_jax.checkpoints import CheckpointError, describe, load, reading, save

KEY = "decoder/layers_1/mlp/wo/kernel"


def test_unrecognised_paths_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: give a directory written by save"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"looked for config.json and params/.*; found nothing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"name": "something else"}')
    (tmp_path / "model.npz").write_text("")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: .*found config.json, model.npz"):
        load(tmp_path)


def test_temporary_directories_are_refused(t5x, arrays):
    path = t5x(arrays)
    writing = path.rename(path.with_name("checkpoint_7.tmp-1700000000"))
    with pytest.raises(CheckpointError, match=r"tmp-1700000000 is being written .*wait until it is renamed"):
        load(writing)
    with pytest.raises(CheckpointError, match=r"found only checkpoint_7.tmp-1700000000, still being written"):
        load(writing.parent)


def test_the_step_with_the_highest_number_is_loaded(t5x, arrays):
    t5x(arrays, step=900)
    t5x({n: a + 1 for n, a in arrays.items()}, step=1000)
    parent = t5x({n: a + 2 for n, a in arrays.items()}, step=20).parent
    _, params = load(parent)
    np.testing.assert_array_equal(params["token_embedder"]["embedding"], arrays["token_embedder/embedding"] + 1)


def test_an_incomplete_newest_step_is_skipped_with_a_warning(t5x, arrays):
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
    with pytest.raises(ValueError, match=r"vocab_size=25 must be between 1 and 24, .* in .*checkpoint_7"):
        load(path, vocab_size=25)


def put(name, value):
    """Returns a change of a T5's arrays that replaces one of them."""
    return lambda arrays: arrays | {name: value}


def drop(begin):
    return lambda arrays: {name: array for name, array in arrays.items() if not name.startswith(begin)}


def spoil(value):
    def change(arrays):
        arrays[KEY][2, 3] = value
        return arrays

    return change


BIAS, QUERY = "encoder/relpos_bias/rel_embedding", "encoder/layers_0/attention/query/kernel"
NO_MODELS = [
    *((spoil(v), rf"checkpoint_7: values of 1 array are not finite \({KEY}: 1 of 80 values") for v in (np.nan, np.inf)),
    (put(KEY, np.zeros((11, 8))), rf"checkpoint_7: 1 array of a wrong shape .*{KEY} is \[11, 8\], but .*\[10, 8\]"),
    (put(BIAS, np.zeros((5, 32))), r"attention/query/kernel has 6 columns, not a multiple of the 5 heads"),
    (put(QUERY, np.zeros((8, 2, 3))), r"query/kernel has shape \[8, 2, 3\], but a T5 has a matrix there"),
    (drop("encoder"), r"unknown architecture: a T5 has token_embedder.*the arrays are decoder/"),
    (put("decoder/adapter/bias", np.zeros(3)), r"unknown architecture: .*no place for the arrays decoder/adapter/bias"),
    *(
        (drop(name), rf"checkpoint_7 is incomplete: 1 of \d+ arrays are missing \({name}\)")
        for name in (KEY, BIAS, "encoder/layers_1/mlp/wi_0/kernel")
    ),
]


@pytest.mark.parametrize(("change", "said"), NO_MODELS)
def test_arrays_that_do_not_form_a_model_are_named(t5x, arrays, change, said):
    changed = {name: array.astype(np.float32) for name, array in change(arrays).items()}
    with pytest.raises(CheckpointError, match=said):
        load(t5x(changed))


def test_describe_lists_format_model_and_size(t5x, arrays, tmp_path, model, params):
    count = sum(a.size for a in arrays.values())
    text = describe(t5x(arrays))
    assert "T5X native, version 3" in text
    assert f"parameters: {count:,} in {len(arrays)} arrays, float32" in text
    save(tmp_path / "mine", model, params, "bfloat16")
    text = describe(tmp_path / "mine")
    assert "format: speccascade_jax, format 1" in text
    assert "bfloat16" in text
    assert "fingerprint: " in text


def test_a_checkpoint_too_large_for_a_device_is_refused(t5x, arrays):
    """Compares a device's memory with its share of the parameters, before an array is read."""
    stored = reading.find(t5x(arrays))
    size = 4 * sum(array.size for array in arrays.values())
    reading._check_room(stored, "float32", (1, 1), size)
    reading._check_room(stored, "bfloat16", (1, 1), size // 2)
    reading._check_room(stored, "float32", (1, 2), int(0.6 * size))
    reading._check_room(stored, "float32", (1, 1), None)
    with pytest.raises(
        ValueError, match=r"needs .* GB on each device of mesh=\(2, 1\), but a device has only .*: use more devices"
    ):
        reading._check_room(stored, "float32", (2, 1), int(0.6 * size))


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


@pytest.mark.parametrize(("given", "said"), [
    ({"dtype": "int4"}, r"dtype is 'int4': choose one of float32, bfloat16"),
    ({"dtype": "int8"}, r"dtype is 'int8', which is for decoding only: load it with prepared=True"),
    ({"mesh": MESH}, r"mesh=\(1, 1\) needs prepared parameters in 16 or 32 bits: use int8"),
    ({"mesh": MESH, "dtype": "int8", "prepared": True}, r"mesh=\(1, 1\) needs prepared parameters in 16 or 32 bits"),
])  # fmt: skip
def test_unsupported_dtypes_and_meshes_are_refused(t5x, arrays, given, said):
    with pytest.raises(ValueError, match=said):
        load(t5x(arrays), **given)
