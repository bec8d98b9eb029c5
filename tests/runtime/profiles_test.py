"""Places for traces: checked in one line before anything runs, and the files of a trace in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.runtime import profiles
from speccascade_jax.storage.buckets import BucketPath


@pytest.mark.parametrize("place", ["{}/traces", "gs://bucket/traces"])
def test_a_place_that_can_be_written_stays_empty_and_takes_a_trace(place, bucket, tmp_path):
    place = place.format(tmp_path)
    profiles.check_place("profile_at", place)
    folder = profiles.host_folder(place)
    assert folder.name == "host-0" and not list(folder.iterdir()) and not bucket.objects
    total = jax.jit(lambda x: jnp.cos(x).sum())
    with profiles.traced(folder / "a"):
        jax.block_until_ready(total(jnp.ones(8)))
    names = [file.name for file in (folder / "a" / "plugins" / "profile").glob("*/*")]
    assert [name.partition(".")[2] for name in sorted(names)].count("xplane.pb") == 1
    assert bool(bucket.objects) is isinstance(folder, BucketPath)


def test_processes_that_start_together_do_not_delete_each_others_probes(tmp_path, monkeypatch):
    write, probes = profiles.write_atomically, []

    def beside_another(path, content):
        probes.append(path)
        write(path, content)
        if len(probes) == 1:  # another process checks the same place before this one deletes its probe
            profiles.check_place("profile_at", tmp_path)

    monkeypatch.setattr(profiles, "write_atomically", beside_another)
    profiles.check_place("profile_at", tmp_path)
    assert len({*probes}) == 2 and not list((tmp_path / "host-0").iterdir())


def _denied(path, content):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize(("place", "reason"), [
    ("{}/file", "file is a file"), ("{}/locked/traces", "Permission denied"),
    ("gs://bucket/traces", "give this account the role Storage Object User"),
    ("s3://bucket/traces", "addresses of s3: can.t be read or written"),
])  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused_in_one_line(place, reason, bucket, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    if "locked" in place:  # root may write everywhere
        monkeypatch.setattr(profiles, "write_atomically", _denied)
    bucket.fault = lambda method, name: "403"
    with pytest.raises(ValueError, match=reason) as refused:
        profiles.check_place("profile_at", place.format(tmp_path))
    assert "\n" not in str(refused.value)
