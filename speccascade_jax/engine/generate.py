"""A whole generation as one compiled program, and its result."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.checks import MOST
from speccascade_jax.core.types import Array, Controls, Params, Prompt, PyTree, Round
from speccascade_jax.engine.counters import Counters
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.loop import one_round, run_rounds


@flax.struct.dataclass
class Generation:
    """The result of `generate`, on the device.

    Attributes:
        tokens: int32 `[B, max_new_tokens]`, 0 after the end.
        lengths: int32 `[B]`, the numbers of output tokens, the stop id included.
        stats: `Counters` per row.
        inner: statistics of engines inside the drafter, or `None`.
        failed_at: int32 `[B, 2]`, the positions of the first non-finite logits of target and draft, -1 if there are
            none.
        record: the results of the argument `record`, a function of a round, stacked along a first axis of
            `max_new_tokens` rounds; `None` if no function was given.
        num_rounds: int32 scalar, the number of rounds.
    """

    tokens: Array
    lengths: Array
    stats: Counters
    inner: Any
    failed_at: Array
    record: Any
    num_rounds: Array


def generate(
    engine: Engine,
    params: Params,
    prompt: Prompt,
    seed: int | Array = 0,
    *,
    controls: Controls,
    max_new_tokens: int,
    record: Callable[[Round], PyTree] | None = None,
    example_ids: Any = None,
    level: int = 0,
    most_rounds: int | Array | None = None,
) -> Generation:
    """Generates outputs for a batch of prompts in one compiled program; nothing leaves the device before the end.

    One program is compiled for each engine, shape of the batch, `max_new_tokens`, `record` and `level`. Other controls,
    seeds, prompts or ids reuse it.

    Args:
        engine: the static components: target, drafter, verifier.
        params: the parameters of the models, `{"target": …, "drafter": …}`.
        prompt: the prompts, right-padded, `[B, P]`.
        seed: an integer.
        controls: α, temperatures and other numbers, one per row.
        max_new_tokens: the length limit of outputs (static).
        record: a function that reduces a `Round` to a pytree of arrays, which are returned for every round (static). It
            should be defined at module level, because a new function object compiles a new program.
        example_ids: the ids that determine the rows' random bits, `[B]`, by default `0 … B − 1`.
        level: a number that is part of every row's random key (static). Give different levels to two generations with
            the same seed and ids that must not share random bits.
        most_rounds: the number of rounds after which the generation ends, finished or not; used by measurements.

    Returns:
        A `Generation`. Non-finite logits do not raise an error here; `raise_on_failure` checks for them.
    """
    ids, seed = row_ids(example_ids, prompt), argument(seed, np.uint32)
    static = {"max_new_tokens": max_new_tokens, "record": record, "level": level}
    if most_rounds is None and engine.planner is not None:
        most_rounds = MOST  # so that an ordinary run uses the same compiled program as a timed run with fewer rounds
    # without a limit the argument is left out, because even an infinite limit would cost an operation in every round
    limit = {} if most_rounds is None else {"most_rounds": argument(most_rounds, np.int32)}
    generation: Generation = _generate(engine, params, prompt, seed, controls, ids, **limit, **static)
    return generation


def argument(value: Any, dtype: Any) -> Any:
    """Converts `value` to an array of `dtype`; a host value stays on the host until a program is called with it."""
    return value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)


def row_ids(example_ids: Any, prompt: Prompt) -> Any:
    """Returns int32 `[B]`, the ids that determine the rows' random bits; default `0 … B − 1`."""
    return argument(np.arange(prompt.tokens.shape[0]) if example_ids is None else example_ids, np.int32)


class _Traced:
    """A counter of how often JAX traced `_generate`, which it does once for each compiled program."""

    programs = 0


@partial(jax.jit, static_argnames=("engine", "max_new_tokens", "record", "level"))
def _generate(
    engine: Engine,
    params: Params,
    prompt: Prompt,
    seed: Array,
    controls: Controls,
    example_ids: Array,
    most_rounds: Array | None = None,
    *,
    max_new_tokens: int,
    record: Callable[[Round], PyTree] | None,
    level: int,
) -> Generation:
    _Traced.programs += 1  # this line runs when JAX traces, never when a compiled program is called
    state = engine.init(params, prompt, rngs.root(seed), example_ids, max_new_tokens, level)
    buffers = None
    if record is not None:
        # a row commits a token in every round it takes part in, so there are at most `max_new_tokens` rounds
        shapes = jax.eval_shape(lambda: record(one_round(engine, params, state, controls)[1]))
        buffers = jax.tree.map(lambda x: jnp.zeros((max_new_tokens, *x.shape), x.dtype), shapes)

    def on_round(carry: tuple[Array, PyTree], turn: Round) -> tuple[Array, PyTree]:
        index, buffers = carry
        if record is not None:
            buffers = jax.tree.map(lambda b, x: b.at[index].set(x), buffers, record(turn))
        return index + 1, buffers

    def unfinished(state: DecodeState) -> Array:
        return ~state.done if most_rounds is None else ~state.done & (state.rounds < most_rounds)

    start = (jnp.zeros((), jnp.int32), buffers)
    state, (rounds, buffers) = run_rounds(engine, params, state, controls, unfinished, start, on_round)
    lengths = state.length - state.start
    # outputs begin after prompts of unequal lengths; they are gathered so that all begin in column 0
    columns = state.start[:, None] + jnp.arange(max_new_tokens)[None]
    tokens = jnp.take_along_axis(state.tokens, columns, axis=1)
    return Generation(
        # entries after a row's end are meaningless, so they are set to 0
        tokens=jnp.where(jnp.arange(max_new_tokens)[None] < lengths[:, None], tokens, 0),
        lengths=lengths,
        stats=state.counters,
        inner=engine.drafter.stats(state.drafter),
        failed_at=state.failed_at,
        record=buffers,
        num_rounds=rounds,
    )


def compiled_for(
    engine: Engine,
    params: Params,
    prompt: Prompt,
    controls: Controls,
    *,
    max_new_tokens: int,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles the program that `generate` runs, without running it, and returns it.

    Arrays may be given as `jax.ShapeDtypeStruct`s. `options` are options of XLA, by name.
    """
    rows = prompt.tokens.shape[0]
    seed, ids = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    static = {"max_new_tokens": max_new_tokens, "record": None, "level": 0}
    return _generate.lower(engine, params, prompt, seed, controls, ids, **static).compile(options)


def compilations() -> int:
    """Returns how many programs `generate` has compiled in this process; other values of controls need no new one."""
    return _Traced.programs


def model_names(draft_alone: bool) -> tuple[str, str]:
    """Returns the names of the engine's two models for messages; both are "draft" if the draft model decodes alone."""
    return ("draft", "draft") if draft_alone else ("target", "draft")


class Failure(NamedTuple):
    """A model's failure: it gave NaN or infinite logits in one row, at one position of the row's sequence.

    The row's output ends with the round before the failure.
    """

    row: int
    model: str
    position: int

    def __str__(self) -> str:
        return (
            f"the {self.model} model gave NaN or infinite logits in row {self.row} at position {self.position} of its "
            f"decoder sequence"
        )


def failures(failed_at: Any, names: Sequence[str] = ("target", "draft")) -> tuple[Failure, ...]:
    """Returns one `Failure` for each row in which a model gave NaN or infinite logits.

    Args:
        failed_at: int `[B, 2]`, the positions of the first non-finite logits of target and draft, or -1.
        names: the names of the two models.
    """
    # one failure per row: the target's, if both models failed
    rows = enumerate(np.asarray(failed_at).tolist())
    row_failures = (
        [(row, name, position) for name, position in zip(names, places, strict=True) if position >= 0]
        for row, places in rows
    )
    return tuple(Failure(*first) for first, *_ in filter(None, row_failures))


def raise_on_failure(generation: Generation, names: Sequence[str] = ("target", "draft")) -> None:
    """Raises a FloatingPointError if a model gave NaN or infinite logits in a row of the generation."""
    raise_if_failed(failures(generation.failed_at, names))


def raise_if_failed(failed: Sequence[Failure]) -> None:
    """Raises a FloatingPointError if there are any failures.

    Raises:
        FloatingPointError: the message names the model, the row and the position of the first failure.
    """
    if failed:
        raise FloatingPointError(
            f"{failed[0]}; check its weights (a checkpoint of another configuration?) and the row's prompt"
        )
