"""A run over acceptance data, epoch after epoch: what is the same for whatever is trained on them.

The place in the data is a function of the optimiser's step, so a saved state is all that a killed run needs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from speccascade_jax.core.checks import check_seed, per_row, several, whole
from speccascade_jax.core.types import Array, Params
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.results.report.printing import clock_time
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.heads.mixing import Batch, Batches, split
from speccascade_jax.training.heads.shards import prompt_keys, read
from speccascade_jax.training.runs import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochTrainer:
    """What every training on acceptance data is told.

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
    """An `EpochTrainer` at work: the pair, the data, its place in them. What is trained is a subclass's.

    Raises:
        ValueError: data of another pair, or a run directory begun with other settings.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.directory = trainer, files.expanded(trainer.run_dir)
        self.data = read(trainer.data)
        self.pair = load_source(trainer.pair)
        self.check()
        prompts = prompt_keys(self.data.examples.prompt())
        self.train_rows, self.held_out_rows = split(prompts, trainer.held_out, trainer.seed)
        self.batches = Batches(self.data.examples, trainer.batch_positions)
        self.steps_per_epoch = len(self.batches.cut(self.train_rows))
        self.total = self.steps_per_epoch * trainer.epochs
        params = self.initial()
        files.claim(self.directory / "settings.json", self.settings(), "name another run_dir, or remove it")
        self.optimizer = optimizer(trainer.peak, self.warmup_steps(), self.total, trainer.weight_decay)
        self.state, logged = self._begun(params)
        self.log = runs.MetricsLog(self.directory / runs.METRICS_FILE, int(self.state.step), logged)

    def check(self) -> None:
        """Refuse data that were not made with this pair."""
        raise NotImplementedError

    def initial(self) -> Params:
        """The parameters to begin with."""
        raise NotImplementedError

    def warmup_steps(self) -> int:
        """Steps in which the rate rises."""
        raise NotImplementedError

    def step(self, epoch: int, batch: Batch) -> dict[str, Array]:
        """One optimiser step of `state`; the losses by name."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any]:
        """What is found on the held-out prompts; logged after every epoch."""
        raise NotImplementedError

    def write(self) -> None:
        """Write what was trained."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What the result hangs on: where data lie, and how often is logged and saved, changes nothing in it."""
        free = {"run_dir", "data", "log_every", "save_every_seconds", "pair"}
        chosen = {name: value for name, value in dataclasses.asdict(self.trainer).items() if name not in free}
        return dict(files.plain(chosen | {"data": self.data.key}))

    def _begun(self, params: Params) -> tuple[TrainState, int | None]:
        """The state to go on from, and how many records were logged when it was saved."""
        state = TrainState(params, self.optimizer.init(params), jnp.int32(0))
        saved = runs.load_state(self.directory, state)
        if saved is None:
            return state, None
        logging.info("resuming %s at step %d of %d", self.directory, int(saved[0].step), self.total)
        return jax.tree.map(jnp.asarray, saved[0]), saved[1].get("logged")

    def _left(self) -> Iterator[tuple[int, int, Batch]]:
        """Epoch, index in it, batch: all that are still to come."""
        step = int(self.state.step)
        for epoch in range(step // self.steps_per_epoch, self.trainer.epochs):
            first = step % self.steps_per_epoch if epoch == step // self.steps_per_epoch else 0
            batches = self.batches.epoch(self.train_rows, self.trainer.seed, epoch)
            for index, batch in enumerate(batches[first:], first):
                yield epoch, index, batch

    def finish(self) -> dict[str, Any]:
        """Train until the last epoch is done, write the result; returns what was found after that epoch."""
        found, began, saved_at = None, time.monotonic(), time.monotonic()
        step = start = int(self.state.step)
        for epoch, index, batch in self._left():
            losses = self.step(epoch, batch)
            step += 1
            if step % self.trainer.log_every == 0:
                spent = time.monotonic() - began
                left = clock_time(spent / (step - start) * (self.total - step))
                self.log.append({"step": step, "epoch": epoch, "losses": jax.tree.map(float, jax.device_get(losses))})
                name, first = next(iter(losses.items()))
                logging.info("step %d of %d, %s left, loss of %s %.4f", step, self.total, left, name, float(first))
            if index + 1 == self.steps_per_epoch:
                found = self.evaluate()
                self.log.append({"step": step, "held_out": found})
            if time.monotonic() - saved_at > self.trainer.save_every_seconds:
                self.save()  # when all is logged: a run that goes on from here logs nothing of this step
                saved_at = time.monotonic()
        self.save()
        self.write()
        return self.evaluate() if found is None else found

    def save(self) -> None:
        """Write the resumable state."""
        runs.save_state(self.directory, self.state, {"logged": self.log.logged})
