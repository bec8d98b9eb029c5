"""Tests of leases: a second writer is refused while the first one lives, and gets the lease after its death."""

from __future__ import annotations

import time

import pytest

from speccascade_jax.storage import leases
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.leases import Lease
from speccascade_jax.storage.locks import LockedError

STORE = BucketPath("gs://bucket/a.jsonl")
PLACE = STORE / "leases" / "whole.json"
SECONDS = 0.3


def test_a_second_writer_is_refused_while_the_first_one_lives(bucket):
    refused = r"gs://bucket/a.jsonl is being written by process \d+ on .* end it, or"
    with Lease(PLACE, STORE, SECONDS):
        with pytest.warns(UserWarning), pytest.raises(LockedError, match=refused):
            Lease(PLACE, STORE, SECONDS)
        with Lease(STORE / "leases" / "another.json", STORE, SECONDS):
            pass
    assert not PLACE.exists()
    with Lease(PLACE, STORE, SECONDS):
        assert PLACE.exists()


@pytest.mark.parametrize("left", [b'{"host": "a", "process": 1}', b"not JSON"])
def test_another_writer_gets_the_lease_of_a_dead_writer_after_it_expires(bucket, left):
    PLACE.write(left)
    began = time.monotonic()
    said = "gs://bucket/a.jsonl was being written by (process 1 on a|an unknown process): waiting 0 s to see if it is"
    with pytest.warns(UserWarning, match=said), Lease(PLACE, STORE, SECONDS):
        assert time.monotonic() - began >= SECONDS
        assert PLACE.read_bytes() != left


def test_a_writer_that_lost_its_lease_raises_an_error_and_leaves_the_new_lease_unchanged(bucket, recwarn):
    lease = Lease(PLACE, STORE, SECONDS)
    PLACE.write(b'{"host": "b", "process": 2}')
    lease._thread.join(5)
    assert "belongs to process 2 on b now: some settings may be measured twice" in str(recwarn[0].message)
    lease.release()
    assert PLACE.read_bytes() == b'{"host": "b", "process": 2}'


def test_a_server_that_fails_for_a_while_ends_no_lease(bucket):
    with Lease(PLACE, STORE, SECONDS) as lease:
        # the server answers reads, but refuses renewals
        bucket.fault = lambda method, name: "403" if method == "POST" else None
        time.sleep(SECONDS)
        bucket.fault = lambda method, name: None
        deadline = time.monotonic() + 5
        while lease._renewals == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lease._thread.is_alive()
        renewals = lease._renewals
        while lease._renewals == renewals and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lease._renewals > renewals and PLACE.read()[0] == lease._content()
        bucket.fault = lambda method, name: "403"
    bucket.fault = lambda method, name: None
    assert PLACE.exists()


def test_a_writer_ends_without_waiting_for_a_server_that_does_not_answer(bucket, monkeypatch):
    monkeypatch.setattr(leases, "_GRACE", 0.1)
    lease = Lease(PLACE, STORE, SECONDS)
    bucket.fault = lambda method, name: "slow"
    began = time.monotonic()
    lease.release()
    assert time.monotonic() - began < 1.5
