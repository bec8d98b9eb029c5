"""Tests of locks: one writer at a time, named in errors; killed writers leave no lock."""

import subprocess
import sys

import pytest

from speccascade_jax.storage import leases, locks
from speccascade_jax.storage.buckets import BucketPath

HOLD = """
import sys, time
from pathlib import Path
from speccascade_jax.storage import locks
from speccascade_jax.storage.buckets import BucketPath
with locks.held(Path(sys.argv[1]), "runs/x"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Starts another process that holds `lock`; yields the process."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "a" / "lock")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_writer_is_refused_and_the_error_names_the_first(tmp_path, other):
    said = rf"runs/x is being written by process {other.pid} .*: end it"
    with pytest.raises(locks.LockedError, match=said), locks.held(tmp_path / "a" / "lock", "runs/x", "end it"):
        raise AssertionError("held twice")
    other.kill()
    other.wait()
    with locks.held(tmp_path / "a" / "lock", "runs/x"):  # the kernel has released the lock of the killed process
        assert (tmp_path / "a" / "lock").is_file()
    assert not (tmp_path / "a" / "lock").exists()


def test_an_error_releases_the_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), locks.held(tmp_path / "lock", "x"):
            raise KeyError


def test_a_file_that_is_not_a_lock_is_unchanged(tmp_path):
    (tmp_path / "uv.lock").write_text("version = 1\n")
    with pytest.raises(ValueError, match=r"uv\.lock is not a lock of uv: move it away"):
        locks.acquire(tmp_path / "uv.lock", "uv")
    assert (tmp_path / "uv.lock").read_text() == "version = 1\n"


def test_a_removed_lock_is_not_held_and_the_next_lock_stays(tmp_path):
    first = locks.acquire(tmp_path / "lock", "x")
    assert locks.is_held(first, tmp_path / "lock")
    (tmp_path / "lock").unlink()
    second = locks.acquire(tmp_path / "lock", "x")
    assert not locks.is_held(first, tmp_path / "lock") and locks.is_held(second, tmp_path / "lock")
    locks.release(first, tmp_path / "lock")
    assert (tmp_path / "lock").exists()
    locks.release(second, tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_in_a_bucket_a_lease_takes_the_place_of_the_lock(bucket, monkeypatch):
    monkeypatch.setattr(leases, "SECONDS", 0.3)
    place = BucketPath("gs://bucket/run")
    with locks.held(place / "lock", place, "end it"):
        refused = r"gs://bucket/run is being written by process \d+ .*: end it"
        with pytest.warns(UserWarning), pytest.raises(locks.LockedError, match=refused):  # noqa: SIM117
            with locks.held(place / "lock", place, "end it"):
                raise AssertionError("held twice")
    assert not bucket.objects
