"""Stores of a sweep that several independent processes measure in parts: each part has a store of its own.

The four parts of `results/a.jsonl` are `results/a.shard-0-of-4.jsonl` and so on. A reader of `results/a.jsonl` also
reads the parts, and a sweep into this store copies the records of the parts. In a bucket, all parts write into one
store, because its records are separate objects.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import expanded

Group = TypeVar("Group")


def checked(shard_id: int, num_shards: int) -> tuple[int, int]:
    """Returns the two arguments unchanged if they are valid.

    Raises:
        ValueError: `num_shards` is below 1, or `shard_id` is not from 0 to `num_shards - 1`.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: give 1 or more")
    if not 0 <= shard_id < num_shards:
        raise ValueError(f"shard_id={shard_id} of num_shards={num_shards}: give one of 0 to {num_shards - 1}")
    return shard_id, num_shards


def share(groups: Sequence[Group], shard_id: int, num_shards: int) -> list[Group]:
    """Returns every `num_shards`-th group, from the group with index `shard_id` on.

    Neighbouring groups take similar time, so the parts of a sweep do too.
    """
    return list(groups[shard_id::num_shards])


def path_of(output: str | Path, shard_id: int, num_shards: int) -> Path:
    """Returns the path of the store for one part of a sweep."""
    path = expanded(output)
    if isinstance(path, BucketPath):
        return path
    return path.with_name(f"{path.stem}.shard-{shard_id}-of-{num_shards}{path.suffix}")


def file_of(output: str | Path) -> Path:
    """Returns the file of a store, following a symbolic link, because outputs and parts are beside the file itself."""
    return expanded(output).resolve()


def parts_of(output: str | Path) -> list[Path]:
    """Returns the existing stores of parts beside a store, sorted; the number of parts may be any."""
    path = file_of(output)
    form = re.compile(re.escape(path.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(path.suffix))
    if isinstance(path, BucketPath) or not path.parent.is_dir():
        return []
    matches = [(form.fullmatch(entry.name), entry) for entry in path.parent.iterdir()]
    return [entry for _, _, entry in sorted((int(name[2]), int(name[1]), entry) for name, entry in matches if name)]
