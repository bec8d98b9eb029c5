"""What the optimiser needs to know of models: how often each accepts the others' tokens, and what a call costs.

Both along the target's own outputs. All models read these in one program, which takes an array that several of them
hold only once, so that what early exits share with their target is computed once (METHODS.md section 7).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.controls import make_sampling
from speccascade_jax.core.sampling import transform
from speccascade_jax.core.types import Array, BoundModel, Params, Prompt, Sampling
from speccascade_jax.models.early_exit import Places, distinct, restored
from speccascade_jax.models.teacher_forcing import continued, failing

STEPS, TURNS, MOST_TURNS = 16, 9, 720
"""Calls that are timed at once, and in how many turns, doubled until the median is known to `CLOSE` of itself."""
CLOSE = 0.03


Batch = tuple[Prompt, Any, Any]
"""Prompts `[B, P]`, and what the target wrote behind them: int32 tokens `[B, L]` and lengths `[B]`."""


@dataclass(frozen=True)
class Measured:
    """Models from the cheapest to the target.

    Attributes:
        names: in this order; costs: seconds of one call at batch 1; acceptance: `[N, N]`, `E [1 − TV(p̃_i, p̃_j)]`.
        positions: how many were looked at.
        breach: by how much the triangle inequality `α_ij + α_jk ≤ α_ik + 1` is broken at most; 0 but for rounding.
    """

    names: tuple[str, ...]
    costs: tuple[float, ...]
    acceptance: np.ndarray
    positions: int
    breach: float


def measure(
    models: Mapping[str, BoundModel],
    prompts: Sequence[Prompt],
    outputs: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    target: str = "target",
    temperature: float | Mapping[str, float] = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    costs: Mapping[str, float] | None = None,
) -> Measured:
    """Acceptance and costs of models along what the target wrote.

    Args:
        models: by name, the target among them; prompts: batches, `[B, P]` each.
        outputs: for each batch int32 tokens `[B, L]` and lengths `[B]`.
        temperature: of all models, or of each; 0 is greedy. top_p, top_k: of all.
        costs: seconds of one call, where they are known already; otherwise they are timed (`call_seconds`).

    Returns:
        The models ordered by cost, without those that cost as much as the target or more.

    Raises:
        ValueError: no such target, temperatures or costs of other models, nothing to look at, or logits that are not
            finite; calls that are not told from noise.
    """
    if target not in models:
        raise ValueError(f"the target {target!r} is not among the models {', '.join(models)}")
    names = tuple(models)
    given = dict(temperature) if isinstance(temperature, Mapping) else dict.fromkeys(names, temperature)
    for what, known in (("temperature", given), ("costs", costs or dict.fromkeys(names))):
        if missing := set(names) - set(known):
            raise ValueError(f"{what} has no entry for {', '.join(sorted(missing))}: give one for each model")
    samplings = {name: (given[name], top_p, top_k) for name in names}
    batches = [(prompt, *written) for prompt, written in zip(prompts, outputs, strict=True)]
    matrix, positions = acceptance(models, batches, samplings)
    first = jax.tree.map(lambda leaf: leaf[:1], prompts[0])
    seconds = dict(costs) if costs else {name: call_seconds(bound, first) for name, bound in models.items()}
    kept = [name for name in names if name == target or seconds[name] < seconds[target]]
    order = sorted(kept, key=lambda name: (name == target, seconds[name]))
    at = [names.index(name) for name in order]
    chosen = matrix[np.ix_(at, at)]
    return Measured(tuple(order), tuple(seconds[name] for name in order), chosen, positions, triangle_breach(chosen))


def acceptance(
    models: Mapping[str, BoundModel], batches: Sequence[Batch], samplings: Mapping[str, tuple[Any, ...]]
) -> tuple[np.ndarray, int]:
    """Returns `E [1 − TV]` of every two models, in their order, and the number of positions.

    Args:
        samplings: of each model its temperature, `top_p` and `top_k`.

    Raises:
        ValueError: as `measure`.
    """
    kinds = tuple(bound.model for bound in models.values())
    held, places = distinct([bound.params for bound in models.values()])
    total, positions = np.zeros((len(models), len(models))), 0
    for batch in batches:
        lengths = batch[2]
        of_rows = [make_sampling(len(lengths), *samplings[name]) for name in models]
        shared, failed = _shared(kinds, places, held, of_rows, batch)
        if np.any(failed):
            name = list(models)[int(np.argwhere(np.asarray(failed))[0][0])]
            raise ValueError(f"model {name!r} gives NaN or infinite logits along an output: check its weights")
        total += np.asarray(shared, np.float64).sum(axis=(2, 3))
        positions += int(np.sum(lengths))
    if not positions:
        raise ValueError("there is no token to measure acceptance along: give prompts that the target answers")
    return np.clip(total / positions, 0.0, 1.0), positions  # float32 laws sum to 1 but for rounding


@partial(jax.jit, static_argnums=(0, 1))
def _shared(
    kinds: Any, places: Places, held: list[Array], samplings: list[Sampling], batch: Batch
) -> tuple[Array, Array]:
    """Returns `Σ_v min(p̃_i, p̃_j)`, `[N, N, B, L]`, 0 beyond the outputs' ends; who fails where, bool `[N, B]`."""
    prompt, tokens, lengths = batch
    counted = (jnp.arange(tokens.shape[1])[None] < lengths[:, None])[..., None]
    laws, failed = [], []
    for model, own, sampling in zip(kinds, restored(held, places), samplings, strict=True):
        logits = continued(model, own, prompt, tokens[:, :-1]).logits[..., : model.vocab_size]
        failed.append(failing(logits, lengths))
        laws.append(jnp.where(counted, transform(logits, sampling), 0.0))
    stacked = jnp.stack(laws)
    sums = jax.lax.map(lambda law: jnp.minimum(law[None], stacked).sum(axis=-1), stacked)
    return sums, jnp.stack(failed)


def triangle_breach(matrix: np.ndarray) -> float:
    """Returns the largest `α_ij + α_jk − α_ik − 1`, at least 0: total variations, and their means, are a metric."""
    over = matrix[:, :, None] + matrix[None, :, :] - matrix[:, None, :] - 1.0
    return float(max(0.0, over.max()))


def call_seconds(bound: BoundModel, prompt: Prompt) -> float:
    """Seconds of a call of one token at the batch of `prompt`: of calls that follow each other, less their prefill.

    Both are timed in turns; the median of the differences counts, of as many turns as it takes to know it well.

    Raises:
        ValueError: it is not told from 0.
    """
    runs = [partial(run, bound.model, STEPS, bound.params, prompt) for run in (_calls, _prefilled)]
    for run in runs:
        jax.block_until_ready(run())  # compiled
    found: list[float] = []
    middle, error = 0.0, math.inf
    while error > CLOSE * middle and len(found) < MOST_TURNS:
        found += [_seconds(runs[0]) - _seconds(runs[1]) for _ in range(max(TURNS, len(found)))]
        middle = float(np.median(found))
        # of a median, from the median absolute deviation, as if the bulk were normal
        error = 1.253 * 1.483 * float(np.median(np.abs(np.asarray(found) - middle))) / len(found) ** 0.5
    if error > CLOSE * middle and middle <= 2 * error:
        taken = f"{STEPS} calls of a model take {1e6 * middle:.0f} µs, give or take {1e6 * error:.0f}"
        raise ValueError(f"{taken}: no longer than the noise here; give costs=, or an idle machine")
    return middle / STEPS


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


@partial(jax.jit, static_argnums=(0, 1))
def _prefilled(model: Any, steps: int, params: Params, prompt: Prompt) -> Any:
    return model.prefill(params, prompt, prompt.tokens.shape[1] + steps)


@partial(jax.jit, static_argnums=(0, 1))
def _calls(model: Any, steps: int, params: Params, prompt: Prompt) -> Array:
    """The tokens of `steps` greedy calls behind a prefill."""
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + steps)
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)

    def step(carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
        cache, token = carry
        out, cache = model.extend(params, cache, token)
        token = out.logits[:, -1:, : model.vocab_size].argmax(-1).astype(jnp.int32)
        return (cache, token), token

    return jax.lax.scan(step, (cache, pending), None, length=steps)[1]
