"""Tests of T5X's formats: golden files written by T5X, variants written by the tests, damage."""

import dataclasses
import json
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load, save_t5x
from speccascade_jax.models.stacks import stack_params
from tests.checkpoints.conftest import CONFIG, random_arrays
from tests.support.checkpoint_arrays import same
from tests.support.damage import edit_json

KEY = "decoder/layers_1/mlp/wo/kernel"
FOLDER = "target.decoder.layers_1.mlp.wo.kernel"


def test_orbax_and_native_hold_the_same_parameters(golden):
    model, params = load(golden("t5x_golden", "untied_2enc_3dec", "checkpoint_1000"))
    orbax_model, orbax_params = load(golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000"))
    assert model == orbax_model
    assert same(params, flatten_dict(orbax_params, sep="/"))


def test_orbax_reads_the_same_as_its_own_library(golden):
    state = golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000", "state")
    whole = ocp.PyTreeCheckpointHandler()
    item = whole.metadata(state).tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    theirs = whole.restore(state, args=ocp.args.PyTreeRestore(restore_args=args))["target"]
    assert same(load(state)[1], flatten_dict(theirs, sep="/"))


def test_a_single_file_has_the_vocabulary_of_t5(golden):
    model, params = load(golden("models", "t5x_tiny", "test_t5_tiny.checkpoint_0"))
    assert (model.vocab_size, model.config.num_embeddings) == (32100, 32128)
    assert params["token_embedder"]["embedding"].shape == (32128, 8)


def test_configuration_is_inferred(t5x, arrays, model):
    loaded, params = load(t5x(arrays))
    assert loaded == model
    assert same(params, arrays)
    assert params["token_embedder"]["embedding"].dtype == jnp.float32


def test_t5_1_0_is_tied_and_has_no_gates(t5x, arrays, model):
    renamed = {n.replace("wi_0", "wi"): a for n, a in arrays.items() if "wi_1" not in n and "logits_dense" not in n}
    loaded, params = load(t5x(renamed))
    assert loaded.config == dataclasses.replace(model.config, gated=False, tied=True)
    assert same(params, renamed)


def test_biases_of_every_layer_are_read_but_not_written(t5x, tmp_path):
    config = dataclasses.replace(CONFIG, layer_biases=True)
    stored = random_arrays(config)
    model, params = load(t5x(stored))
    assert model.config == config and same(params, stored)
    with pytest.raises(ValueError, match=r"biases by layer \(UMT5\) has no T5X format here: use checkpoints.save"):
        save_t5x(tmp_path / "out", model, params)


AWAY = {"path": "/somewhere/else/run/checkpoint_7/{}/"}
# Pointers that T5X wrote on its own file systems, and in its first versions; `{}` is the array's folder.
POINTERS = [
    ({"kvstore": {"driver": "gfile", **AWAY}}, {}),
    ({"kvstore": {"driver": "gcs", **AWAY}}, {}),
    ({"kvstore": {"driver": "file"}, "path": "{}"}, {"at_top": True}),
]


@pytest.mark.parametrize(("pointer", "layout"), POINTERS)
def test_pointers_are_followed_to_the_checkpoints_own_folders(t5x, arrays, pointer, layout):
    def point(folder, array):
        return json.loads(json.dumps({"driver": "zarr", "dtype": "float32"} | pointer).replace("{}", folder))

    assert same(load(t5x(arrays, pointer=point, **layout))[1], arrays)


def test_version_2_stores_bfloat16_as_uint16(t5x, arrays):
    rounded = {n: a.astype(jnp.bfloat16) for n, a in arrays.items()}
    path = t5x({n: a.view(np.uint16) for n, a in rounded.items()}, version=2)
    assert same(load(path)[1], {n: a.astype(np.float32) for n, a in rounded.items()})
    kept = load(path, dtype=None)[1]
    assert kept["token_embedder"]["embedding"].dtype == jnp.bfloat16
    assert "bfloat16" in describe(path)


def test_bfloat16_and_inline_arrays_are_read(t5x, arrays):
    rounded = {n: a.astype(jnp.bfloat16) for n, a in arrays.items()}
    inline = [n for n in arrays if n.endswith("scale")]
    assert same(load(t5x(rounded, inline=inline), dtype="bfloat16")[1], rounded)


def scanned(arrays, inner: str, bias_noise: float = 0.0):
    """Stacks layers along axis 1 below `<stack>/<inner>` and repeats the relative biases in each layer."""
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


@pytest.mark.parametrize("stacked", [False, True])
def test_both_layouts_are_written(tmp_path, arrays, model, stacked):
    """Compares the stored names and shapes with those of T5X, and reads the values back, of either layout of ours."""
    zero = "decoder/layers_1/mlp/wo/kernel"  # chunks of zeros must not be left out
    arrays[zero] = 0 * arrays[zero]
    params = unflatten_dict({name: jnp.asarray(array) for name, array in arrays.items()}, sep="/")
    saved_params = stack_params(params) if stacked else params
    for scan in (False, True):
        path = save_t5x(tmp_path / f"{scan}", model, saved_params, step=7, scan_layers=scan)
        expected = scanned(arrays, "") if scan else arrays
        folders = {entry.name for entry in path.iterdir()} - {"checkpoint"}
        assert path.name == "checkpoint_7" and folders == {f"target.{n.replace('/', '.')}" for n in expected}
        content = flax.serialization.msgpack_restore((path / "checkpoint").read_bytes())["optimizer"]["target"]
        pointers = flatten_dict(content, is_leaf=lambda _, leaf: "driver" in leaf, sep="/")
        shapes = {name: tuple(pointer["metadata"]["shape"]) for name, pointer in pointers.items()}
        assert shapes == {name: array.shape for name, array in expected.items()}
        loaded, read = load(tmp_path / f"{scan}")
        assert loaded == model and same(read, arrays)
    with pytest.raises(FileExistsError, match="checkpoint_7 exists: choose another path or step"):
        save_t5x(tmp_path / "True", model, params, step=7)


def test_relative_biases_by_layer_are_refused(t5x, arrays):
    with pytest.raises(CheckpointError, match=r"unknown architecture: .*rel_embedding holds different relative biases"):
        load(t5x(scanned(arrays, "", bias_noise=0.1)))


def edit(name, change):
    """Returns a damage that changes the bytes of the file `name` of a checkpoint."""

    def damage(path):
        (path / name).write_bytes(change((path / name).read_bytes()))

    return damage


def lose(path):
    for folder in (FOLDER, "target.token_embedder.embedding"):
        shutil.rmtree(path / folder)


CHUNK = f"{FOLDER}/0.0"
DAMAGES = [
    (lose, rf"checkpoint_7 is incomplete: 2 of \d+ .*{KEY}, token_embedder.*copy"),
    (lambda path: (path / CHUNK).unlink(), rf"incomplete: 1 of .*{KEY}"),  # a missing chunk is not read as zeros
    (edit(f"{FOLDER}/.zarray", lambda whole: b"{"), rf"damaged: .*{KEY}"),
]
CUTS = (lambda b: b[:20], lambda b: b"", lambda b: b"garbage" + b, lambda b: b[:40] + b"x" + b[41:])
DAMAGES += [(edit(CHUNK, cut), rf"checkpoint_7 is damaged: 1 array can't be read .*{KEY}.*copy") for cut in CUTS]
DAMAGES += [
    (edit("checkpoint", lambda whole, content=content: content), "checkpoint is not a readable msgpack file")
    for content in (b"", b"\xc1\xc1", b"\x85abc")
]
DAMAGES += [
    (edit("checkpoint", lambda whole: b"\x81\xa1a\x01"), r"no parameters under optimizer/target \(found \['a'\]\)")
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damage_is_named_with_the_arrays(t5x, arrays, damage, said):
    path = t5x(arrays)
    damage(path)
    with pytest.raises(CheckpointError, match=said):
        load(path)


def test_arrays_of_another_checkpoint_are_refused(t5x, arrays):
    def pointer(folder, array):
        return {"driver": "zarr", "kvstore": {"driver": "file", "path": folder}, "metadata": {"shape": [3, 3]}}

    with pytest.raises(CheckpointError, match=r"has shape .* but the msgpack file announces \[3, 3\]"):
        load(t5x(arrays, pointer=pointer))


def test_orbax_damage_is_named(golden, tmp_path):
    source, path = golden("t5x_golden", "orbax_untied_2enc_3dec", "checkpoint_1000"), tmp_path / "checkpoint_1000"
    shutil.copytree(source, path, copy_function=shutil.copyfile)
    for folder in (path, *path.rglob("*/")):
        folder.chmod(0o755)  # The golden folders are read-only.
    state = path / "state"
    largest = max((state / "ocdbt.process_0" / "d").iterdir(), key=lambda f: f.stat().st_size)
    half = largest.read_bytes()[: largest.stat().st_size // 2]
    for damage, said in (
        (lambda: largest.write_bytes(half), r"damaged: \d+ arrays .*decoder/layers_2.*copy"),
        ((state / "manifest.ocdbt").unlink, r"incomplete: 66 of 66 arrays are missing"),
        (lambda: (state / "_METADATA").write_text("{"), r"_METADATA is damaged"),
        ((state / "_METADATA").unlink, r"incomplete: its _METADATA file is missing"),
    ):
        damage()
        with pytest.raises(CheckpointError, match=said):
            load(path)


@pytest.mark.parametrize(
    "sizes",
    [{"shape": [10, 2 * 10**9]}, {"shape": [10**12, 8], "chunks": [10, 8]}, {"chunks": [10**10, 8]}],
)
def test_implausible_array_shapes_are_refused(t5x, arrays, sizes):
    path = t5x(arrays, pointer=lambda folder, array: {"driver": "zarr", "kvstore": {"path": folder}})
    edit_json(path / FOLDER / ".zarray", lambda r: r.update(sizes))
    with pytest.raises(CheckpointError, match=r"checkpoint_7 is damaged \([\d,]+ bytes unpack to more than"):
        load(path)


def test_implausible_numbers_of_stacked_layers_are_refused(t5x, arrays):
    stacked = arrays | {"decoder/decoder/mlp/wo/kernel": np.zeros((2, 20_001, 1), np.float32)}
    with pytest.raises(CheckpointError, match=r"20,001 layers exceed the maximum of 10,000"):
        load(t5x(stacked))


@pytest.mark.parametrize("leaf", ["text", [1, 2], {"driver": "zarr", "kvstore": 3}, np.zeros(3, np.int64)])
def test_leaves_that_are_not_weights_are_named(t5x, arrays, leaf):
    path = t5x(arrays)
    file = path / "checkpoint"
    contents = flax.serialization.msgpack_restore(file.read_bytes())
    contents["optimizer"]["target"]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = leaf
    file.write_bytes(flax.serialization.msgpack_serialize(contents))
    with pytest.raises(CheckpointError, match="checkpoint_7"):
        load(path)
