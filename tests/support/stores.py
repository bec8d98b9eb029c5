"""Small stores of results."""

from pathlib import Path

from speccascade_jax.results.store.result_store import ResultStore
from speccascade_jax.storage.files import point_key


def record(n: int, **more) -> dict:
    """Returns a record of number `n`."""
    return {"key": point_key(n=n), "n": n, **more}


def filled(path: Path, count: int) -> list[dict]:
    """Writes the records of the first `count` numbers to a store at `path`; returns them."""
    with ResultStore(path) as store:
        for n in range(count):
            store.append(record(n, text="Zeile\nmit Umbruch, ä"))
        return list(store.records)


def written(path: Path, *records: dict) -> Path:
    """Adds records to a store and returns its path."""
    with ResultStore(path) as store:
        for entry in records:
            store.append(entry)
    return path
