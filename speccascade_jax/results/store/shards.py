"""Parts of a sweep that are measured by processes that know nothing of each other: one store each, read as one.

`results/a.jsonl` in four parts is `results/a.shard-0-of-4.jsonl` and so on. Whoever reads `results/a.jsonl` reads its
parts too, and a sweep into it takes over what they hold.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from speccascade_jax.storage.files import expanded

Group = TypeVar("Group")


def checked(shard_id: int, num_shards: int) -> tuple[int, int]:
    """The two as they are.

    Raises:
        ValueError: no such part.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: give 1 or more")
    if not 0 <= shard_id < num_shards:
        raise ValueError(f"shard_id={shard_id} of num_shards={num_shards}: give one of 0 to {num_shards - 1}")
    return shard_id, num_shards


def share(groups: Sequence[Group], shard_id: int, num_shards: int) -> list[Group]:
    """Every `num_shards`-th group from number `shard_id` on: neighbours, which cost alike, go to different parts."""
    return list(groups[shard_id::num_shards])


def path_of(output: str | Path, shard_id: int, num_shards: int) -> Path:
    """The store of a part."""
    path = Path(output)
    return path.with_name(f"{path.stem}.shard-{shard_id}-of-{num_shards}{path.suffix}")


def parts_of(output: str | Path) -> list[Path]:
    """The stores of parts that lie beside a store, in order, whatever number of parts they are of."""
    path = expanded(output)
    form = re.compile(re.escape(path.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(path.suffix))
    if not path.parent.is_dir():
        return []
    found = [(form.fullmatch(entry.name), entry) for entry in path.parent.iterdir()]
    return [entry for _, _, entry in sorted((int(name[2]), int(name[1]), entry) for name, entry in found if name)]
