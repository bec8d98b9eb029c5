"""Batched decoding with one model and no drafter, for validation and for files of outputs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.engine.generate import generate, raise_on_failure
from speccascade_jax.methods.build import assemble
from speccascade_jax.metrics import quality
from speccascade_jax.models import sharding
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import example_ids, make_prompt
from speccascade_jax.training.finetune.corpus import examples_of


def decode(
    bound: BoundModel,
    vocabulary: TextVocabulary,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    *,
    batch_size: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    first_id: int = 0,
    after_batch: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Returns the model's output for every prompt, in the order of the prompts; batches hold prompts of similar length.

    Args:
        bound: the model and its parameters.
        vocabulary: provides the ids that end an output.
        prompts: token ids as the model reads them (`pairs.prompts.encode_prompt`).
        max_new: the largest number of new tokens, EOS included.
        batch_size: number of rows decoded together, a multiple of the mesh's `data` axis.
        temperature: 0 decodes greedily, 1 samples from the model's own distribution.
        seed: the random seed.
        first_id: example id of the first prompt: prompt `i` uses the random bits of example `first_id + i`, whatever
            batch it is in.
        after_batch: called after every batch; it may raise an error to end decoding.

    Returns:
        Token ids of every output, ending in EOS unless `max_new` was reached first.
    """
    longest = max(map(len, prompts))
    pair = Pair(target=bound, draft=bound, vocabulary=vocabulary, max_prompt_length=max(longest, 1))
    engine, params = assemble(pair, method="autoregressive")
    controls = make_controls(batch_size, temperature=temperature)
    order = np.argsort([len(ids) for ids in prompts], kind="stable").tolist()
    outputs: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        # repeat the last row to fill the batch, because another number of rows would compile another program
        rows = chosen + chosen[-1:] * (batch_size - len(chosen))
        prompt = sharding.on_devices(make_prompt(pair, [list(prompts[i]) for i in rows]), pair.mesh)
        ids = first_id + np.asarray(rows)
        generation = generate(engine, params, prompt, seed, controls=controls, max_new_tokens=max_new, example_ids=ids)
        generation = sharding.replicate(generation)
        raise_on_failure(generation)
        for i, tokens, length in zip(
            chosen, np.asarray(generation.tokens), np.asarray(generation.lengths), strict=False
        ):
            outputs[i] = tokens[:length].tolist()
        after_batch()
    return outputs


class Scores(NamedTuple):
    """Metrics of a model's outputs on a task, and the texts: prompts, outputs and references."""

    metrics: dict[str, float]
    prompts: list[str]
    outputs: list[str]
    references: list[Any]


def rows_for(mesh: tuple[int, int]) -> int:
    """Returns the rows of a batch for evaluations: 64, or the next number that the mesh's `data` axis divides."""
    return -(-64 // mesh[0]) * mesh[0]


def scores(
    bound: BoundModel,
    vocabulary: TextVocabulary,
    task: Task,
    split: str | None,
    count: int,
    rows: int = 64,
    after_batch: Callable[[], None] = lambda: None,
) -> Scores:
    """Computes the metrics of greedy decoding on the first `count` examples of a task's split.

    Args:
        bound: the model and its parameters.
        vocabulary: encodes prompts and decodes outputs.
        task: the task.
        split: a split of the task, or a part of its only split (`corpus.examples_of`); `None`: its first.
        count: number of examples; all if the split has fewer.
        rows: rows of a batch (`rows_for`).
        after_batch: as in `decode`.
    """
    examples = examples_of(task, split, count)
    is_encoder_decoder = bool(getattr(bound.model, "is_encoder_decoder", False))
    texts = [task.build_prompt(example) for example in examples]
    prompts = [example_ids(vocabulary, is_encoder_decoder, task, example)[0] for example in examples]
    decoded = decode(bound, vocabulary, prompts, task.max_output_length, batch_size=rows, after_batch=after_batch)
    pairs = zip(prompts, decoded, strict=True)
    outputs = [vocabulary.decode(ids, after=() if is_encoder_decoder else prompt) for prompt, ids in pairs]
    outputs = [task.postprocess(text) for text in outputs]
    references = [example.reference for example in examples]
    numbers = quality.score(list(task.metrics), outputs, references)
    return Scores({name: round(value, 2) for name, value in numbers.items()}, texts, outputs, references)
