"""Errors of readers name file and line; what unpacks to far more than it should is refused."""

import gzip

import pytest

from speccascade_jax.data import sentence_pairs
from speccascade_jax.data.tasks.task import json_lines
from speccascade_jax.storage import readers
from tests.support import memory


def test_lines_are_text_whether_packed_or_not(tmp_path):
    content = "ein\r\nzwei\n\ndrei ä".encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    for name in ("a.txt", "a.txt.gz"):
        assert list(readers.lines(tmp_path / name)) == [(1, "ein"), (2, "zwei"), (3, ""), (4, "drei ä")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": "torn', r"x\.jsonl:2 is damaged \(no JSON: Unterminated string"),
        ("[" * 100_000, r"x\.jsonl:2 is damaged \(no JSON: maximum recursion"),
        ("[1, 2]", r"x\.jsonl:2 is damaged \(no JSON object, but \[1, 2\]\)"),
        ("9" * 5000, r"x\.jsonl:2 is damaged \(no JSON: Exceeds the limit"),
        ('{"b": 1}', r"x\.jsonl:2 has no 'a' \(it has b\)"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, said):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=said):
        [record["a"] for record in json_lines(tmp_path / "x.jsonl")]


def test_what_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "p.tsv").write_bytes("a\tb\nc\tä\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"p\.tsv:2 is not UTF-8 \(.*\): convert the file"):
        sentence_pairs.read_pairs(tmp_path / "p.tsv")


def test_damaged_gzip_is_named(tmp_path):
    whole = gzip.compress(b"a\tb\n" * 1000, mtime=0)
    for content in (whole[: len(whole) // 2], b"a\tb\n", whole[:20] + b"\0\0" + whole[22:], whole[:-4] + b"\0\0\0\0"):
        (tmp_path / "p.tsv.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"p\.tsv\.gz is damaged behind line \d+ .*: copy it again"):
            sentence_pairs.read_pairs(tmp_path / "p.tsv.gz")


@pytest.mark.parametrize("line", [b"\0" * 4000, pytest.param(b"a\tb\n", marks=pytest.mark.laws)])
def test_a_bomb_is_refused_before_it_fills_memory(tmp_path, monkeypatch, line):
    monkeypatch.setattr(readers, "PLAUSIBLE", 100_000)
    (tmp_path / "p.tsv.gz").write_bytes(gzip.compress(line * (20_000_000 // len(line)), mtime=0))

    def refused():
        with pytest.raises(ValueError, match=r"p\.tsv\.gz .* bytes unpack to more than"):
            for _ in readers.lines(tmp_path / "p.tsv.gz"):
                pass

    assert memory.peak(refused) < 12_000_000
