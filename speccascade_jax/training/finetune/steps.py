"""Training and evaluation steps, each compiled as one program for a device or a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from speccascade_jax.core.types import Array, BoundModel, Params
from speccascade_jax.models import sharding
from speccascade_jax.models.layers import EXITS
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.distillation import Distillation, OutputSource, check_teacher
from speccascade_jax.training.finetune.losses import counted_positions, token_losses
from speccascade_jax.training.finetune.objective import Objective, Predictions
from speccascade_jax.training.finetune.optimizers import Optimizer
from speccascade_jax.training.finetune.partition import shardings
from speccascade_jax.training.finetune.watching import gradient_norm
from speccascade_jax.training.runs import TrainState

Metrics = dict[str, Array]
"""Measures of a step by name: `loss` (the objective, in nats per target token), `tokens` (how many count in the loss),
and `gradient_norm`."""

Batches = tuple[Batch, Batch | None]
"""The data's batch, and the batch of sampled outputs, if any."""


def shift_right(targets: Array, start_id: int = 0) -> Array:
    """Returns decoder inputs `[B, T]` for `targets`: the start token, then all but the last target."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)


def predict(
    model: Any,
    params: Params,
    batch: Batch,
    dropout: Array | None = None,
    layers: bool = False,
    remat: bool = False,
) -> Predictions:
    """Returns a model's predictions of a batch's tokens, in one pass.

    Args:
        model: a model of `models.families`; its mesh, if any, is that of the parameters.
        params: the parameters, as Flax creates them.
        batch: `[B, …]`.
        dropout: the key of dropout; `None`: no dropout.
        layers: whether to return the decoder layers' outputs.
        remat: whether gradients recompute each layer instead of keeping its intermediate values.
    """
    inputs: tuple[Any, ...]
    if model.is_encoder_decoder:
        real = jnp.arange(batch.encoder_tokens.shape[1]) < batch.encoder_lengths[:, None]
        inputs = (batch.encoder_tokens, shift_right(batch.tokens, model.config.start_id), dropout is None, real)
        targets, counted = batch.tokens, counted_positions(batch.lengths, batch.answers, batch.tokens.shape[1])
    else:
        # a token is predicted from the tokens before it, so the first token of a row does not count
        inputs, targets = (batch.tokens[:, :-1],), batch.tokens[:, 1:]
        counted = counted_positions(batch.lengths, batch.answers, batch.tokens.shape[1])[:, 1:]
    rngs = {} if dropout is None else {"dropout": dropout}
    mutable = [EXITS] if layers else False
    module = model.module.clone(remat=True) if remat else model.module
    with sharding.under(model.mesh, gathers=True):
        output = module.apply({"params": params}, *inputs, rngs=rngs, mutable=mutable)
    logits, hidden = (output[0], output[1][EXITS]["decoder"]["hidden"]) if layers else (output, None)
    return Predictions(logits, targets, counted, hidden)


def make_train_step(
    model: Any,
    optimizer: Optimizer,
    objective: Objective,
    *,
    teacher: BoundModel | None = None,
    **options: Any,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns `step(state, batch, rate, seed) -> (state, metrics)`, which donates the old state's buffers.

    Args:
        model: the model.
        optimizer: the optimiser.
        objective: the loss.
        teacher: the teacher, with distillation.
        options: further arguments of `jitted_step`.

    Raises:
        ValueError: model, teacher and objective do not fit together (see `jitted_step`).
    """
    compiled = jitted_step(model, optimizer, objective, teacher=None if teacher is None else teacher.model, **options)
    teacher_params = None if teacher is None else teacher.params
    return lambda state, *rest: compiled(state, teacher_params, *rest)


def jitted_step(
    model: Any,
    optimizer: Optimizer,
    objective: Objective,
    *,
    distillation: Distillation | None = None,
    teacher: Any = None,
    stop_ids: tuple[int, ...] = (),
    accumulate: int = 1,
    remat: bool = False,
    layout: TrainState | None = None,
) -> Any:
    """Returns the jitted function `step(state, teacher_params, batch, rate, seed) -> (state, metrics)`.

    The function donates the buffers of the old state.

    Random bits (dropout, sampled outputs) depend on the uint32 `seed` and the step number in the state, so a resumed
    run draws the same bits as an uninterrupted one, on any mesh.

    Args:
        model: the model.
        optimizer: the optimiser.
        objective: the loss.
        distillation: settings of the divergence from a teacher; `None`: no teacher.
        teacher: the teacher's model, with distillation; its parameters are an argument of the step.
        stop_ids: token ids that end sampled outputs.
        accumulate: number of parts that a batch is divided into; their gradients are added up, so that memory holds the
            activations of one part.
        remat: whether gradients recompute each layer instead of keeping its intermediate values (rematerialisation).
        layout: the state's shapes and layout on a mesh (`partition.state_layout`); `None`: one device.

    Raises:
        ValueError: the teacher does not fit the model, the model has no early exit to train, or the weight of
            distillation leaves early exits untrained.
    """
    objective.check(model)
    if teacher is not None:
        check_teacher(teacher, model)
    if distillation is not None and distillation.weight == 1 and objective.exit_weight:
        raise ValueError("distillation of weight 1 trains no early exit: lower its weight, or set exit_weight to 0")
    leaves, structure = jax.tree.flatten(None if layout is None else shardings(layout))
    source = None
    if distillation is not None and teacher is not None:
        source = OutputSource(distillation, model, teacher, stop_ids)
    program: Any = Program(model, objective, source, accumulate, remat)
    return _train_step(program, cast(Any, optimizer), (tuple(leaves), structure) if leaves else None)


@dataclass(frozen=True)
class Program:
    """Everything that a training step's program depends on, besides the optimiser (`make_train_step`)."""

    model: Any
    objective: Objective
    source: OutputSource | None
    accumulate: int
    remat: bool = False

    @property
    def drops(self) -> bool:
        """Whether the model has dropout."""
        return any(getattr(self.model.config, name, 0) for name in ("dropout_rate", "layer_dropout"))

    def outputs(self, params: Params, teacher_params: Params, batch: Batch, seed: Array, step: Array) -> Batch | None:
        """Returns the batch on which student and teacher are compared; `None` for the data's batch or no teacher."""
        if self.source is None or not self.source.distillation.drawn:
            return None
        return self.source(params, teacher_params, batch, seed, step)

    def loss(
        self,
        params: Params,
        teacher_params: Params,
        batches: Batches,
        totals: tuple[Array, Array],
        step: Array,
        key: Array,
    ) -> Array:
        """Returns what a part of a batch contributes to the batch's loss, in nats per token.

        Args:
            params: parameters of the model.
            teacher_params: parameters of the teacher.
            batches: the part of the data's batch, and the same rows of the batch that `outputs` returned.
            totals: numbers of tokens that count in the whole batch, and in the whole batch that `outputs` returned.
            step: number of the step, from 0.
            key: key of dropout.
        """
        (batch, drawn), vocab_size, dropout = batches, self.model.config.vocab_size, key if self.drops else None
        weight = 0.0 if self.source is None else self.source.distillation.weight
        loss, predictions = jnp.float32(0), None
        # Without cross-entropy (weight 1) and with sampled sequences, the student needs no pass over the data.
        if weight < 1 or drawn is None:
            predictions = predict(self.model, params, batch, dropout, bool(self.objective.exit_weight), self.remat)
        if predictions is not None and weight < 1:
            exit_logits = partial(_exit_logits, self.model, params)
            loss = self.objective.total(predictions, vocab_size, step, exit_logits) / jnp.maximum(totals[0], 1)
        if self.source is None:
            return loss
        student = predictions if drawn is None else predict(self.model, params, drawn, dropout, remat=self.remat)
        teacher = predict(self.source.teacher, teacher_params, batch if drawn is None else drawn)
        assert student is not None
        divergences = self.source.distillation.divergences(teacher.logits, student.logits, vocab_size)
        return (1.0 - weight) * loss + weight * student.total(divergences) / jnp.maximum(totals[1], 1)


@cache
def _train_step(program: Any, optimizer: Any, layout: Any) -> Any:
    """Returns the jitted step, cached so that trainers with equal settings share one compiled program."""
    direction, model = optimizer.transformation(), program.model

    def step(
        state: TrainState, teacher_params: Params, batch: Batch, rate: Array, seed: Array
    ) -> tuple[TrainState, Metrics]:
        # threefry draws the same bits on every mesh. It is slow, but dropout masks are broadcast over tokens and small.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
        drawn = program.outputs(state.params, teacher_params, batch, seed, state.step)
        tokens = _tokens(model, batch)
        totals = tokens, tokens if drawn is None else _tokens(model, drawn)

        def part(number: Array, batches: Batches) -> tuple[Array, Params]:
            def share(params: Params) -> Array:
                own_key = key if program.accumulate == 1 else jax.random.fold_in(key, number)
                return program.loss(params, teacher_params, batches, totals, state.step, own_key)

            return jax.value_and_grad(share)(state.params)

        loss, grads = _accumulated(part, (batch, drawn), program.accumulate, state.params, model.mesh)
        updates, opt_state = direction.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {"loss": loss, "tokens": tokens, "gradient_norm": gradient_norm(grads)}
        return TrainState(params, opt_state, state.step + 1), metrics

    if layout is None:
        return jax.jit(step, donate_argnums=0)
    return jax.jit(step, donate_argnums=0, out_shardings=(jax.tree.unflatten(layout[1], layout[0]), None))


def _tokens(model: Any, batch: Batch) -> Array:
    """Returns the number of tokens of a batch that count."""
    # A decoder-only model does not predict the first token of a row.
    first = jnp.maximum(batch.answers, 0 if model.is_encoder_decoder else 1)
    return jnp.sum(counted_positions(batch.lengths, first, batch.tokens.shape[1]))


def _exit_logits(model: Any, params: Params, hidden: Array) -> Array:
    """Returns the logits of hidden states, computed with the model's own head."""
    with sharding.under(model.mesh, gathers=True):
        logits: Array = model.module.apply({"params": params}, hidden, method="exit_logits")
    return logits


def _accumulated(
    part: Callable[[Array, Any], tuple[Array, Params]], batch: Any, parts: int, params: Params, mesh: Mesh | None
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

    def add(total: tuple[Array, Params], numbered: tuple[Array, Any]) -> tuple[tuple[Array, Params], None]:
        return optax.tree.add(total, part(*numbered)), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, (jnp.arange(parts), jax.tree.map(divided, batch)))[0]


@cache
def make_eval_step(model: Any) -> Callable[..., tuple[Array, Array]]:
    """Returns `evaluate(params, batch) -> (sum of negative log-likelihoods in nats, target tokens)`."""

    @jax.jit
    def evaluate(params: Params, batch: Batch) -> tuple[Array, Array]:
        predictions = predict(model, params, batch)
        losses = token_losses(predictions.logits, predictions.targets, model.config.vocab_size)
        return predictions.total(losses), jnp.sum(predictions.counted)

    return evaluate
