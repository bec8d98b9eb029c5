"""Checks that all processes of a run have the same data and begin with the same model.

Each host reads its own copy of the files, so the files may differ although all settings are equal. Every process builds
its rows of a batch from its own copy. Without these checks, hosts with different copies would train on a mixture, and
no error would tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.runtime import hosts
from speccascade_jax.training.finetune.batches import PlannedBatch, PlannedData
from speccascade_jax.training.finetune.corpus import examples_of
from speccascade_jax.training.finetune.trainer import Trainer

REMEDY = "give all hosts the files of process 0"
SAMPLE = 4096
"""Number of values of each parameter array that are compared, evenly spaced. This is enough, because two differently
trained models differ in nearly all values."""
_BYTES = 6
"""Length of a digest in bytes; it is short because an error message shows two digests."""


def check_data(trainer: Trainer, data: PlannedData, validation: Sequence[PlannedBatch]) -> None:
    """Checks that all processes have read the same data, before weights are read; all processes must call this.

    Args:
        trainer: the settings.
        data: the encoded corpus.
        validation: the batches of the validation loss.

    Raises:
        ValueError: the model's configuration, the vocabulary, a row of the corpus, a batch of the validation corpus or
            an example of the task differs; names which.
    """
    if not hosts.many():
        return
    read = {
        "the model's configuration": repr(trainer.configuration),
        "the vocabulary": trainer.text.fingerprint,
        "the corpus": rows_digest(data, trainer.seed),
        "the validation corpus": batches_digest(validation),
        "the task": task_digest(trainer),
    }
    hosts.check_same(read, remedy=REMEDY)


def check_weights(trainer: Trainer, params: Params) -> None:
    """Checks that all processes have read the same weights of `init_from`; all processes must call this.

    Raises:
        ValueError: a sample of the weights differs.
    """
    if hosts.many() and trainer.init_from:
        hosts.check_same({"the content of init_from": sample_digest(params)}, remedy=REMEDY)


def rows_digest(data: PlannedData, seed: int) -> str:
    """Returns the number of examples of the first epoch, and a digest of all their tokens, in a text.

    It takes some 2 µs per row of a task; encoding takes 40 µs.
    """
    examples = data.source.examples(seed, 0)
    lengths = examples.lengths
    digest = hashlib.blake2b(lengths.tobytes(), digest_size=_BYTES)
    for index in range(len(lengths)):
        row = examples.row(index)
        for tokens in (row.tokens, row.encoder):
            if tokens is not None:
                digest.update(tokens.tobytes())
    return f"{len(lengths)} examples, digest {digest.hexdigest()}"


def batches_digest(batches: Sequence[PlannedBatch]) -> str:
    """Returns the number of batches, and a digest of their arrays, in a text."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for planned in batches:
        for array in planned.build(slice(None)):
            if array is not None:
                digest.update(f"{array.shape}".encode() + array.tobytes())
    return f"{len(batches)} batches, digest {digest.hexdigest()}"


def task_digest(trainer: Trainer) -> str:
    """Returns the number of examples that metrics are computed on, and a digest of their texts, in a text."""
    task = trainer.scored if trainer.task else None
    examples = [] if task is None else examples_of(task, trainer.split, trainer.examples)
    texts = repr([(task and task.build_prompt(example), example.reference) for example in examples])
    digest = hashlib.blake2b(texts.encode(errors="surrogatepass"), digest_size=_BYTES)
    return f"{len(examples)} examples, digest {digest.hexdigest()}"


def sample_digest(params: Params) -> str:
    """Returns a digest of the shapes of all parameters, and of `SAMPLE` values of each."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for leaf in jax.tree.leaves(params):
        array = np.asarray(leaf)
        values = array.reshape(-1)[:: max(1, array.size // SAMPLE)]
        digest.update(f"{array.shape}".encode() + values.tobytes())
    return digest.hexdigest()
