"""Tests of the store of results: durable appends, keys, two writers, and twenty kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.results.store import result_store as results
from speccascade_jax.results.store import shards
from speccascade_jax.results.store.lines import CHECKSUM, parse_lines
from speccascade_jax.results.store.result_store import ResultStore, StoreLockedError, fill, read_records
from speccascade_jax.storage import files
from speccascade_jax.storage.files import point_key
from tests.support import fake_records
from tests.support.stores import filled, record, written


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "deep" / "sweep.jsonl"


def test_records_are_stored_one_per_line_and_read_in_order(path):
    written = filled(path, 3)
    assert read_records(path) == written
    assert path.read_bytes().count(b"\n") == 3
    with ResultStore(path) as store:
        assert store.records == written and store.damaged == []
        assert store.done_keys() == {record["key"] for record in written}


def test_records_of_a_store_print_as_one_line(path):
    point = fake_records.run(fake_records.coordinates()[4])
    with ResultStore(path) as store:
        store.append(point)
        store.append({"key": "0123456789abcdef", "counts": {"rounds": 3}})
        texts = [repr(stored) for stored in store.records]
    assert [repr(stored) for stored in read_records(path)] == texts
    assert (
        texts[0].startswith(f"<record {point['key'][:8]}: SpecDecode [Lossy] α=")
        and f"{point['quality']['value']:.2f}" in texts[0]
    )
    assert len(texts[0]) < 120 and texts[1] == "<record 01234567 with key, counts>"


def test_numpy_values_and_undefined_numbers_become_json(path):
    written(path, record(0, a=np.float32(0.5), b=np.arange(2), c=float("nan"), d=[float("inf"), np.int64(3)]))
    assert read_records(path) == [record(0, a=0.5, b=[0, 1], c=None, d=[None, 3])]


def test_a_key_is_never_stored_twice(path):
    with ResultStore(path) as store:
        store.append(record(1))
        with pytest.raises(ValueError, match="already holds a record with key"):
            store.append(record(1, other=True))
        with pytest.raises(ValueError, match="non-empty string 'key'"):
            store.append({"n": 1})
    assert len(read_records(path)) == 1


def test_keys_depend_on_every_part_and_on_nothing_else():
    assert point_key(a=1, b="x") == point_key(b="x", a=1)
    assert len({point_key(a=1), point_key(a=2), point_key(b=1), point_key(a=1.5), point_key(a="1")}) == 5


def test_a_store_that_nothing_was_written_to_is_not_left_behind(path):
    ResultStore(path.parent / "a/b/x.jsonl").close()
    assert not path.parent.exists()
    path.parent.mkdir()
    path.touch()
    ResultStore(path).close()  # the file was here before
    assert path.exists()
    path.unlink()
    with ResultStore(path):
        path.write_text("")  # another program's
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"
    path.unlink()
    with ResultStore(path) as store:
        store.append(record("a"))
    assert len(read_records(path)) == 1


def test_a_second_writer_is_refused_with_the_store_and_process_named(path):
    said = rf"process {os.getpid()} \(lock .*sweep.jsonl.lock\)"
    with ResultStore(path), pytest.raises(StoreLockedError, match=said):
        ResultStore(path)
    ResultStore(path).close()
    assert not path.with_name("sweep.jsonl.lock").exists()


def test_the_lock_of_a_killed_writer_is_released(path):
    child = _spawn(path, count=10_000)
    assert child.stdout.readline()
    with pytest.raises(StoreLockedError, match=f"process {child.pid} "):
        ResultStore(path)
    _kill(child)
    ResultStore(path).close()


def test_a_write_cut_short_by_a_full_disk_is_undone(path, monkeypatch):
    with ResultStore(path) as store:
        store.append(record(0))
        real = os.write
        monkeypatch.setattr(results.os, "write", lambda file, line: real(file, line[: len(line) // 2]))
        with pytest.raises(OSError, match=r"No space left .* free some space.*sweep\.jsonl"):
            store.append(record(1))
        monkeypatch.setattr(results.os, "write", real)
        store.append(record(1))
    assert [record["n"] for record in read_records(path)] == [0, 1]


def test_records_of_other_stores_are_taken_over_once(path, tmp_path):
    second, nowhere = tmp_path / "other.jsonl", tmp_path / "nowhere.jsonl"
    filled(second, 3)
    with ResultStore(path) as store:
        store.append(record(1, own=True))
        wanted = [record(n)["key"] for n in (1, 2, 7)]
        assert store.take_over(wanted, (second, nowhere)) == 1 and store.take_over(wanted, (second,)) == 0
    assert [(record["n"], "own" in record) for record in read_records(path)] == [(1, True), (2, False)]


def _of_code(n: int, code: str | None, **more) -> dict:
    """Returns a record with the digest of the code that measured it."""
    return record(n, code=code, provenance={"code": code, "toolchain": {}}, **more)


def _codes(records: list[dict]) -> list[tuple[int, str]]:
    return [(record["n"], record["code"]) for record in records]


def test_a_superseding_record_replaces_the_former_one_in_every_read(path):
    chain = _of_code(0, "b", supersedes="a"), _of_code(0, "a", supersedes="b")
    with ResultStore(path) as store:
        for n in range(3):
            store.append(_of_code(n, "a"))
        store.append(chain[0])
        for again in (_of_code(0, "c"), _of_code(0, "c", supersedes="a"), chain[0]):
            with pytest.raises(ValueError, match="already holds a record with key"):
                store.append(again)
        assert _codes(store.records) == [(0, "b"), (1, "a"), (2, "a")] and read_records(path) == store.records
        store.append(chain[1])
    assert _codes(read_records(path)) == [(0, "a"), (1, "a"), (2, "a")]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5, "a line that was superseded stays"
    path.write_bytes(lines[4] + lines[0])
    with pytest.warns(UserWarning, match=r"line 2 \(the same key as line 1\)"):
        assert read_records(path) == [chain[1]]
    path.write_bytes(b"".join([*lines[:3], lines[3][:-9] + b"\n", lines[4]]))
    with pytest.warns(UserWarning, match="line 4 "), ResultStore(path) as store:
        assert store.records[0] == chain[1], "although the line that it names is damaged"
    assert path.read_bytes() == b"".join([*lines[:3], lines[4]])


def test_a_superseding_line_torn_anywhere_keeps_the_former_record(path):
    written(path, _of_code(0, "a"), _of_code(0, "b", supersedes="a"))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1):
        records, damaged = parse_lines(whole[:cut])
        assert _codes(records) == [(0, "a")] and [line.number for line in damaged] == [2]
        if cut % 9:
            continue  # stores are slow to open and append to, because every write goes to the disk
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match="line 2 "), ResultStore(path) as store:
            assert _codes(store.records) == [(0, "a")]
            store.append(_of_code(0, "b", supersedes="a"))
        assert _codes(read_records(path)) == [(0, "b")]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_superseding_record_is_read_from_any_of_several_files(tmp_path, names):
    paths = dict(zip(names, (tmp_path / name for name in names), strict=True))
    for code, more in (("a", {}), ("b", {"supersedes": "a"})):
        written(paths[code], _of_code(0, code, **more), _of_code(1, code))
    assert _codes(read_records(*paths.values())) == [(0, "b"), (1, names[0])]
    with ResultStore(paths["a"]) as store:
        keys = store.done_keys()
        assert store.take_over(keys, [paths["b"]]) == 1 and store.take_over(keys, [paths["b"]]) == 0
        assert _codes(store.records) == [(0, "b"), (1, "a")]


def _filled_with(path: Path, code: str | None, groups: list, stale: set, **more) -> tuple[int, list]:
    """Fills a store with groups of numbers; returns how many records were added, and which numbers were measured."""
    asked = []

    def evaluate(jobs):
        asked.append(list(jobs))
        yield from (_of_code(n, code) for n in jobs)

    with ResultStore(path) as store:
        return fill(store, groups, lambda n: point_key(n=n), evaluate, stale=stale, **more), asked


def test_fill_measures_only_what_is_missing(path):
    written(path, record(1))
    seen: list[dict] = []
    assert _filled_with(path, None, [[0, 1, 2], [3]], set(), on_record=seen.append) == (3, [[0, 2], [3]])
    assert _filled_with(path, None, [[0, 1, 2], [3]], set()) == (0, [])
    assert [record["n"] for record in seen] == [0, 2, 3]


def test_fill_measures_stale_records_again_and_once(path):
    written(path, *(_of_code(n, None if n else "a") for n in range(3)))
    stale = {record(n)["key"] for n in (0, 1)}
    assert _filled_with(path, "b", [[0, 2], [1, 3], [0, 1]], stale) == (3, [[0], [1, 3]])
    records = read_records(path)
    assert _codes(records) == [(0, "b"), (1, "b"), (2, None), (3, "b")]
    assert [record.get("supersedes", "nothing") for record in records] == ["a", None, "nothing", "nothing"]


def test_a_record_is_found_by_its_judged_key(path):
    with ResultStore(path) as store:
        for n, judged in enumerate(("x", "y", "x")):
            store.append(record(n, judged_key=judged))
        store.append(record(3))
        assert store.judged("x")["n"] == 2 and store.judged("y")["n"] == 1 and store.judged("z") is None


def test_csv_flattens_records(path):
    text = results.to_csv([record(0, quality={"value": 1.5, "all": {"bleu": 2}}), record(1, trials=[1, 2], none=None)])
    head, first, second = text.splitlines()
    assert head == "key,n,quality.value,quality.all.bleu,trials,none"
    assert first.endswith(",0,1.5,2,,") and second.endswith(',1,,,"[1, 2]",')


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no results at .*nothing\.jsonl"):
        read_records(tmp_path / "nothing.jsonl")


def test_several_files_are_merged_without_repeating_a_key(tmp_path):
    for name, numbers in (("a", (0, 1)), ("b", (1, 2))):
        written(tmp_path / name, *(record(n) for n in numbers))
    assert [record["n"] for record in read_records(tmp_path / "a", tmp_path / "b")] == [0, 1, 2]


def test_writing_atomically_replaces_and_leaves_no_temporary_file(tmp_path):
    for text in ("eins\n", "zwei\n"):
        files.write_atomically(tmp_path / "out.md", text)
    assert (tmp_path / "out.md").read_text() == "zwei\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checksum_depends_on_content_and_not_on_formatting(path):
    filled(path, 1)
    line = json.loads(path.read_bytes())
    path.write_text(json.dumps(dict(reversed(line.items())), ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
    assert [record["n"] for record in read_records(path)] == [0]


def test_stores_without_checksums_are_read_and_appended_to(path):
    path.parent.mkdir()
    path.write_text(json.dumps(record(0)) + "\n")
    with ResultStore(path) as store:
        assert store.damaged == []
        store.append(record(1))
    assert read_records(path) == [record(0), record(1)]
    assert [CHECKSUM in json.loads(line) for line in path.read_text().splitlines()] == [False, True]


@given(groups=st.lists(st.integers()), parts=st.integers(1, 9))
def test_every_group_is_in_exactly_one_part(groups, parts):
    shares = [shards.share(list(enumerate(groups)), number, parts) for number in range(parts)]
    assert sorted(group for part in shares for group in part) == list(enumerate(groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("shard_id", "num_shards", "message"), [
    (2, 2, "shard_id=2 of num_shards=2: give one of 0 to 1"),
    (-1, 2, "shard_id=-1 of num_shards=2"),
    (0, 0, "num_shards=0: give 1 or more"),
])  # fmt: skip
def test_invalid_shards_are_refused(shard_id, num_shards, message):
    with pytest.raises(ValueError, match=message):
        shards.checked(shard_id, num_shards)


def test_a_store_is_read_with_its_parts(tmp_path):
    """Checks that the whole store may be missing, parts of other stores are not read, and shared keys appear once."""
    whole, keys = tmp_path / "a.jsonl", {"a.shard-0-of-2": "x", "a.shard-1-of-2": "y", "ab.shard-0-of-2": "z"}
    for name, key in keys.items():
        written(tmp_path / f"{name}.jsonl", {"key": key})
    assert [path.name for path in shards.parts_of(whole)] == ["a.shard-0-of-2.jsonl", "a.shard-1-of-2.jsonl"]
    assert shards.path_of(whole, 1, 2) == tmp_path / "a.shard-1-of-2.jsonl"
    assert [record["key"] for record in read_records(whole)] == ["x", "y"]
    with ResultStore(whole) as store:
        assert store.take_over(["y", "z", "w"], [whole]) == 1
    assert [record["key"] for record in read_records(whole)] == ["y", "x"]


# A sweep with a fake runner in a separate process. It loads the module from its file, because the package would import
# JAX. It prints every record that it has stored, so that the parent knows which ones must not be lost.
_CHILD = """
import sys
from speccascade_jax.storage import files
from speccascade_jax.storage.files import point_key
from speccascade_jax.results.store import result_store as results

def evaluate(points):
    for point in points:
        payload = code * (1 + point * 7919 % 40_000)
        yield {"key": point_key(point=point), "point": point, "provenance": {"code": code}, "payload": payload}

points, code = range(int(sys.argv[2])), sys.argv[3]
groups = [points[n : n + 5] for n in range(0, len(points), 5)]
with results.ResultStore(sys.argv[1]) as store:
    print("open", flush=True)
    stale = [record["key"] for record in store.records if record["provenance"]["code"] != code]
    results.fill(store, groups, lambda p: point_key(point=p), evaluate,
                 lambda record: print(record["point"], flush=True), stale)
"""


def _spawn(path: Path, count: int, code: str = "x") -> subprocess.Popen:
    command = [sys.executable, "-c", _CHILD, str(path), str(count), code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _kill(child: subprocess.Popen) -> list[int]:
    """Kills the process, and returns the points that it reported as stored."""
    child.send_signal(signal.SIGKILL)
    said, _ = child.communicate()
    return [int(line) for line in said.splitlines() if line.isdigit()]


def _rebuilt(point: int, code: str = "x") -> dict:
    payload = code * (1 + point * 7919 % 40_000)
    return {"key": point_key(point=point), "point": point, "provenance": {"code": code}, "payload": payload}


def _killed(path: Path, count: int, times: int, longest: float, code: str = "x"):
    """Starts a sweep and kills it, repeatedly; yields the records, and the points that it reported as stored."""
    chance, stored = random.Random(20), set[int]()
    for _ in range(times):
        child = _spawn(path, count, code)
        assert child.stdout.readline() == "open\n"
        time.sleep(chance.uniform(0.0, longest))
        stored |= set(_kill(child))
        records, damaged = parse_lines(path.read_bytes())
        assert len(damaged) <= 1  # at most a torn last line, which the next start sets aside
        yield records, stored
    assert times < len(stored) < count, f"the kills were to hit a running sweep ({len(stored)} of {count} points)"


def _whole(path: Path, count: int, code: str = "x") -> list[dict]:
    """Runs a sweep to its end; returns its records."""
    child = _spawn(path, count, code)
    child.communicate(timeout=60)
    records, damaged = parse_lines(path.read_bytes())
    assert child.returncode == 0 and damaged == []
    return records


@pytest.mark.laws
def test_twenty_kills_lose_repeat_and_tear_no_record(path):
    for records, stored in _killed(path, 2_000, times=20, longest=0.06):
        points = [record["point"] for record in records]
        assert len(set(points)) == len(points) and stored <= set(points)
    done = len(stored)
    final = _whole(path, done)
    assert sorted(final, key=lambda record: record["point"])[:done] == [_rebuilt(point) for point in range(done)]


@pytest.mark.laws
def test_kills_while_stale_records_are_measured_again_leave_every_point_once(path):
    count = 400
    assert len(_whole(path, count)) == count
    for records, stored in _killed(path, count, times=10, longest=0.04, code="y"):
        assert [record["point"] for record in records] == [*range(count)]
        assert stored <= {record["point"] for record in records if record["provenance"]["code"] == "y"}
    assert _whole(path, count, "y") == [_rebuilt(point, "y") | {"supersedes": "x"} for point in range(count)]
