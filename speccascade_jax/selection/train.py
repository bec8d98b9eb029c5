"""Training selection policies before serving: what `experiments/train_policy.py` runs (paper 5, section 2.4).

Each epoch passes over the queries once, in an order that hangs on the seed and the epoch; the place in the data is a
function of the optimiser's step, so that a saved state is all that a killed run needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from speccascade_jax.core.checks import check_seed, per_row, whole
from speccascade_jax.core.names import hint
from speccascade_jax.core.types import Array, Params
from speccascade_jax.drafters import chooser
from speccascade_jax.pairs import policy_files
from speccascade_jax.pairs.policy_files import Card, Policy
from speccascade_jax.selection import data as selection_data
from speccascade_jax.selection.data import Data
from speccascade_jax.selection.objectives import OBJECTIVES
from speccascade_jax.selection.posterior import Posterior, Whitening, learn_by_trying
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.epochs import EpochRun
from speccascade_jax.training.runs import TrainState

LINUCB = "linucb"
FILE = policy_files.FILE
"""What is written into the run's folder."""


@dataclass(frozen=True, kw_only=True)
class PolicyTrainer:
    """A policy to be trained; METHODS' numbers where nothing is said.

    Attributes:
        run_dir: where state, metrics and the policy go; a run found there is resumed.
        data: a folder of `experiments.make_selection_data`; arms: which of its candidates, in which order (empty: all).
        objective: a name of `objectives.OBJECTIVES`, or "linucb", which learns a linear policy by trying.
        hidden: widths of the hidden layers, tanh between; none is a linear policy.
        alignment_weight: of the rewards, 1 is alignment alone; costs: of each arm, instead of those by parameters.
        queries: how many to learn from, at random (0: all that are not held out); held_out: share that is judged.
        batch, epochs, rate, weight_decay, betas: of AdamW.
        seed: of parameters, split, order and draws; save_every_seconds: of the resumable state.

    Raises:
        ValueError: a value without meaning.
    """

    run_dir: str
    data: str
    arms: tuple[str, ...] = ()
    objective: str = "reinforce"
    hidden: tuple[int, ...] = (512, 512)
    alignment_weight: float = 1.0
    costs: dict[str, float] | None = None
    queries: int = 0
    held_out: float = 0.1
    batch: int = 64
    epochs: int = 3
    rate: float = 1e-3
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    seed: int = 0
    save_every_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("arms", "hidden", "betas"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("batch", "epochs", *(["queries"] if self.queries else [])):
            whole(name, getattr(self, name), 1)
        for width in self.hidden:
            whole("hidden", width, 1)
        check_seed(self.seed)
        per_row("rate", self.rate, 1)
        known = [*OBJECTIVES, LINUCB]
        if self.objective not in known:
            near = hint(self.objective, known)
            raise ValueError(f"unknown objective {self.objective!r}; {near}choose one of {', '.join(known)}")
        if not self.rate > 0 or self.weight_decay < 0:
            raise ValueError(f"rate={self.rate} must be above 0 and weight_decay={self.weight_decay} not below it")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} is outside (0, 1)")
        if not 0 <= self.alignment_weight <= 1:
            raise ValueError(f"alignment_weight={self.alignment_weight} is outside 0 … 1: 1 is alignment alone")

    def run(self) -> dict[str, Any]:
        """Train to the end (from the saved state if there is one), write the policy; returns what `judged` finds."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


def initial(features: int, hidden: tuple[int, ...], arms: int, seed: int) -> Params:
    """Layers as `choosing.perceptron` reads them, uniform in ±1/√fan-in: what the paper's library starts with."""
    sizes = list(zip((features, *hidden), (*hidden, arms), strict=True))
    params = {}
    for number, (wide, out) in enumerate(sizes):
        kernel, bias = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        draw = partial(jax.random.uniform, minval=-(wide**-0.5), maxval=wide**-0.5)
        params[f"layers_{number}"] = {"kernel": draw(kernel, (wide, out)), "bias": draw(bias, (out,))}
    return params


@cache  # equal runs share their compiled step
def optimizer(rate: float, betas: tuple[float, float], weight_decay: float) -> optax.GradientTransformation:
    """AdamW at a constant rate."""
    return optax.adamw(rate, b1=betas[0], b2=betas[1], weight_decay=weight_decay)


class Queries(NamedTuple):
    """A step's queries: `features` `[B, D]`, `rewards` `[B, K]`; `counted` bool `[B]`, false where they fill up."""

    features: np.ndarray
    rewards: np.ndarray
    counted: np.ndarray


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    objective: str, optimizer: optax.GradientTransformation, state: TrainState, queries: Queries, key: Array
) -> tuple[TrainState, dict[str, Array]]:
    """One step; arms are drawn with bits of the step's own."""
    weight = queries.counted / queries.counted.sum()
    uniforms = jax.random.uniform(jax.random.fold_in(key, state.step), queries.rewards.shape)

    def loss(params: Params) -> tuple[Array, Array]:
        scores = chooser.perceptron(params, jnp.asarray(queries.features))
        drawn = chooser.dynamic(scores, uniforms)
        each = OBJECTIVES[objective](scores.mean, jnp.asarray(queries.rewards), drawn)
        return (weight * each).sum(), (weight * (jax.nn.softmax(scores.mean, -1) * queries.rewards).sum(-1)).sum()

    (value, reward), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.updated(optimizer, grads), {"loss": value, "reward": reward}


class Run(EpochRun):
    """A `PolicyTrainer` at work.

    Raises:
        ValueError: candidates that the data lack, rewards that are not finite, fewer queries than asked for, or a run
            directory begun with other settings.
    """

    def prepare(self) -> tuple[Params, optax.GradientTransformation]:
        """Loads the data, deals its queries to training and judging; returns fresh layers and AdamW."""
        trainer, data = self.trainer, selection_data.read(self.trainer.data)
        self.data = data.among(trainer.arms or data.arms)
        self.rewards = self.data.rewards(trainer.alignment_weight, trainer.costs)
        self.rows, self.held_out = split(len(self.rewards), trainer.held_out, trainer.queries, trainer.seed)
        self.steps_per_epoch = -(-len(self.rows) // trainer.batch)
        self.total = self.steps_per_epoch * trainer.epochs
        params = initial(self.data.features.shape[1], trainer.hidden, len(self.data.arms), trainer.seed)
        return params, optimizer(trainer.rate, trainer.betas, trainer.weight_decay)

    def finish(self) -> dict[str, Any]:
        """Trains until the last epoch is done and writes the policy; returns what the held-out queries make of it."""
        policy = self.policy(self.learn_by_trying() if self.trainer.objective == LINUCB else self.learn_by_gradient())
        policy_files.save(self.directory / FILE, policy)
        found = judged(policy, self.data.rows(self.held_out), self.rewards[self.held_out])
        files.write_atomically(self.directory / "judged.json", json.dumps(found, indent=1).encode())
        return found

    def learn_by_gradient(self) -> Params:
        """Trains to the end; returns the parameters."""
        self.train()
        return jax.device_get(self.state.params)

    def step(self, epoch: int, batch: Queries) -> dict[str, Array]:
        """Takes one optimiser step; returns its loss and mean reward."""
        key = jax.random.key(self.trainer.seed + 1)
        self.state, losses = train_step(self.trainer.objective, self.optimizer, self.state, batch, key)
        return losses

    def report(self, step: int, epoch: int, losses: dict[str, Array]) -> None:
        """Logs the losses of an epoch's last step."""
        if step % self.steps_per_epoch == 0:
            rounded = {name: round(float(value), 5) for name, value in losses.items()}
            self.log.append({"step": step, "epoch": epoch + 1, **rounded})
            logging.info("step %d of %d, %s", step, self.total, rounded)

    def batches(self, epoch: int) -> Iterator[Queries]:
        """Yields an epoch's queries in random order; the last batch is filled up with its own."""
        size, order = self.trainer.batch, np.random.default_rng((self.trainer.seed, epoch)).permutation(self.rows)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            rows = np.resize(chosen, size)
            yield Queries(self.data.features[rows], self.rewards[rows], np.arange(size) < len(chosen))

    def learn_by_trying(self) -> Params:
        """A linear policy that saw of each query the reward of the arm that it tried; one pass, from the beginning."""
        features, rewards = self.data.features[self.rows], self.rewards[self.rows]
        noise = max(float(rewards.std()), 1e-3)
        posterior = Posterior.empty(Whitening.of(features), len(self.data.arms), noise=noise)
        learn_by_trying(posterior, features, rewards, rng=np.random.default_rng(self.trainer.seed))
        self.state = replace(self.state, step=jnp.int32(len(self.rows)))
        return posterior.params()

    def policy(self, params: Params) -> Policy:
        trainer, found = self.trainer, self.data
        card = Card(
            scores="ridge" if trainer.objective == LINUCB else "perceptron",
            features=found.features.shape[1],
            arms=found.arms,
            prints=found.prints,
            target=found.target,
            trained=trainer.objective,
            alignment_weight=trainer.alignment_weight,
            pair=found.pair,
            data=found.key,
            queries=len(self.rows),
            steps=int(self.state.step),
        )
        return Policy(params, card)


def split(count: int, held_out: float, wanted: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn from (`wanted`, 0: all) and rows that are judged: the same ones however many are learnt from.

    Raises:
        ValueError: fewer rows than wanted.
    """
    order = np.random.default_rng(seed).permutation(count)
    judged_count = min(max(1, round(held_out * count)), count - 1)
    rows = order[judged_count:]
    if count < 2 or wanted > len(rows):
        raise ValueError(
            f"queries={wanted or 1}, and the data have {count}, of which {judged_count} are held out: make more, or "
            f"ask for fewer"
        )
    return rows[: wanted or len(rows)], order[:judged_count]


def judged(policy: Policy, found: Data, rewards: np.ndarray) -> dict[str, Any]:
    """How a policy does on queries whose rewards `[N, K]` are known.

    Returns:
        `judged`, how many queries; mean `reward` of the greedy and the dynamic policy, of each arm always, at random,
        and of the best arm of each query (`oracle`); `best`, the share of queries for which the greedy one takes a best
        arm; and by domain how often it takes each (`choices`).
    """
    scores = chooser.SCORERS[policy.card.scores](policy.params, jnp.asarray(found.features)).mean
    law, greedy = np.asarray(jax.nn.softmax(scores, -1)), np.asarray(scores).argmax(-1)
    taken = np.take_along_axis(rewards, greedy[:, None], axis=1)[:, 0]
    means = {"greedy": taken, "dynamic": (law * rewards).sum(-1), "random": rewards.mean(-1), "oracle": rewards.max(-1)}
    means |= {f"always {name}": rewards[:, n] for n, name in enumerate(found.arms)}
    choices = {
        domain: {name: float((greedy[found.domain == n] == k).mean()) for k, name in enumerate(found.arms)}
        for n, domain in enumerate(found.domains)
        if (found.domain == n).any()
    }
    best = float((taken >= rewards.max(-1) - 1e-6).mean())
    told = {name: round(float(values.mean()), 4) for name, values in means.items()}
    return {"judged": len(rewards), "best": round(best, 4), "reward": told, "choices": files.plain(choices)}
