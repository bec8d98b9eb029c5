"""Tests of replacing a checkpoint: other files are refused, and after any failure the old or new one is complete."""

import contextlib
import errno
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import jax
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load, native, save
from speccascade_jax.storage.locks import LockedError
from tests.support.checkpoint_arrays import flat, same


def test_existing_directory_is_kept_unless_overwritten(saved, model, params):
    with pytest.raises(FileExistsError, match=r"mine exists: choose another path, or pass overwrite=True"):
        save(saved, model, params)
    before = describe(saved)
    params["token_embedder"]["embedding"] += 1
    save(saved, model, params, overwrite=True)
    assert describe(saved) != before
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"]


def test_folders_with_more_than_a_checkpoint_are_never_replaced(saved, model, params):
    (saved / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match=r"mine holds more than a checkpoint .*\(thesis.txt\): .* move it out"):
        save(saved, model, params, overwrite=True)
    assert (saved / "thesis.txt").read_text() == "years" and load(saved)[0] == model


def test_a_checkpoint_is_replaced_through_a_link_which_stays(saved, model, params, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(saved)
    before = describe(saved)
    params["token_embedder"]["embedding"] += 1
    save(link, model, params, overwrite=True)
    assert link.is_symlink() and [*link.parent.iterdir()] == [link] and describe(saved) != before


CONFIGS = ("{", "7", '{"format": 1, "family": "t5"}', '{"format": "1", "family": "t5", "config": {}, "arrays": {}}')
CONFIGS += ('{"format": 1, "family": "bert", "config": {}, "arrays": {}}',)
OTHERS = [{"letters/a.txt": "dear"}, {"config.json": '{"model_type": "llama"}'}, {"params/a.txt": "1"}]
OTHERS += [{"params/a.txt": "1", "config.json": text} for text in CONFIGS]


@pytest.mark.parametrize("files", OTHERS)
def test_folders_without_a_checkpoint_are_never_replaced(tmp_path, model, params, files):
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    with pytest.raises(FileExistsError, match=r"project exists and is not a checkpoint written by save"):
        save(tmp_path / "project", model, params, overwrite=True)
    assert files == {name: (tmp_path / "project" / name).read_text() for name in files}
    with pytest.raises(
        CheckpointError, match=r"project.*(incomplete|damaged|lacks|format '1'|architecture|no checkpoint|give)"
    ):
        load(tmp_path / "project")


def test_an_incomplete_native_checkpoint_may_be_replaced(saved, model, params):
    shutil.rmtree(saved / "params")
    save(saved, model, params, overwrite=True)
    assert load(saved)[0] == model


def test_a_file_is_never_replaced(tmp_path, model, params):
    (tmp_path / "mine").write_text("{}")
    with pytest.raises(FileExistsError, match=r"not a checkpoint written by save"):
        save(tmp_path / "mine", model, params, overwrite=True)
    assert (tmp_path / "mine").read_text() == "{}"


class Copied(native.NamedArrays):
    """Copies the files of another checkpoint instead of writing them, with the same `table` of arrays."""

    def __init__(self, written, to):
        shutil.copytree(written, to, dirs_exist_ok=True)
        record = json.loads((written.parent / "config.json").read_text())
        self.table, self.parts = record["arrays"], record["parts"]

    def add_all(self, arrays):
        pass

    def close(self):
        pass


@pytest.mark.filterwarnings("ignore:os.fork")  # The child only copies files and exits.
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_save_killed_between_its_renames_leaves_a_whole_checkpoint(saved, model, params, moment, monkeypatch):
    old, new = flat(params), flat(jax.tree.map(lambda x: x + 1, params))
    save(saved.parent / "other" / "new", model, unflatten_dict(new, sep="/"))
    # The child copies these files, because tensorstore's threads do not exist there.
    written = saved.parent / "other" / "new" / "params"
    monkeypatch.setattr(native, "NamedArrays", lambda to, _: Copied(written, to))
    real, renames = Path.rename, []

    def rename(path, target):
        if len(renames) == ("before", "between", "after").index(moment):
            os._exit(9)
        renames.append(target)
        return real(path, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", rename)
        with contextlib.suppress(BaseException):
            native.write(saved, model.config, new.items(), "float32")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert saved.exists() == (moment != "between")
    warned = pytest.warns(UserWarning, match="mine has its previous contents again")
    with warned if moment == "between" else contextlib.nullcontext():
        loaded = load(saved)[1]
    assert same(loaded, new if moment == "after" else old)
    save(saved, model, params, overwrite=True)
    assert sorted(entry.name for entry in saved.parent.iterdir()) == ["mine", "other"]  # no temporary files are left


def test_a_second_writer_of_a_directory_is_refused(saved, model, params):
    with native.claimed(saved, True), pytest.raises(LockedError, match=r"mine is being written by process \d+ .*name"):
        save(saved, model, params, overwrite=True)
    save(saved, model, params, overwrite=True)


def test_a_directory_that_a_thread_writes_to_again_is_deleted_too(tmp_path):
    """Threads that still write make the directory anew if it was deleted while they write."""
    temporary = tmp_path / ".mine.tmp-0"
    temporary.mkdir()
    late = threading.Timer(0.07, temporary.mkdir)
    late.start()
    native._sweep(temporary)
    late.join()
    assert not temporary.exists()


def test_a_full_disk_names_the_directory_and_keeps_the_old_checkpoint(saved, wide):
    before = {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # Longer writes fail, as on a full disk.
    try:
        with pytest.raises(OSError, match=r"free some space, or write elsewhere.*mine") as caught:
            save(saved, *wide, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(saved)
    assert {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()} == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"]


def test_a_failed_save_is_deleted_even_if_a_file_appears_meanwhile(saved, model, params, monkeypatch):
    """Simulates a file that appears between the listing of a folder and its deletion, which then fails."""
    rmtree, calls = shutil.rmtree, []

    def late(folder, **more):
        calls.append(folder)
        if len(calls) > 2:
            rmtree(folder, **more)

    def fails(writer):
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(native.NamedArrays, "close", fails)
    monkeypatch.setattr(native.shutil, "rmtree", late)
    with pytest.raises(OSError, match="no more"):
        save(saved, model, params, overwrite=True)
    assert [entry.name for entry in saved.parent.iterdir()] == ["mine"] and len(calls) > 2
