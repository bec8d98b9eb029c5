"""Training in epochs: one loop for acceptance heads, early exits and selection policies.

The place in the data is a function of the optimiser's step, so a saved state is all that a killed run needs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from absl import logging

from speccascade_jax.core.checks import check_seed, per_row, several, whole
from speccascade_jax.core.types import Array, Params
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.heads.mixing import Batch, Batches, split
from speccascade_jax.training.heads.shards import prompt_keys, read
from speccascade_jax.training.runs import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochTrainer:
    """Settings of every training on acceptance data.

    Attributes:
        run_dir: where state, metrics and what was trained go; a run found there is resumed.
        pair: whose models they are; data: folders of `experiments.make_acceptance_data`, made with that pair.
        held_out: share of the prompts that is not trained on, but judged.
        batch_positions: positions per step, padding included; epochs: passes over the prompts.
        peak, weight_decay: of AdamW (`optimizer`).
        seed: of parameters, the split, the order and the mixes.
        log_every: steps; save_every_seconds: of the resumable state.

    Raises:
        ValueError: a value without meaning.
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
        several("data", self.data, 1)
        object.__setattr__(self, "data", tuple(self.data))
        for name in ("batch_positions", "epochs", "log_every"):
            whole(name, getattr(self, name), 1)
        check_seed(self.seed)
        for name in ("peak", "weight_decay"):
            per_row(name, getattr(self, name), 1)
        if not self.peak > 0 or self.weight_decay < 0:
            raise ValueError(f"peak={self.peak} must be above 0 and weight_decay={self.weight_decay} not below it")
        if not self.save_every_seconds >= 0:
            raise ValueError(f"save_every_seconds={self.save_every_seconds} is no time; 0 saves after every step")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} is outside (0, 1)")


@functools.cache  # equal runs share their compiled step
def optimizer(peak: float, warmup_steps: int, steps: int, weight_decay: float) -> optax.GradientTransformation:
    """AdamW whose rate rises linearly to `peak` and falls as a cosine to 0 at `steps`."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(warmup_steps, steps // 2), steps)
    return optax.adamw(rate, weight_decay=weight_decay)


class EpochRun:
    """A trainer at work: its state, its log, its place in the epochs. Subclasses say what is trained on what.

    Attributes:
        steps_per_epoch, total: optimiser steps, which `prepare` sets.

    Raises:
        ValueError: the run directory was begun with other settings.
    """

    FREE: ClassVar[tuple[str, ...]] = ("run_dir", "data", "save_every_seconds")
    """Settings that change nothing in the result."""
    steps_per_epoch: int
    total: int
    data: Any

    def __init__(self, trainer: Any):
        self.trainer, self.directory = trainer, files.expanded(trainer.run_dir)
        params, self.optimizer = self.prepare()
        files.claim(self.directory / "settings.json", self.settings(), "name another run_dir, or remove it")
        self.state, logged = TrainState.fresh(params, self.optimizer), None
        if saved := runs.load_state(self.directory, self.state):
            self.state, logged = jax.tree.map(jnp.asarray, saved[0]), saved[1].get("logged")
            logging.info("resuming %s at step %d of %d", self.directory, int(self.state.step), self.total)
        self.log = runs.MetricsLog(self.directory / runs.METRICS_FILE, int(self.state.step), logged)

    def prepare(self) -> tuple[Params, optax.GradientTransformation]:
        """Loads the data, sets the numbers of steps; returns the parameters to begin with and the optimiser."""
        raise NotImplementedError

    def batches(self, epoch: int) -> Iterable[Any]:
        """Returns an epoch's batches, a function of the seed and the epoch."""
        raise NotImplementedError

    def step(self, epoch: int, batch: Any) -> dict[str, Array]:
        """Takes one optimiser step of `state`; returns the losses by name."""
        raise NotImplementedError

    def report(self, step: int, epoch: int, losses: dict[str, Array]) -> None:
        """Logs what there is to say after `step` steps."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns what the result depends on, the data by their key."""
        chosen = {name: value for name, value in dataclasses.asdict(self.trainer).items() if name not in self.FREE}
        return dict(files.plain(chosen | {"data": self.data.key}))

    def _remaining(self) -> Iterator[tuple[int, Any]]:
        """Yields epoch and batch of every step that is still to come."""
        begun, first = divmod(int(self.state.step), self.steps_per_epoch)
        for epoch in range(begun, self.trainer.epochs):
            for batch in itertools.islice(self.batches(epoch), first if epoch == begun else 0, None):
                yield epoch, batch

    def train(self) -> None:
        """Trains until the last epoch is done and saves the state."""
        saved_at = time.monotonic()
        for step, (epoch, batch) in enumerate(self._remaining(), int(self.state.step) + 1):
            self.report(step, epoch, self.step(epoch, batch))
            if time.monotonic() - saved_at > self.trainer.save_every_seconds:
                self.save()  # when all is logged: a run that goes on from here logs nothing of this step
                saved_at = time.monotonic()
        self.save()

    def save(self) -> None:
        """Writes the resumable state."""
        runs.save_state(self.directory, self.state, {"logged": self.log.logged})


class AcceptanceRun(EpochRun):
    """An `EpochTrainer` at work: the pair, the data, its place in them. What is trained is a subclass's.

    Raises:
        ValueError: data of another pair, or a run directory begun with other settings.
    """

    FREE = (*EpochRun.FREE, "log_every", "pair")
    evaluated: dict[str, Any] | None = None

    def prepare(self) -> tuple[Params, optax.GradientTransformation]:
        """Loads the pair and its data; returns what `initial` gives, and AdamW with a warm-up."""
        trainer = self.trainer
        self.data = read(trainer.data)
        self.pair = load_source(trainer.pair)
        prompts = prompt_keys(self.data.examples.prompt())
        self.train_rows, self.held_out_rows = split(prompts, trainer.held_out, trainer.seed)
        self.cuts = Batches(self.data.examples, trainer.batch_positions)
        self.steps_per_epoch = len(self.cuts.cut(self.train_rows))
        self.total = self.steps_per_epoch * trainer.epochs
        params = self.initial()
        return params, optimizer(trainer.peak, self.warmup_steps(), self.total, trainer.weight_decay)

    def batches(self, epoch: int) -> list[Batch]:
        """Returns an epoch's batches of the prompts that are not held out."""
        return self.cuts.epoch(self.train_rows, self.trainer.seed, epoch)

    def report(self, step: int, epoch: int, losses: dict[str, Array]) -> None:
        """Logs the losses every `log_every` steps, and what an epoch's end finds on the held-out prompts."""
        if step % self.trainer.log_every == 0:
            self.log.append({"step": step, "epoch": epoch, "losses": jax.tree.map(float, jax.device_get(losses))})
            remaining = runs.time_left(self.began, step - self.first_step, self.total - self.first_step)
            name, loss = next(iter(losses.items()))
            logging.info("step %d of %d, %s left, loss of %s %.4f", step, self.total, remaining, name, float(loss))
        if step % self.steps_per_epoch == 0:
            self.evaluated = self.evaluate()
            self.log.append({"step": step, "held_out": self.evaluated})

    def finish(self) -> dict[str, Any]:
        """Trains until the last epoch is done, writes the result; returns what was found after that epoch."""
        self.began, self.first_step = time.monotonic(), int(self.state.step)
        self.train()
        self.write()
        return self.evaluate() if self.evaluated is None else self.evaluated

    def initial(self) -> Params:
        """Returns the parameters to begin with; refuses data that were not made with this pair."""
        raise NotImplementedError

    def warmup_steps(self) -> int:
        """Returns the number of steps in which the rate rises."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any]:
        """Returns what is found on the held-out prompts; logged after every epoch."""
        raise NotImplementedError

    def write(self) -> None:
        """Writes what was trained."""
        raise NotImplementedError
