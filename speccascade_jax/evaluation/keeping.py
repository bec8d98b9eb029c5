"""What of a judged point's generations is kept beside the store: outputs, where tokens came from, some traces."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary, added_texts
from speccascade_jax.engine import tracing
from speccascade_jax.engine.generate import Generator
from speccascade_jax.evaluation.points import Evaluation
from speccascade_jax.results import trace
from speccascade_jax.results.outputs import LETTERS, Output

_LETTERS = "".join(LETTERS)


class Seen(NamedTuple):
    """Of one row: a letter per token, tokens per round, and its `RoundFacts` as the only row, or `None`."""

    sources: str = ""
    rounds: tuple[int, ...] = ()
    facts: Any = None


def recording(evaluation: Evaluation, program: Any) -> dict[str, Any]:
    """What `Program.generate` is told beside its usual arguments: what to record of each round, if anything.

    A method that is more than one generation has no rounds of one loop, and nothing is recorded of it.
    """
    if not evaluation.keep_outputs or not isinstance(program, Generator):
        return {}
    return {"record": tracing.facts if evaluation.keep_traces else tracing.origins}


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
        prompt, texts = self.task.build_prompt(example), partial(added_texts, self.vocabulary, after=after)
        traced = None
        if own.facts is not None:
            traced = trace.read(own.facts, 0, texts, prompt=prompt, threshold=self.threshold, alone=self.alone)
        return Output(
            id=example.id,
            prompt=prompt,
            reference=example.reference,
            output=prediction,
            tokens=tuple(ids),
            pieces=tuple(texts(ids)),
            sources=own.sources,
            rounds=own.rounds,
            trace=traced,
        )
