"""Measures of a trained model other than its loss, such as its acceptance rate, and the models that they need."""

import contextlib
import dataclasses
from typing import Any

import jax

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel
from speccascade_jax.training.finetune import decoding, partition
from speccascade_jax.training.finetune.acceptance import TEMPERATURES, Acceptance
from speccascade_jax.training.finetune.batches import PlannedBatch, check_data
from speccascade_jax.training.finetune.corpus import examples_of
from speccascade_jax.training.finetune.distillation import check_teacher
from speccascade_jax.training.finetune.trainer import Trainer, trained


def beside(trainer: Trainer, checkpoint: str, stored: str = "") -> BoundModel:
    """Loads another model that a run needs: a teacher, or the target of the acceptance rate.

    The model computes in the run's dtype. Its parameters are spread over the mesh like those of the trained model.

    Args:
        trainer: the settings.
        checkpoint: the checkpoint's folder.
        stored: the dtype of the parameters; empty: that of the run.
    """
    # For a mesh, the model is read into the host's memory, because one device may have no room for all of it.
    with contextlib.nullcontext() if trainer.devices is None else _on_host():
        loaded: Any
        loaded, params = checkpoints.load(checkpoint, dtype=stored or trainer.dtype)
    config = dataclasses.replace(loaded.config, dtype=trainer.dtype)
    model = dataclasses.replace(loaded, config=config, mesh=trainer.devices)
    if trainer.devices is not None:
        params = partition.spread(params, trainer.devices)
    return BoundModel(params=params, model=model)


def model_of(trainer: Trainer, checkpoint: str) -> BoundModel:
    """Returns the model of `checkpoint`, or the model in the run's saved state if `checkpoint` is empty.

    In both cases, the model computes in the run's dtype and on its mesh, with float32 parameters, so that measures are
    comparable.

    Raises:
        ValueError: the checkpoint's vocabulary size differs from the trainer's.
    """
    if not checkpoint:
        return trained(trainer)[0]
    bound = beside(trainer, checkpoint, "float32")
    size, wanted = bound.model.vocab_size, trainer.model.config.vocab_size
    if size != wanted:
        remedy = "name the vocabulary that the checkpoint was trained with (--gin.VOCABULARY)"
        raise ValueError(f"{checkpoint} has {size} tokens, but {trainer.vocabulary} has {wanted} pieces: {remedy}")
    return BoundModel(params=partition.for_decoding(bound.params, trainer.devices), model=bound.model)


def _on_host() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which arrays are made in the host's memory, if JAX has a CPU device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def validation_batches(trainer: Trainer) -> list[PlannedBatch]:
    """Returns the batches for the validation loss and the acceptance rate; none if there is no validation corpus."""
    if trainer.validation is None:
        return []
    data = trainer.validation.tokens(trainer.text, trainer.model.is_encoder_decoder)
    check_data(data, trainer.mesh[0], getattr(trainer.model.config, "max_length", None))
    return list(data.epoch(0, 0)[: trainer.loss_batches])


def acceptance_of(
    trainer: Trainer, validation: list[PlannedBatch], teacher: BoundModel | None = None
) -> Acceptance | None:
    """Returns a callable that measures acceptance rates under the run's target; `None` without a target or prompts.

    Args:
        trainer: the settings.
        validation: batches of the prompts.
        teacher: the teacher of distillation; used as the target if the settings name no target.
    """
    target = beside(trainer, trainer.acceptance_of) if trainer.acceptance_of else teacher
    if target is None or not validation:
        return None
    check_teacher(target.model, trainer.model)
    prompts = [planned.build(slice(None)) for planned in validation]
    return Acceptance(target, prompts, trainer.text.stop_ids, rows=decoding.rows_for(trainer.mesh))


def evaluate(trainer: Trainer, checkpoint: str, examples: int, against: str = "") -> dict[str, Any]:
    """Measures the model of `checkpoint`, or of the run's saved state if `checkpoint` is empty.

    The measures are the task's metrics, from greedy decoding of its first `examples` examples, and the acceptance rates
    on the validation batches.

    Args:
        trainer: the settings; metrics need a task, and acceptance rates need a target.
        checkpoint: the checkpoint's folder.
        examples: number of examples; all are used if the task has fewer.
        against: another checkpoint, whose acceptance rates are subtracted: each difference has a 95% interval, paired
            over the prompts.

    Raises:
        ValueError: there is nothing to measure or to compare, or an evaluation uses training examples
            (`Trainer.check_held_out`).
    """
    trainer.check_held_out()
    bound, result = model_of(trainer, checkpoint), dict[str, Any]()
    if trainer.task:
        task, rows = trainer.scored, decoding.rows_for(trainer.mesh)
        result |= decoding.scores(bound, trainer.text, task, trainer.split, examples, rows).metrics
        result["examples"] = len(examples_of(task, trainer.split, examples))
    teacher = beside(trainer, trainer.distillation.teacher) if trainer.distillation else None
    measure = acceptance_of(trainer, validation_batches(trainer), teacher)
    if measure is None and (against or not trainer.task):
        raise ValueError("no acceptance rate can be measured: set acceptance_of (a target) and validation (a corpus)")
    if measure is not None:
        rates = measure(bound)
        result |= rates.numbers() | {"prompts": len(rates.positions["greedy"])}
        if against:
            other = measure(model_of(trainer, against))
            result |= {f"difference_{name}": _rounded(rates.minus(other, name)) for name in TEMPERATURES}
    return result


def _rounded(numbers: Any) -> list[float]:
    return [round(float(number), 4) for number in numbers]
