"""Training of early-exit heads: all exits of a target are trained together, and its layers are frozen.

Source: Globerson et al. (2025), section 4.1; METHODS section 7. Each head learns the distribution of the whole model
(or of another exit) at every position of the target's own outputs, by KL divergence. With frozen layers, all heads read
the same hidden states. Computing these states takes most of the time, so all heads are trained in one pass. The heads
share nothing else: each ends as if it were trained alone.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.types import Array, Params
from speccascade_jax.models import fingerprints
from speccascade_jax.models.early_exit import Places, depth_of, distinct, early_exit, restored, shared_head
from speccascade_jax.models.teacher_forcing import continued
from speccascade_jax.pairs import exit_files
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.epochs import AcceptanceRun, EpochTrainer
from speccascade_jax.training.heads.mixing import Batch
from speccascade_jax.training.runs import Stepped, TrainState

FILE = "exit_heads.msgpack"
"""Name of the file with the trained heads in the run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitTrainer(EpochTrainer):
    """Trainer of the exit heads of a pair's target; learning rate, warm-up and epochs default to the paper's values.

    Attributes:
        layers: layers of the exits, each from 0 to the target's depth − 1.
        towards: layer of the exit that is the teacher, which must be in `init_from`; `None`: the target is the teacher.
            Globerson et al. (2025) first train all heads towards the target, and then the smallest exit of a stack
            towards the intermediate exit.
        init_from: file of heads to start from; a layer that is not in the file starts with the target's own head.
        warmup: share of the steps in which the learning rate rises.

    Raises:
        ValueError: a setting is invalid.
    """

    layers: tuple[int, ...]
    towards: int | None = None
    init_from: str = ""
    warmup: float = 0.05
    epochs: int = 2
    peak: float = 2e-4
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", several("layers", self.layers, 1))
        for layer in (*self.layers, *(() if self.towards is None else (self.towards,))):
            whole("layers", layer, 0)
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers={self.layers} names a layer twice: name each exit once")
        if self.towards is not None and (not self.init_from or self.towards in self.layers):
            remedy = f"set init_from, and leave it out of layers={self.layers}"
            raise ValueError(f"towards={self.towards}: the exit that teaches the others needs a trained head; {remedy}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} is not a share of the steps: give a number in [0, 1)")

    def run(self) -> dict[str, Any]:
        """Trains to the end, from the saved state if there is one, and writes the heads; returns the evaluation."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


Lesson = tuple[list[Array], Array, Array]
"""A batch that the heads learn from: hidden states `[B, T, E]` of each exit, log-probabilities `[B, T, V]` of the
teacher, and the mask of positions without padding, bool `[B, T]`."""


@partial(jax.jit, static_argnums=(0, 1, 2))
def frozen(
    models: Any, teacher: Any, places: Places, distinct_arrays: list[Array], batch: Batch
) -> tuple[list[Array], Array]:
    """Returns the hidden states of each exit for a batch, and the log-probabilities of the teacher (see `Lesson`).

    Args:
        models: the exits.
        teacher: the model whose log-probabilities are returned.
        places: for each exit and then the teacher, the indices in `distinct_arrays` of its parameters.
        distinct_arrays: the parameters of the exits and the teacher, each array once (`distinct`), so that shared
            layers are computed once.
        batch: `[B, T]`, prompts and the tokens after them.
    """
    bound = restored(distinct_arrays, places)
    tokens = jnp.asarray(batch.tokens)[:, :-1]
    hidden = [
        continued(model, params, batch.prompt, tokens).hidden for model, params in zip(models, bound[:-1], strict=True)
    ]
    logits = continued(teacher, bound[-1], batch.prompt, tokens).logits[..., : teacher.vocab_size]
    return [states for states in hidden if states is not None], jax.nn.log_softmax(logits)


def head_log_law(model: Any, kernel: Array, hidden: Array) -> Array:
    """Returns the float32 log-probabilities `[..., V]` of an exit with the head `kernel`, computed as in decoding."""
    params = {"decoder": {"logits_dense": {"kernel": kernel}}}
    logits: Array = model.model._apply(params, hidden, method="logits")
    return jax.nn.log_softmax(logits[..., : model.vocab_size])


def divergences(model: Any, kernel: Array, hidden: Array, taught: Array, counted: Array) -> Array:
    """Returns the sum of `KL(teacher || exit)` in nats over the positions where `counted` `[B, T]` is true.

    Args:
        model: the exit.
        kernel: its head.
        hidden: `[B, T, E]`, its hidden states.
        taught: `[B, T, V]`, the teacher's log-probabilities.
        counted: bool `[B, T]`.
    """
    log_law = head_log_law(model, kernel, hidden)
    terms = jnp.sum(jnp.where(taught > -jnp.inf, jnp.exp(taught) * (taught - log_law), 0.0), axis=-1)
    return jnp.sum(jnp.where(counted, terms, 0.0))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(models: Any, optimizer: optax.GradientTransformation, state: TrainState, lesson: Lesson) -> Stepped:
    """Takes one optimiser step of all heads; the losses are the KL divergences by layer, in nats per position."""
    hidden, taught, counted = lesson

    def total(params: Params) -> tuple[Array, dict[str, Array]]:
        sums = {}
        for model, name, states in zip(models, params, hidden, strict=True):
            sums[name] = divergences(model, params[name], states, taught, counted) / jnp.maximum(counted.sum(), 1)
        return jnp.sum(jnp.stack(list(sums.values()))), sums

    grads, losses = jax.grad(total, has_aux=True)(state.params)
    return state.updated(optimizer, grads), losses


@partial(jax.jit, static_argnums=0)
def compared(model: Any, kernel: Array, hidden: Array, taught: Array, counted: Array) -> tuple[Array, Array, Array]:
    """Compares an exit with the teacher; returns three sums over the positions that `counted` marks.

    These are the KL divergence in nats, the shared probability mass `Σ_v min(p(v), q(v))`, and the number of positions
    where both have the same greedy token. The arguments are those of `divergences`.
    """
    log_law = head_log_law(model, kernel, hidden)
    shared = jnp.sum(jnp.minimum(jnp.exp(log_law), jnp.exp(taught)), axis=-1)
    same = log_law.argmax(-1) == taught.argmax(-1)
    divergence = divergences(model, kernel, hidden, taught, counted)
    return divergence, jnp.where(counted, shared, 0.0).sum(), jnp.where(counted, same, False).sum()


class Run(AcceptanceRun):
    """Run of an `ExitTrainer`.

    Raises:
        ValueError: a layer does not exist, data or heads belong to another target, or the run directory was started
            with other settings.
    """

    def _check(self) -> None:
        """Refuses data that were made with another pair, and layers that the target does not have."""
        manifest, pair = self.data.manifest, self.pair
        if manifest["pair_fingerprint"] != pair.fingerprint:
            theirs = f"the pair {manifest['pair']!r} ({manifest['pair_fingerprint']})"
            remedy = "make data with this pair (experiments/make_acceptance_data.py)"
            raise ValueError(f"the data were made with {theirs}, not with {pair.name!r} ({pair.fingerprint}): {remedy}")
        depth = depth_of(self.pair.target.model)
        if wrong := [layer for layer in self.trainer.layers if layer >= depth]:
            raise ValueError(f"layer {wrong[0]} has no exit to train: give layers from 0 to {depth - 1}")

    def initial(self) -> tuple[Params, int]:
        """Returns the exit heads to start from, and the number of warm-up steps of the learning rate.

        A layer's head comes from the file `init_from`; without it, or if the file lacks the layer, it is a copy of the
        target's own head.
        """
        self._check()
        trainer, target = self.trainer, self.pair.target
        self.given, self.teacher = None, target
        if trainer.init_from:
            self.given = exit_files.load(trainer.init_from)
            self.given.check(target, trainer.init_from)
            if (layer := trainer.towards) is not None:
                self.teacher = early_exit(target, layer, self.given.kernel(layer, trainer.init_from))
        given_kernels = {} if self.given is None else self.given.kernels
        shared = jnp.asarray(shared_head(target))
        # copies, because a training step donates the buffers of its input state
        kernels = {layer: jnp.array(given_kernels.get(layer, shared)) for layer in sorted(trainer.layers)}
        # training reads only the hidden states of these exits, so any head serves here
        self.exits = [early_exit(target, layer, shared) for layer in kernels]
        self.models = tuple(exit.model for exit in self.exits)
        return {f"{layer:03}": kernel for layer, kernel in kernels.items()}, round(trainer.warmup * self.total)

    def settings(self) -> dict[str, Any]:
        """Returns the run's settings, with the fingerprint of the heads in `init_from` instead of their path."""
        return super().settings() | {"init_from": None if self.given is None else self.given.fingerprint}

    def lesson(self, batch: Batch) -> Lesson:
        """Computes the `Lesson` of a batch with the frozen layers."""
        distinct_arrays, places = distinct([*(exit.params for exit in self.exits), self.teacher.params])
        hidden, taught = frozen(self.models, self.teacher.model, places, distinct_arrays, batch)
        counted = np.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        return hidden, taught, jnp.asarray(counted)

    def step(self, epoch: int, batch: Batch) -> dict[str, Array]:
        """Takes one optimiser step of every head."""
        self.state, losses = train_step(self.models, self.optimizer, self.state, self.lesson(batch))
        return losses

    def evaluate(self) -> dict[str, Any]:
        """Returns each head's KL in nats, shared mass and share of equal greedy tokens on the held-out prompts."""
        sums: dict[str, Any] = {name: np.zeros(3) for name in self.state.params}
        positions = 0
        for cut in self.cuts.cut(self.held_out_rows):
            hidden, *rest = self.lesson(self.cuts.batch(cut))
            positions += int(rest[-1].sum())
            for model, name, states in zip(self.models, sums, hidden, strict=True):
                sums[name] += np.asarray(compared(model, self.state.params[name], states, *rest), np.float64)
        measures = ("kl", "shared_mass", "same_greedy_token")
        means = {name: (total / max(1, positions)).round(5).tolist() for name, total in sums.items()}
        scores = {f"layer {int(name)}": dict(zip(measures, row, strict=True)) for name, row in means.items()}
        logging.info("step %d, held out: %s", int(self.state.step), scores)
        return scores

    def write(self) -> None:
        """Writes all heads and their metadata (`Card`), including heads of `init_from` that were not trained."""
        start_heads = ({}, {}) if self.given is None else (self.given.kernels, self.given.card.towards)
        trained = {int(name): kernel for name, kernel in self.state.params.items()}
        towards, target = (
            start_heads[1] | dict.fromkeys(trained, self.trainer.towards),
            fingerprints.of_model(self.pair.target),
        )
        card = exit_files.Card(target_fingerprint=target, pair=self.pair.name, towards=towards, **self.facts())
        exit_files.save(self.directory / FILE, exit_files.ExitHeads(start_heads[0] | trained, card))
