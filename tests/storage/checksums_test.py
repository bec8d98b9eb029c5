"""Digests of whole files: every flipped bit is seen, files without one load."""

import json

import pytest

from speccascade_jax.storage import checksums

CONTENT = bytes(range(64))


def flips(content):
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def test_a_file_that_is_listed_is_compared(tmp_path):
    (tmp_path / "a.model").write_bytes(CONTENT)
    assert checksums.read(tmp_path / "a.model") == CONTENT  # no digests at all
    checksums.update(tmp_path / "a.model")
    assert checksums.read(tmp_path / "a.model") == CONTENT
    for changed in [*flips(CONTENT), CONTENT[:-1], CONTENT + b"x", b""]:
        (tmp_path / "a.model").write_bytes(changed)
        with pytest.raises(ValueError, match=r"a\.model is damaged: .* checksums\.json: copy it again"):
            checksums.read(tmp_path / "a.model")
    (tmp_path / "b.model").write_bytes(CONTENT)
    assert checksums.read(tmp_path / "b.model") == CONTENT  # not listed


def test_an_update_keeps_what_else_is_listed(tmp_path):
    for name in ("a", "b", "a"):
        (tmp_path / name).write_text(name * 3)
        checksums.update(tmp_path / name)
    assert set(json.loads((tmp_path / "checksums.json").read_text())["bytes"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged"),
        ("[1]", "no JSON object"),
        ("{}", "has format None"),
        ('{"format": 1, "algorithm": "blake2b-128", "bytes": 3}', "bytes is 3"),
    ],
)
def test_damaged_digests_are_named(tmp_path, text, said):
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(ValueError, match=rf"checksums\.json.*{said}|{said}"):
        checksums.read(tmp_path / "a")


def test_a_seal_shows_every_flipped_bit_of_what_it_seals(tmp_path):
    sealed = CONTENT + checksums.seal(CONTENT)
    assert checksums.unsealed(tmp_path / "f", sealed, "again") == CONTENT
    assert checksums.unsealed(tmp_path / "f", CONTENT, "again") == CONTENT  # as earlier versions wrote it
    for changed in flips(CONTENT):
        with pytest.raises(ValueError, match=r"f is damaged: .* not those written: again"):
            checksums.unsealed(tmp_path / "f", changed + sealed[len(CONTENT) :], "again")
