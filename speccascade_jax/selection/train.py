"""Training of selection policies before serving, for `experiments/train_policy.py`.

Source: Huang et al. (2024, assistant selection), section 2.4. Each epoch passes over the queries once, in an order that
depends on the seed and the epoch. The position in the data is a function of the optimiser's step, so a saved state
suffices to resume a killed run.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from rich.console import Console
from rich.table import Table

from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.names import hint
from speccascade_jax.core.types import Array, Params
from speccascade_jax.drafters import chooser
from speccascade_jax.pairs import policy_files
from speccascade_jax.pairs.policy_files import Card, Policy
from speccascade_jax.runtime.progress import counted
from speccascade_jax.selection import data as selection_data
from speccascade_jax.selection.data import Data
from speccascade_jax.selection.learners import Posterior, Whitening, learn_by_trying
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.epochs import EpochRun, check_trainer
from speccascade_jax.training.runs import Stepped, TrainState

Row = dict[str, Any]
LINUCB = "linucb"
LINEAR = "linear"
"""The name that `curves` gives to a linear policy, which is trained by the trainer's own objective."""
FILE = policy_files.FILE
"""The name of the policy's file in the run's folder."""


def reinforce(scores: Array, rewards: Array, drawn: Array) -> Array:
    """Returns the REINFORCE loss `−r(q, a) log π(a|q)` of a query `q` and an arm `a` drawn from the policy `π`.

    Its gradient is an unbiased estimate of the gradient of `expected`.

    Args:
        scores: `[B, K]`, logits of the policy.
        rewards: `[B, K]`, the reward of every arm.
        drawn: int32 `[B]`, an arm `a ~ π` for each query.
    """
    weighted = rewards * jax.nn.log_softmax(scores, -1)
    return -jnp.take_along_axis(weighted, drawn[:, None], axis=1)[:, 0]


def expected(scores: Array, rewards: Array, drawn: Array) -> Array:
    """Returns `−Σ_a π(a|q) r(q, a)`, minus the expected reward of the policy `π` for a query `q`, computed exactly."""
    return -(jax.nn.softmax(scores, -1) * rewards).sum(-1)


def best_arm(scores: Array, rewards: Array, drawn: Array) -> Array:
    """Returns the cross-entropy to the arm with the highest reward; arms in a tie share the weight."""
    best = rewards >= rewards.max(-1, keepdims=True)
    weight = best / best.sum(-1, keepdims=True)
    return -(weight * jax.nn.log_softmax(scores, -1)).sum(-1)


Objective = Callable[[Array, Array, Array], Array]
OBJECTIVES: dict[str, Objective] = {"reinforce": reinforce, "expected": expected, "best_arm": best_arm}
"""The training objectives by name: functions `(scores, rewards, drawn) -> losses [B]` (docs/methods.md, section 8).

The rewards of all arms are known in advance, so the expectation that "reinforce" estimates can be computed exactly.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyTrainer:
    """A trainer of a selection policy; the defaults are those of docs/methods.md, section 8.

    Attributes:
        run_dir: folder of the state, the metrics and the policy; training resumes if it holds a run.
        data: a folder that `experiments.make_selection_data` wrote.
        arms: the candidates of the data to use, in this order (empty: all).
        objective: a name in `OBJECTIVES`, or "linucb", which trains a linear policy on rewards of the arms that it
            tries.
        hidden: widths of the hidden layers, with tanh between layers; empty for a linear policy.
        alignment_weight: weight of alignment in the rewards; 1 counts alignment alone.
        costs: each arm's cost; `None`: computed from its number of parameters.
        queries: number of random training queries (0: all that are not held out).
        held_out: share of the queries that is used for evaluation only.
        batch: number of queries in a batch.
        epochs: number of passes over the queries.
        rate, weight_decay, betas: settings of AdamW.
        seed: random seed of parameters, split, order and draws.
        save_every_seconds: seconds between saves of the state from which training resumes.

    Raises:
        ValueError: a setting is invalid.
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
        for width in self.hidden:
            whole("hidden", width, 1)
        check_trainer(self, "rate", "batch", "epochs", *(["queries"] if self.queries else []))
        known = [*OBJECTIVES, LINUCB]
        if self.objective not in known:
            near = hint(self.objective, known)
            raise ValueError(f"unknown objective {self.objective!r}; {near}choose one of {', '.join(known)}")
        if not 0 <= self.alignment_weight <= 1:
            raise ValueError(f"alignment_weight={self.alignment_weight} is outside 0 (cost only) … 1 (alignment only)")

    def run(self) -> dict[str, Any]:
        """Trains to the end (from the saved state if there is one) and writes the policy; returns the evaluation."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


def initial(features: int, hidden: tuple[int, ...], arms: int, seed: int) -> Params:
    """Returns random layers for `chooser.perceptron`, uniform in ±1/√fan-in, as in the library of the paper."""
    sizes = list(zip((features, *hidden), (*hidden, arms), strict=True))
    params = {}
    for number, (wide, out) in enumerate(sizes):
        kernel, bias = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        draw = partial(jax.random.uniform, minval=-(wide**-0.5), maxval=wide**-0.5)
        params[f"layers_{number}"] = {"kernel": draw(kernel, (wide, out)), "bias": draw(bias, (out,))}
    return params


@cache  # equal settings return the same object, so that runs share their compiled step
def optimizer(rate: float, betas: tuple[float, float], weight_decay: float) -> optax.GradientTransformation:
    """Returns AdamW with a constant learning rate."""
    return optax.adamw(rate, b1=betas[0], b2=betas[1], weight_decay=weight_decay)


class Queries(NamedTuple):
    """The queries of a step: `features` `[B, D]`, `rewards` `[B, K]`; `counted` bool `[B]` is false in padding."""

    features: np.ndarray
    rewards: np.ndarray
    counted: np.ndarray


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    objective: str, optimizer: optax.GradientTransformation, state: TrainState, queries: Queries, key: Array
) -> Stepped:
    """Takes one step of the optimiser; arms are drawn with the step's own random bits."""
    weight = queries.counted / queries.counted.sum()
    uniforms = jax.random.uniform(jax.random.fold_in(key, state.step), queries.rewards.shape)

    def loss(params: Params) -> tuple[Array, Array]:
        scores = chooser.perceptron(params, jnp.asarray(queries.features))
        drawn = chooser.dynamic(scores, uniforms)
        losses = OBJECTIVES[objective](scores.mean, jnp.asarray(queries.rewards), drawn)
        return (weight * losses).sum(), (weight * (jax.nn.softmax(scores.mean, -1) * queries.rewards).sum(-1)).sum()

    (value, reward), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.updated(optimizer, grads), {"loss": value, "reward": reward}


class Run(EpochRun):
    """One training run of a `PolicyTrainer`.

    Raises:
        ValueError: the data lack a candidate, a reward is not finite, there are fewer queries than requested, or the
            run directory was started with other settings.
    """

    def prepare(self) -> tuple[Params, optax.GradientTransformation]:
        """Loads the data and splits its queries for training and evaluation; returns fresh layers and AdamW."""
        trainer, data = self.trainer, selection_data.read(self.trainer.data)
        self.data = data.among(trainer.arms or data.arms)
        self.rewards = self.data.rewards(trainer.alignment_weight, trainer.costs)
        self.rows, self.held_out = split(len(self.rewards), trainer.held_out, trainer.queries, trainer.seed)
        self.steps_per_epoch = -(-len(self.rows) // trainer.batch)
        self.total = self.steps_per_epoch * trainer.epochs
        params = initial(self.data.features.shape[1], trainer.hidden, len(self.data.arms), trainer.seed)
        return params, optimizer(trainer.rate, trainer.betas, trainer.weight_decay)

    def finish(self) -> dict[str, Any]:
        """Trains to the end of the last epoch and writes the policy; returns the evaluation on the held-out queries."""
        policy = self.policy(self.learn_by_trying() if self.trainer.objective == LINUCB else self.learn_by_gradient())
        policy_files.save(self.directory / FILE, policy)
        evaluation = judged(policy, self.data.rows(self.held_out), self.rewards[self.held_out])
        files.write_atomically(self.directory / "judged.json", json.dumps(evaluation, indent=1).encode())
        return evaluation

    def learn_by_gradient(self) -> Params:
        """Trains by gradient steps to the end of the last epoch; returns the policy's parameters."""
        self.train(self.trainer.save_every_seconds)
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
        """Yields an epoch's queries in random order; repeated queries fill up the last batch and do not count."""
        size, order = self.trainer.batch, np.random.default_rng((self.trainer.seed, epoch)).permutation(self.rows)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            rows = np.resize(chosen, size)
            yield Queries(self.data.features[rows], self.rewards[rows], np.arange(size) < len(chosen))

    def learn_by_trying(self) -> Params:
        """Trains a linear policy in one pass; each query shows only the reward of the arm that LinUCB tries."""
        features, rewards = self.data.features[self.rows], self.rewards[self.rows]
        noise = max(float(rewards.std()), 1e-3)
        posterior = Posterior.empty(Whitening.of(features), len(self.data.arms), noise=noise)
        learn_by_trying(posterior, features, rewards, rng=np.random.default_rng(self.trainer.seed))
        self.state = replace(self.state, step=jnp.int32(len(self.rows)))
        return posterior.params()

    def policy(self, params: Params) -> Policy:
        """Returns the policy with these parameters and a card that describes its training."""
        trainer, data = self.trainer, self.data
        facts: Any = {name: getattr(data, name) for name in ("arms", "prints", "target", "pair")}
        facts |= {"features": data.features.shape[1], "data": data.key}
        facts |= {"trained": trainer.objective, "alignment_weight": trainer.alignment_weight}
        facts |= {"queries": len(self.rows), "steps": int(self.state.step)}
        return Policy(params, Card(scores="ridge" if trainer.objective == LINUCB else "perceptron", **facts))


def split(count: int, held_out: float, wanted: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits the rows at random into training rows (`wanted` of them, 0: all) and evaluation rows.

    The evaluation rows do not depend on `wanted`.

    Raises:
        ValueError: there are fewer rows than wanted.
    """
    order = np.random.default_rng(seed).permutation(count)
    judged_count = min(max(1, round(held_out * count)), count - 1)
    rows = order[judged_count:]
    if count < 2 or wanted > len(rows):
        data_size = f"the data hold {count}, and {judged_count} of them are held out"
        raise ValueError(f"queries={wanted or 1}, but {data_size}: make more queries, or give a smaller number")
    return rows[: wanted or len(rows)], order[:judged_count]


def judged(policy: Policy, data: Data, rewards: np.ndarray) -> dict[str, Any]:
    """Evaluates a policy on queries with known rewards `[N, K]`.

    Returns:
        A dictionary with these entries:

        - `judged`: the number of queries;
        - `reward`: the mean reward of the greedy and of the dynamic policy, of each fixed arm, of a random arm, and of
          the best arm of each query (`oracle`);
        - `best`: the share of queries for which the greedy policy takes a best arm;
        - `choices`: for each domain, the share of the queries for which the greedy policy takes each arm.
    """
    scores = chooser.SCORERS[policy.card.scores](policy.params, jnp.asarray(data.features)).mean
    law, greedy = np.asarray(jax.nn.softmax(scores, -1)), np.asarray(scores).argmax(-1)
    taken = np.take_along_axis(rewards, greedy[:, None], axis=1)[:, 0]
    means = {"greedy": taken, "dynamic": (law * rewards).sum(-1), "random": rewards.mean(-1), "oracle": rewards.max(-1)}
    means |= {f"always {name}": rewards[:, n] for n, name in enumerate(data.arms)}
    choices = {}
    for n in np.unique(data.domain):
        taken_there = greedy[data.domain == n]
        choices[data.domains[n]] = {name: float((taken_there == k).mean()) for k, name in enumerate(data.arms)}
    best = float((taken >= rewards.max(-1) - 1e-6).mean())
    rounded = {name: round(float(values.mean()), 4) for name, values in means.items()}
    return {"judged": len(rewards), "best": round(best, 4), "reward": rounded, "choices": files.plain(choices)}


def curves(
    trainer: PolicyTrainer,
    *,
    queries: Sequence[int] = (64, 256, 1024),
    objectives: Sequence[str] = ("reinforce", "expected", "best_arm", LINEAR, "linucb"),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Row]:
    """Trains a policy for every number of queries, objective and seed.

    The result corresponds to Figure 3 of Huang et al. (2024, assistant selection). All policies of a seed are evaluated
    on the same held-out queries, because their rewards are known for every arm. `selection.report` measures the time
    that a policy's choices save.

    The runs are stored in `<run_dir>/curves/…`, so that killed runs resume. Finished runs are not trained again, except
    the single pass of LinUCB.

    Args:
        trainer: the settings that all runs share.
        queries: numbers of training queries; those beyond the data are left out, and the largest possible one is added.
        objectives: as in `PolicyTrainer`, or `LINEAR`.
        seeds: random seeds; every number of queries and objective is trained with each seed.

    Returns:
        The rows, one for each run: `queries`, `objective`, `seed`, `best`, `reward`, `choices`.
    """
    several("queries", queries, 1)
    several("objectives", objectives, 1)
    several("seeds", seeds, 1)
    for count in queries:
        whole("queries", count, 1)
    total = len(selection_data.read(trainer.data).features)
    most = len(split(total, trainer.held_out, 0, trainer.seed)[0])
    counts = sorted({count for count in queries if count < most} | {most})
    runs = []  # all trainers are built, and so checked, before the first one trains
    for objective, count, seed in itertools.product(objectives, counts, seeds):
        kind: Row = {"hidden": ()} if objective == LINEAR else {"objective": objective}
        folder = files.expanded(trainer.run_dir) / "curves" / f"{objective}-{count}-{seed}"
        runs.append((objective, replace(trainer, **kind, run_dir=str(folder), queries=count, seed=seed)))
    trained = counted(runs, "training", "policies")
    rows = [{"objective": name, "queries": run.queries, "seed": run.seed, **run.run()} for name, run in trained]
    _keep(trainer, "curves", rows)
    _show_curves(rows)
    return rows


def weights(trainer: PolicyTrainer, *, alignment_weights: Sequence[float] = (0.0, 0.5, 1.0)) -> list[Row]:
    """Trains a policy for every alignment weight; measures its choices and rewards.

    Source: Huang et al., 2024, assistant selection, Figure 2.

    Returns:
        The rows, one for each weight: `alignment_weight`, `best`, `reward`, `choices`.
    """
    several("alignment_weights", alignment_weights, 1)
    folder = files.expanded(trainer.run_dir) / "weights"
    runs = [replace(trainer, alignment_weight=w, run_dir=str(folder / f"{w:g}")) for w in alignment_weights]
    trained = counted(runs, "training", "policies")
    rows = [{"alignment_weight": run.alignment_weight, **run.run()} for run in trained]
    _keep(trainer, "weights", rows)
    _show_weights(rows)
    return rows


def _keep(trainer: PolicyTrainer, name: str, rows: list[Row]) -> None:
    from speccascade_jax.results.report.figures import studies as figures

    folder = files.expanded(trainer.run_dir)
    files.rewrite(folder / f"{name}.json", json.dumps(files.plain(rows), indent=1), '"reward":')
    getattr(figures, f"draw_{name}")(rows, folder / f"{name}.png")
    print(f"rows: {folder / name}.json\nplot: {folder / name}.png")


def _show_curves(rows: list[Row]) -> None:
    console, objectives = Console(), list(dict.fromkeys(row["objective"] for row in rows))
    heads = [f"{name}: best arm, reward" for name in objectives]
    table = Table("queries", *heads, title="held-out queries, mean over seeds")
    for count in sorted({row["queries"] for row in rows}):
        some = [row for row in rows if row["queries"] == count]
        table.add_row(str(count), *(_means([row for row in some if row["objective"] == name]) for name in objectives))
    console.print(table)
    rewards = [f"{name} {value:.4f}" for name, value in rows[-1]["reward"].items() if name not in ("greedy", "dynamic")]
    console.print(", ".join(rewards), "(last seed)")


def _means(rows: list[Row]) -> str:
    best = sum(row["best"] for row in rows) / len(rows)
    reward = sum(row["reward"]["greedy"] for row in rows) / len(rows)
    return f"{best:.1%}, {reward:.4f}"


def _show_weights(rows: list[Row]) -> None:
    domains = rows[0]["choices"]
    table = Table("alignment weight", "reward", "best arm", *(f"{name}: choices" for name in domains))
    for row in rows:
        shares = [", ".join(f"{arm} {share:.0%}" for arm, share in arms.items()) for arms in row["choices"].values()]
        table.add_row(f"{row['alignment_weight']:g}", f"{row['reward']['greedy']:.4f}", f"{row['best']:.1%}", *shares)
    Console().print(table)
