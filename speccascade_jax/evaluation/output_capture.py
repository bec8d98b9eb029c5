"""What of a judged point's generations is kept beside the store: outputs, where tokens came from, some traces."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary, added_texts
from speccascade_jax.engine import tracing
from speccascade_jax.evaluation.points import Evaluation
from speccascade_jax.methods.method import Decoder
from speccascade_jax.results.store import trace
from speccascade_jax.results.store.outputs import LETTERS, Output

_LETTERS = "".join(LETTERS)


class Seen(NamedTuple):
    """Of one row: a letter per token, tokens per round, and its `RoundFacts` as the only row, or `None`."""

    sources: str = ""
    rounds: tuple[int, ...] = ()
    facts: Any = None


_SMALL = 16_384
"""A vocabulary of which the facts of all rows cost less than a second program, for batches without a traced row."""


def recording(evaluation: Evaluation, decoder: Decoder, traced: bool) -> dict[str, Any]:
    """What `Decoder.generate` is told beside its usual arguments: what to record of each round, if anything.

    A method that is more than one generation has no rounds of one loop, and nothing is recorded of it.

    Args:
        traced: whether the batch has a row of which a trace is kept.
    """
    if not evaluation.keep_outputs or decoder.engine is None:
        return {}
    whole = traced or (evaluation.keep_traces and decoder.engine.target.vocab_size <= _SMALL)
    return {"record": tracing.facts if whole else tracing.origins}


def seen(record: Any, rows: int, traced: Sequence[bool], alone: bool) -> list[Seen]:
    """What was recorded of a batch's first `rows` rows, on the host; `traced`: of which the facts are kept."""
    if record is None:
        return [Seen()] * rows
    record = jax.tree.map(np.asarray, record)
    origins, found = getattr(record, "origins", record), []
    for row in range(rows):
        counts = origins.num_new[:, row]
        own = [origins.source[number, row, :count] for number, count in enumerate(counts.tolist())]
        sources = "d" * int(counts.sum()) if alone else "".join(_LETTERS[n] for n in np.concatenate(own).tolist())
        facts = jax.tree.map(lambda x, row=row: x[:, row : row + 1].copy(), record) if traced[row] else None
        found.append(Seen(sources, tuple(counts[counts > 0].tolist()), facts))
    return found


class Keeper(NamedTuple):
    """Makes outputs of what was seen.

    `after`: the ids that an output continues; `threshold`: what the stop policy compares with, in words.
    """

    task: Task
    vocabulary: TextVocabulary
    alone: bool
    threshold: str

    def output(self, example: Example, ids: list[int], after: Ids, prediction: str, own: Seen) -> Output:
        """One example's output, as it is kept."""
        prompt = self.task.build_prompt(example)

        def texts(some: list[int], before: list[int]) -> list[str]:
            return added_texts(self.vocabulary, some, [*after, *before])

        traced = None
        if own.facts is not None:
            traced = trace.read(own.facts, 0, texts, prompt=prompt, threshold=self.threshold, alone=self.alone)
        return Output(
            id=example.id,
            prompt=prompt,
            reference=example.reference,
            output=prediction,
            tokens=tuple(ids),
            pieces=tuple(texts(ids, [])),
            sources=own.sources,
            rounds=own.rounds,
            trace=traced,
        )
