"""Two points side by side: the examples on which they differ most, with what differs marked. Needs no JAX."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.text import Text

from speccascade_jax.core.names import hint
from speccascade_jax.metrics import quality
from speccascade_jax.results.analysis.panels import label
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.result_store import Record


class Pair(NamedTuple):
    """An example's outputs by both points, and their scores (of the example alone, by the main metric)."""

    first: Output
    second: Output
    scores: tuple[float, float]

    @property
    def gain(self) -> float:
        """How much better the second is."""
        return self.scores[1] - self.scores[0]


def find(records: Sequence[Record], name: str) -> Record:
    """The record whose key begins with `name`, or the only one of a method called so, with `@α` behind it if given.

    Raises:
        ValueError: none, or several.
    """

    def called(record: Record) -> str:
        point = record["point"]
        return point["curve"] if point["alpha"] is None else f"{point['curve']}@{point['alpha']:g}"

    found = [record for record in records if record["key"].startswith(name)] if len(name) >= 4 else []
    found = found or [record for record in records if record["point"]["curve"] == name]
    found = found or [record for record in records if called(record) == name]
    if len(found) != 1:
        known = sorted({record["point"]["curve"] for record in records} | set(map(called, records)))
        what = "no record is" if not found else f"{len(found)} records are"
        raise ValueError(
            f"{what} called {name!r}: {hint(name, known)}give the first digits of a key (the report names them), or "
            f"one of {', '.join(known)}"
        )
    return found[0]


def title(record: Record) -> str:
    """What a record's point is called."""
    point = record["point"]
    at = "" if point["alpha"] is None else f" (α {point['alpha']:g})"
    return f"{label(record)}{at}, T = {point['temperature']:g}"


def pairs(store: str | Path, first: Record, second: Record) -> list[Pair]:
    """Every example that both wrote an output for, from the second's worst to its best beside the first.

    Raises:
        ValueError: outputs of one were not kept, or they were judged on other examples.
    """
    kept = []
    for record in (first, second):
        if (found := outputs.read(store, record)) is None:
            raise ValueError(
                f"the outputs of {record['key']} were not kept: measure it into another store, with "
                f"Evaluation.keep_outputs = True"
            )
        kept.append({each.id: each for each in found})
    if first["fingerprints"]["examples"] != second["fingerprints"]["examples"]:
        raise ValueError(f"{first['key']} and {second['key']} were judged on other examples: choose two of one task")
    scores = [_scores(record, each) for record, each in zip((first, second), kept, strict=True)]
    both = [number for number in kept[0] if number in kept[1]]
    made = [Pair(kept[0][number], kept[1][number], (scores[0][number], scores[1][number])) for number in both]
    return sorted(made, key=lambda each: (each.gain, each.first.id))


def _scores(record: Record, kept: Mapping[int, Output]) -> dict[int, float]:
    """Of each example alone: BLEU over the orders that it is long enough for, else what the record holds of it."""
    metric = record["quality"]["metric"]
    if metric == "bleu":
        return {number: quality.sentence_bleu(each.output, str(each.reference)) for number, each in kept.items()}
    told = record["quality"]["per_example"]
    rows = np.asarray(told["statistics"][metric], np.float64).reshape(len(told["ids"]), -1)
    return dict(zip(told["ids"], quality.get_metric(metric).from_sums(rows, 1).tolist(), strict=True))


def marked(text: str, other: str, style: str) -> Text:
    """A text with the words that the other lacks in a style."""
    words, theirs = (re.findall(r"\s*\S+", each) for each in (text, other))
    made = Text()
    for kind, begin, end, _, _ in difflib.SequenceMatcher(None, words, theirs, autojunk=False).get_opcodes():
        made.append("".join(words[begin:end]), style=None if kind == "equal" else style)
    return made


def shown(first: Record, second: Record, some: Sequence[Pair]) -> Iterator[Text]:
    """Lines for a terminal."""
    for each in some:
        reference = each.first.reference if isinstance(each.first.reference, str) else each.first.reference[0]
        yield Text(f"example {each.first.id}, {each.scores[0]:.1f} → {each.scores[1]:.1f}", style="bold")
        yield Text.assemble(("  prompt     ", "dim"), each.first.prompt[-400:])
        yield Text.assemble(("  reference  ", "dim"), reference)
        yield Text.assemble(("  1          ", "dim"), marked(each.first.output, each.second.output, "bold red"))
        yield Text.assemble(("  2          ", "dim"), marked(each.second.output, each.first.output, "bold green"))
