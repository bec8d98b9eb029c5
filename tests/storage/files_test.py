"""Tests of atomic writes: a full disk keeps the old file and names it; `~` is expanded; a folder keeps its settings.

Reports replace only reports. Errors of readers name file and line, and zip bombs are refused.
"""

import errno
import gzip
import json
import os
import subprocess
import sys
import time

import pytest

from speccascade_jax.data import sentence_pairs
from speccascade_jax.data.tasks.task import json_lines
from speccascade_jax.storage import files, locks, readers
from tests.support import memory


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path, monkeypatch):
    files.write_atomically(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; .* free some space.*a\.json") as caught:
        files.write_atomically(tmp_path / "a.json", "new")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "a").write_text("")
    said = r"tmp.*/a is a file, so nothing can be written below it: name another output"
    with pytest.raises(OSError, match=said):
        files.write_atomically(tmp_path / "a" / "b" / "c.json", "new")
    with pytest.raises(OSError, match=said), locks.held(tmp_path / "a" / "c.lock", "c"):
        pass


def test_the_next_writer_removes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    writer = "import sys, time, os; from speccascade_jax.storage import files; os.fsync = lambda _: time.sleep(60); "
    writer += "files.write_atomically(sys.argv[1], 'new')"
    process = subprocess.Popen([sys.executable, "-c", writer, str(tmp_path / "a.json")])
    while not (leftovers := [file for file in tmp_path.glob("a.json.*.tmp") if file.stat().st_size]):
        time.sleep(0.02)
    mine = [tmp_path / name for name in ("a.json.my_notes.tmp", "a.json.tmp", "b.json.abcdefgh.tmp")]
    for file in mine:
        file.write_text("mine")
    files.write_atomically(tmp_path / "a.json", "first")
    assert leftovers[0].exists(), "the file of a live writer was removed"
    process.kill()
    process.wait()
    files.write_atomically(tmp_path / "a.json", "second")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.json", *mine])


def test_a_folder_that_holds_files_of_others_is_not_claimed(tmp_path):
    (tmp_path / "README.md").write_text("")
    files.claim(tmp_path / "settings.json", {"a": 1}, "name another run_dir")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"b holds files that this command did not make .metrics.jsonl.: name"):
        files.claim(tmp_path / "b" / "settings.json", {"a": 1}, "name another run_dir")
    files.claim(tmp_path / "b" / "settings.json", {"a": 1}, "name another run_dir", checked=("metrics.jsonl",))


@pytest.mark.parametrize("url", ["s3://bucket/a", "https://host/a", "file:///tmp/a", "s3:/bucket/a"])
def test_a_url_is_refused_and_no_folder_of_its_name_is_made(url, tmp_path, monkeypatch):
    """`Path` makes one slash of two, so a path that was made of a URL is refused too."""
    monkeypatch.chdir(tmp_path)
    for use in (files.expanded, files.check_replaceable, lambda path: files.write_atomically(path, "")):
        with pytest.raises(
            ValueError, match=f"{url}: addresses of {url.partition('/')[0]} can.t be read or written; copy or mount"
        ):
            use(url)
    assert not os.listdir(tmp_path)
    assert str(files.expanded("C:/a")) == "C:/a" and str(files.expanded("a:b/c")) == "a:b/c"


def test_parts_are_written_in_order(tmp_path):
    files.write_atomically(tmp_path / "a", "ä", b"b", "")
    assert (tmp_path / "a").read_bytes() == "äb".encode()


def test_home_folders_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expanded("~/x") == tmp_path / "x" and files.expanded("a/~").parts == ("a", "~")
    files.write_atomically("~/x", "there")
    assert (tmp_path / "x").read_text() == "there"
    with pytest.raises(ValueError, match="~nobody-of-that-name/x: .*write the full path"):
        files.expanded("~nobody-of-that-name/x")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1', "\xff"])
def test_unreadable_settings_are_refused(tmp_path, text):
    (tmp_path / "settings.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"settings\.json is damaged .*: .*name another run_dir"):
        files.claim(tmp_path / "settings.json", {"a": 1}, "name another run_dir")


def test_files_that_a_command_did_not_make_are_not_replaced(tmp_path):
    file = tmp_path / "out.json"
    files.check_replaceable(file, '"a":')
    file.write_text("\n")
    files.check_replaceable(file, '"a":')
    file.write_text(json.dumps({"a": 1}))
    files.check_replaceable(file, '"a":')
    for content in (b"\x89PNG\r\n", b'{"b": "a"}', b"import gin\n", b'{"key":"a","a":1}\n'):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"out\.json was not made by this command, so it is not replaced"):
            files.check_replaceable(file, '"a":')
    with pytest.raises(ValueError, match="is not a file, so nothing can be written to it"):
        files.check_replaceable(tmp_path)


def test_plain_and_gzipped_files_give_the_same_lines(tmp_path):
    content = "ein\r\nzwei\n\ndrei ä".encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    for name in ("a.txt", "a.txt.gz"):
        assert list(readers.lines(tmp_path / name)) == [(1, "ein"), (2, "zwei"), (3, ""), (4, "drei ä")]


@pytest.mark.parametrize(("line", "said"), [
    ('{"a": "torn', r"x\.jsonl:2 is damaged \(not JSON: Unterminated string"),
    ("[" * 100_000, r"x\.jsonl:2 is damaged \(not JSON: maximum recursion"),
    ("[1, 2]", r"x\.jsonl:2 is damaged \(not a JSON object, but \[1, 2\]\)"),
    ("9" * 5000, r"x\.jsonl:2 is damaged \(not JSON: Exceeds the limit"),
    ('{"b": 1}', r"x\.jsonl:2 has no field 'a' \(it has b\)"),
])  # fmt: skip
def test_invalid_records_are_named_with_their_line(tmp_path, line, said):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=said):
        [record["a"] for record in json_lines(tmp_path / "x.jsonl")]


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "p.tsv").write_bytes("a\tb\nc\tä\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"p\.tsv:2 is not UTF-8 \(.*\): convert the file"):
        sentence_pairs.read_pairs(tmp_path / "p.tsv")


def test_damaged_gzip_is_named(tmp_path):
    whole = gzip.compress(b"a\tb\n" * 1000, mtime=0)
    for content in (whole[: len(whole) // 2], b"a\tb\n", whole[:20] + b"\0\0" + whole[22:], whole[:-4] + b"\0\0\0\0"):
        (tmp_path / "p.tsv.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"p\.tsv\.gz is damaged after line \d+ .*: copy it again"):
            sentence_pairs.read_pairs(tmp_path / "p.tsv.gz")


@pytest.mark.parametrize("line", [b"\0" * 4000, pytest.param(b"a\tb\n", marks=pytest.mark.laws)])
def test_a_zip_bomb_is_refused_before_it_fills_memory(tmp_path, monkeypatch, line):
    monkeypatch.setattr(readers, "PLAUSIBLE", 100_000)
    (tmp_path / "p.tsv.gz").write_bytes(gzip.compress(line * (20_000_000 // len(line)), mtime=0))

    def refused():
        with pytest.raises(ValueError, match=r"p\.tsv\.gz .* bytes unpack to more than"):
            for _ in readers.lines(tmp_path / "p.tsv.gz"):
                pass

    assert memory.peak(refused) < 12_000_000
