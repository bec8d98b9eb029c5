"""Batched greedy translation by one model, for validation during training: the engine with nothing that drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sacrebleu

from speccascade_jax.api import assemble, make_controls, make_prompt
from speccascade_jax.data import tasks
from speccascade_jax.data.vocabularies import Vocabulary
from speccascade_jax.generation import generate, raise_on_failure
from speccascade_jax.models.base import BoundModel
from speccascade_jax.pair import Pair


def translate(
    bound: BoundModel, vocabulary: Vocabulary, sources: Sequence[str], max_new: int = 128, batch_size: int = 64
) -> list[str]:
    """The greedy translation of every source, in order; sources are sorted by length into batches."""
    pair = Pair(target=bound, draft=bound, vocabulary=vocabulary)
    engine, params = assemble(pair, method="autoregressive")
    encoded = [[*vocabulary.encode(source), vocabulary.eos_id] for source in sources]
    order = np.argsort([len(ids) for ids in encoded], kind="stable")
    texts = [""] * len(sources)
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size].tolist()
        # the last batch is filled up: another number of rows would be another compilation
        rows = [encoded[i] for i in chosen] + [[vocabulary.eos_id]] * (batch_size - len(chosen))
        controls = make_controls(batch_size)
        found = generate(engine, params, make_prompt(pair, rows), controls=controls, max_new_tokens=max_new)
        raise_on_failure(found)
        for i, ids in zip(chosen, np.asarray(found.tokens), strict=False):
            texts[i] = vocabulary.decode(ids.tolist())
    return texts


def bleu(bound: BoundModel, vocabulary: Vocabulary, task_name: str, count: int) -> float:
    """BLEU (sacrebleu's defaults) of greedy decoding on the first `count` examples of a task's first split."""
    task = tasks.get_task(task_name)
    examples = task.load(limit=count)
    prompts = [task.build_prompt(example) for example in examples]
    found = translate(bound, vocabulary, prompts, task.max_output_length)
    references = [example.reference for example in examples]
    return float(sacrebleu.corpus_bleu([task.postprocess(text) for text in found], [references]).score)
