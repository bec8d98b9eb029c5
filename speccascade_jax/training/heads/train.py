"""Training acceptance heads on a frozen draft: a grid of depths and rejection weights at once.

Paper 3, section 3.3; METHODS section 6. One pass of the draft over a batch's mix (`mixing`) gives the hidden states. It
costs as much as several heads, so all heads of the grid share it; they share nothing else, and each ends as it would if
it were trained alone.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from speccascade_jax.core import files
from speccascade_jax.core.checks import check_seed, per_row, several, whole
from speccascade_jax.core.types import Array, Params
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.models import along, fingerprints
from speccascade_jax.pairs import head_files
from speccascade_jax.results.printing import clock_time
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.training import runs
from speccascade_jax.training.heads import calibration
from speccascade_jax.training.heads.mixing import HELD_OUT, Batch, Batches, mix_key, mixed_states, split
from speccascade_jax.training.heads.shards import MEANING, check_draft, prompt_keys, read
from speccascade_jax.training.runs import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTrainer:
    """A grid of heads to be trained on one draft.

    Attributes:
        run_dir: where state, metrics and heads (`heads/depth1_wrej6.msgpack`) go; a run found there is resumed.
        pair: whose draft it is; data: folders of `acceptance_data`, made with that draft.
        depths, w_rejs, laws: the grid; laws: whether a head reads the law too (`stopping.acceptance_head.with_law`).
        from_target: probability that a token of the mix is the target's.
        held_out: share of the prompts that is not trained on, but judged.
        batch_positions: positions per step, padding included; epochs: passes over the prompts.
        peak, warmup_steps, weight_decay: of AdamW; the rate rises linearly to `peak`, then falls as a cosine to 0.
        seed: of the heads, the split, the order and the mixes.
        log_every: steps; save_every_seconds: of the resumable state.

    Raises:
        ValueError: a value without meaning.
    """

    run_dir: str
    pair: ModelPair
    data: tuple[str, ...]
    depths: tuple[int, ...] = (0, 1, 2, 3, 4)
    w_rejs: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0)
    laws: tuple[bool, ...] = (False, True)
    from_target: float = 0.15
    held_out: float = 0.05
    batch_positions: int = 1536
    epochs: int = 8
    peak: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    seed: int = 0
    log_every: int = 50
    save_every_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("data", "depths", "w_rejs", "laws"):
            several(name, getattr(self, name), 1)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for depth in self.depths:
            whole("depths", depth, 0)
        for name, least in {"batch_positions": 1, "epochs": 1, "log_every": 1, "warmup_steps": 0}.items():
            whole(name, getattr(self, name), least)
        check_seed(self.seed)
        for name in ("peak", "weight_decay", "w_rejs"):
            per_row(name, getattr(self, name), len(self.w_rejs))
        if not self.peak > 0 or self.weight_decay < 0:
            raise ValueError(f"peak={self.peak} must be above 0 and weight_decay={self.weight_decay} not below it")
        if not self.save_every_seconds >= 0:
            raise ValueError(f"save_every_seconds={self.save_every_seconds} is no time; 0 saves after every step")
        if not all(w > 0 for w in self.w_rejs):
            raise ValueError(f"w_rejs={self.w_rejs} must be positive weights; 1 weighs both sides alike")
        if not 0 <= self.from_target < 1:
            raise ValueError(f"from_target={self.from_target} is outside [0, 1): nothing would be trained on at 1")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} is outside (0, 1)")

    @property
    def grid(self) -> dict[str, tuple[int, float, bool]]:
        """Name of a head -> its depth, its rejection weight, whether it reads the law."""
        kinds = itertools.product(self.depths, self.w_rejs, self.laws)
        return {head_name(depth, w_rej, law): (depth, w_rej, law) for depth, w_rej, law in kinds}

    def run(self) -> dict[str, Any]:
        """Train to the end (from the saved state if there is one), write the heads; returns what `evaluate` found."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


def head_name(depth: int, w_rej: float, law: bool = False) -> str:
    """How a head of the grid is called."""
    return f"depth{depth}_wrej{w_rej:g}" + ("_law" if law else "")


@functools.cache  # equal runs share their compiled step
def optimizer(peak: float, warmup_steps: int, steps: int, weight_decay: float) -> optax.GradientTransformation:
    """AdamW whose rate rises linearly to `peak` and falls as a cosine to 0 at `steps`."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(warmup_steps, steps // 2), steps)
    return optax.adamw(rate, weight_decay=weight_decay)


WRejs = tuple[tuple[str, float], ...]
"""Name and rejection weight of every head."""


def total_loss(params: Params, inputs: Array, kept: Array, counted: Array, w_rejs: WRejs) -> Any:
    """The sum of all heads' losses, whose gradient is each head's own, and the losses by name."""
    losses = {name: heads.weighted_bce(heads.logits(params[name], inputs), kept, counted, w) for name, w in w_rejs}
    return jnp.sum(jnp.stack(list(losses.values()))), losses


@functools.partial(jax.jit, static_argnames=("optimizer", "w_rejs"), donate_argnums=0)
def train_step(
    state: TrainState,
    inputs: Array,
    kept: Array,
    counted: Array,
    optimizer: optax.GradientTransformation,
    w_rejs: WRejs,
) -> tuple[TrainState, dict[str, Array]]:
    """One step of every head on inputs `[N, D + 2]` with labels `[N]`; returns the losses by name."""
    grads, losses = jax.grad(total_loss, has_aux=True)(state.params, inputs, kept, counted, w_rejs)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), losses


@jax.jit
def all_logits(params: Params, inputs: Array) -> dict[str, Array]:
    """Every head's logits `[N]` of inputs `[N, D + 2]`."""
    return {name: heads.logits(one, inputs) for name, one in params.items()}


class Run:
    """A `HeadTrainer` at work: the draft, the data, the heads, its place in the data.

    Raises:
        ValueError: data made with another draft, or a run directory begun with other settings.
    """

    def __init__(self, trainer: HeadTrainer):
        self.trainer, self.directory = trainer, files.expanded(trainer.run_dir)
        self.data = read(trainer.data)
        self.pair = load_source(trainer.pair)
        check_draft(self.data, fingerprints.of_model(self.pair.draft), self.pair.name)
        prompts = prompt_keys(self.data.examples.prompt())
        self.train_rows, self.held_out_rows = split(prompts, trainer.held_out, trainer.seed)
        self.batches = Batches(self.data.examples, trainer.batch_positions)
        self.steps_per_epoch = len(self.batches.cut(self.train_rows))
        self.total = self.steps_per_epoch * trainer.epochs
        files.claim(self.directory / "settings.json", self._settings(), "name another run_dir, or remove it")
        self.optimizer = optimizer(trainer.peak, trainer.warmup_steps, self.total, trainer.weight_decay)
        self.state, logged = self._initial()
        self.log = runs.MetricsLog(self.directory / runs.METRICS_FILE, int(self.state.step), logged)

    def _settings(self) -> dict[str, Any]:
        # where the data lie, and how often is logged and saved, changes nothing in the heads
        free = {"run_dir", "data", "log_every", "save_every_seconds", "pair"}
        chosen = {name: value for name, value in dataclasses.asdict(self.trainer).items() if name not in free}
        return files.plain(chosen | {"data": self.data.key})

    def _initial(self) -> tuple[TrainState, int | None]:
        """The state to begin with, and how many records were logged when it was saved."""
        size = along.features(self.pair.draft)
        if size is None:
            raise ValueError(f"the draft of pair {self.pair.name!r} gives no hidden states: no head can read it")
        key = jax.random.key(self.trainer.seed)
        grid = self.trainer.grid.items()
        params = {name: heads.initial(key, size, depth, law) for name, (depth, _, law) in grid}
        state = TrainState(params, self.optimizer.init(params), jnp.int32(0))
        saved = runs.load_state(self.directory, state)
        if saved is None:
            return state, None
        logging.info("resuming %s at step %d of %d", self.directory, int(saved[0].step), self.total)
        return jax.tree.map(jnp.asarray, saved[0]), saved[1].get("logged")

    def states(self, batch: Batch, epoch: int) -> tuple[Array, Array, Array]:
        """Inputs, labels and which count, of a batch in an epoch's mix (`mixing.mixed_states`)."""
        draft, trainer = self.pair.draft, self.trainer
        key = mix_key(trainer.seed, epoch)
        return mixed_states(draft.model, draft.params, batch, key, trainer.from_target, trainer.batch_positions)

    def _left(self) -> Iterator[tuple[int, int, Batch]]:
        """Epoch, index in it, batch: all that are still to come."""
        step = int(self.state.step)
        for epoch in range(step // self.steps_per_epoch, self.trainer.epochs):
            first = step % self.steps_per_epoch if epoch == step // self.steps_per_epoch else 0
            batches = self.batches.epoch(self.train_rows, self.trainer.seed, epoch)
            for index, batch in enumerate(batches[first:], first):
                yield epoch, index, batch

    def finish(self) -> dict[str, Any]:
        """Train until the last epoch is done, write the heads; returns what was found after that epoch."""
        found, began, saved_at = None, time.monotonic(), time.monotonic()
        step = start = int(self.state.step)
        for epoch, index, batch in self._left():
            losses = self.step(epoch, batch)
            step += 1
            if step % self.trainer.log_every == 0:
                spent = time.monotonic() - began
                left = clock_time(spent / (step - start) * (self.total - step))
                self.log.append({"step": step, "epoch": epoch, "losses": jax.tree.map(float, jax.device_get(losses))})
                first = float(next(iter(losses.values())))
                logging.info("step %d of %d, %s left, loss of the first head %.4f", step, self.total, left, first)
            if index + 1 == self.steps_per_epoch:
                found = self.evaluate()
                self.log.append({"step": step, "held_out": found})
            if time.monotonic() - saved_at > self.trainer.save_every_seconds:
                self.save()  # when all is logged: a run that goes on from here logs nothing of this step
                saved_at = time.monotonic()
        self.save()
        self.write_heads()
        return self.evaluate() if found is None else found

    def save(self) -> None:
        """Write the resumable state."""
        runs.save_state(self.directory, self.state, {"logged": self.log.logged})

    def step(self, epoch: int, batch: Batch) -> dict[str, Array]:
        """One optimiser step of every head."""
        w_rejs = tuple((name, w_rej) for name, (_, w_rej, _) in self.trainer.grid.items())
        self.state, losses = train_step(self.state, *self.states(batch, epoch), self.optimizer, w_rejs)
        return losses

    def evaluate(self) -> dict[str, Any]:
        """AUC and log loss (the weight of rejections undone) of every head on the held-out prompts' `Y` tokens."""
        logits, kept = self.judge(self.held_out_rows)
        found = {}
        for name, (_, w_rej, _) in self.trainer.grid.items():
            loss = calibration.log_loss(probability(logits[name], w_rej), kept)
            found[name] = {"auc": round(calibration.auc(logits[name], kept), 5), "log_loss": round(loss, 5)}
        best = max(found, key=lambda name: found[name]["auc"])
        logging.info("step %d, held out: best AUC %.4f (%s)", int(self.state.step), found[best]["auc"], best)
        return found

    def judge(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Every head's logits and the labels at the `Y` tokens of some prompts, `[N]` each."""
        logits: dict[str, list[np.ndarray]] = {name: [] for name in self.trainer.grid}
        kept = []
        for cut in self.batches.cut(rows):
            inputs, labels, counted = jax.device_get(self.states(self.batches.batch(cut), HELD_OUT))
            kept.append(labels[counted])
            for name, values in jax.device_get(all_logits(self.state.params, inputs)).items():
                logits[name].append(values[counted])
        return {name: np.concatenate(values) for name, values in logits.items()}, np.concatenate(kept)

    def write_heads(self) -> None:
        """Write every head of the grid with its card."""
        meant = {name: self.data.manifest[name] for name in (*MEANING, "pair") if name != "format"}
        prompts, positions = len(self.train_rows), int(self.data.examples.lengths[self.train_rows].sum())
        meant |= {"data": self.data.key, "prompts": prompts, "positions": positions, "steps": int(self.state.step)}
        meant |= {"features": along.features(self.pair.draft)}
        for name, (depth, w_rej, law) in self.trainer.grid.items():
            head = head_files.Head(self.state.params[name], head_files.Card(depth=depth, w_rej=w_rej, law=law, **meant))
            head_files.save(self.directory / "heads" / f"{name}.msgpack", head)


def probability(logits: np.ndarray, w_rej: float) -> np.ndarray:
    """The probability that a head means, the weight of rejections undone.

    The weighted loss is least at `P̂ / (1 − P̂) = P / (w_rej (1 − P))`: the weight shifts the logit and nothing else.
    """
    return 1.0 / (1.0 + np.exp(-(np.asarray(logits, np.float64) + np.log(w_rej))))
