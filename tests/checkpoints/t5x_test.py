"""T5X's formats: goldens written by T5X, variants written here, damage."""

import dataclasses
import os
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load
from speccascade_jax.models.t5 import teacher_forced_logits

KEY = "decoder/layers_1/mlp/wo/kernel"
FOLDER = "target.decoder.layers_1.mlp.wo.kernel"


def same(params, arrays) -> bool:
    flat = flatten_dict(params, sep="/")
    return flat.keys() == arrays.keys() and all(np.array_equal(flat[n], arrays[n]) for n in arrays)


def writable_copy(source, target):
    shutil.copytree(source, target)
    for folder, _, files in os.walk(target):
        for name in [folder, *(os.path.join(folder, file) for file in files)]:
            os.chmod(name, 0o755)
    return target


@pytest.mark.parametrize("name", ["untied_2enc_3dec", "tied_1enc_2dec", "orbax_untied_2enc_3dec"])
def test_golden_logits(golden, name):
    folder = golden("t5x_golden", name)
    model, params = load(folder)
    expected = np.load(golden("t5x_golden", name.removeprefix("orbax_")) / "golden.npz")
    logits = teacher_forced_logits(model, params, expected["encoder_tokens"], expected["decoder_input_tokens"])
    # 1.09e-5 where the suite's compiler adds in another order; without its flags below 1e-5
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=2e-5)
    assert model.config.tied == name.startswith("tied")


def test_orbax_and_native_hold_the_same_parameters(golden):
    model, params = load(golden("t5x_golden", "untied_2enc_3dec", "checkpoint_1000"))
    other, other_params = load(golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000"))
    assert model == other
    assert same(params, flatten_dict(other_params, sep="/"))


def test_orbax_reads_the_same_as_its_own_library(golden):
    state = golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000", "state")
    whole = ocp.PyTreeCheckpointHandler()
    item = whole.metadata(state).tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    theirs = whole.restore(state, args=ocp.args.PyTreeRestore(restore_args=args))["target"]
    assert same(load(state)[1], flatten_dict(theirs, sep="/"))


def test_single_file_has_t5s_vocabulary(golden):
    model, params = load(golden("models", "t5x_tiny", "test_t5_tiny.checkpoint_0"))
    assert (model.vocab_size, model.config.num_embeddings) == (32100, 32128)
    assert params["token_embedder"]["embedding"].shape == (32128, 8)


def test_configuration_is_inferred(t5x, arrays, model):
    loaded, params = load(t5x(arrays))
    assert loaded == model
    assert same(params, arrays)
    assert params["token_embedder"]["embedding"].dtype == jnp.float32


def test_t5_1_0_without_gates_and_tied(t5x, arrays, model):
    renamed = {n.replace("wi_0", "wi"): a for n, a in arrays.items() if "wi_1" not in n and "logits_dense" not in n}
    loaded, params = load(t5x(renamed))
    assert loaded.config == dataclasses.replace(model.config, gated=False, tied=True)
    assert same(params, renamed)


@pytest.mark.parametrize("driver", ["gfile", "gcs"])
def test_absolute_paths_of_the_writer(t5x, arrays, driver):
    def pointer(folder, array):
        store = {"driver": driver, "path": f"/somewhere/else/run/checkpoint_7/{folder}/"}
        return {"driver": "zarr", "dtype": "float32", "kvstore": store}

    assert same(load(t5x(arrays, pointer=pointer))[1], arrays)


def test_very_old_pointers_and_layout(t5x, arrays):
    def pointer(folder, array):
        return {"driver": "zarr", "dtype": "float32", "kvstore": {"driver": "file"}, "path": folder}

    assert same(load(t5x(arrays, pointer=pointer, at_top=True))[1], arrays)


def test_version_2_stores_bfloat16_as_uint16(t5x, arrays):
    rounded = {n: a.astype(jnp.bfloat16) for n, a in arrays.items()}
    path = t5x({n: a.view(np.uint16) for n, a in rounded.items()}, version=2)
    assert same(load(path)[1], {n: a.astype(np.float32) for n, a in rounded.items()})
    kept = load(path, dtype=None)[1]
    assert kept["token_embedder"]["embedding"].dtype == jnp.bfloat16
    assert "bfloat16" in describe(path)


def test_bfloat16_and_inline_arrays(t5x, arrays):
    rounded = {n: a.astype(jnp.bfloat16) for n, a in arrays.items()}
    inline = [n for n in arrays if n.endswith("scale")]
    assert same(load(t5x(rounded, inline=inline), dtype="bfloat16")[1], rounded)


def scanned(arrays, inner: str, bias_noise: float = 0.0):
    """Layers stacked at axis 1 below `<stack>/<inner>`, relative biases repeated in each layer."""
    result, stacks = {}, {"encoder": 2, "decoder": 3}
    for name, array in arrays.items():
        stack, _, rest = name.partition("/")
        if "layers_0/" in name:
            per_layer = [arrays[name.replace("layers_0", f"layers_{i}")] for i in range(stacks[stack])]
            result[name.replace("layers_0", inner or stack)] = np.stack(per_layer, axis=1)
        elif "relpos_bias" in name:
            repeated = np.stack([array + bias_noise * i for i in range(stacks[stack])], axis=1)
            result[f"{stack}/{inner or stack}/{rest}"] = repeated
        elif "layers_" not in name:
            result[name] = array
    return result


@pytest.mark.parametrize("inner", ["", "layers"])
def test_scanned_layers_are_unstacked(t5x, arrays, model, inner):
    loaded, params = load(t5x(scanned(arrays, inner)))
    assert loaded == model
    assert same(params, arrays)


def test_relative_biases_by_layer_are_refused(t5x, arrays):
    with pytest.raises(CheckpointError, match=r"unknown architecture: .*rel_embedding holds different relative biases"):
        load(t5x(scanned(arrays, "", bias_noise=0.1)))


def test_missing_folders_are_named(t5x, arrays):
    path = t5x(arrays)
    shutil.rmtree(path / FOLDER)
    shutil.rmtree(path / "target.token_embedder.embedding")
    with pytest.raises(CheckpointError, match=rf"checkpoint_7 is incomplete: 2 of \d+ .*{KEY}, token_embedder.*copy"):
        load(path)


def test_missing_chunk_is_not_read_as_zero(t5x, arrays):
    path = t5x(arrays)
    (path / FOLDER / "0.0").unlink()
    with pytest.raises(CheckpointError, match=rf"incomplete: 1 of .*{KEY}"):
        load(path)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:20], lambda b: b"", lambda b: b"garbage" + b, lambda b: b[:40] + b"x" + b[41:]]
)
def test_damaged_chunk_names_the_array(t5x, arrays, damage):
    path = t5x(arrays)
    chunk = path / FOLDER / "0.0"
    chunk.write_bytes(damage(chunk.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"checkpoint_7 is damaged: 1 array can't be read .*{KEY}.*copy"):
        load(path)


def test_damaged_array_metadata(t5x, arrays):
    path = t5x(arrays)
    (path / FOLDER / ".zarray").write_text("{")
    with pytest.raises(CheckpointError, match=rf"damaged: .*{KEY}"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"\xc1\xc1", b"\x85abc"])
def test_damaged_msgpack(t5x, arrays, content):
    path = t5x(arrays)
    (path / "checkpoint").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint is not a readable msgpack file"):
        load(path)


def test_other_msgpack(tmp_path):
    (tmp_path / "file").write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(CheckpointError, match=r"no parameters under optimizer/target \(found \['a'\]\)"):
        load(tmp_path / "file")


def test_arrays_of_another_checkpoint(t5x, arrays):
    def pointer(folder, array):
        return {"driver": "zarr", "kvstore": {"driver": "file", "path": folder}, "metadata": {"shape": [3, 3]}}

    with pytest.raises(CheckpointError, match=r"has shape .* but the msgpack file announces \[3, 3\]"):
        load(t5x(arrays, pointer=pointer))


def test_orbax_damage_names_the_arrays(golden, tmp_path):
    source = golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000")
    path = writable_copy(source, tmp_path / "checkpoint_1000")
    largest = max((path / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"checkpoint_1000 is damaged: \d+ arrays .*decoder/layers_2.*copy"):
        load(path)


def test_orbax_without_its_manifest_or_metadata(golden, tmp_path):
    source = golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000")
    path = writable_copy(source, tmp_path / "checkpoint_1000")
    (path / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: 66 of 66 arrays are missing"):
        load(path)
    (path / "state" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=r"_METADATA is damaged"):
        load(path)
    (path / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: its _METADATA file is missing"):
        load(path)


@pytest.mark.parametrize(
    "sizes",
    [
        {"shape": [10, 2 * 10**9]},
        {"shape": [10**12, 8], "chunks": [10, 8]},
        {"chunks": [10**10, 8]},
    ],
)
def test_the_shape_of_an_array_is_not_believed(t5x, arrays, edited, sizes):
    path = t5x(arrays, pointer=lambda folder, array: {"driver": "zarr", "kvstore": {"path": folder}})
    edited(path / FOLDER / ".zarray", lambda r: r.update(sizes))
    with pytest.raises(CheckpointError, match=r"checkpoint_7 is damaged \([\d,]+ bytes unpack to more than"):
        load(path)


def test_layers_of_a_stack_are_not_believed(t5x, arrays):
    stacked = arrays | {"decoder/decoder/mlp/wo/kernel": np.zeros((2, 20_001, 1), np.float32)}
    with pytest.raises(CheckpointError, match=r"20,001 layers are more than the 10,000"):
        load(t5x(stacked))


@pytest.mark.parametrize("leaf", ["text", [1, 2], {"driver": "zarr", "kvstore": 3}, np.zeros(3, np.int64)])
def test_leaves_that_are_no_weights_are_named(t5x, arrays, leaf):
    path = t5x(arrays)
    file = path / "checkpoint"
    contents = flax.serialization.msgpack_restore(file.read_bytes())
    contents["optimizer"]["target"]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = leaf
    file.write_bytes(flax.serialization.msgpack_serialize(contents))
    with pytest.raises(CheckpointError, match="checkpoint_7"):
        load(path)
