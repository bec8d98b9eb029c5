"""Tests of digests of whole files: every flipped bit is detected, and files without a digest load."""

import json

import pytest

from speccascade_jax.storage import checksums
from tests.support import damage

CONTENT = bytes(range(64))


def test_listed_files_are_checked(tmp_path):
    file = tmp_path / "a.model"
    file.write_bytes(CONTENT)
    assert checksums.read(file) == CONTENT  # without a file of digests, nothing is checked
    checksums.update(file)
    for _ in damage.flips(file):
        with pytest.raises(ValueError, match=r"a\.model is damaged: .* checksums\.json: copy it again"):
            checksums.read(file)
    assert checksums.read(file) == CONTENT
    for changed in (CONTENT[:-1], CONTENT + b"x", b""):
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"a\.model is damaged"):
            checksums.read(file)
    (tmp_path / "b.model").write_bytes(CONTENT)
    assert checksums.read(tmp_path / "b.model") == CONTENT  # a file without a listed digest is not checked


def test_an_update_keeps_the_other_entries(tmp_path):
    for name in ("a", "b", "a"):
        (tmp_path / name).write_text(name * 3)
        checksums.update(tmp_path / name)
    assert set(json.loads((tmp_path / "checksums.json").read_text())["bytes"]) == {"a", "b"}


@pytest.mark.parametrize(("text", "said"), [
    ("{", "is damaged"),
    ("[1]", "not a JSON object"),
    ("{}", "has format None"),
    ('{"format": 1, "algorithm": "blake2b-128", "bytes": 3}', "bytes is 3"),
])  # fmt: skip
def test_damaged_digest_files_are_refused(tmp_path, text, said):
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(ValueError, match=rf"checksums\.json.*{said}|{said}"):
        checksums.read(tmp_path / "a")


def test_a_seal_detects_every_flipped_bit(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(CONTENT + checksums.seal(CONTENT))
    assert checksums.unsealed(file, file.read_bytes(), "again") == CONTENT
    assert checksums.unsealed(file, CONTENT, "again") == CONTENT  # a file that an earlier version wrote has no seal
    for _ in damage.flips(file, end=len(CONTENT)):
        with pytest.raises(ValueError, match=r"f is damaged: its bytes have changed: again"):
            checksums.unsealed(file, file.read_bytes(), "again")
