"""The store of results: durable appends, torn and damaged lines, two writers, and twenty kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from speccascade_jax.core import files
from speccascade_jax.core.files import point_key
from speccascade_jax.results import store as results
from speccascade_jax.results.store import ResultStore, StoreLockedError, fill, read_records


def _record(n: int, **more) -> dict:
    return {"key": point_key(n=n), "n": n, **more}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "deep" / "sweep.jsonl"


def _filled(path: Path, count: int) -> list[dict]:
    with ResultStore(path) as store:
        for n in range(count):
            store.append(_record(n, text="Zeile\nmit Umbruch, ä"))
        return list(store.records)


def test_records_come_back_in_order_and_one_per_line(path):
    written = _filled(path, 3)
    assert read_records(path) == written
    assert path.read_bytes().count(b"\n") == 3
    with ResultStore(path) as store:
        assert store.records == written and store.damaged == []
        assert store.done_keys() == {record["key"] for record in written}


def test_numpy_values_and_undefined_numbers_become_json(path):
    with ResultStore(path) as store:
        store.append(_record(0, a=np.float32(0.5), b=np.arange(2), c=float("nan"), d=[float("inf"), np.int64(3)]))
    assert read_records(path) == [_record(0, a=0.5, b=[0, 1], c=None, d=[None, 3])]


def test_a_key_is_never_stored_twice(path):
    with ResultStore(path) as store:
        store.append(_record(1))
        with pytest.raises(ValueError, match="already holds a record with key"):
            store.append(_record(1, other=True))
        with pytest.raises(ValueError, match="non-empty string 'key'"):
            store.append({"n": 1})
    assert len(read_records(path)) == 1


def test_keys_depend_on_every_part_and_on_nothing_else():
    assert point_key(a=1, b="x") == point_key(b="x", a=1)
    assert len({point_key(a=1), point_key(a=2), point_key(b=1), point_key(a=1.5), point_key(a="1")}) == 5


def test_a_last_line_torn_anywhere_is_set_aside_and_the_rest_kept(path):
    _filled(path, 2)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match="line 2 "), ResultStore(path) as store:
            assert [record["n"] for record in store.records] == [0]
            assert [line.number for line in store.damaged] == [2]
            store.append(_record(5))
        assert [record["n"] for record in read_records(path)] == [0, 5]
        aside = path.with_name("sweep.jsonl.damaged")
        assert aside.read_bytes() == whole[start:cut]
        aside.unlink()


def test_a_complete_last_line_without_its_end_is_kept(path):
    written = _filled(path, 2)
    path.write_bytes(path.read_bytes()[:-1])
    with ResultStore(path) as store:
        assert store.records == written and store.damaged == []
        store.append(_record(7))
    assert [record["n"] for record in read_records(path)] == [0, 1, 7]


def test_damaged_lines_anywhere_are_reported_by_number(path):
    _filled(path, 3)
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


def test_two_writers_are_refused_by_name_and_process(path):
    with (
        ResultStore(path),
        pytest.raises(StoreLockedError, match=rf"process {os.getpid()} \(lock .*sweep.jsonl.lock\)"),
    ):
        ResultStore(path)
    with ResultStore(path):
        pass
    assert not path.with_name("sweep.jsonl.lock").exists()


def test_the_lock_of_a_killed_writer_does_not_stay(path):
    child = _spawn(path, count=10_000)
    assert child.stdout.readline()
    with pytest.raises(StoreLockedError, match=f"process {child.pid} "):
        ResultStore(path)
    _kill(child)
    ResultStore(path).close()


def test_a_write_that_the_disk_cut_short_leaves_no_trace(path, monkeypatch):
    with ResultStore(path) as store:
        store.append(_record(0))
        real = os.write
        monkeypatch.setattr(results.os, "write", lambda file, line: real(file, line[: len(line) // 2]))
        with pytest.raises(OSError, match=r"No space left .* free some space.*sweep\.jsonl"):
            store.append(_record(1))
        monkeypatch.setattr(results.os, "write", real)
        store.append(_record(1))
    assert [record["n"] for record in read_records(path)] == [0, 1]


def test_fill_measures_only_what_is_missing(path):
    def evaluate(jobs):
        asked.append(list(jobs))
        yield from (_record(n) for n in jobs)

    groups = [[0, 1, 2], [3]]
    asked: list[list[int]] = []
    with ResultStore(path) as store:
        store.append(_record(1))
        seen: list[dict] = []
        assert fill(store, groups, lambda n: point_key(n=n), evaluate, seen.append) == 3
        assert fill(store, groups, lambda n: point_key(n=n), evaluate) == 0
    assert asked == [[0, 2], [3]]
    assert [record["n"] for record in seen] == [0, 2, 3]


def test_records_of_other_stores_are_taken_over_once(path, tmp_path):
    other, nowhere = tmp_path / "other.jsonl", tmp_path / "nowhere.jsonl"
    _filled(other, 3)
    with ResultStore(path) as store:
        store.append(_record(1, own=True))
        wanted = [_record(n)["key"] for n in (1, 2, 7)]
        assert store.take_over(wanted, (other, nowhere)) == 1 and store.take_over(wanted, (other,)) == 0
    assert [(record["n"], "own" in record) for record in read_records(path)] == [(1, True), (2, False)]


def test_csv_flattens_records(path):
    text = results.to_csv(
        [_record(0, quality={"value": 1.5, "all": {"bleu": 2}}), _record(1, trials=[1, 2], none=None)]
    )
    head, first, second = text.splitlines()
    assert head == "key,n,quality.value,quality.all.bleu,trials,none"
    assert first.endswith(",0,1.5,2,,") and second.endswith(',1,,,"[1, 2]",')


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no results at .*nothing\.jsonl"):
        read_records(tmp_path / "nothing.jsonl")


def test_several_files_are_merged_without_repeating_a_key(tmp_path):
    for name, numbers in (("a", (0, 1)), ("b", (1, 2))):
        with ResultStore(tmp_path / name) as store:
            for n in numbers:
                store.append(_record(n))
    assert [record["n"] for record in read_records(tmp_path / "a", tmp_path / "b")] == [0, 1, 2]


def test_writing_atomically_replaces_and_leaves_no_temporary_file(tmp_path):
    for text in ("eins\n", "zwei\n"):
        files.write_atomically(tmp_path / "out.md", text)
    assert (tmp_path / "out.md").read_text() == "zwei\n"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:.*damaged line")
def test_a_first_record_that_was_torn_is_no_stranger(path):
    path.parent.mkdir()
    whole = json.dumps(_record(0)).replace(" ", "").encode()
    for torn in (b"", b"\n", whole[:1], whole[:5], whole[:-1]):
        path.write_bytes(torn)
        with ResultStore(path) as store:
            store.append(_record(1))
        assert [record["n"] for record in read_records(path)] == [1]


@pytest.mark.parametrize(
    "content",
    [
        b"sweep.alphas = {'opt': (0.1,)}\n",
        b"\x89PNG\r\n\x1a\n\x00\x00",
        b"\x82\xa6format\x01",
        b'{"a": 1}',
        b"[" * 9000,
    ],
    ids=["gin", "png", "msgpack", "json", "nested"],
)
def test_a_file_that_is_no_store_is_refused_and_left_as_it_is(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    for read in (ResultStore, read_records):
        with pytest.raises(results.NotAStoreError, match=r"sweep\.jsonl holds no record: .* Name another"):
            read(path)
    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_neither_a_folder_nor_a_stranger_in_the_locks_place_is_touched(path):
    path.mkdir(parents=True)
    with pytest.raises(results.NotAStoreError, match="is no file .* name another output"):
        ResultStore(path)
    lock = path.with_name("poetry.lock")
    lock.write_text("[[package]]\n")
    with pytest.raises(ValueError, match=r"poetry\.lock is no lock of .*poetry: "):
        ResultStore(path.with_name("poetry"))
    assert lock.read_text() == "[[package]]\n"


def test_damaged_lines_are_kept_byte_for_byte_and_so_are_the_others(path):
    _filled(path, 3)
    one, two, three = path.read_bytes().splitlines(keepends=True)
    crlf, torn = b'{"key": \xff}\r\n', b'{"key": "torn'
    spaced = json.dumps(json.loads(two)).encode() + b"\r\n"  # of another writer, but whole
    path.write_bytes(one + crlf + spaced + three + torn)
    with pytest.warns(UserWarning, match="2 damaged"):
        ResultStore(path).close()
    aside = path.with_name("sweep.jsonl.damaged")
    assert path.read_bytes() == one + spaced + three and aside.read_bytes() == crlf + torn
    path.write_bytes(one + b"again\n")
    with pytest.warns(UserWarning, match="1 damaged"):
        ResultStore(path).close()
    assert aside.read_bytes() == crlf + torn + b"\nagain\n"


def test_many_damaged_lines_are_counted_and_few_are_listed(path):
    _filled(path, 1)
    path.write_bytes(path.read_bytes() + b"x\n" * 300)
    with pytest.warns(UserWarning, match="300 damaged") as caught:
        read_records(path)
    assert len(str(caught[0].message)) < 600 and "and 295 more" in str(caught[0].message)


def test_every_flipped_digit_of_a_record_is_noticed(path):
    with ResultStore(path) as store:
        store.append(_record(0, value=0.12345, deep={"b": [1, 2.5], "a": None}))
        store.append(_record(1))
    whole = path.read_bytes()
    first = whole.index(b"\n")
    places = [n for n in range(first) if chr(whole[n]).isdigit()]
    assert len(places) > 20
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.warns(UserWarning, match=r"line 1 \(its checksum is of something else\)"):
            assert [record["n"] for record in read_records(path)] == [1]


def test_a_checksum_is_of_what_a_record_says_and_not_of_how(path):
    _filled(path, 1)
    told = json.loads(path.read_bytes())
    path.write_text(json.dumps(dict(reversed(told.items())), ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
    assert [record["n"] for record in read_records(path)] == [0]


def test_records_from_before_there_were_checksums_are_read_and_added_to(path):
    path.parent.mkdir()
    path.write_text(json.dumps(_record(0)) + "\n")
    with ResultStore(path) as store:
        assert store.damaged == []
        store.append(_record(1))
    assert read_records(path) == [_record(0), _record(1)]
    assert [results.CHECKSUM in json.loads(line) for line in path.read_text().splitlines()] == [False, True]


def _swap(path: Path, how: str) -> None:
    """What may happen to a store while it is written."""
    away = path.with_name("elsewhere") / "other.jsonl"
    if how == "deleted":
        path.unlink()
    elif how == "moved":
        path.rename(path.with_name("moved.jsonl"))
    elif how == "folder deleted":
        shutil.rmtree(path.parent)
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif how == "replaced":
        others = path.with_name("others.jsonl")
        _filled(others, 1)
        with ResultStore(others) as store:
            store.append(_record(77))
        others.replace(path)
    elif how == "linked":  # moved to another disk, and a link left in its place
        away.parent.mkdir()
        shutil.copy(path, away)
        path.unlink()
        path.symlink_to(away)
    elif how == "linked into nothing":
        path.unlink()
        path.symlink_to(away)


CHANGES = ["deleted", "moved", "folder deleted", "emptied", "cut", "replaced", "linked", "linked into nothing"]


@pytest.mark.filterwarnings("ignore:.*damaged line")
@pytest.mark.parametrize("how", CHANGES)
def test_a_store_that_is_taken_away_while_it_is_written_loses_nothing(path, how):
    with ResultStore(path) as store:
        for n in range(3):
            store.append(_record(n))
        _swap(path, how)
        with pytest.warns(UserWarning, match=r"sweep\.jsonl was removed, replaced or changed while it was written"):
            store.append(_record(3))
        store.append(_record(4))
        with pytest.raises(ValueError, match="already holds a record with key"):
            store.append(_record(0))
        with pytest.raises(StoreLockedError):
            ResultStore(path)
        assert read_records(path) == store.records
    found = read_records(path)
    assert {record["n"] for record in found} == {0, 1, 2, 3, 4} | ({77} if how == "replaced" else set())
    assert path.is_symlink() == how.startswith("linked")
    assert not list(path.parent.rglob("*.lock"))


def test_a_record_that_the_new_file_holds_already_is_not_added_again(path):
    with ResultStore(path) as store:
        store.append(_record(0))
        path.unlink()
        path.write_text(json.dumps(_record(1)) + "\n")
        with pytest.warns(UserWarning, match="1 of 1 records that it lacked"):
            store.append(_record(1))
    assert [record["n"] for record in read_records(path)] == [1, 0]


def test_a_store_that_cannot_come_back_says_where_its_records_are(path, monkeypatch):
    for number, foreign in enumerate((True, False)):
        store = ResultStore(path.with_name(f"{number}.jsonl"))
        for n in range(3):
            store.append(_record(n))
        store.path.unlink()
        store.path.write_bytes(b"something else\n") if foreign else store.path.mkdir()
        with pytest.raises(OSError, match=r"all 4 records of this run are in .*jsonl\.rescued-\d+") as caught:
            store.append(_record(3))
        aside = str(caught.value).rpartition(" ")[2]
        assert [record["n"] for record in read_records(aside)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="is closed"):
            store.append(_record(4))
        store.close()


def test_a_lock_that_was_removed_is_taken_again_or_the_second_writer_is_named(path):
    lock = path.with_name("sweep.jsonl.lock")
    with ResultStore(path) as store:
        store.append(_record(0))
        lock.unlink()
        with pytest.warns(UserWarning, match="0 of 1 records that it lacked"):
            store.append(_record(1))
        assert lock.read_text() == str(os.getpid())
        lock.unlink()
        with ResultStore(path) as second:
            second.append(_record(2))
            with pytest.raises(OSError, match=rf"process {os.getpid()} .*all 3 records of this run are in"):
                store.append(_record(3))
            assert lock.exists(), "the second writer's lock"
            second.append(_record(4))
    assert [record["n"] for record in read_records(path)] == [0, 1, 2, 4]


def test_a_link_is_written_through_and_locks_what_it_leads_to(path, tmp_path):
    _filled(path, 1)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    path.write_bytes(path.read_bytes() + b"torn")
    with pytest.warns(UserWarning, match="1 damaged"), ResultStore(link) as store:
        store.append(_record(1))
        with pytest.raises(StoreLockedError, match="sweep.jsonl"):
            ResultStore(path)
    assert link.is_symlink() and [record["n"] for record in read_records(path)] == [0, 1]


# A sweep with a fake runner in a process of its own. It loads the module by its file: the package would import
# JAX. What it has stored it says on its output, so that the parent knows what must not be lost.
_CHILD = """
import sys
from speccascade_jax.core.files import point_key
from speccascade_jax.results import store as results

def evaluate(points):
    for point in points:
        yield {"key": point_key(point=point), "point": point, "payload": "x" * (1 + point * 7919 % 40_000)}

points = range(int(sys.argv[2]))
groups = [points[n : n + 5] for n in range(0, len(points), 5)]
with results.ResultStore(sys.argv[1]) as store:
    print("open", flush=True)
    results.fill(store, groups, lambda p: point_key(point=p), evaluate,
                 lambda record: print(record["point"], flush=True))
"""


def _spawn(path: Path, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", _CHILD, str(path), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _kill(child: subprocess.Popen) -> list[int]:
    """Kill, and return the points that the child said it had stored."""
    child.send_signal(signal.SIGKILL)
    said, _ = child.communicate()
    return [int(line) for line in said.splitlines() if line.isdigit()]


def _rebuilt(point: int) -> dict:
    return {"key": point_key(point=point), "point": point, "payload": "x" * (1 + point * 7919 % 40_000)}


@pytest.mark.laws
def test_twenty_kills_lose_double_and_tear_nothing(path):
    count, chance = 2_000, random.Random(20)
    stored: set[int] = set()
    for _ in range(20):
        child = _spawn(path, count)
        assert child.stdout.readline() == "open\n"
        time.sleep(chance.uniform(0.0, 0.06))
        stored |= set(_kill(child))
        records, damaged = results.parse_lines(path.read_bytes())
        points = [record["point"] for record in records]
        assert len(set(points)) == len(points)
        assert stored <= set(points)
        assert len(damaged) <= 1  # a torn last line at most: the next start sets it aside
    done = len(stored)
    assert 20 < done < count, f"the kills were to hit a running sweep ({done} of {count} points)"
    child = _spawn(path, done)
    child.communicate(timeout=60)
    assert child.returncode == 0
    final, damaged = results.parse_lines(path.read_bytes())
    assert damaged == []
    assert sorted(final, key=lambda record: record["point"])[:done] == [_rebuilt(point) for point in range(done)]


def test_records_hold_no_raw_newlines(path):
    _filled(path, 1)
    assert json.loads(path.read_bytes().splitlines()[0])["text"] == "Zeile\nmit Umbruch, ä"
