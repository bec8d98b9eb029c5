"""The training run: batches in, checkpoints and metrics out, resumable at any moment."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
from absl import logging

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.storage.files import expanded
from speccascade_jax.training import runs
from speccascade_jax.training.t5 import decoding, growth, steps
from speccascade_jax.training.t5.corpus import Batch, Corpus
from speccascade_jax.training.t5.schedule import Schedule


@dataclasses.dataclass
class Position:
    """Where a run is: the next batch (`epoch`, `index` in it), training `minutes` so far, target `tokens` seen.

    And what its metrics need: how many records are `logged`, the steps since the last report and the seconds they took.
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
    """One training run of a T5 model, as a configuration.

    Attributes:
        run_dir: where state, metrics and exports go; a run found there is resumed.
        config: the model; vocabulary: path of the sentencepiece file.
        corpus, validation: what is trained on, and what the validation loss is computed on.
        schedule, optimizer, objective: how it is trained.
        init_from: a checkpoint that a new run starts from, grown where `config` is larger (`growth`), or empty.
        seed: of parameters, dropout and data order.
        log_every, evaluate_every: in steps; save_every_minutes: of the resumable state.
        loss_batches: batches of `validation` that the validation loss is a mean over.
        bleu_task, bleu_examples: the task (`data.tasks.table`) and how many of its examples BLEU is computed on.
    """

    run_dir: str
    config: T5Config
    vocabulary: str
    corpus: Corpus
    validation: Corpus
    schedule: Schedule
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
        size = Vocabulary(self.vocabulary).vocab_size
        if size != self.config.vocab_size:
            raise ValueError(
                f"{self.vocabulary} has {size} pieces, but the model's vocab_size is {self.config.vocab_size}"
            )

    def run(self) -> dict[str, float]:
        """Train to the schedule's end (from the saved state if there is one); returns the last evaluation.

        Raises:
            LockedError: another process trains in `run_dir`.
        """
        with runs.alone(expanded(self.run_dir)):
            return Run(self).finish()


class Run:
    """A `Trainer` at work: its arrays, its place in the data, its clock."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.directory = expanded(trainer.run_dir)
        self.vocabulary = Vocabulary(trainer.vocabulary)
        self.pairs: Any = trainer.corpus.tokens(self.vocabulary)
        self.state, self.position = self._initial()
        self.log = runs.MetricsLog(
            self.directory / runs.METRICS_FILE, int(self.state.step), logged=self.position.logged
        )
        teacher = load_float32(trainer.objective.distill_from) if trainer.objective.distill_from else None
        self.train_step = steps.make_train_step(trainer.config, trainer.optimizer, trainer.objective, teacher)
        self.eval_step = steps.make_eval_step(trainer.config)
        # The counter-based generator of XLA costs a fraction of threefry on CPU, and dropout asks for many bits.
        self.key = jax.random.key(trainer.seed + 1, impl="rbg")
        self.clock = time.monotonic()
        self.reported_at = self.clock - self.position.seconds

    def _initial(self) -> tuple[runs.TrainState, Position]:
        trainer = self.trainer
        state = steps.init_state(trainer.config, trainer.optimizer, jax.random.key(trainer.seed))
        saved = runs.load_state(self.directory, state)
        if saved is not None:
            logging.info("resuming %s at step %d", self.directory, int(saved[0].step))
            return jax.tree.map(jax.numpy.asarray, saved[0]), Position(**saved[1])
        if trainer.init_from:
            bound = load_float32(trainer.init_from)
            params = growth.grow(bound.params, cast(T5, bound.model).config, trainer.config, state.params)
            state = runs.TrainState.fresh(params, trainer.optimizer.transformation())
        return state, Position()

    def batches(self) -> Iterator[Batch]:
        """The batches from the run's position on, epoch after epoch, moving the position."""
        while True:
            epoch = self.trainer.corpus.epoch(self.pairs, self.trainer.seed, self.position.epoch)
            for batch in epoch[self.position.index :]:
                self.position.index += 1
                yield batch
            self.position.epoch, self.position.index = self.position.epoch + 1, 0

    def minutes(self) -> float:
        """Minutes this run has taken, those before a resume included."""
        return self.position.minutes + (time.monotonic() - self.clock) / 60

    def finish(self) -> dict[str, float]:
        """Train until the plan is done, then evaluate and save."""
        trainer, step = self.trainer, int(self.state.step)
        saved_at = time.monotonic()
        batches = self.batches()
        while trainer.schedule.progress(step, self.minutes()) < 1.0:
            rate = trainer.schedule.rate(step, self.minutes())
            self.position.window.append(self._step(next(batches), rate))
            step += 1
            if step % trainer.log_every == 0:
                self._report(step, rate)
            if step % trainer.evaluate_every == 0:
                self.evaluate(step)
            if time.monotonic() - saved_at > 60 * trainer.save_every_minutes:
                self.save()
                saved_at = time.monotonic()
        self.save()
        return self.evaluate(step)

    def _step(self, batch: Batch, rate: float) -> dict[str, float]:
        self.state, metrics = self.train_step(self.state, batch.source, batch.target, np.float32(rate), self.key)
        found = {name: float(value) for name, value in metrics.items()}
        if not np.isfinite(found["loss"]):
            where = f"at step {int(self.state.step)}, learning rate {rate:.2e}"
            raise FloatingPointError(f"the loss is {found['loss']} {where}; lower the schedule's peak")
        self.position.tokens += int(found["tokens"])
        return found

    def _report(self, step: int, rate: float) -> None:
        """Log means over the steps since the last report."""
        window, seconds = self.position.window, time.monotonic() - self.reported_at
        minutes, tokens = self.minutes(), sum(each["tokens"] for each in window)
        done = self.trainer.schedule.progress(step, minutes)
        left = minutes * (1 - done) / done if done else float("nan")
        record = {
            "step": step,
            "loss": round(sum(each["loss"] * each["tokens"] for each in window) / max(1.0, tokens), 4),
            "learning_rate": rate,
            "tokens_per_second": round(tokens / seconds),
            "epoch": self.position.epoch,
            "minutes": round(minutes, 2),
        }
        self.log.append(record)
        self.position.window, self.reported_at = [], time.monotonic()
        shown = (step, 100 * done, left, record["loss"], rate, record["tokens_per_second"])
        logging.info("step %d  %.1f%%, %.0f min left  loss %.3f  rate %.2e  %d tokens/s", *shown)

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation loss (nats per target token, no smoothing) and greedy BLEU; logged and returned."""
        trainer = self.trainer
        pairs: Any = trainer.validation.tokens(self.vocabulary)
        chosen = trainer.validation.epoch(pairs, 0, 0)[: trainer.loss_batches]
        sums = [self.eval_step(self.state.params, batch.source, batch.target) for batch in chosen]
        loss = sum(float(total) for total, _ in sums) / sum(int(count) for _, count in sums)
        bound = BoundModel(params=self.state.params, model=T5(trainer.config))
        score = decoding.bleu(bound, self.vocabulary, trainer.bleu_task, trainer.bleu_examples)
        found = {"step": step, "validation_loss": round(loss, 4), "bleu": round(score, 2)}
        self.log.append({**found, "minutes": round(self.minutes(), 2)})
        logging.info("step %d  validation loss %.3f  BLEU %.2f", step, loss, score)
        return found

    def save(self) -> None:
        """Write the resumable state."""
        seconds = time.monotonic() - self.reported_at
        position = dataclasses.replace(self.position, minutes=self.minutes(), logged=self.log.logged, seconds=seconds)
        runs.save_state(self.directory, self.state, dataclasses.asdict(position))


def load_float32(path: str) -> BoundModel:
    """The model of a checkpoint, its parameters in float32 however they are stored."""
    model, params = checkpoints.load(path)
    return BoundModel(params=params, model=model)
