"""Training run of a T5 that can resume at any moment, export of its state as a checkpoint, and its BLEU score."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from absl import logging

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel, count
from speccascade_jax.data.tasks import table
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.storage.files import expanded
from speccascade_jax.training import runs
from speccascade_jax.training.t5 import decoding, growth, steps
from speccascade_jax.training.t5.corpus import Batch, Corpus


@dataclasses.dataclass
class Position:
    """Position of a run: the next batch (`epoch`, and `index` in it), training `minutes`, and target `tokens` so far.

    It also holds the state of the metrics: the number of `logged` records, the metrics of the steps since the last
    report (`window`), and the `seconds` that these steps took.
    """

    epoch: int = 0
    index: int = 0
    minutes: float = 0.0
    tokens: int = 0
    logged: int | None = None
    window: list[dict[str, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """Configuration of one training run of a T5 model.

    Attributes:
        run_dir: folder of the state, the metrics and the exports; training resumes if the folder holds a run.
        config: configuration of the model; vocabulary: path of the sentencepiece file.
        corpus, validation: the training corpus, and the corpus of the validation loss.
        schedule, optimizer, objective: settings of learning rate, optimiser and loss.
        init_from: checkpoint that a new run starts from, or empty. The model of the checkpoint is grown if `config` is
            larger (`growth`).
        seed: random seed of parameters, dropout and data order.
        log_every, evaluate_every: number of steps between records and between evaluations; save_every_minutes: minutes
            between saves of the resumable state.
        loss_batches: number of batches of `validation` for the validation loss.
        bleu_task, bleu_examples: the task (`data.tasks.table`) and the number of its examples for BLEU.
    """

    run_dir: str
    config: T5Config
    vocabulary: str
    corpus: Corpus
    validation: Corpus
    schedule: steps.Schedule
    optimizer: steps.Optimizer = steps.Optimizer()
    objective: steps.Objective = steps.Objective()
    init_from: str = ""
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 500
    save_every_minutes: float = 3.0
    loss_batches: int = 8
    bleu_task: str = "tatoeba_joined"
    bleu_examples: int = 128

    def __post_init__(self) -> None:
        size, wanted = Vocabulary(self.vocabulary).vocab_size, self.config.vocab_size
        if size != wanted:
            raise ValueError(f"{self.vocabulary} has {size} pieces, but the model's vocab_size is {wanted}")

    def run(self) -> dict[str, float]:
        """Trains to the end of the schedule, from the saved state if there is one; returns the last evaluation.

        Raises:
            LockedError: another process trains in `run_dir`.
        """
        with runs.alone(expanded(self.run_dir)):
            return Run(self).finish()


class Run(runs.Run):
    """Run of a `Trainer`, with its arrays, its position in the data, and its clock."""

    def __init__(self, trainer: Trainer):
        self.vocabulary = Vocabulary(trainer.vocabulary)
        self.pairs: Any = trainer.corpus.tokens(self.vocabulary)
        super().__init__(trainer, _initial(trainer))
        self.position = Position(**self.resumed_from)
        teacher = load_float32(trainer.objective.distill_from) if trainer.objective.distill_from else None
        self.train_step = steps.make_train_step(trainer.config, trainer.optimizer, trainer.objective, teacher)
        self.eval_step = steps.make_eval_step(trainer.config)
        # Dropout needs many random bits, and XLA's counter-based generator (rbg) is much cheaper than threefry on a
        # CPU.
        self.key = jax.random.key(trainer.seed + 1, impl="rbg")
        self.clock = time.monotonic()
        self.reported_at = self.clock - self.position.seconds

    def batches(self) -> Iterator[Batch]:
        """Yields batches from the position of the run on, epoch after epoch, and advances the position."""
        while True:
            epoch = self.trainer.corpus.epoch(self.pairs, self.trainer.seed, self.position.epoch)
            for batch in epoch[self.position.index :]:
                self.position.index += 1
                yield batch
            self.position.epoch, self.position.index = self.position.epoch + 1, 0

    def minutes(self) -> float:
        """Returns the minutes that this run has taken, including the minutes before it was resumed."""
        return self.position.minutes + (time.monotonic() - self.clock) / 60

    def remaining(self) -> Iterator[Batch]:
        """Yields batches until the schedule is complete."""
        batches = self.batches()
        while self.trainer.schedule.progress(int(self.state.step), self.minutes()) < 1.0:
            yield next(batches)

    def take(self, step: int, batch: Batch) -> None:
        """Takes a training step; logs metrics and evaluates if `log_every` or `evaluate_every` steps are complete."""
        rate = self.trainer.schedule.rate(step - 1, self.minutes())
        self.position.window.append(self._step(batch, rate))
        if step % self.trainer.log_every == 0:
            self._report(step, rate)
        if step % self.trainer.evaluate_every == 0:
            self.evaluate(step)

    def finish(self) -> dict[str, float]:
        """Trains until the schedule is complete, saves, and evaluates."""
        self.train(60 * self.trainer.save_every_minutes)
        return self.evaluate(int(self.state.step))

    def saved_position(self) -> dict[str, Any]:
        """Returns the position in the data and the clock, as the fields of `Position`."""
        seconds = time.monotonic() - self.reported_at
        position = dataclasses.replace(self.position, minutes=self.minutes(), logged=self.log.logged, seconds=seconds)
        return dataclasses.asdict(position)

    def _step(self, batch: Batch, rate: float) -> dict[str, float]:
        self.state, metrics = self.train_step(self.state, batch.source, batch.target, np.float32(rate), self.key)
        values = {name: float(value) for name, value in metrics.items()}
        if not np.isfinite(values["loss"]):
            place = f"at step {int(self.state.step)}, learning rate {rate:.2e}"
            raise FloatingPointError(f"the loss is {values['loss']} {place}; lower the schedule's peak")
        self.position.tokens += int(values["tokens"])
        return values

    def _report(self, step: int, rate: float) -> None:
        """Logs the means of the metrics over the steps since the last report."""
        window, seconds = self.position.window, time.monotonic() - self.reported_at
        minutes, tokens = self.minutes(), sum(metrics["tokens"] for metrics in window)
        done = self.trainer.schedule.progress(step, minutes)
        minutes_left = minutes * (1 - done) / done if done else float("nan")
        loss = round(sum(metrics["loss"] * metrics["tokens"] for metrics in window) / max(1.0, tokens), 4)
        record = {"step": step, "loss": loss, "learning_rate": rate, "tokens_per_second": round(tokens / seconds)}
        self.log.append(record | {"epoch": self.position.epoch, "minutes": round(minutes, 2)})
        self.position.window, self.reported_at = [], time.monotonic()
        shown = (step, 100 * done, minutes_left, loss, rate, record["tokens_per_second"])
        logging.info("step %d  %.1f%%, %.0f min left  loss %.3f  rate %.2e  %d tokens/s", *shown)

    def evaluate(self, step: int) -> dict[str, float]:
        """Computes, logs and returns the validation loss (nats per target token, no smoothing) and greedy BLEU."""
        trainer = self.trainer
        pairs: Any = trainer.validation.tokens(self.vocabulary)
        chosen = trainer.validation.epoch(pairs, 0, 0)[: trainer.loss_batches]
        sums = [self.eval_step(self.state.params, batch.source, batch.target) for batch in chosen]
        loss = sum(float(total) for total, _ in sums) / sum(int(count) for _, count in sums)
        bound = BoundModel(params=self.state.params, model=T5(trainer.config))
        score = decoding.bleu(bound, self.vocabulary, trainer.bleu_task, trainer.bleu_examples)
        evaluation = {"step": step, "validation_loss": round(loss, 4), "bleu": round(score, 2)}
        self.log.append({**evaluation, "minutes": round(self.minutes(), 2)})
        logging.info("step %d  validation loss %.3f  BLEU %.2f", step, loss, score)
        return evaluation


def _initial(trainer: Trainer) -> runs.TrainState:
    """Returns fresh parameters, or the parameters of `init_from` for a run that has saved nothing yet."""
    state = steps.init_state(trainer.config, trainer.optimizer, jax.random.key(trainer.seed))
    if not trainer.init_from or (expanded(trainer.run_dir) / runs.STATE_FILE).is_file():
        return state
    bound = load_float32(trainer.init_from)
    params = growth.grow(bound.params, cast(T5, bound.model).config, trainer.config, state.params)
    return runs.TrainState.fresh(params, trainer.optimizer.transformation())


def load_float32(path: str) -> BoundModel:
    """Returns the model of a checkpoint, with its parameters cast to float32."""
    model, params = checkpoints.load(path)
    return BoundModel(params=params, model=model)


def trained(trainer: Trainer) -> tuple[BoundModel, int]:
    """Returns the model in the saved state of a run, and the number of steps that it was trained for.

    Raises:
        FileNotFoundError: the run has not saved anything yet.
    """
    fresh = jax.eval_shape(lambda key: steps.init_state(trainer.config, trainer.optimizer, key), jax.random.key(0))
    saved = runs.load_state(expanded(trainer.run_dir), fresh)
    if saved is None:
        raise FileNotFoundError(f"{trainer.run_dir} holds no {runs.STATE_FILE}; train first (--mode=train)")
    return BoundModel(params=saved[0].params, model=T5(trainer.config)), int(saved[0].step)


def model_of(trainer: Trainer, checkpoint: str) -> BoundModel:
    """Returns the model of `checkpoint`, or the model in the run's saved state if `checkpoint` is empty.

    Raises:
        ValueError: the checkpoint's vocabulary size differs from the trainer's.
    """
    bound = load_float32(checkpoint) if checkpoint else trained(trainer)[0]
    size = bound.model.vocab_size
    if size != trainer.config.vocab_size:
        pieces = f"{trainer.vocabulary} has {trainer.config.vocab_size} pieces"
        remedy = "name the vocabulary that the checkpoint was trained with (--gin.VOCABULARY)"
        raise ValueError(f"{checkpoint} has {size} tokens, but {pieces}: {remedy}")
    return bound


def export(trainer: Trainer, output: Path, dtype: str) -> dict[str, int]:
    """Writes the weights in the saved state of a run to `output` as a checkpoint.

    Returns the number of training steps and the number of parameters.
    """
    bound, step = trained(trainer)
    checkpoints.save(output, bound.model, bound.params, dtype=dtype)
    return {"step": step, "parameters": count(bound.params)}


def evaluate(trainer: Trainer, checkpoint: str, examples: int) -> dict[str, float]:
    """Returns the BLEU of greedy decoding with `checkpoint`, or with the run's saved state if it is empty.

    The score is over the first `examples` examples of the trainer's `bleu_task`, or over all of them if the task has
    fewer.
    """
    bound = model_of(trainer, checkpoint)
    score = decoding.bleu(bound, Vocabulary(trainer.vocabulary), trainer.bleu_task, examples)
    return {"bleu": round(score, 2), "examples": len(table.get_task(trainer.bleu_task).load(limit=examples))}
