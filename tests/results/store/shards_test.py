"""Parts of a sweep: every group in exactly one, and read as the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.results.store import shards
from speccascade_jax.results.store.result_store import ResultStore, read_records


@given(groups=st.lists(st.integers()), parts=st.integers(1, 9))
def test_every_group_is_in_exactly_one_part(groups, parts):
    found = [shards.share(list(enumerate(groups)), number, parts) for number in range(parts)]
    assert sorted(one for part in found for one in part) == list(enumerate(groups))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("shard_id", "num_shards", "message"),
    [
        (2, 2, "shard_id=2 of num_shards=2: give one of 0 to 1"),
        (-1, 2, "shard_id=-1 of num_shards=2"),
        (0, 0, "num_shards=0: give 1 or more"),
    ],
)
def test_a_part_that_is_none_is_refused(shard_id, num_shards, message):
    with pytest.raises(ValueError, match=message):
        shards.checked(shard_id, num_shards)


def test_a_store_is_read_with_its_parts(tmp_path):
    """The whole need not be there; others' parts are not read, and a key that two hold comes once."""
    whole, written = tmp_path / "a.jsonl", {"a.shard-0-of-2": "x", "a.shard-1-of-2": "y", "ab.shard-0-of-2": "z"}
    for name, key in written.items():
        with ResultStore(tmp_path / f"{name}.jsonl") as store:
            store.append({"key": key})
    assert [path.name for path in shards.parts_of(whole)] == ["a.shard-0-of-2.jsonl", "a.shard-1-of-2.jsonl"]
    assert shards.path_of(whole, 1, 2) == tmp_path / "a.shard-1-of-2.jsonl"
    assert [record["key"] for record in read_records(whole)] == ["x", "y"]
    with ResultStore(whole) as store:
        assert store.take_over(["y", "z", "w"], [whole]) == 1
    assert [record["key"] for record in read_records(whole)] == ["y", "x"]


def test_a_store_without_parts_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no results at .*absent\.jsonl"):
        read_records(tmp_path / "absent.jsonl")
