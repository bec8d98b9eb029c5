"""Training of acceptance heads on a frozen draft, for a whole grid of depths and rejection weights at once.

The method is that of SpecDec++ (Huang et al., 2024, section 3.3; METHODS section 6). One forward pass of the draft over
a batch, whose tokens are a mix of the target's and the draft's (`mixing`), gives the hidden states. This pass costs as
much as training several heads, so all heads of the grid share it. The heads share nothing else, so each one becomes the
same as if it were trained alone.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from speccascade_jax.core.checks import per_row, several, whole
from speccascade_jax.core.types import Array, Params
from speccascade_jax.models import fingerprints, teacher_forcing
from speccascade_jax.pairs import head_files
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.storage import files
from speccascade_jax.training import runs
from speccascade_jax.training.epochs import AcceptanceRun, EpochTrainer
from speccascade_jax.training.heads import calibration
from speccascade_jax.training.heads.mixing import HELD_OUT, Batch, Mixed, mix_key, mixed_states
from speccascade_jax.training.heads.shards import MEANING, check_draft
from speccascade_jax.training.runs import Stepped, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTrainer(EpochTrainer):
    """Trainer of a grid of heads on one draft; the heads are written to files such as `heads/depth1_wrej6.msgpack`.

    Attributes:
        depths, w_rejs, laws: the axes of the grid: depths of the heads, weights of rejections in the loss, and whether
            a head also reads features of the draft's distribution (`stopping.acceptance_head.with_law`).
        from_target: probability that a token of the mix is the target's token.
        warmup_steps: warm-up steps of the learning rate.

    Raises:
        ValueError: a setting is invalid.
    """

    depths: tuple[int, ...] = (0, 1, 2, 3, 4)
    w_rejs: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0)
    laws: tuple[bool, ...] = (False, True)
    from_target: float = 0.15
    warmup_steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "w_rejs", "laws"):
            object.__setattr__(self, name, several(name, getattr(self, name), 1))
        for depth in self.depths:
            whole("depths", depth, 0)
        whole("warmup_steps", self.warmup_steps, 0)
        per_row("w_rejs", self.w_rejs, len(self.w_rejs))
        if not all(w > 0 for w in self.w_rejs):
            raise ValueError(
                f"w_rejs={self.w_rejs} must be positive weights; 1 weighs acceptances and rejections equally"
            )
        if not 0 <= self.from_target < 1:
            raise ValueError(f"from_target={self.from_target} is outside [0, 1): at 1 there is nothing to train on")

    @property
    def grid(self) -> dict[str, tuple[int, float, bool]]:
        """Maps the name of a head to its depth, its rejection weight, and whether it reads the draft's distribution."""
        kinds = itertools.product(self.depths, self.w_rejs, self.laws)
        return {head_name(depth, w_rej, law): (depth, w_rej, law) for depth, w_rej, law in kinds}

    def run(self) -> dict[str, Any]:
        """Trains to the end, from the saved state if there is one, and writes the heads; returns the evaluation."""
        with runs.alone(files.expanded(self.run_dir)):
            return Run(self).finish()


def head_name(depth: int, w_rej: float, law: bool = False) -> str:
    """Returns the name of a head in the grid."""
    return f"depth{depth}_wrej{w_rej:g}" + ("_law" if law else "")


WRejs = tuple[tuple[str, float], ...]
"""Pairs of name and rejection weight, one for every head."""


def total_loss(params: Params, inputs: Array, kept: Array, counted: Array, w_rejs: WRejs) -> Any:
    """Returns the sum of all heads' losses, and the losses by name.

    The gradient of the sum consists of each head's own gradient, because heads share no parameters.
    """
    losses = {name: heads.weighted_bce(heads.logits(params[name], inputs), kept, counted, w) for name, w in w_rejs}
    return jnp.sum(jnp.stack(list(losses.values()))), losses


@functools.partial(jax.jit, static_argnames=("optimizer", "w_rejs"), donate_argnums=0)
def train_step(state: TrainState, mixed: Mixed, optimizer: optax.GradientTransformation, w_rejs: WRejs) -> Stepped:
    """Takes one optimiser step of every head, on the inputs and labels of one mix (`mixed_states`)."""
    grads, losses = jax.grad(total_loss, has_aux=True)(state.params, *mixed, w_rejs)
    return state.updated(optimizer, grads), losses


@jax.jit
def all_logits(params: Params, inputs: Array) -> dict[str, Array]:
    """Returns every head's logits `[N]` for inputs `[N, D + 2]`."""
    return {name: heads.logits(head_params, inputs) for name, head_params in params.items()}


class Run(AcceptanceRun):
    """Run of a `HeadTrainer`, with the draft, the data, the heads and the position in the data.

    Raises:
        ValueError: the data belong to another draft, or the run directory was started with other settings.
    """

    def initial(self) -> tuple[Params, int]:
        """Returns fresh heads, and the number of warm-up steps; refuses data with proposals of another draft."""
        check_draft(self.data, fingerprints.of_model(self.pair.draft), self.pair.name)
        size = teacher_forcing.features(self.pair.draft)
        if size is None:
            raise ValueError(f"the draft of pair {self.pair.name!r} returns no hidden states, which a head needs")
        key, grid = jax.random.key(self.trainer.seed), self.trainer.grid
        params = {name: heads.initial(key, size, depth, law) for name, (depth, _, law) in grid.items()}
        return params, int(self.trainer.warmup_steps)

    def states(self, batch: Batch, epoch: int) -> Mixed:
        """Returns inputs, labels and the mask of draft tokens for a batch, mixed for an epoch (`mixed_states`)."""
        draft, trainer = self.pair.draft, self.trainer
        key = mix_key(trainer.seed, epoch)
        return mixed_states(draft.model, draft.params, batch, key, trainer.from_target, trainer.batch_positions)

    def step(self, epoch: int, batch: Batch) -> dict[str, Array]:
        """Takes one optimiser step of every head."""
        w_rejs = tuple((name, w_rej) for name, (_, w_rej, _) in self.trainer.grid.items())
        self.state, losses = train_step(self.state, self.states(batch, epoch), self.optimizer, w_rejs)
        return losses

    def evaluate(self) -> dict[str, Any]:
        """Returns every head's AUC and log loss on the draft tokens in mixes of held-out prompts.

        The log loss is computed after the rejection weight is undone.
        """
        logits, kept = self.judge(self.held_out_rows)
        scores = {}
        for name, (_, w_rej, _) in self.trainer.grid.items():
            loss = calibration.log_loss(probability(logits[name], w_rej), kept)
            scores[name] = {"auc": round(calibration.auc(logits[name], kept), 5), "log_loss": round(loss, 5)}
        best = max(scores, key=lambda name: scores[name]["auc"])
        logging.info("step %d, held out: best AUC %.4f (%s)", int(self.state.step), scores[best]["auc"], best)
        return scores

    def judge(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns every head's logits, and the labels, `[N]` each, at the draft's tokens in mixes of some prompts."""
        logits: dict[str, list[np.ndarray]] = {name: [] for name in self.trainer.grid}
        kept = []
        for cut in self.cuts.cut(rows):
            inputs, labels, counted = jax.device_get(self.states(self.cuts.batch(cut), HELD_OUT))
            kept.append(labels[counted])
            for name, values in jax.device_get(all_logits(self.state.params, inputs)).items():
                logits[name].append(values[counted])
        return {name: np.concatenate(values) for name, values in logits.items()}, np.concatenate(kept)

    def write(self) -> None:
        """Writes every head of the grid with its card."""
        meant = {name: self.data.manifest[name] for name in (*MEANING, "pair") if name != "format"}
        meant |= self.facts() | {"features": teacher_forcing.features(self.pair.draft)}
        for name, (depth, w_rej, law) in self.trainer.grid.items():
            head = head_files.Head(self.state.params[name], head_files.Card(depth=depth, w_rej=w_rej, law=law, **meant))
            head_files.save(self.directory / "heads" / f"{name}.msgpack", head)


def probability(logits: np.ndarray, w_rej: float) -> np.ndarray:
    """Returns the acceptance probability that a head predicts, after the rejection weight is undone.

    The weighted loss is smallest at `P̂ / (1 − P̂) = P / (w_rej (1 − P))`, so the weight only shifts the logit, and
    adding `log w_rej` undoes the shift.
    """
    return 1.0 / (1.0 + np.exp(-(np.asarray(logits, np.float64) + np.log(w_rej))))
