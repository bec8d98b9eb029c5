"""Training and evaluation steps, each compiled as one program for a device or a mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from speccascade_jax.core.types import Array, BoundModel, Params
from speccascade_jax.models import sharding
from speccascade_jax.models.layers import EXITS
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.losses import counted_positions, token_losses
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.optimizers import Optimizer
from speccascade_jax.training.finetune.watching import gradient_norm
from speccascade_jax.training.runs import TrainState

Metrics = dict[str, Array]
"""Numbers of a step: `loss` per target token (the objective), `tokens` that count, `gradient_norm`."""


@dataclass(frozen=True)
class Predictions:
    """A model's logits for the tokens of a batch that count.

    Attributes:
        logits: float32 `[B, T, num_embeddings]`, each predicting the token of `targets` at its position.
        targets: int32 `[B, T]`.
        counted: bool `[B, T]`, which positions count.
        hidden: for each decoder layer its output `[B, T, E]`; `None` unless asked for.
    """

    logits: Array
    targets: Array
    counted: Array
    hidden: Sequence[Array] | None = None

    def total(self, values: Array) -> Array:
        """Returns the sum of `values` `[B, T]` over the positions that count."""
        return jnp.sum(jnp.where(self.counted, values, 0.0))


def shift_right(targets: Array, start_id: int = 0) -> Array:
    """Returns decoder inputs `[B, T]` for `targets`: the start token, then all but the last target."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)


def predict(
    model: Any, params: Params, batch: Batch, dropout: Array | None = None, layers: bool = False
) -> Predictions:
    """Returns a model's predictions of a batch's tokens, in one pass.

    Args:
        model: a model of `models.families`; its mesh, if any, is that of the parameters.
        params: the parameters, as Flax creates them.
        batch: `[B, …]`.
        dropout: the key of dropout; `None`: no dropout.
        layers: whether to return the decoder layers' outputs.
    """
    inputs: tuple[Any, ...]
    if model.is_encoder_decoder:
        real = jnp.arange(batch.encoder_tokens.shape[1]) < batch.encoder_lengths[:, None]
        inputs = (batch.encoder_tokens, shift_right(batch.tokens, model.config.start_id), dropout is None, real)
        targets, counted = batch.tokens, counted_positions(batch.lengths, batch.answers, batch.tokens.shape[1])
    else:
        # a token is predicted from those before it, so the first token of a row is never counted
        inputs, targets = (batch.tokens[:, :-1],), batch.tokens[:, 1:]
        counted = counted_positions(batch.lengths, batch.answers, batch.tokens.shape[1])[:, 1:]
    rngs = {} if dropout is None else {"dropout": dropout}
    mutable = [EXITS] if layers else False
    with sharding.under(model.mesh, gathers=True):
        output = model.module.apply({"params": params}, *inputs, rngs=rngs, mutable=mutable)
    logits, hidden = (output[0], output[1][EXITS]["decoder"]["hidden"]) if layers else (output, None)
    return Predictions(logits, targets, counted, hidden)


def make_train_step(
    model: Any,
    optimizer: Optimizer,
    objective: Objective,
    *,
    teacher: BoundModel | None = None,
    accumulate: int = 1,
    layout: TrainState | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns `step(state, batch, rate, key) -> (state, metrics)`, which donates the old state's buffers.

    The key of dropout is folded with the step number in the state, so a resumed run draws the same bits as an
    uninterrupted one.

    Args:
        model: the model.
        optimizer: the optimiser.
        objective: the loss.
        teacher: the model that the objective distils from, if any.
        accumulate: number of parts that a batch is divided into; their gradients are added up, so that memory holds the
            activations of one part.
        layout: the state's shapes and layout on a mesh (`partition.state_layout`); `None`: one device.

    Raises:
        ValueError: the teacher's vocabulary has another size, or the model has no early exit to train.
    """
    objective.check(model, teacher)
    shardings = None if layout is None else jax.tree.map(lambda leaf: leaf.sharding, layout)
    leaves, structure = jax.tree.flatten(shardings)
    kept = None if layout is None else (tuple(leaves), structure)
    compiled = _train_step(model, optimizer, objective, None if teacher is None else teacher.model, accumulate, kept)
    teacher_params = None if teacher is None else teacher.params
    return lambda state, *rest: compiled(state, teacher_params, *rest)


@cache
def _train_step(
    model: Any, optimizer: Optimizer, objective: Objective, teacher: Any, accumulate: int, layout: Any
) -> Any:
    """Returns the jitted step, cached so that trainers with equal settings share one compiled program."""
    direction = optimizer.transformation()
    dropped = any(getattr(model.config, name, 0) for name in ("dropout_rate", "layer_dropout"))

    def part_loss(
        params: Params, teacher_params: Params, batch: Batch, step: Array, key: Array, tokens: Array
    ) -> Array:
        made = predict(model, params, batch, key if dropped else None, layers=bool(objective.exit_weight))
        taught = None if teacher is None else predict(teacher, teacher_params, batch)
        exit_logits = _exit_logits(model, params)
        return objective.total(made, taught, model.config.vocab_size, step, exit_logits) / jnp.maximum(tokens, 1)

    def step(
        state: TrainState, teacher_params: Params, batch: Batch, rate: Array, key: Array
    ) -> tuple[TrainState, Metrics]:
        counted = counted_positions(batch.lengths, jnp.maximum(batch.answers, _first(model)), batch.tokens.shape[1])
        tokens, key = jnp.sum(counted), jax.random.fold_in(key, state.step)

        def part(number: Array, batch: Batch) -> tuple[Array, Params]:
            own_key = key if accumulate == 1 else jax.random.fold_in(key, number)
            return jax.value_and_grad(part_loss)(state.params, teacher_params, batch, state.step, own_key, tokens)

        loss, grads = _accumulated(part, batch, accumulate, state.params, model.mesh)
        updates, opt_state = direction.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {"loss": loss, "tokens": tokens, "gradient_norm": gradient_norm(grads)}
        return TrainState(params, opt_state, state.step + 1), metrics

    shardings = None if layout is None else (jax.tree.unflatten(layout[1], layout[0]), None)
    return jax.jit(step, donate_argnums=0, **({} if shardings is None else {"out_shardings": shardings}))


def _first(model: Any) -> int:
    """Returns the index of the first token that a model predicts."""
    return 0 if model.is_encoder_decoder else 1


def _exit_logits(model: Any, params: Params) -> Callable[[Array], Array]:
    """Returns the function that computes the logits of hidden states with the model's own head."""

    def logits(hidden: Array) -> Array:
        with sharding.under(model.mesh, gathers=True):
            return model.module.apply({"params": params}, hidden, method="exit_logits")

    return logits


def _accumulated(
    part: Callable[[Array, Batch], tuple[Array, Params]], batch: Batch, parts: int, params: Params, mesh: Mesh | None
) -> tuple[Array, Params]:
    """Returns the sums of the losses and gradients of a batch's parts, computed one after the other."""
    if parts == 1:
        return part(jnp.int32(0), batch)

    def divided(rows: Array) -> Array:
        # part `i` takes rows `i`, `i + parts`, …, so that each device keeps its rows
        split = rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1)
        if mesh is None:
            return split
        return jax.lax.with_sharding_constraint(split, NamedSharding(mesh, sharding.P(None, *sharding.ROWS)))

    def add(total: tuple[Array, Params], numbered: tuple[Array, Batch]) -> tuple[tuple[Array, Params], None]:
        return optax.tree.add(total, part(*numbered)), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, (jnp.arange(parts), jax.tree.map(divided, batch)))[0]


@cache
def make_eval_step(model: Any) -> Callable[..., tuple[Array, Array]]:
    """Returns `evaluate(params, batch) -> (sum of negative log-likelihoods in nats, target tokens)`."""

    @jax.jit
    def evaluate(params: Params, batch: Batch) -> tuple[Array, Array]:
        made = predict(model, params, batch)
        losses = token_losses(made.logits, made.targets, model.config.vocab_size)
        return made.total(losses), jnp.sum(made.counted)

    return evaluate
