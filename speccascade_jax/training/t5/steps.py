"""Training and evaluation steps of a T5, each compiled as one program, with their optimiser, schedule and losses."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from speccascade_jax.core.types import Array, BoundModel, Params
from speccascade_jax.models.t5 import EXITS, T5, T5Config, T5Module, teacher_forced_logits
from speccascade_jax.training.runs import TrainState


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam that scales the update of each array by the root mean square of the array, as Adafactor does.

    T5's initial kernels differ widely in size: the kernels of queries include the scale of the attention, and
    embeddings have unit variance. So no single absolute step size fits all arrays. The learning rate is an argument of
    each step and is relative: 0.01 changes an array by about a hundredth per step (Shazeer and Stern, 2018, section 8).

    Attributes:
        b1, b2, eps: as in `optax.adam`.
        min_scale: smallest scale of an array; without it, an array that starts at zero would not grow.
        clip: largest global norm of the gradient.
    """

    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    min_scale: float = 1e-3
    clip: float = 1.0

    def transformation(self) -> optax.GradientTransformation:
        """Returns the optax transformation of gradients to updates, without the learning rate."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            optax.scale_by_param_block_rms(self.min_scale),
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate with a linear warm-up to `peak`, and a decay to `final * peak` at the planned end.

    The plan limits the number of steps, of minutes, or both; the run ends at whichever limit comes first. A limit in
    minutes lets the run end on time on a machine of any speed. The elapsed time is part of the saved state, so a
    resumed run keeps its plan.

    Attributes:
        peak: the highest learning rate.
        warmup_steps: number of steps until `peak`.
        max_steps, max_minutes: limits of the plan; 0 sets no limit.
        decay: "linear", "cosine", or "rsqrt" (peak * sqrt(warmup / step), which does not depend on the plan).
        final: fraction of `peak` at the end (for linear and cosine).
    """

    peak: float = 1e-3
    warmup_steps: int = 300
    max_steps: int = 0
    max_minutes: float = 0.0
    decay: str = "linear"
    final: float = 0.02

    def __post_init__(self) -> None:
        if self.decay not in ("linear", "cosine", "rsqrt"):
            raise ValueError(f"decay {self.decay!r} is not one of linear, cosine, rsqrt")
        if self.max_steps <= 0 and self.max_minutes <= 0:
            raise ValueError("the schedule has no end: set max_steps or max_minutes")

    def progress(self, step: int, minutes: float) -> float:
        """Returns the completed fraction of the plan, in [0, 1]."""
        by_steps = step / self.max_steps if self.max_steps > 0 else 0.0
        by_time = minutes / self.max_minutes if self.max_minutes > 0 else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, step: int, minutes: float) -> float:
        """Returns the learning rate of step `step` (from 0), `minutes` into the run."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.decay == "rsqrt":
            return self.peak * warmup * math.sqrt(max(1, self.warmup_steps) / max(step + 1, self.warmup_steps, 1))
        done = self.progress(step, minutes)
        remaining = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * warmup * (self.final + (1.0 - self.final) * remaining)


@dataclasses.dataclass(frozen=True)
class Objective:
    """Loss per target token: `(1 - w)` cross-entropy `+ w` KL to a teacher.

    Attributes:
        smoothing: label smoothing of the cross-entropy.
        distill_from: checkpoint of the teacher, which has the same vocabulary, or empty for no teacher.
        distill_weight: the weight w, used only with a teacher.
        exit_weight: weight of early exits; 0 trains none. Every step adds the cross-entropy of one early exit, computed
            with the model's own head; the layers of the decoder take turns. The exit after layer `l` of `L` has the
            weight `exit_weight l / L`, and the whole model has the weight 1. The turns, and weights that grow with
            depth, follow LayerSkip, section 4.2.
    """

    smoothing: float = 0.1
    distill_from: str = ""
    distill_weight: float = 0.5
    exit_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.distill_weight <= 1.0 or not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"distill_weight must be in [0, 1] and smoothing in [0, 1): {self}")
        if not 0.0 <= self.exit_weight < math.inf:
            raise ValueError(f"exit_weight is {self.exit_weight}: give 0, or a positive weight for early exits")


def smoothed_cross_entropy(logits: Array, targets: Array, vocab_size: int, smoothing: float = 0.0) -> Array:
    """Returns the sum of `-(1 - s) log P(target) - s mean_v log P(v)` in nats: Szegedy et al. (2016), section 7.

    The sum is over real target positions (token 0 is padding), so sums over batches of any shape can be added. The
    logits are the only array of shape `[B, T, V]`: the comparison with an index range is fused into the reduction,
    while a one-hot target would be another array of that size.

    Args:
        logits: float32 `[B, T, num_embeddings]`; entries from `vocab_size` on are ignored, -inf included.
        targets: int32 `[B, T]`, 0 at padding.
        vocab_size: number of real vocabulary entries.
        smoothing: s, the probability mass that is spread evenly over the `vocab_size` real entries.
    """
    real = logits[..., :vocab_size]
    normaliser = jax.nn.logsumexp(real, axis=-1)
    at_target = jnp.arange(vocab_size) == targets[..., None]
    chosen = jnp.sum(jnp.where(at_target, real, 0.0), axis=-1)
    losses = normaliser - (1.0 - smoothing) * chosen
    if smoothing:
        losses -= smoothing * jnp.mean(real, axis=-1)
    return jnp.sum(jnp.where(targets > 0, losses, 0.0))


def distillation(logits: Array, teacher_logits: Array, targets: Array, vocab_size: int) -> Array:
    """Returns the sum of `KL(teacher || student)` in nats: word-level distillation (Kim and Rush, 2016, section 3.1).

    Args:
        logits: float32 `[B, T, num_embeddings]`, logits of the student, with the real vocabulary entries first.
        teacher_logits: float32 `[B, T, num_embeddings]`, logits of the teacher, with the real vocabulary entries first.
        targets: int32 `[B, T]`; only positions with a nonzero target count.
        vocab_size: number of real vocabulary entries.
    """
    student = jax.nn.log_softmax(logits[..., :vocab_size])
    teacher = jax.nn.log_softmax(teacher_logits[..., :vocab_size])
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
    return jnp.sum(jnp.where(targets > 0, divergence, 0.0))


def shift_right(targets: Array, start_id: int = 0) -> Array:
    """Returns decoder inputs `[B, T]` for `targets`: the start token, then all but the last target."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)


def init_state(config: T5Config, optimizer: Optimizer, key: Array) -> TrainState:
    """Returns fresh parameters and optimiser state."""
    tokens = jnp.ones((1, 2), jnp.int32)
    params = jax.jit(T5Module(config).init)(key, tokens, tokens)["params"]
    return TrainState.fresh(params, optimizer.transformation())


def make_train_step(
    config: T5Config, optimizer: Optimizer, objective: Objective, teacher: BoundModel | None = None
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Returns `step(state, source, target, rate, key) -> (state, metrics)`, which donates the old state's buffers.

    The dropout key is folded with the step number in the state, so a resumed run draws the same bits as an
    uninterrupted run. The metrics are `loss` (the objective per target token) and `tokens` (number of target tokens).

    Raises:
        ValueError: the teacher's vocabulary has another size, or the decoder has too few layers for an early exit.
    """
    if objective.exit_weight and config.num_decoder_layers < 2:
        raise ValueError(
            "a decoder of one layer has no early exit: set exit_weight to 0, or num_decoder_layers to 2 or more"
        )
    if teacher is not None and teacher.model.vocab_size != config.vocab_size:
        raise ValueError(f"the teacher has {teacher.model.vocab_size} tokens, but the student has {config.vocab_size}")
    compiled = _train_step(config, optimizer, objective, None if teacher is None else teacher.model)
    teacher_params = None if teacher is None else teacher.params
    return lambda state, *rest: compiled(state, teacher_params, *rest)


@cache
def _train_step(config: T5Config, optimizer: Optimizer, objective: Objective, teacher: Any) -> Any:
    """Returns the jitted step, cached so that trainers with equal settings share one compiled program."""
    module, direction = T5Module(config), optimizer.transformation()
    deterministic = config.dropout_rate == config.layer_dropout == 0

    def step(
        state: TrainState, teacher_params: Params, source: Array, target: Array, rate: Array, key: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        tokens, inputs = jnp.sum(target > 0), shift_right(target, config.start_id)
        rngs = {"dropout": jax.random.fold_in(key, state.step)}

        def mean_loss(params: Params) -> Array:
            output, sown = module.apply(
                {"params": params}, source, inputs, deterministic=deterministic, rngs=rngs, mutable=[EXITS]
            )
            logits = cast(Array, output)
            loss = smoothed_cross_entropy(logits, target, config.vocab_size, objective.smoothing)
            if teacher is not None:
                taught = teacher_forced_logits(teacher, teacher_params, source, inputs)
                pulled = distillation(logits, jax.lax.stop_gradient(taught), target, config.vocab_size)
                loss = (1.0 - objective.distill_weight) * loss + objective.distill_weight * pulled
            if objective.exit_weight:
                hidden, weight = _exit_in_turn(sown[EXITS]["decoder"]["hidden"], state.step, objective.exit_weight)
                exited = cast(Array, module.apply({"params": params}, hidden, method="exit_logits"))
                early = smoothed_cross_entropy(exited, target, config.vocab_size, objective.smoothing)
                loss = (loss + weight * early) / (1.0 + weight)
            return loss / jnp.maximum(tokens, 1)

        loss, grads = jax.value_and_grad(mean_loss)(state.params)
        updates, opt_state = direction.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        return TrainState(params, opt_state, state.step + 1), {"loss": loss, "tokens": tokens}

    return jax.jit(step, donate_argnums=0)


def _exit_in_turn(hidden: Sequence[Array], step: Array, weight: float) -> tuple[Array, Array]:
    """Returns the hidden states of the early exit whose turn it is at this step, and the weight of its loss."""
    below = len(hidden) - 1  # the exit after the last layer is the whole model
    turn = step % below
    return jnp.stack(hidden[:-1])[turn], weight * (turn + 1) / len(hidden)


@cache
def make_eval_step(config: T5Config) -> Callable[..., tuple[Array, Array]]:
    """Returns `evaluate(params, source, target) -> (sum of negative log-likelihoods in nats, target tokens)`."""

    @jax.jit
    def evaluate(params: Params, source: Array, target: Array) -> tuple[Array, Array]:
        logits = teacher_forced_logits(T5(config), params, source, shift_right(target, config.start_id))
        return smoothed_cross_entropy(logits, target, config.vocab_size), jnp.sum(target > 0)

    return evaluate
