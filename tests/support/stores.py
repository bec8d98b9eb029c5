"""Small stores of results."""

from pathlib import Path

from speccascade_jax.results.store.result_store import ResultStore
from speccascade_jax.storage.files import point_key


def record(n: int, **more) -> dict:
    """A record of number `n`."""
    return {"key": point_key(n=n), "n": n, **more}


def filled(path: Path, count: int) -> list[dict]:
    """The records of a store at `path` that holds those of the first `count` numbers."""
    with ResultStore(path) as store:
        for n in range(count):
            store.append(record(n, text="Zeile\nmit Umbruch, ä"))
        return list(store.records)


def written(path: Path, *records: dict) -> Path:
    """The path of a store, which records were added to."""
    with ResultStore(path) as store:
        for each in records:
            store.append(each)
    return path
