"""Files beside a store with the outputs of every record, and with the prompts of the examples.

The folder `results/a.outputs` is beside `results/a.jsonl`. It holds one JSON-lines file for each record, named by the
record's key. Another file holds the prompts and references, which records on the same examples share; it is named by
the hash of the examples (the record's `fingerprints.examples`). A record's outputs are written before the record. The
outputs of a migrated record may be stored under its former key. The outputs of a record that supersedes another are in
a new file beside the former one. The last line of a file is its seal: the file's name, its number of lines and their
checksum. Files of earlier versions have no seal. This module does not import JAX.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from speccascade_jax.results.store import shards
from speccascade_jax.results.store.record import Record, Row, get_entry
from speccascade_jax.results.store.trace import Trace
from speccascade_jax.storage import readers
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import expanded, write_atomically

ENTRY: Final = "outputs"
"""Name of a record's entry for its `Output`s, which are stored in these files instead of in the record's line."""
FILE: Final = "outputs_file"
"""Name of a record's entry for the file of its outputs; only records that were written into a bucket have it."""
LETTERS = {"d": "draft", "r": "replaced", "b": "bonus", "t": "target"}
"""The source of a token, for example "draft" for a kept draft token, by the letter for it in the files."""
GIVEN, WRITTEN = ("id", "prompt", "reference"), ("id", "output", "tokens", "pieces", "sources", "rounds")
"""Fields of an `Output` that a store holds once for each example (`GIVEN`), and once for each record (`WRITTEN`)."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A point's output for one example.

    Attributes:
        id: the example's id; prompt: the models' input; reference: one reference text, or several.
        output: the scored text; tokens: the output's ids, including a stop id.
        pieces: the text that each token adds before the text is cut for scoring.
        sources: a letter of `LETTERS` per token; rounds: number of tokens that each round committed. Both are empty if
            the method consists of several generations.
        trace: kept for the first few examples (`Evaluation.keep_traces`).
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
    """Returns the folder that holds the outputs of a store's records."""
    return _beside(shards.file_of(store))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.outputs")


def write(store: str | Path, record: Record, outputs: Sequence[Output]) -> None:
    """Writes a record's outputs; each file is written completely or not at all."""
    outputs_folder = folder(store)
    while not _add_examples(outputs_folder / _examples(record), outputs):
        pass  # another process added examples to the same object
    path = outputs_folder / _files_of(record)[0]
    write_atomically(path, *_sealed(path, map(_to_entry, outputs)))


def named(store: str | Path, record: Record) -> Record:
    """Returns the record with the name of its file of outputs, if the store is in a bucket; otherwise unchanged.

    The name contains a hash of the outputs. So two processes that measure one point at the same time write two files,
    and each record names its own file.
    """
    if not isinstance(folder(store), BucketPath):
        return record
    digest = _digest([_line(_to_entry(output)) for output in record[ENTRY]])
    return record | {FILE: f"{record['key']}-{digest}.jsonl"}


def _add_examples(path: Path, outputs: Sequence[Output]) -> bool:
    """Adds the examples of some outputs to the file of examples; returns whether the file holds them now."""
    generation = path.read()[1] if isinstance(path, BucketPath) else b""
    known = _read_examples(path) if path.exists() else {}
    if known and {output.id for output in outputs} <= set(known):
        return True
    known |= {output.id: {name: getattr(output, name) for name in GIVEN} for output in outputs}
    lines = _sealed(path, known.values())
    if isinstance(path, BucketPath):
        return path.swap("".join(lines).encode(), generation)
    write_atomically(path, *lines)
    return True


def _sealed(path: Path, entries: Iterable[Row]) -> list[str]:
    """Returns entries as the lines of a file, and a seal: the file's name, the number of lines and their checksum.

    When the file is read, the seal shows whether the lines are complete and were written for this file.
    """
    lines = [_line(entry) for entry in entries]
    return [*lines, _line({SEAL: _seal(path, lines)})]


def _seal(path: Path, lines: Sequence[str]) -> Row:
    return {"file": path.stem, "lines": len(lines), "checksum": _digest(lines)}


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def _to_entry(output: Output) -> Row:
    entry: Row = {name: getattr(output, name) for name in WRITTEN}
    return entry if output.trace is None else entry | {"trace": output.trace.to_json()}


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"


def _files_of(record: Record) -> list[str]:
    """Returns the names that a record's file of outputs may have; a new file gets the first name."""
    if FILE in record:
        return [record[FILE]]
    # A record that supersedes another has its own file. The former record's file is still needed until the new record
    # is written, and other parts of the store may read it.
    if "supersedes" in record:
        return [f"{record['key']}-{record['provenance']['code']}.jsonl"]
    return [f"{get_entry(record, name)}.jsonl" for name in ("key", "former_key") if name in record]


def _examples(record: Record) -> str:
    return f"examples-{record['fingerprints']['examples']}.jsonl"


def read(store: str | Path, record: Record) -> list[Output] | None:
    """Returns a record's outputs, from a store or one of its parts; `None` if none were kept.

    Raises:
        ValueError: a file is damaged or incomplete, or belongs to another record; the message names it.
    """
    if (files := _files(store, record)) is None:
        return None
    outputs_file, known = files[0], _read_examples(files[1])
    entries, sealed = _entries(outputs_file, WRITTEN)
    if unknown := [entry["id"] for entry in entries if entry["id"] not in known]:
        raise ValueError(f"{outputs_file} holds example {unknown[0]!r}, which {files[1].name} lacks: {_REMEDY}")
    ids = record.get("quality", {}).get("per_example", {}).get("ids")
    if not sealed and ids is not None and {entry["id"] for entry in entries} != set(ids):
        raise ValueError(
            f"{outputs_file} holds {len(entries)} outputs, not those of its record's {len(ids)} examples: {_REMEDY}"
        )
    return [_output(entry, known[entry["id"]], outputs_file) for entry in entries]


def kept(store: str | Path, record: Record) -> bool:
    """Returns whether a store, or one of its parts, holds a record's outputs."""
    return _files(store, record) is not None


def _files(store: str | Path, record: Record) -> tuple[Path, Path] | None:
    """Returns the file of a record's outputs (under its key or former key) and that of its examples, if both exist."""
    if "fingerprints" not in record:
        return None
    # earlier versions wrote this folder beside a symbolic link, not beside the file that the link points to
    folders = [folder(store), _beside(expanded(store)), *map(folder, shards.parts_of(store))]
    for name, path in itertools.product(_files_of(record), folders):
        outputs, examples = path / name, path / _examples(record)
        if outputs.is_file() and examples.is_file():
            return outputs, examples
    return None


def _output(entry: Row, example: Row, path: Path) -> Output:
    values = {name: entry[name] for name in WRITTEN} | {name: example[name] for name in GIVEN}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    try:
        trace = entry.get("trace") and Trace.from_json(entry["trace"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged (the trace of example {entry['id']}: {error!r}): {_REMEDY}") from error
    return Output(**values | lists, trace=trace)


def _read_examples(path: Path) -> dict[int, Row]:
    return {entry["id"]: entry for entry in _entries(path, GIVEN)[0]}


def _entries(path: Path, names: Sequence[str]) -> tuple[list[Row], bool]:
    """Returns a file's entries and whether the file has a seal, after checking the seal and the fields `names`."""
    lines = [f"{line}\n" for _, line in readers.lines(path)]
    entries = [readers.parsed(line, f"{path}:{number}", _REMEDY) for number, line in enumerate(lines, 1)]
    seal = entries.pop()[SEAL] if entries and SEAL in entries[-1] else None
    if seal is not None and seal != _seal(path, lines[:-1]):
        raise ValueError(f"{path} is damaged, incomplete, or another record's ({len(entries)} lines): {_REMEDY}")
    for number, entry in enumerate(entries, 1):
        if wrong := [name for name in names if not isinstance(entry.get(name), _TYPES.get(name, str))]:
            raise ValueError(f"{path}:{number} is damaged (it has no valid {wrong[0]!r}): {_REMEDY}")
    return entries, seal is not None


SEAL: Final = "sealed"
"""Name of the entry in a file's last line that holds the seal."""
_REMEDY = "delete the file, and measure its point into another store"
_TYPES: dict[str, Any] = {
    "id": int, "reference": (str, list), "tokens": list, "pieces": list, "rounds": list,
}  # fmt: skip
"""Types of the fields that are not strings."""


def adopt(store: str | Path, record: Record, others: Iterable[str | Path]) -> None:
    """Copies a record's outputs into a store, from the first store in `others` that holds them."""
    for source in others:
        if (kept := read(source, record)) is not None:
            return write(store, record, kept)
