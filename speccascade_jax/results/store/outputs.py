"""Outputs kept beside a store: what every point wrote, example by example, and what it was given.

Beside `results/a.jsonl` lies the folder `results/a.outputs`: one JSON-lines file for each record, named by its key, and
one of the prompts and references that its records share, named by the hash of the examples (the record's
`fingerprints.examples`). A record's outputs are there before the record is. Those of a record that was migrated when it
was read may lie under its former key; those of a record that supersedes another have a file beside that one's. Nothing
here imports JAX.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from speccascade_jax.results.store import shards
from speccascade_jax.results.store.record import Record, Row, get_entry
from speccascade_jax.results.store.trace import Trace
from speccascade_jax.storage import readers
from speccascade_jax.storage.files import expanded, write_atomically

ENTRY: Final = "outputs"
"""A record's entry that is kept here and not in its line: what `Kept` holds."""
LETTERS = {"d": "draft", "r": "replaced", "b": "bonus", "t": "target"}
"""How files spell where a token came from."""
GIVEN, WRITTEN = ("id", "prompt", "reference"), ("id", "output", "tokens", "pieces", "sources", "rounds")
"""Fields of an `Output` that a store keeps once for each example, and once for each record."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one point wrote for one example.

    Attributes:
        id: the example's; prompt: what the models were given; reference: one text or several.
        output: what is scored; tokens: its ids, a stop id included.
        pieces: what each token adds to the text as it was written (before it is cut for scoring).
        sources: a letter per token, `LETTERS`; rounds: how many tokens each round committed. Empty where the method is
            more than one generation.
        trace: of the first few examples (`Evaluation.keep_traces`).
    """

    id: int
    prompt: str
    reference: str | tuple[str, ...]
    output: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    sources: str = ""
    rounds: tuple[int, ...] = ()
    trace: Trace | None = None


def folder(store: str | Path) -> Path:
    """Where the outputs of a store's records lie."""
    path = expanded(store)
    return path.with_name(f"{path.stem}.outputs")


def write(store: str | Path, record: Record, outputs: Sequence[Output]) -> None:
    """Write a record's outputs, each file whole or not at all."""
    where = folder(store)
    shared = where / _examples(record)
    known = _read_examples(shared) if shared.exists() else {}
    if not shared.exists() or not {each.id for each in outputs} <= set(known):
        known |= {each.id: {name: getattr(each, name) for name in GIVEN} for each in outputs}
        write_atomically(shared, *map(_line, known.values()))
    write_atomically(where / _files_of(record)[0], *map(_line, map(_to_entry, outputs)))


def _to_entry(each: Output) -> Row:
    entry: Row = {name: getattr(each, name) for name in WRITTEN}
    return entry if each.trace is None else entry | {"trace": each.trace.to_json()}


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"


def _files_of(record: Record) -> list[str]:
    """Returns the names that a record's file may have, the one that is written first."""
    if "supersedes" in record:  # until the record is written, and in other parts, the former outputs are still read
        return [f"{record['key']}-{record['provenance']['code']}.jsonl"]
    return [f"{get_entry(record, name)}.jsonl" for name in ("key", "former_key") if name in record]


def _examples(record: Record) -> str:
    return f"examples-{record['fingerprints']['examples']}.jsonl"


def read(store: str | Path, record: Record) -> list[Output] | None:
    """A record's outputs, of a store or of one of its parts; `None` where none were kept.

    Raises:
        ValueError: a damaged file; names it, and the line.
    """
    if (found := _files(store, record)) is None:
        return None
    own, known = found[0], _read_examples(found[1])
    return [_output(entry, known[entry["id"]]) for entry in _entries(own) if entry["id"] in known]


def kept(store: str | Path, record: Record) -> bool:
    """Whether a store, or one of its parts, keeps a record's outputs."""
    return _files(store, record) is not None


def _files(store: str | Path, record: Record) -> tuple[Path, Path] | None:
    """Returns a record's file, of today's key or its former one, and that of its examples, where both are there."""
    if "fingerprints" not in record:
        return None
    for name, path in itertools.product(_files_of(record), (store, *shards.parts_of(store))):
        outputs, examples = folder(path) / name, folder(path) / _examples(record)
        if outputs.is_file() and examples.is_file():
            return outputs, examples
    return None


def _output(entry: Row, example: Row) -> Output:
    trace = entry.get("trace")
    values = {name: entry[name] for name in WRITTEN} | {name: example[name] for name in GIVEN}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Output(**values | lists, trace=trace and Trace.from_json(trace))


def _read_examples(path: Path) -> dict[int, Row]:
    return {entry["id"]: entry for entry in _entries(path)}


def _entries(path: Path) -> Iterator[Row]:
    for number, line in readers.lines(path):
        yield readers.parsed(line, f"{path}:{number}", "delete the file, and measure its point into another store")


def adopt(store: str | Path, record: Record, others: Iterable[str | Path]) -> None:
    """Copy what other stores keep of a record that a store takes over."""
    for other in others:
        if (kept := read(other, record)) is not None:
            return write(store, record, kept)
