"""Tests of the store's file: torn and damaged lines, other files at its path, and stores removed while in use."""

import json
import os
import shutil
from pathlib import Path

import pytest

from speccascade_jax.results.store.lines import NotAStoreError
from speccascade_jax.results.store.result_store import ResultStore, StoreLockedError, read_records
from tests.support.stores import filled, record, written


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "deep" / "sweep.jsonl"


def numbers(path: Path) -> list[int]:
    """Returns the numbers of a store's records, in order."""
    return [record["n"] for record in read_records(path)]


def test_a_last_line_torn_anywhere_is_set_aside_and_the_rest_is_kept(path):
    filled(path, 2)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match="line 2 "), ResultStore(path) as store:
            assert [record["n"] for record in store.records] == [0]
            assert [line.number for line in store.damaged] == [2]
            store.append(record(5))
        assert numbers(path) == [0, 5]
        aside = path.with_name("sweep.jsonl.damaged")
        assert aside.read_bytes() == whole[start:cut]
        aside.unlink()


def test_a_complete_last_line_without_a_line_end_is_kept(path):
    written = filled(path, 2)
    path.write_bytes(path.read_bytes()[:-1])
    with ResultStore(path) as store:
        assert store.records == written and store.damaged == []
        store.append(record(7))
    assert numbers(path) == [0, 1, 7]


def test_damaged_lines_anywhere_are_reported_by_number(path):
    filled(path, 3)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b'{"key": "x"', lines[1], b"\xff\xfe", b"[1]", lines[0], lines[2]]) + b"\n")
    with pytest.warns(UserWarning, match="4 damaged") as caught:
        read_records(path)
    text = str(caught[0].message)
    assert "line 2 (not JSON" in text and "line 4 (not JSON" in text
    assert "line 5 (not a record with a key)" in text and "line 6 (the same key as line 1)" in text
    with pytest.warns(UserWarning, match="set aside in .*sweep.jsonl.damaged"), ResultStore(path) as store:
        assert [record["n"] for record in store.records] == [0, 1, 2]
    assert path.read_bytes().split(b"\n")[:3] == lines[:3]
    assert path.with_name("sweep.jsonl.damaged").read_bytes().count(b"\n") == 4


@pytest.mark.filterwarnings("ignore:.*damaged line")
def test_a_file_of_one_torn_record_is_accepted_as_a_store(path):
    path.parent.mkdir()
    whole = json.dumps(record(0)).replace(" ", "").encode()
    for torn in (b"", b"\n", whole[:1], whole[:5], whole[:-1]):
        path.write_bytes(torn)
        written(path, record(1))
        assert numbers(path) == [1]


STRANGERS = {
    "gin": b"sweep.alphas = {'opt': (0.1,)}\n", "png": b"\x89PNG\r\n\x1a\n\x00\x00", "msgpack": b"\x82\xa6format\x01",
    "json": b'{"a": 1}', "nested": b"[" * 9000,
}  # fmt: skip


@pytest.mark.parametrize("content", STRANGERS.values(), ids=STRANGERS)
def test_a_file_that_is_not_a_store_is_refused_and_left_unchanged(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    for read in (ResultStore, read_records):
        with pytest.raises(NotAStoreError, match=r"sweep\.jsonl holds no record: .* Name another"):
            read(path)
    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_a_folder_and_a_foreign_lock_file_are_refused_and_left_unchanged(path):
    path.mkdir(parents=True)
    with pytest.raises(NotAStoreError, match="is not a file .* name another output"):
        ResultStore(path)
    lock = path.with_name("poetry.lock")
    lock.write_text("[[package]]\n")
    with pytest.raises(ValueError, match=r"poetry\.lock is not a lock of .*poetry: "):
        ResultStore(path.with_name("poetry"))
    assert lock.read_text() == "[[package]]\n"


def test_damaged_and_intact_lines_are_kept_byte_for_byte(path):
    filled(path, 3)
    first, two, three = path.read_bytes().splitlines(keepends=True)
    crlf, torn = b'{"key": \xff}\r\n', b'{"key": "torn'
    spaced = json.dumps(json.loads(two)).encode() + b"\r\n"  # a complete line that another JSON writer wrote
    path.write_bytes(first + crlf + spaced + three + torn)
    with pytest.warns(UserWarning, match="2 damaged"):
        ResultStore(path).close()
    aside = path.with_name("sweep.jsonl.damaged")
    assert path.read_bytes() == first + spaced + three and aside.read_bytes() == crlf + torn
    path.write_bytes(first + b"again\n")
    with pytest.warns(UserWarning, match="1 damaged"):
        ResultStore(path).close()
    assert aside.read_bytes() == crlf + torn + b"\nagain\n"


def test_many_damaged_lines_are_counted_and_few_are_listed(path):
    filled(path, 1)
    path.write_bytes(path.read_bytes() + b"x\n" * 300)
    with pytest.warns(UserWarning, match="300 damaged") as caught:
        read_records(path)
    assert len(str(caught[0].message)) < 600 and "and 295 more" in str(caught[0].message)


def test_every_changed_digit_of_a_record_is_detected(path):
    written(path, record(0, value=0.12345, deep={"b": [1, 2.5], "a": None}), record(1))
    whole = path.read_bytes()
    first = whole.index(b"\n")
    places = [n for n in range(first) if chr(whole[n]).isdigit()]
    assert len(places) > 20
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.warns(UserWarning, match=r"line 1 \(its checksum does not match\)"):
            assert numbers(path) == [1]


def _replace(path: Path) -> None:
    others_path = path.with_name("others.jsonl")
    filled(others_path, 1)
    written(others_path, record(77))
    others_path.replace(path)


def _link(path: Path, copied: bool = True) -> None:
    """Moves a store to another disk and leaves a link in its place, or leaves a link to a missing file."""
    away = path.with_name("elsewhere") / "other.jsonl"
    if copied:
        away.parent.mkdir()
        shutil.copy(path, away)
    path.unlink()
    path.symlink_to(away)


CHANGES = {
    "deleted": Path.unlink,
    "moved": lambda path: path.rename(path.with_name("moved.jsonl")),
    "folder deleted": lambda path: shutil.rmtree(path.parent),
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "replaced": _replace,
    "linked": _link,
    "linked into nothing": lambda path: _link(path, copied=False),
}
"""Events that may happen to a store while it is written."""


@pytest.mark.filterwarnings("ignore:.*damaged line")
@pytest.mark.parametrize("how", CHANGES)
def test_a_store_removed_while_it_is_written_loses_nothing(path, how):
    with ResultStore(path) as store:
        for n in range(3):
            store.append(record(n))
        CHANGES[how](path)
        with pytest.warns(UserWarning, match=r"sweep\.jsonl was removed, replaced or changed while it was written"):
            store.append(record(3))
        store.append(record(4))
        with pytest.raises(ValueError, match="already holds a record with key"):
            store.append(record(0))
        with pytest.raises(StoreLockedError):
            ResultStore(path)
        assert read_records(path) == store.records
    records = read_records(path)
    assert {record["n"] for record in records} == {0, 1, 2, 3, 4} | ({77} if how == "replaced" else set())
    assert path.is_symlink() == how.startswith("linked")
    assert not list(path.parent.rglob("*.lock"))


@pytest.mark.parametrize("superseded_before", [True, False])
def test_superseding_records_are_restored_after_the_file_was_replaced(path, superseded_before):
    """Checks that the next record, or an earlier one, supersedes the record in an older copy of the store."""
    code = {"provenance": {"code": "a"}}
    with ResultStore(path) as store:
        store.append(record(0, **code))
        older = path.read_bytes()
        store.append(record(1, **code))
        superseding = record(0, new=True, provenance={"code": "b"}, supersedes="a")
        if superseded_before:
            store.append(superseding)
        path.unlink()
        path.write_bytes(older)
        with pytest.warns(UserWarning, match=f"the {1 + superseded_before} of 2 records that it lacked"):
            store.append(record(2) if superseded_before else superseding)
        assert store.records[0] == superseding and read_records(path) == store.records


def test_a_record_that_the_new_file_holds_already_is_not_added_again(path):
    with ResultStore(path) as store:
        store.append(record(0))
        path.unlink()
        path.write_text(json.dumps(record(1)) + "\n")
        with pytest.warns(UserWarning, match="1 of 1 records that it lacked"):
            store.append(record(1))
    assert numbers(path) == [1, 0]


def test_a_store_that_cannot_be_restored_names_the_file_with_its_records(path, monkeypatch):
    for number, foreign in enumerate((True, False)):
        store = ResultStore(path.with_name(f"{number}.jsonl"))
        for n in range(3):
            store.append(record(n))
        store.path.unlink()
        store.path.write_bytes(b"something else\n") if foreign else store.path.mkdir()
        with pytest.raises(OSError, match=r"all 4 records of this run are in .*jsonl\.rescued-\d+") as caught:
            store.append(record(3))
        aside = str(caught.value).rpartition(" ")[2]
        assert numbers(aside) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="is closed"):
            store.append(record(4))
        store.close()


def test_a_removed_lock_is_taken_again_or_the_second_writer_is_named(path):
    lock = path.with_name("sweep.jsonl.lock")
    with ResultStore(path) as store:
        store.append(record(0))
        lock.unlink()
        with pytest.warns(UserWarning, match="0 of 1 records that it lacked"):
            store.append(record(1))
        assert lock.read_text() == str(os.getpid())
        lock.unlink()
        with ResultStore(path) as second:
            second.append(record(2))
            with pytest.raises(OSError, match=rf"process {os.getpid()} .*all 3 records of this run are in"):
                store.append(record(3))
            assert lock.exists(), "the second writer's lock"
            second.append(record(4))
    assert numbers(path) == [0, 1, 2, 4]


def test_a_link_is_followed_for_writes_and_for_the_lock(path, tmp_path):
    filled(path, 1)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    path.write_bytes(path.read_bytes() + b"torn")
    with pytest.warns(UserWarning, match="1 damaged"), ResultStore(link) as store:
        store.append(record(1))
        with pytest.raises(StoreLockedError, match="sweep.jsonl"):
            ResultStore(path)
    assert link.is_symlink() and numbers(path) == [0, 1]
