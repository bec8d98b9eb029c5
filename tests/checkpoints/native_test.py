"""Our own format: round trips, what its files hold, damage."""

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

from speccascade_jax.checkpoints import CheckpointError, load, model_of, save
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import parameter_shapes, tiny
from tests.support import checkpoint_arrays, damage
from tests.support.checkpoint_arrays import same

KEY = "decoder/layers_1/mlp/wo/kernel"


@pytest.fixture
def saved_wide(tmp_path, wide):
    """With arrays large enough to lie in data files of their own (small ones lie inside the index)."""
    save(tmp_path / "mine", *wide)
    return tmp_path / "mine"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, model, params, arrays, dtype):
    save(tmp_path / "deep" / "mine", model, flax.core.freeze(params), dtype)
    loaded, restored = load(tmp_path / "deep" / "mine")
    assert loaded == model
    assert same(restored, {name: a.astype(jnp.dtype(dtype)).astype(np.float32) for name, a in arrays.items()})
    for asked, kind in ((dtype, None), ("float32", "float32")):
        restored = load(tmp_path / "deep" / "mine", dtype=kind)[1]
        assert {leaf.dtype.name for leaf in jax.tree.leaves(restored)} == {asked}


def test_zeros_come_back_as_zeros(tmp_path, model, params):
    params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = jnp.zeros((10, 8))
    save(tmp_path / "mine", model, params, "bfloat16")
    assert not np.asarray(load(tmp_path / "mine")[1]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]).any()


def test_orbax_reads_the_parameters(saved, arrays):
    assert same(ocp.PyTreeCheckpointer().restore(saved / "params"), arrays)


def test_files_are_few_and_tell_nothing_of_the_writer(saved, arrays, tmp_path):
    files = [file for file in saved.rglob("*") if file.is_file()]
    # not one or two per array; how many hangs on how long the writer waits: 16 on a free machine, 26 on a busy one
    assert len(files) < len(arrays)
    told = [str(tmp_path), os.fspath(Path.home()), socket.gethostname(), "timestamp", "nsecs", "sharding"]
    told += [getpass.getuser()] if len(getpass.getuser()) > 5 else []
    for file in files:
        content = file.read_bytes()
        assert not [word for word in told if len(word) > 5 and word.encode() in content], file


def test_bfloat16_is_smaller_than_its_raw_bytes(tmp_path, wide):
    model, params = wide
    save(tmp_path / "mine", model, params, "bfloat16")
    size = sum(file.stat().st_size for file in data_files(tmp_path / "mine"))
    assert size < 2 * sum(a.size for a in flatten_dict(params).values())


def test_bad_arguments(tmp_path, model, params):
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


def undigested(change):
    """A `config.json` as earlier versions wrote it, without a digest of its own, and changed."""

    def edit(record):
        del record["blake2b"]
        change(record)

    return edit


def test_changed_bytes_are_named(saved, edited):
    edited(saved / "config.json", undigested(lambda r: r["arrays"][KEY].update(blake2b="0" * 32)))
    with pytest.raises(
        CheckpointError, match=rf"mine is damaged: 1 array can't be read .*{KEY}(.|\n)*checksum in config.json"
    ):
        load(saved)


def data_files(path):
    return [file for file in (path / "params").rglob("*") if file.parent.name == "d"]


def garble(content):
    middle = slice(len(content) // 4, len(content) // 2)
    return content[: middle.start] + bytes(byte ^ 0x5A for byte in content[middle]) + content[middle.stop :]


@pytest.mark.parametrize("change", [garble, lambda content: content[:100]])
def test_damaged_data_file(saved_wide, change):
    file = max(data_files(saved_wide), key=lambda f: f.stat().st_size)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"mine is damaged: \d+ arrays? can't be read \(\w+/"):
        load(saved_wide)


@pytest.mark.parametrize("files", ["**/d/*", "manifest.ocdbt"])
def test_lost_files(saved, files):
    for file in list((saved / "params").glob(files)):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"mine is incomplete: 66 of 66 arrays are missing"):
        load(saved)


def test_missing_parts(saved):
    (saved / "params").rename(saved / "elsewhere")
    with pytest.raises(CheckpointError, match=r"mine is incomplete: its params folder is missing"):
        load(saved)
    (saved / "elsewhere").rename(saved / "params")
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"mine is incomplete: its config.json is missing"):
        load(saved)


def test_array_that_params_lacks(saved, edited):
    edited(saved / "params" / "_METADATA", lambda m: m["tree_metadata"].pop(str(tuple(KEY.split("/")))))
    with pytest.raises(CheckpointError, match=rf"mine is incomplete: 1 of \d+ arrays are missing \({KEY}\)"):
        load(saved)


def test_damaged_configuration(saved, edited):
    file = saved / "config.json"
    whole = file.read_text()
    changes = {
        r"lacks arrays": lambda r: r.pop("arrays"),
        r"has format 9, and this version reads 1 and 2: update": lambda r: r.update(format=9),
        r"unknown architecture 'gpt'; known: t5": lambda r: r.update(family="gpt"),
        r"config is not a DecoderConfig \(.*num_encoder_layers": lambda r: r.update(family="decoder"),
        r"config is not a T5Config \(.*depth": lambda r: r["config"].update(depth=3),
        r"config is not a T5Config \(.*d_ff": lambda r: r["config"].pop("d_ff"),
        r"wrong shape .*needs \[8, 11\]": undigested(lambda r: r["config"].update(d_ff=11)),
        r"config.json: .*d_ff is 10.0": lambda r: r["config"].update(d_ff=10.0),
        r"config is not a T5Config \(.*'list'": lambda r: r.update(config=[]),
        r"20,000,00\d layers are more than the \d+ there can be": undigested(
            lambda r: r["config"].update(num_encoder_layers=2 * 10**7)
        ),
    }
    for message, change in changes.items():
        file.write_text(whole)
        edited(file, change)
        with pytest.raises(CheckpointError, match=message):
            load(saved)
    file.write_text(whole[:100])
    with pytest.raises(CheckpointError, match=r"config.json is damaged"):
        load(saved)


@pytest.mark.parametrize("name", ["gemma2_2b", "llama3.1_8b", "qwen2.5_7b"])
def test_decoders_with_all_that_their_configurations_hold(tmp_path, name):
    config = tiny(name)
    rng = np.random.default_rng(0)
    flat = {n: rng.normal(size=s).astype(np.float32) for n, s in parameter_shapes(config).items()}
    save(tmp_path / "mine", DecoderLM(config), unflatten_dict(flat, sep="/"))
    model, params = load(tmp_path / "mine")
    assert model == DecoderLM(config)
    assert hash(model) == hash(DecoderLM(config))  # a static argument of jit
    assert same(params, flat)
    fused = checkpoint_arrays.flat(model.prepare(params))
    assert fused.keys() != flat.keys() and same(load(tmp_path / "mine", prepared=True)[1], fused)


def test_bfloat16_is_held_and_on_a_cpu_not_computed_in(saved):
    model, params = load(saved, dtype="bfloat16", prepared=True)
    assert model.config.dtype == "float32"
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert load(saved, dtype="bfloat16")[0].config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "computes", "holds"),
    [
        ("float32", "float32", "float32"),
        ("float16", "float32", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        (None, "bfloat16", "float32"),
    ],
)
def test_an_explicit_dtype_is_that_of_computation_too(tmp_path, model, params, asked, computes, holds):
    """Whatever the model computed in that was saved; here bfloat16, with parameters of float32."""
    half = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="bfloat16"))
    save(tmp_path / "mine", half, params)
    found, restored = load(tmp_path / "mine", dtype=asked)
    assert found.config.dtype == computes
    assert {array.dtype.name for array in jax.tree.leaves(restored)} == {holds}
    assert load(tmp_path / "mine")[0] == model


def test_every_flipped_bit_of_the_configuration_is_seen(saved, model):
    file = saved / "config.json"
    whole = file.read_bytes()
    arrays = json.loads(whole)["arrays"]
    for _ in damage.flips(file, 150, whole.index(b'"arrays"')):
        try:
            loaded = model_of(saved)
        except CheckpointError as error:
            assert str(saved) in str(error)
        else:  # a space that became another, or a name that nobody reads
            assert loaded == model and json.loads(file.read_bytes())["arrays"] == arrays


def test_a_configuration_without_a_digest_loads(saved, edited, model):
    edited(saved / "config.json", lambda r: r.pop("blake2b"))
    assert load(saved)[0] == model
