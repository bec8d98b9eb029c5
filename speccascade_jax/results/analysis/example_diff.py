"""Comparison of two points' outputs: the examples that differ most, with the differing words marked. Needs no JAX."""

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
    """The outputs of two points for one example, and the score of each output alone by the main metric."""

    first: Output
    second: Output
    scores: tuple[float, float]

    @property
    def gain(self) -> float:
        """Score of the second output minus that of the first."""
        return self.scores[1] - self.scores[0]


def find(records: Sequence[Record], name: str) -> Record:
    """Returns the record whose key begins with `name`, or the only record of the method `name` or `name@α`.

    Raises:
        ValueError: no record matches, or several do.
    """

    def called(record: Record) -> str:
        point = record["point"]
        return point["curve"] if point["alpha"] is None else f"{point['curve']}@{point['alpha']:g}"

    matches = [record for record in records if record["key"].startswith(name)] if len(name) >= 4 else []
    matches = matches or [record for record in records if record["point"]["curve"] == name]
    matches = matches or [record for record in records if called(record) == name]
    if len(matches) != 1:
        known = sorted({record["point"]["curve"] for record in records} | set(map(called, records)))
        count = "no record is" if not matches else f"{len(matches)} records are"
        raise ValueError(
            f"{count} called {name!r}: {hint(name, known)}give the first digits of a key (the report shows the keys), "
            f"or one of {', '.join(known)}"
        )
    return matches[0]


def title(record: Record) -> str:
    """Returns the name of a record's point for tables and texts: method, α and temperature."""
    point = record["point"]
    alpha_text = "" if point["alpha"] is None else f" (α {point['alpha']:g})"
    return f"{label(record)}{alpha_text}, T = {point['temperature']:g}"


def pairs(store: str | Path, first: Record, second: Record) -> list[Pair]:
    """Returns the output pairs of all examples that both records share, by ascending gain of the second over the first.

    Raises:
        ValueError: a record's outputs were not kept, or the two records were measured on different examples.
    """
    kept = []
    for record in (first, second):
        if (record_outputs := outputs.read(store, record)) is None:
            raise ValueError(
                f"the outputs of {record['key']} were not kept: measure it again into another store, with "
                f"Evaluation.keep_outputs = True"
            )
        kept.append({entry.id: entry for entry in record_outputs})
    if first["fingerprints"]["examples"] != second["fingerprints"]["examples"]:
        raise ValueError(
            f"{first['key']} and {second['key']} were measured on different examples: choose two points of one task"
        )
    scores = [_scores(record, entry) for record, entry in zip((first, second), kept, strict=True)]
    shared_ids = [number for number in kept[0] if number in kept[1]]
    example_pairs = [
        Pair(kept[0][number], kept[1][number], (scores[0][number], scores[1][number])) for number in shared_ids
    ]
    return sorted(example_pairs, key=lambda entry: (entry.gain, entry.first.id))


def _scores(record: Record, kept: Mapping[int, Output]) -> dict[int, float]:
    """Returns each example's score: sentence BLEU if the metric is BLEU, else the score in the record's statistics."""
    metric = record["quality"]["metric"]
    if metric.startswith("bleu"):
        texts = {number: (output.output, str(output.reference)) for number, output in kept.items()}
        return {number: quality.sentence_bleu(*pair, metric) for number, pair in texts.items()}
    per_example = record["quality"]["per_example"]
    rows = np.asarray(per_example["statistics"][metric], np.float64).reshape(len(per_example["ids"]), -1)
    return dict(zip(per_example["ids"], quality.get_metric(metric).from_sums(rows, 1).tolist(), strict=True))


def marked(text: str, other: str, style: str) -> Text:
    """Returns `text` with `style` on the words that differ from `other`."""
    words, theirs = (re.findall(r"\s*\S+", side) for side in (text, other))
    result = Text()
    for kind, begin, end, _, _ in difflib.SequenceMatcher(None, words, theirs, autojunk=False).get_opcodes():
        result.append("".join(words[begin:end]), style=None if kind == "equal" else style)
    return result


def shown(first: Record, second: Record, some: Sequence[Pair]) -> Iterator[Text]:
    """Yields lines for a terminal that show pairs of outputs, with the differing words marked."""
    for pair in some:
        reference = pair.first.reference if isinstance(pair.first.reference, str) else pair.first.reference[0]
        yield Text(f"example {pair.first.id}, {pair.scores[0]:.1f} → {pair.scores[1]:.1f}", style="bold")
        yield Text.assemble(("  prompt     ", "dim"), pair.first.prompt[-400:])
        yield Text.assemble(("  reference  ", "dim"), reference)
        yield Text.assemble(("  1          ", "dim"), marked(pair.first.output, pair.second.output, "bold red"))
        yield Text.assemble(("  2          ", "dim"), marked(pair.second.output, pair.first.output, "bold green"))
