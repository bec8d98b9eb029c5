"""From a run's resumable state to a checkpoint, and what a checkpoint scores."""

from pathlib import Path

import jax

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.tasks import table
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.models.t5 import T5
from speccascade_jax.storage.files import expanded
from speccascade_jax.training import runs
from speccascade_jax.training.t5 import decoding, loop, steps


def trained(trainer: loop.Trainer) -> tuple[BoundModel, int]:
    """The model of the run's saved state, and its step.

    Raises:
        FileNotFoundError: the run has not saved anything yet.
    """
    fresh = jax.eval_shape(lambda key: steps.init_state(trainer.config, trainer.optimizer, key), jax.random.key(0))
    saved = runs.load_state(expanded(trainer.run_dir), fresh)
    if saved is None:
        raise FileNotFoundError(f"{trainer.run_dir} holds no {runs.STATE_FILE}; train first (--mode=train)")
    return BoundModel(params=saved[0].params, model=T5(trainer.config)), int(saved[0].step)


def model_of(trainer: loop.Trainer, checkpoint: str) -> BoundModel:
    """The model of `checkpoint`, or of the run's saved state where that is empty.

    Raises:
        ValueError: the checkpoint's vocabulary has another size than the trainer's.
    """
    bound = loop.load_float32(checkpoint) if checkpoint else trained(trainer)[0]
    size = bound.model.vocab_size
    if size != trainer.config.vocab_size:
        raise ValueError(
            f"{checkpoint} has {size} tokens, but {trainer.vocabulary} has {trainer.config.vocab_size} pieces: "
            f"name the vocabulary that the checkpoint was trained with (--gin.VOCABULARY)"
        )
    return bound


def export(trainer: loop.Trainer, output: Path, dtype: str) -> dict[str, int]:
    """Write the run's weights to `output` as a checkpoint; returns its step and number of parameters."""
    bound, step = trained(trainer)
    checkpoints.save(output, bound.model, bound.params, dtype=dtype)
    return {"step": step, "parameters": sum(leaf.size for leaf in jax.tree.leaves(bound.params))}


def evaluate(trainer: loop.Trainer, checkpoint: str, examples: int) -> dict[str, float]:
    """BLEU of greedy decoding on `examples` validation examples, by `checkpoint` or the run's state.

    The examples are the first ones of the trainer's `bleu_task`; a task with fewer gives all it has.
    """
    bound = model_of(trainer, checkpoint)
    score = decoding.bleu(bound, Vocabulary(trainer.vocabulary), trainer.bleu_task, examples)
    return {"bleu": round(score, 2), "examples": len(table.get_task(trainer.bleu_task).load(limit=examples))}
