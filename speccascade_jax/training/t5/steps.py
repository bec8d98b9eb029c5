"""One training step and one evaluation step, jitted whole."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
import optax

from speccascade_jax.core.types import Array, BoundModel, Params
from speccascade_jax.models.t5 import T5, T5Config, T5Module, teacher_forced_logits
from speccascade_jax.training.t5 import losses

StepFn = Callable[..., tuple[Any, dict[str, Array]]]


@flax.struct.dataclass
class TrainState:
    """What a step changes: parameters, optimiser state, int32 step count."""

    params: Params
    opt_state: Any
    step: Array


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam whose update of each array is scaled by that array's root mean square, as Adafactor's is.

    T5's initial kernels differ widely in size (queries hold the attention's scale, embeddings have unit
    variance), so one absolute step size does not fit them all. The learning rate comes with each step and is
    relative: 0.01 changes an array by about a hundredth per step (Shazeer and Stern, 2018, section 8).

    Attributes:
        b1, b2, eps: as in `optax.adam`.
        min_scale: the least scale of an array; lets one that starts at zero grow.
        clip: the largest global gradient norm.
    """

    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    min_scale: float = 1e-3
    clip: float = 1.0

    def transformation(self) -> optax.GradientTransformation:
        """The update direction, before the learning rate."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            optax.scale_by_param_block_rms(self.min_scale),
        )


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised, per target token: `(1 - w)` cross-entropy `+ w` KL to a teacher.

    Attributes:
        smoothing: label smoothing of the cross-entropy.
        distill_from: a checkpoint of the teacher (same vocabulary), or empty for none.
        distill_weight: w, used with a teacher only.
    """

    smoothing: float = 0.1
    distill_from: str = ""
    distill_weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.distill_weight <= 1.0 or not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"weights must lie in [0, 1]: {self}")


def shift_right(targets: Array) -> Array:
    """Decoder inputs `[B, T]` of `targets`: the start token 0, then all but the last target."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))


def init_state(config: T5Config, optimizer: Optimizer, key: Array) -> TrainState:
    """Fresh parameters and optimiser state."""
    tokens = jnp.ones((1, 2), jnp.int32)
    params = jax.jit(T5Module(config).init)(key, tokens, tokens)["params"]
    return fresh_state(params, optimizer)


def fresh_state(params: Params, optimizer: Optimizer) -> TrainState:
    """Step 0 of training that starts from `params`."""
    return TrainState(params, optimizer.transformation().init(params), jnp.int32(0))


def make_train_step(
    config: T5Config, optimizer: Optimizer, objective: Objective, teacher: BoundModel | None = None
) -> StepFn:
    """`step(state, source, target, rate, key) -> (state, metrics)`, the state's buffers reused.

    The dropout key is folded with the state's step, so that a resumed run draws what it would have drawn.
    Metrics: `loss` (the objective per target token) and `tokens`.

    Raises:
        ValueError: the teacher's vocabulary has another size.
    """
    if teacher is not None and teacher.model.vocab_size != config.vocab_size:
        raise ValueError(f"the teacher has {teacher.model.vocab_size} tokens, the student {config.vocab_size}")
    compiled = _train_step(config, optimizer, objective, None if teacher is None else teacher.model)
    teacher_params = None if teacher is None else teacher.params
    return lambda state, *rest: compiled(state, teacher_params, *rest)


@cache
def _train_step(config: T5Config, optimizer: Optimizer, objective: Objective, teacher: Any) -> Any:
    """The jitted step, one for equal settings: trainers of one process share what is compiled."""
    module, direction = T5Module(config), optimizer.transformation()

    def loss_fn(params: Params, teacher_params: Params, source: Array, target: Array, key: Array) -> Array:
        inputs = shift_right(target)
        rngs = {"dropout": key}
        found = module.apply({"params": params}, source, inputs, deterministic=config.dropout_rate == 0, rngs=rngs)
        logits = cast(Array, found)
        loss = losses.smoothed_cross_entropy(logits, target, config.vocab_size, objective.smoothing)
        if teacher is None:
            return loss
        taught = teacher_forced_logits(teacher, teacher_params, source, inputs)
        pulled = losses.distillation(logits, jax.lax.stop_gradient(taught), target, config.vocab_size)
        return (1.0 - objective.distill_weight) * loss + objective.distill_weight * pulled

    def step(
        state: TrainState, teacher_params: Params, source: Array, target: Array, rate: Array, key: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        tokens = jnp.sum(target > 0)

        def mean_loss(params: Params) -> Array:
            key_now = jax.random.fold_in(key, state.step)
            return loss_fn(params, teacher_params, source, target, key_now) / jnp.maximum(tokens, 1)

        loss, grads = jax.value_and_grad(mean_loss)(state.params)
        updates, opt_state = direction.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        return TrainState(params, opt_state, state.step + 1), {"loss": loss, "tokens": tokens}

    return jax.jit(step, donate_argnums=0)


@cache
def make_eval_step(config: T5Config) -> Callable[..., tuple[Array, Array]]:
    """`evaluate(params, source, target) -> (sum of negative log-likelihoods in nats, target tokens)`."""

    @jax.jit
    def evaluate(params: Params, source: Array, target: Array) -> tuple[Array, Array]:
        logits = teacher_forced_logits(T5(config), params, source, shift_right(target))
        return losses.smoothed_cross_entropy(logits, target, config.vocab_size), jnp.sum(target > 0)

    return evaluate
