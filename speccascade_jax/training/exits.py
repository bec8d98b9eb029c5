"""Training the heads of early exits: all of a target's in one pass over the data, its own layers as they are.

Paper 4, section 4.1; METHODS.md section 7. Each head learns the law of the whole model (or of another exit) at every
position of the target's own outputs, as KL divergence. Frozen layers give the same states to all heads, which is where
the time goes, so all are trained at once; they share nothing else, and each ends as it would alone.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.types import Array, BoundModel, Params
from speccascade_jax.models import fingerprints
from speccascade_jax.models.early_exit import Places, depth_of, distinct, early_exit, restored, shared_head
from speccascade_jax.models.teacher_forcing import continued
from speccascade_jax.pairs import exit_files
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.epochs import AcceptanceRun, EpochTrainer
from speccascade_jax.training.heads.mixing import Batch
from speccascade_jax.training.runs import TrainState

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
        several("layers", self.layers, 1)
        object.__setattr__(self, "layers", tuple(self.layers))
        for layer in (*self.layers, *(() if self.towards is None else (self.towards,))):
            whole("layers", layer, 0)
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers={self.layers} names one twice: name each exit once")
        if self.towards is not None and (not self.init_from or self.towards in self.layers):
            raise ValueError(
                f"towards={self.towards}: an exit teaches others with a head that it has; give init_from, and leave "
                f"it out of layers={self.layers}"
            )
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} is no share of the steps: give a number in [0, 1)")

    def run(self) -> dict[str, Any]:
        """Train to the end (from the saved state if there is one), write the heads; returns what `evaluate` found."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


@partial(jax.jit, static_argnums=(0, 1, 2))
def frozen(
    models: tuple[Any, ...], teacher: Any, places: Places, held: list[Array], batch: Batch
) -> tuple[list[Array], Array]:
    """What exits give along a batch: states `[B, T, E]` of each, and the teacher's log-law `[B, T, V]`.

    Args:
        places, held: `distinct` parameters of the exits and, last, of the teacher: what they share is computed once.
    """
    bound = restored(held, places)
    tokens = jnp.asarray(batch.tokens)[:, :-1]
    hidden = [continued(model, own, batch.prompt, tokens).hidden for model, own in zip(models, bound[:-1], strict=True)]
    logits = continued(teacher, bound[-1], batch.prompt, tokens).logits[..., : teacher.vocab_size]
    return [each for each in hidden if each is not None], jax.nn.log_softmax(logits)


def head_logits(model: Any, kernel: Array, hidden: Array) -> Array:
    """float32 logits `[..., V]` of an exit's own head, by the very code that it drafts with."""
    params = {"decoder": {"logits_dense": {"kernel": kernel}}}
    found: Array = model.model._apply(params, hidden, method="logits")
    return found[..., : model.vocab_size]


def divergences(model: Any, kernel: Array, hidden: Array, taught: Array, counted: Array) -> Array:
    """The sum of `KL(teacher || exit)` in nats over the positions that are `counted` `[B, T]`."""
    own = jax.nn.log_softmax(head_logits(model, kernel, hidden))
    each = jnp.sum(jnp.where(taught > -jnp.inf, jnp.exp(taught) * (taught - own), 0.0), axis=-1)
    return jnp.sum(jnp.where(counted, each, 0.0))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    models: tuple[Any, ...],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    hidden: list[Array],
    taught: Array,
    counted: Array,
) -> tuple[TrainState, dict[str, Array]]:
    """One step of all heads; the divergences by layer, in nats a position."""

    def total(params: Params) -> tuple[Array, dict[str, Array]]:
        sums = {
            name: divergences(model, params[name], states, taught, counted) / jnp.maximum(counted.sum(), 1)
            for model, name, states in zip(models, params, hidden, strict=True)
        }
        return jnp.sum(jnp.stack(list(sums.values()))), sums

    grads, losses = jax.grad(total, has_aux=True)(state.params)
    return state.updated(optimizer, grads), losses


@partial(jax.jit, static_argnums=0)
def compared(model: Any, kernel: Array, hidden: Array, taught: Array, counted: Array) -> tuple[Array, Array, Array]:
    """Sums over positions: the divergence, the mass shared with the teacher, and where both say the same token."""
    own = jax.nn.log_softmax(head_logits(model, kernel, hidden))
    shared = jnp.sum(jnp.minimum(jnp.exp(own), jnp.exp(taught)), axis=-1)
    same = own.argmax(-1) == taught.argmax(-1)
    divergence = divergences(model, kernel, hidden, taught, counted)
    return divergence, jnp.where(counted, shared, 0.0).sum(), jnp.where(counted, same, False).sum()


class Run(AcceptanceRun):
    """An `ExitTrainer` at work.

    Raises:
        ValueError: no such layer, data or heads of another target, or a run directory begun with other settings.
    """

    def _check(self) -> None:
        """Refuses data that were made with another pair, layers that there are not, heads of another target."""
        made, found = self.data.manifest["pair_fingerprint"], self.pair.fingerprint
        if made != found:
            raise ValueError(
                f"the data were made with the pair {made} ({self.data.manifest['pair']!r}), but {self.pair.name!r} is "
                f"{found}: make data with this pair (experiments/make_acceptance_data.py)"
            )
        depth = depth_of(self.pair.target.model)
        if wrong := [layer for layer in self.trainer.layers if layer >= depth]:
            raise ValueError(f"there is nothing to train at layer {wrong[0]}: exits are below layer {depth}, the last")
        self.given: exit_files.ExitHeads | None = None
        if self.trainer.init_from:
            self.given = exit_files.load(self.trainer.init_from)
            self.given.check(self.pair.target, self.trainer.init_from)

    def initial(self) -> Params:
        """Returns the given heads, and the target's own where none is."""
        self._check()
        given = {} if self.given is None else self.given.kernels
        own = jnp.asarray(shared_head(self.pair.target))
        # arrays of their own: a step gives up those of the state before it
        kernels = {layer: jnp.array(given.get(layer, own)) for layer in sorted(self.trainer.layers)}
        # only their states are read: which head they have here means nothing
        self.exits = [early_exit(self.pair.target, layer, own) for layer in kernels]
        self.teacher = self._teacher()
        return {f"{layer:03}": kernel for layer, kernel in kernels.items()}

    def _teacher(self) -> BoundModel:
        towards = self.trainer.towards
        if towards is None or self.given is None:
            return self.pair.target
        return early_exit(self.pair.target, towards, self.given.kernel(towards, self.trainer.init_from))

    def warmup_steps(self) -> int:
        """The trainer's share of all steps."""
        return round(self.trainer.warmup * self.total)

    def settings(self) -> dict[str, Any]:
        """As every run's; heads to go on from count by what they are, not by where they lie."""
        given = None if self.given is None else self.given.fingerprint
        return super().settings() | {"init_from": given}

    @property
    def models(self) -> tuple[Any, ...]:
        """Of the exits, from the lowest."""
        return tuple(exit.model for exit in self.exits)

    def _states(self, batch: Batch) -> tuple[list[Array], Array, Array]:
        held, places = distinct([*(exit.params for exit in self.exits), self.teacher.params])
        hidden, taught = frozen(self.models, self.teacher.model, places, held, batch)
        counted = np.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        return hidden, taught, jnp.asarray(counted)

    def step(self, epoch: int, batch: Batch) -> dict[str, Array]:
        """One optimiser step of every head."""
        self.state, losses = train_step(self.models, self.optimizer, self.state, *self._states(batch))
        return losses

    def evaluate(self) -> dict[str, Any]:
        """Of every head on the held-out prompts' positions: KL in nats, the mass shared, the same greedy token."""
        sums: dict[str, Any] = {name: np.zeros(3) for name in self.state.params}
        positions = 0
        for cut in self.cuts.cut(self.held_out_rows):
            hidden, *rest = self._states(self.cuts.batch(cut))
            positions += int(rest[-1].sum())
            for model, name, states in zip(self.models, sums, hidden, strict=True):
                sums[name] += np.asarray(compared(model, self.state.params[name], states, *rest), np.float64)
        found = {}
        for name, each in sums.items():
            kl, shared, same = (each / max(1, positions)).round(5).tolist()
            found[f"layer {int(name)}"] = {"kl": kl, "shared_mass": shared, "same_greedy_token": same}
        logging.info("step %d, held out: %s", int(self.state.step), found)
        return found

    def write(self) -> None:
        """Write the heads, those given and not trained among them, with their card."""
        given = ({}, {}) if self.given is None else (self.given.kernels, self.given.card.towards)
        trained = {int(name): kernel for name, kernel in self.state.params.items()}
        card = exit_files.Card(
            target_fingerprint=fingerprints.of_model(self.pair.target),
            pair=self.pair.name,
            towards=given[1] | dict.fromkeys(trained, self.trainer.towards),
            data=self.data.key,
            prompts=len(self.train_rows),
            positions=int(self.data.examples.lengths[self.train_rows].sum()),
            steps=int(self.state.step),
        )
        exit_files.save(self.directory / FILE, exit_files.ExitHeads(given[0] | trained, card))
