"""Files whole or not at all: a full disk names the file and leaves the old one; `~`; what a folder was begun with."""

import errno
import os

import pytest

from speccascade_jax.storage import files


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    files.write_atomically(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; .* free some space.*a\.json") as caught:
        files.write_atomically(tmp_path / "a.json", "new")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match=r"a/b\.json"):
        files.write_atomically(tmp_path / "a" / "b.json", "new")


def test_parts_are_written_in_order(tmp_path):
    files.write_atomically(tmp_path / "a", "ä", b"b", "")
    assert (tmp_path / "a").read_bytes() == "äb".encode()


def test_home_folders_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expanded("~/x") == tmp_path / "x" and files.expanded("a/~").parts == ("a", "~")
    files.write_atomically("~/x", "there")
    assert (tmp_path / "x").read_text() == "there"
    with pytest.raises(ValueError, match="~nobody-of-that-name/x: .*write the whole path"):
        files.expanded("~nobody-of-that-name/x")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1', "\xff"])
def test_settings_that_cannot_be_read_are_named(tmp_path, text):
    (tmp_path / "settings.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"settings\.json is damaged .*: .*name another run_dir"):
        files.claim(tmp_path / "settings.json", {"a": 1}, "name another run_dir")
