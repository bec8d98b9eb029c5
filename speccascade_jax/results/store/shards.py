"""Parts of a sweep that independent processes measure: one store each, read as one.

The four parts of `results/a.jsonl` are `results/a.shard-0-of-4.jsonl` and so on. A reader of `results/a.jsonl` reads
its parts too, and a sweep into it takes over their records.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from speccascade_jax.storage.files import expanded

Group = TypeVar("Group")


def checked(shard_id: int, num_shards: int) -> tuple[int, int]:
    """Returns the two arguments unchanged if they are valid.

    Raises:
        ValueError: there is no such part.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: give 1 or more")
    if not 0 <= shard_id < num_shards:
        raise ValueError(f"shard_id={shard_id} of num_shards={num_shards}: give one of 0 to {num_shards - 1}")
    return shard_id, num_shards


def share(groups: Sequence[Group], shard_id: int, num_shards: int) -> list[Group]:
    """Returns every `num_shards`-th group from `shard_id` on: neighbours take similar time, so parts do too."""
    return list(groups[shard_id::num_shards])


def path_of(output: str | Path, shard_id: int, num_shards: int) -> Path:
    """Returns the path of a part's store."""
    path = Path(output)
    return path.with_name(f"{path.stem}.shard-{shard_id}-of-{num_shards}{path.suffix}")


def file_of(output: str | Path) -> Path:
    """Returns the store's file: a symbolic link is followed, because the outputs and parts are beside the file."""
    return Path(os.path.realpath(expanded(output)))


def parts_of(output: str | Path) -> list[Path]:
    """Returns the stores of parts that exist beside a store, in order, whatever the number of parts is."""
    path = file_of(output)
    form = re.compile(re.escape(path.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(path.suffix))
    if not path.parent.is_dir():
        return []
    matches = [(form.fullmatch(entry.name), entry) for entry in path.parent.iterdir()]
    return [entry for _, _, entry in sorted((int(name[2]), int(name[1]), entry) for name, entry in matches if name)]
