"""Tests of the package's own format: round trips, contents of its files, damage; values and sizes of 8-bit arrays."""

import dataclasses
import getpass
import json
import os
import socket
from pathlib import Path

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.checkpoints import CheckpointError, converting, load, model_of, native, reading, save
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import parameter_shapes
from speccascade_jax.models.decoder_presets import tiny
from speccascade_jax.models.products import quantised
from tests.support import checkpoint_arrays, damage
from tests.support.checkpoint_arrays import same
from tests.support.damage import edit_json

KEY = "decoder/layers_1/mlp/wo/kernel"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_survive_a_round_trip(tmp_path, model, params, arrays, dtype):
    """Includes an array of zeros, which must not count as absent."""
    arrays[KEY] = np.zeros((10, 8), np.float32)
    params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = jnp.zeros((10, 8))
    save(tmp_path / "deep" / "mine", model, flax.core.freeze(params), dtype)
    loaded, restored = load(tmp_path / "deep" / "mine")
    assert loaded == model
    assert same(restored, {name: a.astype(jnp.dtype(dtype)).astype(np.float32) for name, a in arrays.items()})
    for asked, kind in ((dtype, None), ("float32", "float32")):
        restored = load(tmp_path / "deep" / "mine", dtype=kind)[1]
        assert {leaf.dtype.name for leaf in jax.tree.leaves(restored)} == {asked}


def test_bfloat16_is_smaller_than_its_raw_bytes(tmp_path, wide):
    model, params = wide
    save(tmp_path / "mine", model, params, "bfloat16")
    size = sum(file.stat().st_size for file in data_files(tmp_path / "mine"))
    assert size < 2 * sum(a.size for a in flatten_dict(params).values())


def test_orbax_reads_the_parameters(saved, arrays):
    assert same(ocp.PyTreeCheckpointer().restore(saved / "params"), arrays)


def test_files_are_few_and_reveal_nothing_about_the_writer(saved, arrays, tmp_path):
    files = [file for file in saved.rglob("*") if file.is_file()]
    # There must not be one or two files per array. The number depends on how long the writer waits: 16 on an idle
    # machine, 26 on a busy one.
    assert len(files) < len(arrays)
    secrets = [str(tmp_path), os.fspath(Path.home()), socket.gethostname(), "timestamp", "nsecs", "sharding"]
    secrets += [getpass.getuser()] if len(getpass.getuser()) > 5 else []
    for file in files:
        content = file.read_bytes()
        assert not [word for word in secrets if len(word) > 5 and word.encode() in content], file


def test_invalid_arguments_are_refused(tmp_path, model, params):
    with pytest.raises(ValueError, match=r"dtype is 'float64': choose one of float32, bfloat16"):
        save(tmp_path / "mine", model, params, "float64")
    params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = jnp.full((10, 8), jnp.nan)
    with pytest.raises(CheckpointError, match=rf"not finite \({KEY}: 80 of 80"):
        save(tmp_path / "mine", model, params)
    params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = jnp.zeros((10, 9))
    with pytest.raises(CheckpointError, match=rf"wrong shape .*{KEY} is \[10, 9\], but .* needs \[10, 8\]"):
        save(tmp_path / "mine", model, params)
    del params["decoder"]["layers_1"]["mlp"]["wo"]
    with pytest.raises(CheckpointError, match=rf"1 of \d+ arrays are missing \({KEY}\)"):
        save(tmp_path / "mine", model, params)
    assert not list(tmp_path.iterdir())


def config(change):
    """Returns a damage that changes entries of `config.json`."""
    return lambda path: edit_json(path / "config.json", change)


def undigested(change):
    """Returns a damage like `config`, after removing the file's own digest, which earlier versions did not write."""
    return config(lambda record: (record.pop("blake2b"), change(record)))


def lose(files):
    def damage(path):
        for file in list(path.glob(files)):
            file.rename(path.parent / file.name)

    return damage


def forget(path):
    """Removes one array from the tree's metadata."""
    edit_json(path / "params" / "_METADATA", lambda m: m["tree_metadata"].pop(str(tuple(KEY.split("/")))))


DAMAGES = [
    (undigested(lambda r: r["arrays"][KEY].update(blake2b="0" * 32)),
     rf"mine is damaged: 1 array can't be read .*{KEY}(.|\n)*checksum in config.json"),
    (lose("params/**/d/*"), r"mine is incomplete: 66 of 66 arrays are missing"),
    (lose("params/manifest.ocdbt"), r"mine is incomplete: 66 of 66 arrays are missing"),
    (lose("params"), r"mine is incomplete: its params folder is missing"),
    (lose("config.json"), r"mine is incomplete: its config.json is missing"),
    (forget, rf"mine is incomplete: 1 of \d+ arrays are missing \({KEY}\)"),
    (config(lambda r: r.pop("arrays")), r"lacks arrays"),
    (config(lambda r: r.update(format=9)), r"has format 9, but this version reads 1 and 2: update"),
    (config(lambda r: r.update(family="gpt")), r"unknown architecture 'gpt'; known: t5"),
    (config(lambda r: r.update(family="decoder")), r"config is not a DecoderConfig \(.*num_encoder_layers"),
    (config(lambda r: r["config"].update(depth=3)), r"config is not a T5Config \(.*depth"),
    (config(lambda r: r["config"].pop("d_ff")), r"config is not a T5Config \(.*d_ff"),
    (undigested(lambda r: r["config"].update(d_ff=11)), r"wrong shape .*needs \[8, 11\]"),
    (config(lambda r: r["config"].update(d_ff=10.0)), r"config.json: .*d_ff is 10.0"),
    (config(lambda r: r.update(config=[])), r"config is not a T5Config \(.*'list'"),
    (undigested(lambda r: r["config"].update(num_encoder_layers=2 * 10**7)),
     r"20,000,00\d layers exceed the maximum of \d+"),
    (lambda path: (path / "config.json").write_text((path / "config.json").read_text()[:100]),
     r"config.json is damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damage_is_named(saved, damage, said):
    damage(saved)
    with pytest.raises(CheckpointError, match=said):
        load(saved)


def data_files(path):
    return [file for file in (path / "params").rglob("*") if file.parent.name == "d"]


def garble(content):
    middle = slice(len(content) // 4, len(content) // 2)
    return content[: middle.start] + bytes(byte ^ 0x5A for byte in content[middle]) + content[middle.stop :]


@pytest.mark.parametrize("change", [garble, lambda content: content[:100]])
def test_damaged_data_files_are_refused(tmp_path, wide, change):
    """Uses arrays large enough for data files of their own; the index contains small arrays."""
    save(tmp_path / "mine", *wide)
    file = max(data_files(tmp_path / "mine"), key=lambda f: f.stat().st_size)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"mine is damaged: \d+ arrays? can't be read \(\w+/"):
        load(tmp_path / "mine")


@pytest.mark.parametrize(
    "name", ["gemma2_2b", "llama3.1_8b", "qwen2.5_7b", "gemma3_4b", "gemma4_e2b", "gemma4_26b_a4b"]
)
def test_decoders_survive_a_round_trip_with_all_settings(tmp_path, name):
    config = tiny(name)
    rng = np.random.default_rng(0)
    flat = {n: rng.normal(size=s).astype(np.float32) for n, s in parameter_shapes(config).items()}
    save(tmp_path / "mine", DecoderLM(config), unflatten_dict(flat, sep="/"))
    model, params = load(tmp_path / "mine")
    assert model == DecoderLM(config)
    stored = json.loads((tmp_path / "mine" / "config.json").read_text())["config"]
    assert ("qk_norm" in stored) == config.qk_norm  # earlier versions read the older families
    assert hash(model) == hash(DecoderLM(config))  # the model must be hashable, because it is a static argument of jit
    assert same(params, flat)
    fused = checkpoint_arrays.flat(model.prepare(params))
    assert fused.keys() != flat.keys() and same(load(tmp_path / "mine", prepared=True)[1], fused)


def test_bfloat16_is_stored_but_a_cpu_computes_in_float32(saved):
    model, params = load(saved, dtype="bfloat16", prepared=True)
    assert model.config.dtype == "float32"
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert load(saved, dtype="bfloat16")[0].config.dtype == "bfloat16"


@pytest.mark.parametrize(("asked", "computes", "holds"), [
    ("float32", "float32", "float32"),
    ("float16", "float32", "float16"),
    ("bfloat16", "bfloat16", "bfloat16"),
    (None, "bfloat16", "float32"),
])  # fmt: skip
def test_an_explicit_dtype_also_sets_the_dtype_of_computation(tmp_path, model, params, asked, computes, holds):
    """Checks the dtypes of a saved model that computes in bfloat16 and has float32 parameters."""
    half = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="bfloat16"))
    save(tmp_path / "mine", half, params)
    loaded, restored = load(tmp_path / "mine", dtype=asked)
    assert loaded.config.dtype == computes
    assert {array.dtype.name for array in jax.tree.leaves(restored)} == {holds}
    assert load(tmp_path / "mine")[0] == model


def test_every_flipped_bit_of_the_configuration_is_detected(saved, model):
    file = saved / "config.json"
    whole = file.read_bytes()
    arrays = json.loads(whole)["arrays"]
    for _ in damage.flips(file, 150, whole.index(b'"arrays"')):
        try:
            loaded = model_of(saved)
        except CheckpointError as error:
            assert str(saved) in str(error)
        else:  # The flip changed white space or a name that no reader uses.
            assert loaded == model and json.loads(file.read_bytes())["arrays"] == arrays


def test_a_configuration_without_a_digest_loads(saved, model):
    undigested(lambda record: None)(saved)
    assert load(saved)[0] == model


# --- in 8 bits

EMBEDDING = "token_embedder/embedding"


@pytest.fixture
def narrow(tmp_path, model, params):
    save(tmp_path / "narrow", model, params, "int8")
    return tmp_path / "narrow"


def test_8_bit_errors_are_at_most_half_a_127th_of_the_columns_largest_value(narrow, model, arrays):
    loaded, restored = load(narrow)
    values = flatten_dict(restored, sep="/")
    assert loaded == model and values.keys() == arrays.keys()
    for name, array in arrays.items():
        assert values[name].dtype == jnp.float32
        if (kind := name.rsplit("/", 1)[-1]) not in ("kernel", "embedding"):
            np.testing.assert_array_equal(values[name], array)
            continue
        largest = np.abs(array).max(axis=0 if kind == "kernel" else 1, keepdims=True)
        off = np.abs(np.asarray(values[name]) - array)
        assert np.all(off <= largest / 254 * (1 + 1e-5)) and off.max() > 0, name


def test_loading_an_8_bit_checkpoint_in_8_bits_changes_nothing(narrow):
    """Checks that quantizing again gives the same values, because both scales are a column's maximum over 127."""
    kernel = flatten_dict(load(narrow)[1], sep="/")[KEY]
    numbers, scales = quantised(np.asarray(kernel))
    np.testing.assert_allclose(numbers * scales, kernel, rtol=1e-6)


def test_kernels_and_embeddings_are_stored_in_8_bits_with_scales(narrow):
    record = json.loads((narrow / "config.json").read_text())
    assert (record["format"], record["dtype"]) == (2, "int8")
    table = record["arrays"]
    assert table[KEY]["dtype"] == table[EMBEDDING]["dtype"] == "int8"
    kernel, embedding = (table[name + native.SCALES]["shape"] for name in (KEY, EMBEDDING))
    assert kernel == [1, table[KEY]["shape"][1]] and embedding == [table[EMBEDDING]["shape"][0], 1]
    assert {row["dtype"] for name, row in table.items() if "norm" in name or "rel_" in name} == {"float32"}


def test_other_dtypes_are_cast_from_the_stored_values(narrow):
    whole = flatten_dict(load(narrow)[1], sep="/")[KEY]
    half = flatten_dict(load(narrow, dtype="bfloat16")[1], sep="/")[KEY]
    np.testing.assert_array_equal(half, np.asarray(whole).astype(jnp.bfloat16))


def test_8_bit_checkpoints_survive_conversions(narrow, tmp_path, arrays):
    """Converts to float32 and back to 8 bits: the integers are equal, and scales may differ in the last bit."""
    converting.convert(reading.find(narrow), tmp_path / "wide", "float32")
    converting.convert(reading.find(tmp_path / "wide"), tmp_path / "again", "int8")
    first, again = (flatten_dict(load(path)[1], sep="/") for path in (narrow, tmp_path / "again"))
    for name in arrays:
        np.testing.assert_allclose(again[name], first[name], rtol=1e-6)


@pytest.mark.parametrize("shape", [None, (3, 1)])
def test_8_bit_arrays_without_matching_scales_are_refused(narrow, shape):
    stored = reading.find(narrow)
    numbers = native.Tensor((10, 8), "int8", narrow, lambda: None)
    tensors = {KEY: numbers}
    if shape:
        tensors[KEY + native.SCALES] = native.Tensor(shape, "float32", narrow, lambda: None)
    said = "no scales" if shape is None else r"scales of shape \[3, 1\]"
    with pytest.raises(CheckpointError, match=rf"{KEY} is an 8-bit array of shape \[10, 8\], but has {said}; "):
        native.widened(stored.path, tensors)


def test_flipped_8_bit_numbers_are_detected(narrow):
    """Checks that the digests cover the stored bytes."""
    undigested(lambda record: record["arrays"][KEY].update(blake2b="0" * 32))(narrow)
    with pytest.raises(CheckpointError, match=KEY):
        load(narrow)
