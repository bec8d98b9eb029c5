"""Training runs that resume after a kill at any moment: state, position in the data, metrics, and end of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from speccascade_jax.core.types import BoundModel
from speccascade_jax.runtime import hosts
from speccascade_jax.storage.checksums import digest
from speccascade_jax.storage.files import expanded
from speccascade_jax.training import runs
from speccascade_jax.training.bucket_states import open_states
from speccascade_jax.training.finetune import agreement, decoding, partition, steps, watching
from speccascade_jax.training.finetune.batches import PlannedBatch, check_data
from speccascade_jax.training.finetune.evaluations import acceptance_of, beside, validation_batches
from speccascade_jax.training.finetune.trainer import MODEL, Trainer, write_model
from speccascade_jax.training.states import saved_on_stop


def train(trainer: Trainer) -> dict[str, Any]:
    """Trains to the end of the schedule, from the saved state if there is one; returns the last evaluation.

    Args:
        trainer: the settings.

    Raises:
        LockedError: another process trains in `run_dir`.
        ValueError: a setting is invalid, or does not fit another one.
    """
    trainer.check_folder()
    trainer.check_held_out()
    with runs.alone(expanded(trainer.run_dir)):
        return Run(trainer).finish()


@dataclasses.dataclass
class Position:
    """Position of a run, which is saved with its state and from which it resumes.

    It holds the next batch (`epoch`, and `index` in the epoch), the training time in `minutes`, and the number of
    target `tokens` so far. `begun` holds the data's digest and the seed at the run's start, which must not change when
    it is resumed (`Run.identity`).

    The other fields are the state of the metrics: the number of `logged` records, the metrics of the steps since the
    last report (`window`), the `seconds` that these steps took, and the last complete `evaluation`. `owed` says whether
    the current step's evaluation must be repeated, because a signal interrupted it.
    """

    epoch: int = 0
    index: int = 0
    minutes: float = 0.0
    tokens: int = 0
    begun: dict[str, Any] = dataclasses.field(default_factory=dict)
    logged: int | None = None
    window: list[dict[str, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)
    owed: bool = False


class Started(NamedTuple):
    """A step that devices may still be computing: its number, learning rate, metrics, and floating-point operations."""

    step: int
    rate: float
    metrics: dict[str, jax.Array]
    flops: float


class Run:
    """Run of a `Trainer`, with its arrays, its position in the data, and its clock."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.directory, self.mesh = trainer, expanded(trainer.run_dir), trainer.devices
        self.model: Any = trainer.model
        self.devices = jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)
        self.data = trainer.corpus.tokens(trainer.text, self.model.is_encoder_decoder)
        self.validation = validation_batches(trainer)
        longest = getattr(self.model.config, "max_length", None)
        check_data(self.data, trainer.accumulate * trainer.mesh[0], longest)
        agreement.check_data(trainer, self.data, self.validation)
        self.states, layout = open_states(self.directory), trainer.layout()
        saved = self.states.latest(layout)
        if saved is None and (self.directory / MODEL).exists():
            raise ValueError(
                f"{self.directory / MODEL} is not the model of a run in this folder, which has no state, and would be "
                "replaced: name another run_dir, or move it"
            )
        self.position = Position(**saved[1]) if saved else Position()
        self._check_begun()
        self.state = saved[0] if saved else self._first_state()
        if saved:
            logging.info("resuming %s at step %d", self.directory, int(self.state.step))
        self.log = runs.MetricsLog(self.directory / runs.METRICS_FILE, int(self.state.step), self.position.logged)
        self._build(layout)
        self.started: Started | None = None
        self.stop_if_asked: Callable[[], None] = lambda: None
        self.clock = time.monotonic()
        self.reported_at = self.clock - self.position.seconds
        self.progress = watching.Progress(trainer.schedule, self.position.minutes)

    def _first_state(self) -> runs.TrainState:
        """Returns the state of a new run."""
        params = self.trainer.initial()
        agreement.check_weights(self.trainer, params)
        return partition.fresh_state(params, self.trainer.optimizer, self.mesh)

    def _check_begun(self) -> None:
        """Refuses to resume a run with other data or another seed, unless an earlier version saved its state.

        Another `init_from` is only reported: the checkpoint may have moved, and it is not read when a run is resumed.

        Raises:
            ValueError: data or seed have changed; names which.
        """
        begun, now = self.position.begun, self.identity()
        if changed := [name for name, value in now.items() if begun.get(name, value) != value]:
            raise ValueError(
                f"{self.directory} was begun with another {' and another '.join(changed)}: name another run_dir, or "
                "give the former one"
            )
        former_start, start = begun.get("init_from"), self.trainer.init_from or ""
        if start and former_start not in (None, start):
            logging.warning("the run resumes from its saved state, begun from %r: %r is not read", former_start, start)
        self.position.begun = {"init_from": start} | begun | now

    def identity(self) -> dict[str, Any]:
        """Returns the values that must not change during a run: a digest of its data, and its seed.

        The digest covers the first planned batch and the number of batches; it is the same on every mesh.
        """
        plan = self.data.epoch(self.trainer.seed, 0)
        arrays = [np.asarray(array) for array in plan[0].build(slice(None)) if array is not None]
        content = b"".join([str(len(plan)).encode(), *[str(a.shape).encode() + a.tobytes() for a in arrays]])
        return {"corpus": digest(content), "seed": self.trainer.seed}

    def _build(self, layout: runs.TrainState) -> None:
        """Prepares the programs of a step and of an evaluation."""
        trainer = self.trainer
        teacher = beside(trainer, trainer.distillation.teacher) if trainer.distillation else None
        self.take_step = steps.make_train_step(
            self.model, trainer.optimizer, trainer.objective, distillation=trainer.distillation, teacher=teacher,
            stop_ids=tuple(trainer.text.stop_ids), accumulate=trainer.accumulate, remat=trainer.remat,
            layout=None if self.mesh is None else layout,
        )  # fmt: skip
        self.acceptance = acceptance_of(trainer, self.validation, teacher)

    def finish(self) -> dict[str, Any]:
        """Trains until the schedule is complete, evaluates, and writes the trained model."""
        save = functools.partial(self.save, wait=True)
        with contextlib.closing(self.states), saved_on_stop(save) as self.stop_if_asked:
            self._train()
            evaluation = self._last_evaluation()
        self.log.flush()
        params = partition.on_host(partition.for_decoding(self.state.params, self.mesh))
        if hosts.first():
            write_model(self.directory / MODEL, self.model, params, self.trainer.text)
        return evaluation

    def _train(self) -> None:
        trainer, saved_at = self.trainer, time.monotonic()
        step = int(self.state.step)
        if self.position.owed:
            self.evaluate(step)
        for planned in self.remaining():
            step += 1
            self.take(step, planned)
            self.progress.tell(step)
            # saved after the step is logged, so that a resumed run does not log it again
            if hosts.agreed(time.monotonic() - saved_at > 60 * trainer.save_every_minutes):
                self.save()
                saved_at = time.monotonic()
            self.stop_if_asked()
        self.save(wait=True)

    def _last_evaluation(self) -> dict[str, Any]:
        """Returns the evaluation of the trained model; makes it only if the last step has not."""
        step, last = int(self.state.step), self.position.evaluation
        return last if last.get("step") == step else self.evaluate(step)

    def save(self, wait: bool = False) -> None:
        """Writes the resumable state."""
        self._settle()
        self.log.flush()  # the saved position counts the records that a resumed run must find
        seconds = time.monotonic() - self.reported_at
        position = dataclasses.replace(self.position, minutes=self.minutes(), logged=self.log.logged, seconds=seconds)
        self.states.save(int(self.state.step), self.state, dataclasses.asdict(position), wait)

    def minutes(self) -> float:
        """Returns the minutes that this run has taken, including the minutes before it was resumed."""
        minutes = self.position.minutes + (time.monotonic() - self.clock) / 60
        # The learning rate must be equal on all hosts. It depends on the minutes only if the schedule limits them.
        return float(hosts.agreed(minutes)) if self.trainer.schedule.max_minutes else minutes

    def remaining(self) -> Iterator[PlannedBatch]:
        """Yields planned batches from the position of the run on, until the schedule is complete."""
        step = int(self.state.step)
        while True:
            for planned in self.data.epoch(self.trainer.seed, self.position.epoch)[self.position.index :]:
                if self.trainer.schedule.progress(step, self.minutes()) >= 1.0:
                    return
                self.position.index, step = self.position.index + 1, step + 1
                yield planned
            self.position.epoch, self.position.index = self.position.epoch + 1, 0

    def take(self, step: int, planned: PlannedBatch) -> None:
        """Starts step `step` (from 1); logs metrics every `log_every` steps, and evaluates every `evaluate_every`."""
        rate = self.trainer.schedule.rate(step - 1, self.minutes())
        started = self._start(step, planned, rate)
        self._settle()  # the devices compute the new step while the host waits for the metrics of the one before
        self.started = started
        if step % self.trainer.log_every == 0:
            self._report(step, rate)
        if step % self.trainer.evaluate_every == 0:
            self.evaluate(step)

    def _start(self, step: int, planned: PlannedBatch, rate: float) -> Started:
        host = planned.build(partition.host_rows(planned.rows, self.mesh))
        batch = partition.on_mesh(host, planned.rows, self.mesh)
        self.state, metrics = self.take_step(self.state, batch, np.float32(rate), np.uint32(self.trainer.seed))
        flops = watching.training_flops(self.model.config, host.lengths, host.encoder_lengths)
        return Started(step, rate, metrics, float(flops) * planned.rows / len(host.lengths))

    def _settle(self) -> None:
        """Waits for the started step, and adds its metrics to `window`; does nothing if no step is started.

        Raises:
            FloatingPointError: its loss is not finite.
        """
        if self.started is None:
            return
        (step, rate, metrics, flops), self.started = self.started, None
        values = {name: float(value) for name, value in metrics.items()}
        if not np.isfinite(values["loss"]):
            place = f"at step {step}, learning rate {rate:.2e}"
            raise FloatingPointError(f"the loss is {values['loss']} {place}; lower the schedule's peak")
        self.position.tokens += int(values["tokens"])
        self.position.window.append(values | {"flops": flops})

    def _report(self, step: int, rate: float) -> None:
        """Logs the means of the metrics over the steps since the last report."""
        self._settle()
        window, seconds = self.position.window, time.monotonic() - self.reported_at
        minutes = self.minutes()
        tokens, flops = (sum(metrics[name] for metrics in window) for name in ("tokens", "flops"))
        done = self.trainer.schedule.progress(step, minutes)
        minutes_left = minutes * (1 - done) / done if done else float("nan")
        loss = round(sum(metrics["loss"] * metrics["tokens"] for metrics in window) / max(1.0, tokens), 4)
        norm = round(sum(metrics["gradient_norm"] for metrics in window) / len(window), 4)
        speeds = watching.speeds(tokens, flops, seconds, self.devices)
        record = {"step": step, "loss": loss, "gradient_norm": norm, "learning_rate": rate, **speeds}
        self.log.append(record | {"epoch": self.position.epoch, "minutes": round(minutes, 2)})
        self.position.window, self.reported_at = [], time.monotonic()
        self.progress.told_at = self.reported_at
        mfu = f"  MFU {speeds['mfu']:.1%}" if speeds["mfu"] is not None else ""
        shown = (step, 100 * done, minutes_left, loss, norm, rate, speeds["tokens_per_second"], mfu)
        if hosts.first():
            logging.info("step %d  %.1f%%, %.0f min left  loss %.3f  gradient %.2f  rate %.2e  %d tokens/s%s", *shown)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Computes, logs and returns the validation loss (nats per target token), the acceptance rate and the metrics.

        The loss has no smoothing; the metrics are those of greedy decoding. A signal ends the evaluation after a batch;
        the resumed run then repeats it.
        """
        self._settle()  # raises an error if the last loss is not finite, so that such parameters are not evaluated
        self.position.owed = True
        trainer, evaluation = self.trainer, dict[str, Any]({"step": step})
        if self.validation:
            evaluation["validation_loss"] = round(self._validation_loss(), 4)
        bound = BoundModel(params=partition.for_decoding(self.state.params, self.mesh), model=self.model)
        if self.acceptance is not None:
            evaluation |= self.acceptance(bound, self.stop_if_asked).numbers()
        if trainer.task:
            evaluation |= self._scores(bound)
        self.log.append({**evaluation, "minutes": round(self.minutes(), 2)})
        self.position.evaluation, self.position.owed = evaluation, False
        if hosts.first():
            logging.info("%s", "  ".join(f"{name} {value}" for name, value in evaluation.items()))
        return evaluation

    def _validation_loss(self) -> float:
        evaluate, total, tokens = steps.make_eval_step(self.model), 0.0, 0
        for planned in self.validation:
            host = planned.build(partition.host_rows(planned.rows, self.mesh))
            losses, counted = evaluate(self.state.params, partition.on_mesh(host, planned.rows, self.mesh))
            total, tokens = total + float(losses), tokens + int(counted)
            self.stop_if_asked()
        return total / tokens

    def _scores(self, bound: BoundModel) -> dict[str, float]:
        trainer = self.trainer
        rows = decoding.rows_for(trainer.mesh)
        result = decoding.scores(
            bound, trainer.text, trainer.scored, trainer.split, trainer.examples, rows, self.stop_if_asked
        )
        texts = zip(result.prompts, result.outputs, result.references, strict=True)
        for prompt, output, reference in list(texts)[: trainer.shown] if hosts.first() else ():
            logging.info("  %r\n    -> %r\n    reference %r", prompt[:200], output, reference)
        return result.metrics
