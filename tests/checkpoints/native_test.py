"""Our own format: round trips, what its files hold, damage."""

import contextlib
import dataclasses
import errno
import getpass
import json
import os
import resource
import shutil
import socket
from pathlib import Path

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load, model_of, native, save
from speccascade_jax.core.locks import LockedError
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import parameter_shapes, tiny

KEY = "decoder/layers_1/mlp/wo/kernel"


@pytest.fixture
def saved(tmp_path, model, params):
    save(tmp_path / "mine", model, params)
    return tmp_path / "mine"


@pytest.fixture
def saved_wide(tmp_path, wide):
    """With arrays large enough to lie in data files of their own (small ones lie inside the index)."""
    save(tmp_path / "mine", *wide)
    return tmp_path / "mine"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, model, params, arrays, dtype):
    save(tmp_path / "deep" / "mine", model, params, dtype)
    loaded, restored = load(tmp_path / "deep" / "mine")
    flat = flatten_dict(restored, sep="/")
    assert loaded == model
    assert flat.keys() == arrays.keys()
    for name, array in arrays.items():
        assert flat[name].dtype == jnp.float32
        np.testing.assert_array_equal(flat[name], array.astype(jnp.dtype(dtype)).astype(np.float32))
    kept = flatten_dict(load(tmp_path / "deep" / "mine", dtype=None)[1], sep="/")
    assert kept[KEY].dtype == jnp.dtype(dtype)


def test_frozen_and_numpy_parameters(tmp_path, model, params):
    save(tmp_path / "mine", model, flax.core.freeze(params))
    assert load(tmp_path / "mine")[0] == model


def test_zeros_come_back_as_zeros(tmp_path, model, params):
    params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] = jnp.zeros((10, 8))
    save(tmp_path / "mine", model, params, "bfloat16")
    assert not np.asarray(load(tmp_path / "mine")[1]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]).any()


def test_orbax_reads_the_parameters(saved, arrays):
    restored = flatten_dict(ocp.PyTreeCheckpointer().restore(saved / "params"), sep="/")
    assert all(np.array_equal(restored[name], arrays[name]) for name in arrays)


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


def test_existing_directory_is_kept_unless_overwritten(saved, model, params):
    with pytest.raises(FileExistsError, match=r"mine exists: choose another path, or pass overwrite=True"):
        save(saved, model, params)
    before = describe(saved)
    params["token_embedder"]["embedding"] += 1
    save(saved, model, params, overwrite=True)
    assert describe(saved) != before
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"]


def test_other_directories_are_never_replaced(tmp_path, model, params):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    with pytest.raises(FileExistsError, match=r"no checkpoint written by save"):
        save(tmp_path / "letters", model, params, overwrite=True)
    assert (tmp_path / "letters" / "a.txt").read_text() == "dear"


def test_folders_that_hold_more_than_a_checkpoint_are_never_replaced(saved, model, params):
    (saved / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match=r"mine holds more than a checkpoint .*\(thesis.txt\): .* move it out"):
        save(saved, model, params, overwrite=True)
    assert (saved / "thesis.txt").read_text() == "years" and load(saved)[0] == model


@pytest.mark.parametrize(
    "text",
    [None, "{", "7", '{"format": 1, "family": "t5"}', '{"format": "1", "family": "t5", "config": {}, "arrays": {}}']
    + ['{"format": 1, "family": "bert", "config": {}, "arrays": {}}'],
)
def test_a_params_folder_alone_makes_no_checkpoint_that_may_be_replaced(tmp_path, model, params, text):
    (tmp_path / "project" / "params").mkdir(parents=True)
    (tmp_path / "project" / "params" / "a.txt").write_text("1")
    if text is not None:
        (tmp_path / "project" / "config.json").write_text(text)
    with pytest.raises(FileExistsError, match=r"project exists and is no checkpoint written by save"):
        save(tmp_path / "project", model, params, overwrite=True)
    assert (tmp_path / "project" / "params" / "a.txt").read_text() == "1"
    with pytest.raises(CheckpointError, match=r"is incomplete|is damaged|lacks|has format '1'|architecture 'bert'"):
        load(tmp_path / "project")


def test_an_incomplete_checkpoint_of_ours_may_be_replaced(saved, model, params):
    shutil.rmtree(saved / "params")
    save(saved, model, params, overwrite=True)
    assert load(saved)[0] == model


def test_a_file_is_never_replaced(tmp_path, model, params):
    (tmp_path / "mine").write_text("{}")
    with pytest.raises(FileExistsError, match=r"no checkpoint written by save"):
        save(tmp_path / "mine", model, params, overwrite=True)
    assert (tmp_path / "mine").read_text() == "{}"


def test_failed_write_leaves_the_old_one(saved, model, params, monkeypatch):
    before = describe(saved)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("speccascade_jax.checkpoints.native.write_tree", fail)
    with pytest.raises(OSError, match="disk full"):
        save(saved, model, params, overwrite=True)
    assert describe(saved) == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"]


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


def test_garbled_data_file(saved_wide):
    file = max(data_files(saved_wide), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    middle = slice(len(content) // 4, len(content) // 2)
    content[middle] = bytes(byte ^ 0x5A for byte in content[middle])
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"mine is damaged: \d+ arrays? can't be read \(\w+/"):
        load(saved_wide)


def test_truncated_data_file(saved_wide):
    file = max(data_files(saved_wide), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:100])
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
        r"has format 9, and this version reads 1: update": lambda r: r.update(format=9),
        r"unknown architecture 'gpt'; known: t5": lambda r: r.update(family="gpt"),
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
    restored = flatten_dict(params, sep="/")
    assert restored.keys() == flat.keys()
    assert all(np.array_equal(restored[n], array) for n, array in flat.items())
    fused = flatten_dict(model.prepare(params), sep="/")
    prepared = flatten_dict(load(tmp_path / "mine", prepared=True)[1], sep="/")
    assert prepared.keys() == fused.keys() != flat.keys()
    assert all(np.array_equal(prepared[n], array) for n, array in fused.items())


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


def test_a_family_that_does_not_fit_its_configuration(saved, edited):
    edited(saved / "config.json", lambda r: r.update(family="decoder"))
    with pytest.raises(CheckpointError, match=r"config is not a DecoderConfig \(.*num_encoder_layers"):
        load(saved)


def test_other_tools_directories_are_never_replaced(tmp_path, model, params):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileExistsError, match=r"no checkpoint written by save"):
        save(tmp_path / "theirs", model, params, overwrite=True)
    assert [entry.name for entry in (tmp_path / "theirs").iterdir()] == ["config.json"]


def test_every_flipped_bit_of_the_configuration_is_seen(saved, model):
    file = saved / "config.json"
    whole = file.read_bytes()
    rest = json.loads(whole)
    for bit in np.random.default_rng(0).choice(8 * whole.index(b'"arrays"'), 150, replace=False).tolist():
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            found = model_of(saved)
        except CheckpointError as error:
            assert str(saved) in str(error)
        else:  # a space that became another, or a name that nobody reads
            assert found == model and json.loads(changed)["arrays"] == rest["arrays"]


def test_a_configuration_without_a_digest_loads(saved, edited, model):
    edited(saved / "config.json", lambda r: r.pop("blake2b"))
    assert load(saved)[0] == model


@pytest.mark.filterwarnings("ignore:os.fork")  # the child copies files and dies
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_save_killed_between_its_renames_leaves_the_old_or_the_new(saved, model, params, moment, monkeypatch):
    def flat(tree):
        return {name: np.asarray(value) for name, value in flatten_dict(tree, sep="/").items()}

    old, new = flat(params), flat(jax.tree.map(lambda x: x + 1, params))
    save(saved.parent / "other" / "new", model, unflatten_dict(new, sep="/"))
    written = saved.parent / "other" / "new" / "params"  # copied in the child, where tensorstore's threads are not
    monkeypatch.setattr(native, "write_tree", lambda to, _: shutil.copytree(written, to, dirs_exist_ok=True))
    real, renames = Path.rename, []

    def rename(path, target):
        if len(renames) == ("before", "between", "after").index(moment):
            os._exit(9)
        renames.append(target)
        return real(path, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", rename)
        with contextlib.suppress(BaseException):
            native.write(saved, model.config, new, "float32")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert saved.exists() == (moment != "between")
    warned = pytest.warns(UserWarning, match="mine is the old one again")
    with warned if moment == "between" else contextlib.nullcontext():
        found = flat(load(saved)[1])
    expected = new if moment == "after" else old
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    save(saved, model, params, overwrite=True)
    assert sorted(entry.name for entry in saved.parent.iterdir()) == ["mine", "other"]  # what was left is gone


def test_two_writers_of_one_directory(saved, model, params):
    with native.claimed(saved, True), pytest.raises(LockedError, match=r"mine is being written by process \d+ .*name"):
        save(saved, model, params, overwrite=True)
    save(saved, model, params, overwrite=True)


def test_a_full_disk_names_the_directory_and_leaves_the_old_one(saved, wide):
    before = {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # a write beyond fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"free some space, or write elsewhere.*mine") as caught:
            save(saved, *wide, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(saved)
    assert {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()} == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"]


def test_what_failed_is_deleted_though_it_is_still_written_to(saved, model, params, monkeypatch):
    """A file that comes between the listing of a folder and its deletion lets that fail."""
    rmtree, calls = shutil.rmtree, []

    def late(folder, **more):
        calls.append(folder)
        if len(calls) > 2:
            rmtree(folder, **more)

    def fails(folder, arrays):
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(native, "write_tree", fails)
    monkeypatch.setattr(native.shutil, "rmtree", late)
    with pytest.raises(OSError, match="no more"):
        save(saved, model, params, overwrite=True)
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"] and len(calls) == 3
