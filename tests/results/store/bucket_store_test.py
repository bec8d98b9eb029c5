"""Tests of stores in buckets: no record is lost, doubled or torn, even if several writers are killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest

from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.bucket_store import BucketStore, open_store
from speccascade_jax.results.store.lines import NotAStoreError
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.result_store import ResultStore, check_name, read_records
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.locks import LockedError
from tests.support.stores import record

STORE = "gs://bucket/runs/a.jsonl"


@pytest.fixture(autouse=True)
def short_leases(monkeypatch):
    monkeypatch.setattr(BucketStore, "lease_seconds", 0.5)


def output(number: int, text: str = "b") -> Output:
    return Output(id=number, prompt="a", reference="c", output=text, tokens=(1, 2), pieces=(text, ""))


def with_outputs(n: int, *kept: Output, **entries) -> dict:
    return record(n, fingerprints={"examples": "e"}, outputs=list(kept), **entries)


def test_records_and_outputs_are_those_of_a_local_store(bucket, tmp_path):
    for path in (STORE, tmp_path / "a.jsonl"):
        with open_store(path) as store:
            for n in range(5):
                store.append(with_outputs(n, output(0), output(n), started=f"2026-01-0{9 - n}"))
            assert store.done_keys() == {record(n)["key"] for n in range(5)} and store.judged("none") is None
    local = read_records(tmp_path / "a.jsonl")
    there = read_records(STORE)
    assert [r.pop("outputs_file")[:33] for r in read_records(STORE)] == [f"{r['key']}-" for r in there]
    assert [outputs.read(STORE, r) for r in there] == [outputs.read(tmp_path / "a.jsonl", r) for r in local[::-1]]
    for stored in there:  # records are copied in the order in which they were measured
        del stored["outputs_file"]
    assert there == local[::-1]
    assert [name for name in BucketPath("gs://bucket/runs").below() if "leases" in name] == []


def test_a_store_in_a_bucket_is_copied_into_a_local_one_and_back(bucket, tmp_path):
    with open_store(STORE) as store:
        store.append(with_outputs(0, output(0)))
    with ResultStore(tmp_path / "b.jsonl") as local:
        assert local.take_over([record(0)["key"]], [STORE, "gs://bucket/none.jsonl"]) == 1
    with open_store("gs://bucket/c.jsonl") as third:
        assert third.take_over([record(0)["key"]], [tmp_path / "b.jsonl"]) == 1
        assert outputs.read("gs://bucket/c.jsonl", third.records[0]) == [output(0)]


def test_a_copy_of_a_local_store_is_read_but_not_written(bucket, tmp_path):
    with ResultStore(tmp_path / "a.jsonl") as store:
        store.append(record(0))
    BucketPath(STORE).write((tmp_path / "a.jsonl").read_bytes())
    assert read_records(STORE) == [record(0)]
    with pytest.raises(NotAStoreError, match="is one object, to which no record can be added: name another output"):
        open_store(STORE)
    with pytest.raises(FileNotFoundError, match="no results at gs://bucket/none.jsonl"):
        read_records("gs://bucket/none.jsonl")


def test_the_first_of_two_records_of_a_point_is_kept(bucket):
    with open_store(STORE, "0-of-2") as first, open_store(STORE, "1-of-2") as second:
        first.append(with_outputs(0, output(0, "first"), by=1))
        second.append(with_outputs(0, output(0, "second"), by=2))
        assert second.records == first.records == read_records(STORE)
        assert outputs.read(STORE, second.records[0]) == [output(0, "first")]
        first.append(record(1))
        assert second.done_keys() == {record(0)["key"], record(1)["key"]}
        with pytest.raises(ValueError, match="already holds a record with key"):
            second.append(record(1))


def test_a_second_writer_of_the_same_part_is_refused(bucket):
    with open_store(STORE), pytest.warns(UserWarning), pytest.raises(LockedError, match="is being written by process"):
        open_store(STORE)
    store = open_store(STORE)
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.append(record(0))


def test_a_superseding_record_replaces_the_former_one(bucket):
    """The code may return to an earlier version."""
    with open_store(STORE) as store:
        store.append(record(0, provenance={"code": "a"}, started="2026-01-01"))
    for day, (code, former) in enumerate((("b", "a"), ("a", "b"), ("b", "a"), ("c", "b"))):
        with open_store(STORE) as store:
            started = f"2026-01-0{2 + day}"
            store.append(record(0, provenance={"code": code}, supersedes=former, started=started, day=day))
            assert [r["day"] for r in store.records] == [day]
        assert [r["day"] for r in read_records(STORE)] == [day]
    assert len(BucketPath(STORE + "/records").below()) == 5


def test_the_superseding_record_is_read_even_if_clocks_are_wrong(bucket):
    with open_store(STORE) as store:
        for day, (code, former) in ((1, ("a", {})), (3, ("b", {"supersedes": "a"})), (2, ("c", {"supersedes": "b"}))):
            store.append(record(0, provenance={"code": code}, started=f"2026-01-0{day}", **former))
    assert [r["provenance"]["code"] for r in read_records(STORE)] == ["c"]


def test_processes_of_one_mesh_measure_the_points_on_which_they_agreed(bucket):
    with open_store(STORE, "0-of-1", follow=False) as store, open_store(STORE, "0-of-2") as other:
        other.append(record(0, by=2))
        assert store.done_keys() == set()
        store.append(record(0, by=1))
        assert [r["by"] for r in store.records] == [2]


def test_a_bucket_without_a_path_is_refused_as_an_output():
    with pytest.raises(ValueError, match="output='gs://my.jsonl' names a bucket: give gs://BUCKET/NAME.jsonl"):
        check_name("gs://my.jsonl")


@pytest.mark.parametrize("damage", [b"", b'{"key": "torn', b'{"key":"a","checksum":"0"}\n'])
def test_a_damaged_record_is_named_and_measured_again(bucket, damage):
    with open_store(STORE) as store:
        store.append(record(0))
        store.append(record(1))
    place = next(BucketPath(STORE + "/records").iterdir())
    lost = json.loads(place.read_bytes())
    place.write(damage)
    with pytest.warns(UserWarning, match=rf"1 damaged record\(s\) left out: {place.name} \("):
        store = open_store(STORE)
    with store:
        (point,) = (n for n in (0, 1) if record(n)["key"] == lost["key"])
        store.append(record(point))
    assert {r["n"] for r in read_records(STORE)} == {0, 1}


def test_an_account_that_cannot_list_is_refused(bucket):
    bucket.fault = lambda method, name: "403" if method == "GET" and name == "bucket/" else None
    with pytest.raises(OSError, match="this account cannot list objects"):
        open_store(STORE)


def test_examples_of_two_writers_are_merged(bucket):
    writers = [
        threading.Thread(target=outputs.write, args=(STORE, record(n, fingerprints={"examples": "e"}), [output(n)]))
        for n in range(6)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (examples,) = BucketPath("gs://bucket/runs/a.outputs").glob("examples-*.jsonl")
    assert sorted(outputs._read_examples(examples)) == list(range(6))


WRITER = """
import sys
sys.path.insert(0, {root!r})
from speccascade_jax.results.store.bucket_store import BucketStore, open_store
from speccascade_jax.results.store.result_store import fill
from tests.results.store.bucket_store_test import output, with_outputs
BucketStore.lease_seconds = 0.3
with open_store({store!r}, sys.argv[1]) as store:
    points = range({count})
    records = lambda numbers: (with_outputs(n, output(n)) for n in numbers)
    fill(store, [[n] for n in points], lambda n: with_outputs(n)["key"], records)
"""


@pytest.mark.laws
def test_four_writers_that_are_killed_again_and_again_lose_and_double_nothing(bucket):
    """All four measure the same points, so they also meet at the same records."""
    count, kills, chosen = 60, int(os.environ.get("SPECCASCADE_KILLS", "8")), random.Random(0)
    code = WRITER.format(root=str(repository_root()), store=STORE, count=count)
    running, left = {}, [kills] * 4
    while any(left) or running:
        for part, process in list(running.items()):
            if process.poll() is not None:
                assert process.returncode in (0, -9), process.stderr.read()
                del running[part]
        for part in range(4):
            if part not in running and (left[part] or len(read_records_or_none()) < count):
                command = [sys.executable, "-c", code, f"{part}-of-4"]
                running[part] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        time.sleep(chosen.uniform(0.2, 0.5))
        if living := [part for part in running if left[part]]:
            victim = chosen.choice(living)
            running[victim].kill()
            left[victim] -= 1
    records = read_records(STORE)
    assert [r["n"] for r in sorted(records, key=lambda r: r["n"])] == list(range(count))
    assert all(outputs.read(STORE, r) == [output(r["n"])] for r in records)


def read_records_or_none():
    try:
        return read_records(STORE)
    except FileNotFoundError:
        return []
