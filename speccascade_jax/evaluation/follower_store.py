"""What stands for a store of results in processes other than the first: all know what is done, one writes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import Record, ResultStore
from speccascade_jax.runtime import hosts


class Follower:
    """As much of a `ResultStore` as sweeps ask; keeps what it is given in memory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.records: list[Record] = []
        self.keys: set[str] = set()

    def append(self, record: Record) -> None:
        record.pop(outputs.ENTRY, None)  # the first process keeps them
        self.records.append(record)
        self.keys.add(record["key"])

    def take_over(self, keys: Iterable[str], paths: Iterable[str | Path]) -> int:
        return 0

    def done_keys(self) -> set[str]:
        return set(self.keys)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def opened(path: str | Path) -> Any:
    """The store at a path in the first process, what stands for it in the others."""
    return ResultStore(path) if hosts.first() else Follower(path)


def check_same(keys: list[str]) -> None:
    """Refuse processes that were given other points, weights or examples than the first one.

    Raises:
        ValueError: in those that were.
    """
    if hosts.agreed(keys) != keys:
        raise ValueError(
            "this process was given other settings, weights or examples than the first one, or runs on another kind of "
            "machine: give all of them the same"
        )


def agree(store: Any) -> None:
    """Let all processes know what the first one's store holds."""
    keys = hosts.agreed(sorted(store.done_keys()))
    if isinstance(store, Follower):
        store.keys = set(keys)
