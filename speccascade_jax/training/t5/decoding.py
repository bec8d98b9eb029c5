"""Batched decoding with one model and no drafter, for validation and for distillation."""

from collections.abc import Sequence

import numpy as np

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.tasks import table
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.engine.generate import generate, raise_on_failure
from speccascade_jax.methods.build import assemble
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import make_prompt


def decode(
    bound: BoundModel,
    vocabulary: Vocabulary,
    sources: Sequence[Sequence[int]],
    max_new: int,
    *,
    batch_size: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    first_id: int = 0,
) -> list[list[int]]:
    """Returns the model's output for every source, in the order of the sources; batches hold sources of similar length.

    Args:
        bound: the model and its parameters.
        vocabulary: provides the end-of-sequence id (EOS).
        sources: token ids without EOS.
        max_new: the largest number of new tokens, EOS included.
        batch_size: number of rows decoded together.
        temperature: 0 decodes greedily, 1 samples from the model's own distribution.
        seed: the random seed.
        first_id: example id of the first source: source `i` uses the random bits of example `first_id + i`, whatever
            batch it is in.

    Returns:
        Token ids of every source, ending in EOS unless `max_new` was reached first.
    """
    pair = Pair(target=bound, draft=bound, vocabulary=vocabulary)
    engine, params = assemble(pair, method="autoregressive")
    controls = make_controls(batch_size, temperature=temperature)
    order = np.argsort([len(ids) for ids in sources], kind="stable").tolist()
    outputs: list[list[int]] = [[] for _ in sources]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        # repeat the last row to fill the batch, because another number of rows would compile another program
        rows = chosen + chosen[-1:] * (batch_size - len(chosen))
        prompt = make_prompt(pair, [[*sources[i], vocabulary.eos_id] for i in rows])
        ids = first_id + np.asarray(rows)
        generation = generate(engine, params, prompt, seed, controls=controls, max_new_tokens=max_new, example_ids=ids)
        raise_on_failure(generation)
        for i, tokens, length in zip(
            chosen, np.asarray(generation.tokens), np.asarray(generation.lengths), strict=False
        ):
            outputs[i] = tokens[:length].tolist()
    return outputs


def bleu(bound: BoundModel, vocabulary: Vocabulary, task_name: str, count: int) -> float:
    """Computes BLEU (sacrebleu's defaults) of greedy decoding on the first `count` examples of a task's first split."""
    task = table.get_task(task_name)
    examples = task.load(limit=count)
    sources = [vocabulary.encode(task.build_prompt(example)) for example in examples]
    outputs = [vocabulary.decode(ids) for ids in decode(bound, vocabulary, sources, task.max_output_length)]
    references = [example.reference for example in examples]
    return quality.score(["bleu"], [task.postprocess(text) for text in outputs], references)["bleu"]
