"""Training the heads of early exits: all of a target's in one pass over the data, its own layers as they are.

Paper 4, section 4.1; METHODS.md section 7. Each head learns the law of the whole model (or of another exit) at every
position of the target's own outputs, as KL divergence. Frozen layers give the same states to all heads, which is where
the time goes, so all are trained at once; they share nothing else, and each ends as it would alone.
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
"""What is written into the run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitTrainer(EpochTrainer):
    """Heads to be trained for exits of a pair's target; rate, warm-up and epochs are the paper's where nothing is said.

    Attributes:
        layers: of the exits, each 0 to the target's depth − 1.
        towards: the layer of the exit whose law is taught (one of `init_from`'s); `None`: the target's own law. The
            paper trains all heads on the target's and then the smallest one of a stack on the intermediate one's.
        init_from: heads to go on from; a layer without starts with the target's own head.
        warmup: share of the steps in which the rate rises.

    Raises:
        ValueError: a value without meaning.
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
            raise ValueError(f"layers={self.layers} names one twice: name each exit once")
        if self.towards is not None and (not self.init_from or self.towards in self.layers):
            remedy = f"give init_from, and leave it out of layers={self.layers}"
            raise ValueError(f"towards={self.towards}: an exit teaches others with a head that it has; {remedy}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} is no share of the steps: give a number in [0, 1)")

    def run(self) -> dict[str, Any]:
        """Train to the end (from the saved state if there is one), write the heads; returns what `evaluate` found."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


Lesson = tuple[list[Array], Array, Array]
"""States `[B, T, E]` of every exit, the teacher's log-law `[B, T, V]`, and which positions count, bool `[B, T]`."""


@partial(jax.jit, static_argnums=(0, 1, 2))
def frozen(models: Any, teacher: Any, places: Places, held: list[Array], batch: Batch) -> tuple[list[Array], Array]:
    """Returns what exits give along a batch: the states of each, and the teacher's log-law (see `Lesson`).

    Args:
        places, held: `distinct` parameters of the exits and, last, of the teacher: what they share is computed once.
    """
    bound = restored(held, places)
    tokens = jnp.asarray(batch.tokens)[:, :-1]
    hidden = [continued(model, own, batch.prompt, tokens).hidden for model, own in zip(models, bound[:-1], strict=True)]
    logits = continued(teacher, bound[-1], batch.prompt, tokens).logits[..., : teacher.vocab_size]
    return [states for states in hidden if states is not None], jax.nn.log_softmax(logits)


def head_log_law(model: Any, kernel: Array, hidden: Array) -> Array:
    """Returns the log-law `[..., V]` of an exit's own head in float32, by the very code that it drafts with."""
    params = {"decoder": {"logits_dense": {"kernel": kernel}}}
    logits: Array = model.model._apply(params, hidden, method="logits")
    return jax.nn.log_softmax(logits[..., : model.vocab_size])


def divergences(model: Any, kernel: Array, hidden: Array, taught: Array, counted: Array) -> Array:
    """Returns the sum of `KL(teacher || exit)` in nats over the positions that are `counted` `[B, T]`."""
    log_law = head_log_law(model, kernel, hidden)
    terms = jnp.sum(jnp.where(taught > -jnp.inf, jnp.exp(taught) * (taught - log_law), 0.0), axis=-1)
    return jnp.sum(jnp.where(counted, terms, 0.0))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(models: Any, optimizer: optax.GradientTransformation, state: TrainState, lesson: Lesson) -> Stepped:
    """Takes one step of all heads; the losses are the divergences by layer, in nats a position."""
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
    """Sums over positions the divergence, the mass shared with the teacher, and where both say the same token."""
    log_law = head_log_law(model, kernel, hidden)
    shared = jnp.sum(jnp.minimum(jnp.exp(log_law), jnp.exp(taught)), axis=-1)
    same = log_law.argmax(-1) == taught.argmax(-1)
    divergence = divergences(model, kernel, hidden, taught, counted)
    return divergence, jnp.where(counted, shared, 0.0).sum(), jnp.where(counted, same, False).sum()


class Run(AcceptanceRun):
    """An `ExitTrainer` at work.

    Raises:
        ValueError: no such layer, data or heads of another target, or a run directory begun with other settings.
    """

    def _check(self) -> None:
        """Refuses data that were made with another pair, layers that there are not, heads of another target."""
        made, pair = self.data.manifest, self.pair
        if made["pair_fingerprint"] != pair.fingerprint:
            theirs = f"the pair {made['pair_fingerprint']} ({made['pair']!r})"
            remedy = "make data with this pair (experiments/make_acceptance_data.py)"
            raise ValueError(f"the data were made with {theirs}, but {pair.name!r} is {pair.fingerprint}: {remedy}")
        depth = depth_of(self.pair.target.model)
        if wrong := [layer for layer in self.trainer.layers if layer >= depth]:
            raise ValueError(f"there is nothing to train at layer {wrong[0]}: exits are below layer {depth}, the last")

    def initial(self) -> tuple[Params, int]:
        """Returns the heads of `init_from`, or the target's own, and the warm-up's share of all steps."""
        self._check()
        trainer, target = self.trainer, self.pair.target
        self.given, self.teacher = None, target
        if trainer.init_from:
            self.given = exit_files.load(trainer.init_from)
            self.given.check(target, trainer.init_from)
            if (layer := trainer.towards) is not None:
                self.teacher = early_exit(target, layer, self.given.kernel(layer, trainer.init_from))
        given = {} if self.given is None else self.given.kernels
        shared = jnp.asarray(shared_head(target))
        # arrays of their own: a step gives up those of the state before it
        kernels = {layer: jnp.array(given.get(layer, shared)) for layer in sorted(trainer.layers)}
        # only their states are read: which head they have here means nothing
        self.exits = [early_exit(target, layer, shared) for layer in kernels]
        self.models = tuple(exit.model for exit in self.exits)
        return {f"{layer:03}": kernel for layer, kernel in kernels.items()}, round(trainer.warmup * self.total)

    def settings(self) -> dict[str, Any]:
        """Returns every run's settings; heads to go on from count by what they are, not by where they lie."""
        return super().settings() | {"init_from": None if self.given is None else self.given.fingerprint}

    def lesson(self, batch: Batch) -> Lesson:
        """Returns what the heads learn from along a batch."""
        held, places = distinct([*(exit.params for exit in self.exits), self.teacher.params])
        hidden, taught = frozen(self.models, self.teacher.model, places, held, batch)
        counted = np.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        return hidden, taught, jnp.asarray(counted)

    def step(self, epoch: int, batch: Batch) -> dict[str, Array]:
        """Takes one optimiser step of every head."""
        self.state, losses = train_step(self.models, self.optimizer, self.state, self.lesson(batch))
        return losses

    def evaluate(self) -> dict[str, Any]:
        """Returns each head's KL in nats, mass shared and share of same greedy tokens on the held-out prompts."""
        sums: dict[str, Any] = {name: np.zeros(3) for name in self.state.params}
        positions = 0
        for cut in self.cuts.cut(self.held_out_rows):
            hidden, *rest = self.lesson(self.cuts.batch(cut))
            positions += int(rest[-1].sum())
            for model, name, states in zip(self.models, sums, hidden, strict=True):
                sums[name] += np.asarray(compared(model, self.state.params[name], states, *rest), np.float64)
        measures = ("kl", "shared_mass", "same_greedy_token")
        means = {name: (total / max(1, positions)).round(5).tolist() for name, total in sums.items()}
        found = {f"layer {int(name)}": dict(zip(measures, each, strict=True)) for name, each in means.items()}
        logging.info("step %d, held out: %s", int(self.state.step), found)
        return found

    def write(self) -> None:
        """Writes the heads, those given and not trained among them, with their card."""
        given = ({}, {}) if self.given is None else (self.given.kernels, self.given.card.towards)
        trained = {int(name): kernel for name, kernel in self.state.params.items()}
        towards, target = (
            given[1] | dict.fromkeys(trained, self.trainer.towards),
            fingerprints.of_model(self.pair.target),
        )
        card = exit_files.Card(target_fingerprint=target, pair=self.pair.name, towards=towards, **self.facts())
        exit_files.save(self.directory / FILE, exit_files.ExitHeads(given[0] | trained, card))
