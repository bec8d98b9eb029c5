"""Checkpoints that are written in a bucket: whole or absent at every moment, and equal to local ones."""

from __future__ import annotations

import json

import flax
import jax
import numpy as np
import pytest

from experiments.convert import main
from speccascade_jax.checkpoints import load, native, save, save_t5x, tree_writing
from speccascade_jax.checkpoints.converting import convert
from speccascade_jax.checkpoints.reading import find
from speccascade_jax.storage import buckets
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.locks import LockedError
from tests.checkpoints.buckets_test import of_huggingface, uploaded

OURS = BucketPath("gs://bucket/models/ours")


def same(path, other) -> bool:
    (model, params), (again, restored) = load(path, dtype=None), load(other, dtype=None)
    equal = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), params, restored)
    return model == again and jax.tree.all(equal)


def same_values(restored, params) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, restored, flax.core.unfreeze(params)))


SLOW = [pytest.param(dtype, marks=pytest.mark.laws) for dtype in ("bfloat16", "int8")]


@pytest.mark.parametrize("dtype", ["float32", *SLOW])
def test_conversions_to_from_and_in_a_bucket_equal_local_ones(bucket, dtype, tmp_path, capsys):
    theirs, local, again = of_huggingface(tmp_path, "gemma2"), tmp_path / "local", OURS.parent / "again"
    for source, destination in (
        (theirs, local),
        (uploaded(theirs), OURS),
        (OURS, again),
        (OURS, tmp_path / "b"),
    ):
        assert main([str(source), str(destination), "--dtype", dtype]) == 0, capsys.readouterr().err
        assert same(local, destination)
        assert find(destination).fingerprint == find(local).fingerprint
    written = [name for method, name in bucket.asked if method == "POST" and name.startswith("bucket/models/again/")]
    assert written[-1].endswith("again/config.json")
    assert not [name for name in bucket.objects if "lock" in name]


def test_a_kill_at_any_moment_leaves_the_former_checkpoint_or_the_new_one(bucket, model, params, tmp_path):
    save(tmp_path / "new", model, params)
    older = jax.tree.map(lambda array: array + 1, params)
    save(tmp_path / "old", model, older)
    moments = []
    bucket.fault = lambda method, name: moments.append(dict(bucket.objects)) if method != "GET" else None
    save(OURS, model, older)
    save(OURS, model, params, overwrite=True)
    bucket.fault = lambda method, name: None
    moments.append(dict(bucket.objects))
    outcomes = []
    for bucket.objects in moments:
        try:
            outcomes.append("new" if same(OURS, tmp_path / "new") else "old" if same(OURS, tmp_path / "old") else "?")
        except (FileNotFoundError, CheckpointError):
            outcomes.append("-")
    # first absent, then the old one, then the new one
    assert [*dict.fromkeys(outcomes)] == ["-", "old", "new"]
    assert outcomes == sorted(outcomes, key=["-", "old", "new"].index)
    assert sorted({name.split("/")[3].partition("-")[0] for name in bucket.objects}) == ["config.json", "params"]
    assert len({name.split("/")[3] for name in bucket.objects}) == 2  # the former arrays are deleted
    # what a killed writer left is no obstacle for the next one, which deletes it
    unfinished = moments[outcomes.index("old") - 1]
    bucket.objects = {name: content for name, content in unfinished.items() if not name.endswith(".lock")}
    assert OURS.below()
    save(OURS, model, params)
    assert same(OURS, tmp_path / "new") and len({name.split("/")[3] for name in bucket.objects}) == 2


def test_what_cannot_be_written_is_one_line_and_the_former_checkpoint_stays(
    bucket, model, params, tmp_path, monkeypatch
):
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    buckets._opened.cache_clear()
    save(OURS, model, params)
    before = dict(bucket.objects)
    for part in ("/params-", "/config.json"):  # after the second, its arrays stay: the request may have arrived
        bucket.fault = lambda method, name, part=part: "503" if method == "POST" and part in name else None
        with pytest.raises(OSError, match=r"gs://bucket/models/ours.*; run the same command again") as raised:
            save(OURS, model, jax.tree.map(np.negative, params), overwrite=True)
        assert "\n" not in str(raised.value)
        bucket.fault = lambda method, name: None
        assert {name: bucket.objects[name] for name in before} == before
        assert (len(bucket.objects) == len(before)) == (part == "/params-")
    save(OURS, model, params, overwrite=True)
    assert len(bucket.objects) == len(before)
    buckets._opened.cache_clear()


def test_only_a_checkpoint_of_this_format_is_replaced(bucket, model, params):
    save(OURS, model, params)
    with pytest.raises(FileExistsError, match="ours exists: choose another path, or pass overwrite=True"):
        save(OURS, model, params)
    (OURS / "vocabulary.model").write(b"mine")
    with pytest.raises(FileExistsError, match=r"holds more than a checkpoint written by save \(vocabulary.model\)"):
        save(OURS, model, params, overwrite=True)
    with pytest.raises(FileExistsError, match=r"ours/config.json exists and is not a checkpoint"):
        save(OURS / "config.json", model, params, overwrite=True)
    with pytest.raises(ValueError, match="gs://bucket is a whole bucket: give gs://BUCKET/NAME"):
        save("gs://bucket", model, params)
    with pytest.raises(ValueError, match="T5X's format is written to local folders only; give a local folder, and"):
        save_t5x(OURS, model, params)


def test_of_two_writers_one_commits_and_the_other_says_so(bucket, model, params, monkeypatch):
    def writes_meanwhile(method, name):
        if method == "POST" and name.endswith("_METADATA") and "theirs" not in bucket.__dict__:
            bucket.theirs = True
            (OURS / "config.json").write(b"theirs")

    bucket.fault = writes_meanwhile
    with pytest.raises(LockedError, match="gs://bucket/models/ours was written by another process meanwhile"):
        save(OURS, model, params)
    del bucket.theirs
    assert (OURS / "config.json").read_bytes() == b"theirs" and OURS.below() == ["config.json"]


@pytest.mark.parametrize("outcome", [OSError, KeyboardInterrupt])
def test_the_arrays_stay_if_the_answer_about_the_configuration_is_lost(bucket, model, params, outcome, monkeypatch):
    """The server has stored the new configuration, or stores it after the process was told to stop."""

    def interrupted(path, content, generation):
        if path.name != "config.json":
            return swap(path, content, generation)
        sent.append(content)
        raise outcome("no answer")

    sent, swap, newer = [], BucketPath.swap, jax.tree.map(np.negative, params)
    save(OURS, model, params)
    with monkeypatch.context() as patch, pytest.raises(outcome):
        patch.setattr(BucketPath, "swap", interrupted)
        save(OURS, model, newer, overwrite=True)
    assert same_values(load(OURS)[1], params)
    (OURS / "config.json").write(sent[0])  # the request arrives
    assert same_values(load(OURS)[1], newer)


@pytest.mark.laws
def test_a_writer_that_cleans_up_late_leaves_the_next_writer_s_arrays(bucket, model, params, monkeypatch):
    """The first writer is suspended after it has replaced the configuration; its lease has ended when it goes on."""

    def arrays(before_last=lambda: None):
        flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep="/")
        for number, name in enumerate(sorted(flat), 1):
            if number == len(flat):
                before_last()
            yield name, np.asarray(flat[name])

    def clean_up():
        assert [name for name in OURS.below() if name.split("/")[0] not in (first.params.name, "config.json")]
        suspended.__exit__(None, None, None)

    monkeypatch.setattr(tree_writing, "_TOGETHER", 1)  # each array is written before the next is read
    suspended = native._replacing(OURS)
    first = suspended.__enter__()
    writer = native.NamedArrays(first.params, {})
    for name, array in arrays():
        writer.add_all({name: array})
    writer.close()
    text = native._config_text(model.config, writer.table, writer.parts, "float32", first.params.name)
    first.commit(text)
    native.write(OURS, model.config, arrays(clean_up), "float32")
    assert same_values(load(OURS)[1], params)


@pytest.mark.parametrize("name", ["../old/params", "params-zz", 7])
def test_a_configuration_that_names_other_arrays_is_damaged(bucket, model, params, name):
    save(OURS, model, params)
    text, params = (OURS / "config.json").read_text(), [*OURS.iterdir()][1].name
    assert params in text
    (OURS / "config.json").write(text.replace(json.dumps(params), json.dumps(name)).encode())
    with pytest.raises(CheckpointError, match="config.json is damaged"):
        find(OURS)


def test_a_checkpoint_that_is_overwritten_while_it_is_read_is_noticed(bucket, tmp_path):
    folder = BucketPath(uploaded(of_huggingface(tmp_path, "gemma2")))
    stored = find(folder)
    file = next(folder.glob("*.safetensors"))
    file.write(file.read_bytes())
    with pytest.raises(CheckpointError, match="the object was deleted or replaced while it was read; read it again"):
        convert(stored, tmp_path / "ours", "float32")
    assert not (tmp_path / "ours").exists()
