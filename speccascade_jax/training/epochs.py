"""Training loop over epochs, shared by acceptance heads, early exits and selection policies.

The step number of the optimiser determines the position in the data, so a saved state suffices to resume a killed run.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import jax
import optax
from absl import logging

from speccascade_jax.core.checks import check_seed, per_row, several, whole
from speccascade_jax.core.types import Array, Params
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.runtime.progress import stage
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.heads import mixing, shards
from speccascade_jax.training.runs import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochTrainer:
    """Settings common to all trainers on acceptance data, which `experiments.make_acceptance_data` writes.

    Attributes:
        run_dir: folder of the state, the metrics and the result; training resumes if the folder holds a run.
        pair: the models; data: folders that `experiments.make_acceptance_data` wrote for this pair.
        held_out: share of the prompts that are used for evaluation only.
        batch_positions: number of positions per step, padding included; epochs: number of passes over the prompts.
        peak, weight_decay: peak learning rate and weight decay of AdamW (`optimizer`).
        seed: random seed of the parameters, the held-out prompts, the order of prompts, and the mixes of target and
            draft tokens.
        log_every: steps between log records; save_every_seconds: seconds between saves of the resumable state.

    Raises:
        ValueError: a setting is invalid.
    """

    run_dir: str
    pair: ModelPair
    data: tuple[str, ...]
    held_out: float = 0.05
    batch_positions: int = 1536
    epochs: int = 8
    peak: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0
    log_every: int = 50
    save_every_seconds: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", several("data", self.data, 1))
        check_trainer(self, "peak", "batch_positions", "epochs", "log_every")
        if not self.save_every_seconds >= 0:
            raise ValueError(
                f"save_every_seconds={self.save_every_seconds} is not a time: give 0 or more; 0 saves after every step"
            )


def check_trainer(trainer: Any, rate: str, *counts: str) -> None:
    """Checks a trainer's learning rate (the field that `rate` names), its counts, its seed and its held-out share."""
    for name in counts:
        whole(name, getattr(trainer, name), 1)
    check_seed(trainer.seed)
    for name in (rate, "weight_decay"):
        per_row(name, getattr(trainer, name), 1)
    if not getattr(trainer, rate) > 0 or trainer.weight_decay < 0:
        wanted = f"must be above 0, and weight_decay={trainer.weight_decay} must be 0 or more"
        raise ValueError(f"{rate}={getattr(trainer, rate)} {wanted}")
    if not 0 < trainer.held_out < 1:
        raise ValueError(f"held_out={trainer.held_out} is outside (0, 1)")


@functools.cache  # so that runs with equal settings share one compiled step
def optimizer(peak: float, warmup_steps: int, steps: int, weight_decay: float) -> optax.GradientTransformation:
    """Returns AdamW with a learning rate that rises linearly to `peak` and falls as a cosine to 0 at step `steps`."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(warmup_steps, steps // 2), steps)
    return optax.adamw(rate, weight_decay=weight_decay)


class EpochRun(runs.Run):
    """Run of a trainer over epochs; the step number determines the position in the data.

    Subclasses define data and model.

    Attributes:
        steps_per_epoch, total: numbers of optimiser steps in an epoch and in the whole run; `prepare` sets them.

    Raises:
        ValueError: the run directory was started with other settings.
    """

    FREE: ClassVar[tuple[str, ...]] = ("run_dir", "data", "save_every_seconds")
    """Settings that do not change the result, so a resumed run may change them."""
    steps_per_epoch: int
    total: int
    data: Any

    def __init__(self, trainer: Any):
        self.trainer, begun = trainer, files.expanded(trainer.run_dir) / "settings.json"
        params, self.optimizer = self.prepare()
        read = runs.STATE_FILE, runs.METRICS_FILE
        files.claim(begun, self.settings(), "name another run_dir, or remove it", checked=read)
        super().__init__(trainer, TrainState.fresh(params, self.optimizer))

    def prepare(self) -> tuple[Params, optax.GradientTransformation]:
        """Loads the data and sets the numbers of steps; returns the initial parameters and the optimiser."""
        raise NotImplementedError

    def batches(self, epoch: int) -> Iterable[Any]:
        """Returns the batches of an epoch, which depend only on the seed and the epoch."""
        raise NotImplementedError

    def step(self, epoch: int, batch: Any) -> dict[str, Array]:
        """Takes one optimiser step of `state`; returns the losses by name."""
        raise NotImplementedError

    def report(self, step: int, epoch: int, losses: dict[str, Array]) -> None:
        """Logs the results of a step; `step` is the number of steps taken so far."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the result depends on, and a hash that identifies the data."""
        chosen = {name: value for name, value in dataclasses.asdict(self.trainer).items() if name not in self.FREE}
        return dict(files.plain(chosen | {"data": self.data.key}))

    def remaining(self) -> Iterator[tuple[int, Any]]:
        """Yields the epoch and the batch of every remaining step."""
        begun, first = divmod(int(self.state.step), self.steps_per_epoch)
        for epoch in range(begun, self.trainer.epochs):
            for batch in itertools.islice(self.batches(epoch), first if epoch == begun else 0, None):
                yield epoch, batch

    def take(self, step: int, batch: tuple[int, Any]) -> None:
        """Takes a step and reports its losses."""
        self.report(step, batch[0], self.step(*batch))


class AcceptanceRun(EpochRun):
    """Run of an `EpochTrainer`, with the pair, the data and the position in the data.

    Subclasses define the trained model.

    Raises:
        ValueError: the data belong to another pair, or the run directory was started with other settings.
    """

    FREE = (*EpochRun.FREE, "log_every", "pair")
    evaluated: dict[str, Any] | None = None

    def prepare(self) -> tuple[Params, optax.GradientTransformation]:
        """Loads the pair and its data; returns the initial parameters, and AdamW with a warm-up."""
        trainer = self.trainer
        self.data = shards.read(trainer.data)
        self.pair = load_source(trainer.pair)
        prompts = shards.prompt_keys(self.data.examples.prompt())
        self.train_rows, self.held_out_rows = mixing.split(prompts, trainer.held_out, trainer.seed)
        self.cuts = mixing.Batches(self.data.examples, trainer.batch_positions)
        self.steps_per_epoch = len(self.cuts.cut(self.train_rows))
        self.total = self.steps_per_epoch * trainer.epochs
        params, warmup_steps = self.initial()
        return params, optimizer(trainer.peak, warmup_steps, self.total, trainer.weight_decay)

    def batches(self, epoch: int) -> list[mixing.Batch]:
        """Returns the batches of training prompts in an epoch."""
        return self.cuts.epoch(self.train_rows, self.trainer.seed, epoch)

    def report(self, step: int, epoch: int, losses: dict[str, Array]) -> None:
        """Logs the losses every `log_every` steps, and the evaluation on held-out prompts after every epoch."""
        if step % self.trainer.log_every == 0:
            self.log.append({"step": step, "epoch": epoch, "losses": jax.tree.map(float, jax.device_get(losses))})
            remaining = runs.time_left(self.began, step - self.first_step, self.total - self.first_step)
            name, loss = next(iter(losses.items()))
            logging.info("step %d of %d, %s left, loss of %s %.4f", step, self.total, remaining, name, float(loss))
        if step % self.steps_per_epoch == 0:
            with stage("evaluating on held-out prompts"):
                self.evaluated = self.evaluate()
            self.log.append({"step": step, "held_out": self.evaluated})

    def finish(self) -> dict[str, Any]:
        """Trains to the end of the last epoch and writes the result; returns the final evaluation."""
        self.began, self.first_step = time.monotonic(), int(self.state.step)
        self.train(self.trainer.save_every_seconds)
        self.write()
        return self.evaluate() if self.evaluated is None else self.evaluated

    def facts(self) -> dict[str, Any]:
        """Returns the entries about training data and steps for the metadata (`Card`) of the written file."""
        prompts, positions = len(self.train_rows), int(self.data.examples.lengths[self.train_rows].sum())
        return {"data": self.data.key, "prompts": prompts, "positions": positions, "steps": int(self.state.step)}

    def initial(self) -> tuple[Params, int]:
        """Returns the initial parameters, and the number of warm-up steps of the learning rate.

        Raises:
            ValueError: the data were not made with this pair.
        """
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any]:
        """Returns the evaluation on the held-out prompts, which is logged after every epoch."""
        raise NotImplementedError

    def write(self) -> None:
        """Writes the trained parameters to a file."""
