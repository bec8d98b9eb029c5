"""Measurements for the optimiser: the acceptance rate between every two models, and the cost of a call of each model.

Acceptance rates are measured along the target's own outputs. One compiled program computes the distributions of all
models along an output. An array that several models share is passed to it once, so layers that early exits share with
their target are computed once (docs/methods.md, section 7).
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
from speccascade_jax.runtime.progress import counted

STEPS, TURNS, MOST_TURNS = 16, 9, 720
"""The number of calls in one timed run, and the initial and the largest number of timed runs.

The number of runs is doubled until the standard error of the median time is at most `CLOSE` times the median.
"""
CLOSE = 0.03


Batch = tuple[Prompt, Any, Any]
"""Prompts `[B, P]`, and the outputs of the target for these prompts: int32 tokens `[B, L]` and lengths `[B]`."""


@dataclass(frozen=True)
class Measured:
    """Measurements of models, ordered from the cheapest to the target.

    Attributes:
        names: names of the models, in this order.
        costs: seconds of one call of each model at batch size 1.
        acceptance: `[N, N]`, `E [1 − TV(p̃_i, p̃_j)]`, where TV is the total variation distance.
        positions: number of positions over which acceptance was averaged.
        breach: largest violation of the triangle inequality `α_ij + α_jk ≤ α_ik + 1`; 0 up to rounding.
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
    """Measures the acceptance rates between models along the target's outputs, and the cost of a call of each model.

    Args:
        models: the models by name, the target among them.
        prompts: batches of prompts, `[B, P]` each.
        outputs: the target's outputs for each batch: int32 tokens `[B, L]` and lengths `[B]`.
        target: the target's name in `models`.
        temperature: one value for all models, or a value for each name; 0 is greedy.
        top_p: one value for all models.
        top_k: one value for all models.
        costs: seconds of one call by name, if known; otherwise calls are timed (`call_seconds`).

    Returns:
        The measurements, in the order of the costs; models that cost as much as the target or more are left out.

    Raises:
        ValueError: the target is unknown, a model has no temperature or cost, there are no tokens, logits are not
            finite, or the time of a call cannot be distinguished from noise.
    """
    if target not in models:
        raise ValueError(f"the target {target!r} is not among the models {', '.join(models)}: give it as one of them")
    names = tuple(models)
    temperatures = dict(temperature) if isinstance(temperature, Mapping) else dict.fromkeys(names, temperature)
    for setting, known in (("temperature", temperatures), ("costs", costs or dict.fromkeys(names))):
        if missing := set(names) - set(known):
            raise ValueError(f"{setting} has no entry for {', '.join(sorted(missing))}: give one for each model")
    samplings = {name: (temperatures[name], top_p, top_k) for name in names}
    batches = [(prompt, *written) for prompt, written in zip(prompts, outputs, strict=True)]
    matrix, positions = acceptance(models, batches, samplings)
    first = jax.tree.map(lambda leaf: leaf[:1], prompts[0])
    timed = counted(models.items(), "timing a call of each model", "models", len(models))
    seconds = dict(costs) if costs else {name: call_seconds(bound, first) for name, bound in timed}
    kept = [name for name in names if name == target or seconds[name] < seconds[target]]
    order = sorted(kept, key=lambda name: (name == target, seconds[name]))
    indices = [names.index(name) for name in order]
    chosen = matrix[np.ix_(indices, indices)]
    return Measured(tuple(order), tuple(seconds[name] for name in order), chosen, positions, triangle_breach(chosen))


def acceptance(
    models: Mapping[str, BoundModel], batches: Sequence[Batch], samplings: Mapping[str, tuple[Any, ...]]
) -> tuple[np.ndarray, int]:
    """Returns the acceptance rates `E [1 − TV]` between all models, `[N, N]`, and the number of averaged positions.

    Args:
        models: the models by name.
        batches: prompts `[B, P]`, outputs int32 `[B, L]` and their lengths `[B]`, for each batch.
        samplings: each model's temperature, `top_p` and `top_k`.

    Raises:
        ValueError: as in `measure`.
    """
    kinds = tuple(bound.model for bound in models.values())
    distinct_arrays, places = distinct([bound.params for bound in models.values()])
    total, positions = np.zeros((len(models), len(models))), 0
    for batch in counted(batches, "acceptance between the models", "batches"):
        lengths = batch[2]
        of_rows = [make_sampling(len(lengths), *samplings[name]) for name in models]
        shared, failed = _shared(kinds, places, distinct_arrays, of_rows, batch)
        if np.any(failed):
            name = list(models)[int(np.argwhere(np.asarray(failed))[0][0])]
            raise ValueError(f"model {name!r} gives NaN or infinite logits along an output: check its weights")
        total += np.asarray(shared, np.float64).sum(axis=(2, 3))
        positions += int(np.sum(lengths))
    if not positions:
        raise ValueError("the target's outputs have no tokens to measure: give prompts that the target answers")
    return np.clip(total / positions, 0.0, 1.0), positions  # rounding of float32 can bring a mean above 1


@partial(jax.jit, static_argnums=(0, 1))
def _shared(
    kinds: Any, places: Places, distinct_arrays: list[Array], samplings: list[Sampling], batch: Batch
) -> tuple[Array, Array]:
    """Returns `1 − TV = Σ_v min(p̃_i, p̃_j)` of all models `i` and `j` at each position, `[N, N, B, L]`.

    It also returns which models gave non-finite logits in which rows, bool `[N, B]`. The sums are 0 beyond the end of
    an output.
    """
    prompt, tokens, lengths = batch
    counted = (jnp.arange(tokens.shape[1])[None] < lengths[:, None])[..., None]
    laws, failed = [], []
    for model, params, sampling in zip(kinds, restored(distinct_arrays, places), samplings, strict=True):
        logits = continued(model, params, prompt, tokens[:, :-1]).logits[..., : model.vocab_size]
        failed.append(failing(logits, lengths))
        laws.append(jnp.where(counted, transform(logits, sampling), 0.0))
    stacked = jnp.stack(laws)
    sums = jax.lax.map(lambda law: jnp.minimum(law[None], stacked).sum(axis=-1), stacked)
    return sums, jnp.stack(failed)


def triangle_breach(matrix: np.ndarray) -> float:
    """Returns the largest violation of the triangle inequality, `α_ij + α_jk − α_ik − 1`, at least 0.

    Total variation distance and its mean over positions are metrics, so only rounding can violate the inequality.
    """
    over = matrix[:, :, None] + matrix[None, :, :] - matrix[:, None, :] - 1.0
    return float(max(0.0, over.max()))


def call_seconds(bound: BoundModel, prompt: Prompt) -> float:
    """Returns the seconds of a one-token call at the batch size of `prompt`, without prefill.

    Two programs are timed in alternation: prefill followed by calls, and prefill alone. The result is the median
    difference of the two times, divided by the number of calls. Timing is repeated until the median is precise.

    Raises:
        ValueError: the time of a call cannot be distinguished from 0.
    """
    runs = [partial(run, bound.model, STEPS, bound.params, prompt) for run in (_calls, _prefilled)]
    for run in runs:
        jax.block_until_ready(run())  # compile before timing
    differences: list[float] = []
    middle, error = 0.0, math.inf
    while error > CLOSE * middle and len(differences) < MOST_TURNS:
        differences += [_seconds(runs[0]) - _seconds(runs[1]) for _ in range(max(TURNS, len(differences)))]
        middle = float(np.median(differences))
        # standard error of the median, from the median absolute deviation of a normal distribution
        error = 1.253 * 1.483 * float(np.median(np.abs(np.asarray(differences) - middle))) / len(differences) ** 0.5
    if error > CLOSE * middle and middle <= 2 * error:
        taken = f"{STEPS} calls of a model take {1e6 * middle:.0f} µs, ± {1e6 * error:.0f}"
        raise ValueError(f"{taken}, which is within the noise: give costs=, or use an idle machine")
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
    """Returns the tokens of `steps` greedy calls after a prefill."""
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + steps)
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)

    def step(carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
        cache, token = carry
        out, cache = model.extend(params, cache, token)
        token = out.logits[:, -1:, : model.vocab_size].argmax(-1).astype(jnp.int32)
        return (cache, token), token

    return jax.lax.scan(step, (cache, pending), None, length=steps)[1]
