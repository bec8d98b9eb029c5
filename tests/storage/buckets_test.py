"""Tests of objects in buckets: read and written as a whole, never overwritten by a second writer, one-line errors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from speccascade_jax.storage import buckets, files
from speccascade_jax.storage.buckets import BucketPath

PLACE = BucketPath("gs://bucket/runs/a.jsonl")


def test_paths_in_a_bucket_keep_both_slashes():
    assert [str(path) for path in (PLACE, PLACE.parent, PLACE / "b" / "c", PLACE.with_suffix(".png"))] == [
        "gs://bucket/runs/a.jsonl", "gs://bucket/runs", "gs://bucket/runs/a.jsonl/b/c", "gs://bucket/runs/a.png",
    ]  # fmt: skip
    assert (PLACE.bucket, PLACE.key, PLACE.stem) == ("bucket", "runs/a.jsonl", "a")
    relative = PLACE.relative_to("gs://bucket")
    assert str(relative) == "runs/a.jsonl" and PLACE.parent.parent / relative == PLACE
    with pytest.raises(ValueError, match="gs://bucket/runs/a.jsonl is not below gs://bucket/run"):
        PLACE.relative_to("gs://bucket/run")
    assert isinstance(PLACE, Path) and {PLACE: 1}[BucketPath("gs://bucket/runs/a.jsonl")] == 1


@pytest.mark.parametrize("path", ["gs://bucket/a", Path("gs://bucket/a"), BucketPath("gs://bucket/a")])
def test_addresses_become_places_in_a_bucket(path):
    assert files.expanded(path) == BucketPath("gs://bucket/a") and str(files.expanded(path)) == "gs://bucket/a"


@pytest.mark.parametrize(("address", "message"), [
    ("gs://", "gs:// names no bucket: give gs://BUCKET/NAME"), ("gs:///a", "names no bucket|NAME"),
    ("gs://UPPER/a", "names no bucket"), ("gs://bucket/a/../b", "have no meaning in a bucket"),
])  # fmt: skip
def test_addresses_without_a_bucket_are_refused(address, message):
    with pytest.raises(ValueError, match=message):
        buckets.checked(address) if address != "gs:///a" else buckets.checked("gs://-/a")


@pytest.mark.parametrize(("address", "message"), [
    (" gs://bucket/a", "' gs://bucket/a' has spaces around it: leave them out"),
    ("gs://bucket/a ", "has spaces around it: leave them out"), ("gs://bucket/a\n", "has spaces around it"),
    ("\tgs:/bucket/a ", "has spaces around it: leave them out"),
    ("gs:bucket/a", "'gs:bucket/a' is no address of a bucket: give gs://BUCKET/NAME"),
    ("gs:", "'gs:' is no address of a bucket: give gs://BUCKET/NAME"),
    (Path("gs:b"), "'gs:b' is no address of a bucket: give gs://BUCKET/NAME"),
    ("gs://bucket/a\x00b", "can.t name an object"), ("gs://bucket/a\nb", "can.t name an object"),
    ("gs://bucket/" + "ä" * 600, r"gs://bucket/ä+ can.t name an object: give at most 1,024"),
    ("GS://bucket/a", "addresses of GS: can.t be read or written; .* one in gs://"),
])  # fmt: skip
def test_what_is_almost_an_address_becomes_no_local_folder(address, message):
    with pytest.raises(ValueError, match=message) as raised:
        files.expanded(address)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_a_name_that_is_too_long_is_named_with_its_remedy(bucket):
    for use in ((PLACE / ("x" * 1100)).read_bytes, lambda: (PLACE / ("x" * 1100)).write(b"")):
        with pytest.raises(OSError, match="Invalid GCS object name.*; give a name of at most 1,024 bytes"):
            use()


def test_steps_that_need_a_local_file_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (open, os.stat, PLACE.touch, PLACE.rename, os.path.realpath):
        with pytest.raises(ValueError, match="gs://bucket/runs/a.jsonl: this step works on local files only; copy it"):
            use(PLACE) if use in (open, os.stat, os.path.realpath) else use(*["b"] * (use == PLACE.rename))
    assert not list(tmp_path.iterdir())


def test_an_object_is_read_as_it_was_written(bucket):
    files.write_atomically("gs://bucket/runs/a.jsonl", "ä\n", b"\x00")
    assert bucket.objects["bucket/runs/a.jsonl"][0] == PLACE.read_bytes() == "ä\n\0".encode()
    assert PLACE.read_text() == PLACE.open().read() == "ä\n\0" and PLACE.read_range(1, 3) == b"\xa4\n"
    assert PLACE.stat().st_size == 4 and PLACE.exists() and not PLACE.is_dir()
    PLACE.unlink()
    assert not PLACE.exists()
    for missing in (PLACE.read_bytes, PLACE.unlink, lambda: PLACE.read_range(0, 1)):
        with pytest.raises(FileNotFoundError, match="gs://bucket/runs/a.jsonl"):
            missing()


def test_names_below_a_place_are_its_folder(bucket):
    for name in ("runs/a.jsonl", "runs/b/c.json", "runs-2/d", *[f"many/{i:03}" for i in range(250)]):
        BucketPath(f"gs://bucket/{name}").write(name.encode())
    runs = BucketPath("gs://bucket/runs")
    assert runs.below() == ["a.jsonl", "b/c.json"] and list(runs.iterdir()) == [runs / "a.jsonl", runs / "b"]
    assert list(runs.glob("*.jsonl")) == [PLACE] and list(runs.parent.glob("*/*.jsonl")) == [PLACE]
    assert runs.is_dir() and not runs.is_file() and not BucketPath("gs://bucket/run").exists()
    many = BucketPath("gs://bucket/many")
    # the list of names has three pages
    assert many.read_below(many.below()) == [f"many/{i:03}".encode() for i in range(250)]
    assert [str(path) for path in BucketPath("gs://bucket").iterdir()][1:] == ["gs://bucket/runs-2", "gs://bucket/runs"]


def test_only_one_of_many_writers_creates_an_object_and_none_overwrites_it(bucket):
    won = []
    writers = [threading.Thread(target=lambda i=i: PLACE.create(b"%d" % i) and won.append(i)) for i in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [PLACE.read_bytes()] == [b"%d" % i for i in won]


def test_an_object_is_replaced_only_if_it_has_not_changed_since_it_was_read(bucket):
    PLACE.write(b"one")
    content, generation = PLACE.read()
    PLACE.write(b"two")
    assert content == b"one" and not PLACE.swap(b"three", generation) and PLACE.read_bytes() == b"two"
    assert PLACE.swap(None, PLACE.read()[1]) and not PLACE.exists()


@pytest.fixture
def quick_retries(monkeypatch):
    """Repeats requests at once, so that tests do not wait."""
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 4, "initial_delay": "1ms", "max_delay": "5ms"})
    buckets._opened.cache_clear()
    yield
    buckets._opened.cache_clear()


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("fault", ["503", "429", "500", "reset", "lost"])
def test_requests_that_fail_for_a_moment_are_repeated(bucket, fault):
    failures = iter([fault, fault])
    bucket.fault = lambda method, name: next(failures, None)
    assert PLACE.create(b"whole") and PLACE.read_bytes() == b"whole"
    failures = iter([fault, fault])
    assert not PLACE.create(b"another") and PLACE.read_bytes() == b"whole"


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(("fault", "message"), [
    ("503", "gs://bucket/runs/a.jsonl: .*; the server failed several times; run the same command again"),
    ("reset", "gs://bucket/runs/a.jsonl: .*; the server failed several times; run the same command again"),
    ("401", "gs://bucket/runs/a.jsonl: .*; run gcloud auth application-default login"),
    ("403", "gs://bucket/runs/a.jsonl: .*; give this account the role Storage Object User"),
])  # fmt: skip
def test_a_lasting_failure_is_one_line_with_its_remedy(bucket, fault, message):
    bucket.fault = lambda method, name: fault
    for use in (PLACE.read_bytes, lambda: PLACE.write(b"x"), PLACE.exists, PLACE.below):
        with pytest.raises(OSError, match=message) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert not bucket.objects


def test_a_placeholder_object_for_a_folder_is_not_listed(bucket):
    for name in ("bucket/runs/", "bucket/runs/b/", "bucket/runs/a.jsonl"):
        bucket.objects[name] = b"", next(bucket.generations)
    assert PLACE.parent.below() == ["a.jsonl"] and list(PLACE.parent.iterdir()) == [PLACE]


def test_an_object_that_vanishes_while_it_is_read_is_named(bucket):
    PLACE.write(bytes(100))
    opened = PLACE.open("rb", buffering=0)
    PLACE.unlink()
    with pytest.raises(OSError, match="gs://bucket/runs/a.jsonl: the object was deleted or replaced while it was read"):
        opened.read()


def test_parts_of_an_object_are_those_of_one_generation(bucket):
    PLACE.write(b"old content")
    pinned, buffer = PLACE.pinned(), bytearray(3)
    opened = PLACE.open("rb", buffering=0)
    assert pinned.read_range(0, 3) == b"old" and pinned.read_into([4], [memoryview(buffer)]) == 0 and buffer == b"con"
    PLACE.write(b"new content")
    for read in (lambda: pinned.read_range(0, 3), lambda: pinned.read_into([0], [memoryview(buffer)]), opened.read):
        with pytest.raises(
            OSError, match="runs/a.jsonl: the object was deleted or replaced while it was read; read it"
        ):
            read()
    assert PLACE.read_range(0, 3) == b"new" and PLACE.pinned().read_range(0, 3) == b"new"
    PLACE.unlink()
    with pytest.raises(FileNotFoundError):
        PLACE.pinned()


def test_an_exchange_returns_the_generation_for_the_next_one(bucket):
    first = PLACE.exchange(b"one", buckets.ABSENT)
    second = PLACE.exchange(b"two", first)
    assert second == PLACE.read()[1] and PLACE.exchange(b"three", first) is None
    failures = iter(["lost"])
    bucket.fault = lambda method, name: next(failures, None) if method == "POST" else None
    third = PLACE.exchange(b"three", second)
    assert third == PLACE.read()[1] and PLACE.read_bytes() == b"three"


def test_all_objects_below_a_place_are_deleted(bucket):
    for name in ("a/1", "a/b/2", "a", "ab"):
        BucketPath(f"gs://bucket/{name}").write(b"")
    files.remove_folder(BucketPath("gs://bucket/a"))
    assert sorted(bucket.objects) == ["bucket/a", "bucket/ab"]
