"""Acceptance rate of a draft under a target on validation prompts, without a run of speculative decoding.

Along an output of the target, a token that the draft samples is accepted with probability `Σ_v min(p(v), q(v))` at
temperature 1 (Leviathan et al., 2023, Corollary 3.6; METHODS section 2), and a greedy token if both models have the
same most likely token. Both are known at every position from one pass of each model over the output.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.sampling import argmax
from speccascade_jax.core.types import Array, BoundModel, Params, Prompt
from speccascade_jax.models import sharding
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap, Interval
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.outputs import TEACHER, Sampler, outputs_of, prompt_of, step_seed, whole_rows

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Name of an acceptance rate -> temperature of the target's outputs, along which it is computed."""
_BOOTSTRAP = Bootstrap()


class Rates(NamedTuple):
    """Acceptance rates of one draft on a set of prompts.

    Attributes:
        accepted: for each name in `TEMPERATURES`, the sum over positions of the probability of acceptance, float64
            `[N]`, one number per prompt.
        positions: for each name, the number of positions, `[N]`.
    """

    accepted: dict[str, np.ndarray]
    positions: dict[str, np.ndarray]

    def samples(self, name: str) -> np.ndarray:
        """Returns the rate `[1 + samples]`: over all positions, then over resamples of the prompts."""
        return _BOOTSTRAP.ratio(self.accepted[name], self.positions[name])

    def interval(self, name: str) -> Interval:
        """Returns the mean over all positions and its 95% interval, whose ends equal the mean for too few prompts."""
        if len(self.positions[name]) < LEAST_EXAMPLES:
            return Interval(*[self._mean(name)] * 3)
        return _BOOTSTRAP.interval(self.samples(name))

    def minus(self, other: "Rates", name: str) -> Interval:
        """Returns this rate minus another draft's rate on the same prompts and outputs, with its 95% interval.

        As in `interval`, the ends equal the difference for too few prompts.
        """
        if len(self.positions[name]) < LEAST_EXAMPLES:
            return Interval(*[self._mean(name) - other._mean(name)] * 3)
        return _BOOTSTRAP.interval(self.samples(name) - other.samples(name))

    def _mean(self, name: str) -> float:
        return float(self.accepted[name].sum() / max(1, self.positions[name].sum()))

    def numbers(self) -> dict[str, Any]:
        """Returns the rates and the ends of their intervals for a log: `acceptance_greedy`, `acceptance_sampled`, …."""
        rates = {f"acceptance_{name}": self.interval(name) for name in TEMPERATURES}
        ends = {f"{name}_interval": [round(rate.low, 4), round(rate.high, 4)] for name, rate in rates.items()}
        return {name: round(rate.value, 4) for name, rate in rates.items()} | ends


class Acceptance:
    """Measurement of the acceptance rates of several drafts, or of a draft in training, under one target.

    The prompts are fixed. The target's outputs are decoded at the first call and kept for further calls.

    Args:
        target: the target with its parameters.
        batches: batches of the prompts; their targets only limit the outputs' lengths.
        stop_ids: token ids that end an output.
        seed: random seed of the sampled outputs.
        max_new_tokens: largest number of tokens of an output; 0: as many as fit the rows.
        rows: number of rows that are decoded together, a multiple of the mesh's `data` axis.

    Raises:
        ValueError: there are no prompts.
    """

    def __init__(
        self,
        target: BoundModel,
        batches: Sequence[Batch],
        stop_ids: Sequence[int],
        *,
        seed: int = 0,
        max_new_tokens: int = 0,
        rows: int = 64,
    ):
        self.target, self.batches, self.seed = target, restacked(batches, rows), seed
        self.stop_ids, self.max_new_tokens = tuple(stop_ids), max_new_tokens
        self._outputs: dict[str, list[Batch]] = {}

    def outputs(self, name: str, after_batch: Callable[[], None] = lambda: None) -> list[Batch]:
        """Returns the batches with the target's outputs at the temperature of `name` in `TEMPERATURES`."""
        kept = self._outputs.setdefault(name, [])
        sampler = Sampler(self.target.model, self.stop_ids, TEMPERATURES[name], self.max_new_tokens, level=TEACHER)
        for number, batch in enumerate(self.batches[len(kept) :], len(kept)):
            placed, seed = _on_devices(self.target, batch), step_seed(self.seed, number)
            kept.append(jax.block_until_ready(_decode(sampler, self.target.params, placed, seed)))
            after_batch()
        return kept

    def __call__(self, draft: BoundModel, after_batch: Callable[[], None] = lambda: None) -> Rates:
        """Computes the acceptance rates of a draft.

        Args:
            draft: the draft, whose parameters are plain or prepared for decoding.
            after_batch: called after every batch; it may raise an error to end the computation.
        """
        accepted, positions = {}, {}
        for name, temperature in TEMPERATURES.items():
            parts = []
            for batch in self.outputs(name, after_batch):
                agreement = _agreement(self.target, draft, batch, greedy=temperature == 0)
                parts.append(jax.block_until_ready(agreement))
                after_batch()
            sums, lengths = (np.concatenate(arrays) for arrays in zip(*sharding.replicate(parts), strict=True))
            # Empty rows, which only fill the batch up, have no output and are dropped.
            accepted[name], positions[name] = sums[lengths > 0].astype(np.float64), lengths[lengths > 0]
        return Rates(accepted, positions)


def restacked(batches: Sequence[Batch], rows: int) -> list[Batch]:
    """Regroups prompts into batches of one shape, with `rows` rows each, so that few programs are compiled.

    All arrays get the width of the widest batch. Empty rows of the given batches are left out, and the last new batch
    is filled up with empty rows.

    Raises:
        ValueError: there are no prompts.
    """
    real = [np.asarray(batch.lengths) > 0 for batch in batches]
    total = sum(int(mask.sum()) for mask in real)
    if not total:
        raise ValueError("there are no validation prompts: give at least one, or log no acceptance rate")
    missing = -total % rows

    def joined(arrays: Sequence[Any]) -> np.ndarray:
        arrays = [np.asarray(array)[mask] for array, mask in zip(arrays, real, strict=True)]
        widest = np.max([array.shape[1:] for array in arrays], axis=0).astype(int)
        padded = [np.pad(x, [(0, 0), *((0, w - n) for w, n in zip(widest, x.shape[1:], strict=True))]) for x in arrays]
        return np.pad(np.concatenate(padded), [(0, missing)] + [(0, 0)] * len(widest))

    fields = [None if parts[0] is None else joined(parts) for parts in zip(*batches, strict=True)]
    cuts = [slice(start, start + rows) for start in range(0, total + missing, rows)]
    return [Batch(*(None if field is None else field[cut] for field in fields)) for cut in cuts]


def acceptance(
    target: BoundModel, draft: BoundModel, batches: Sequence[Batch], stop_ids: Sequence[int], *, seed: int = 0
) -> Rates:
    """Computes the acceptance rates of one draft; `Acceptance` keeps the target's outputs for further drafts."""
    return Acceptance(target, batches, stop_ids, seed=seed)(draft)


def _on_devices(target: BoundModel, batch: Batch) -> Batch:
    return sharding.on_devices(batch, getattr(target.model, "mesh", None))


@partial(jax.jit, static_argnames="sampler")
def _decode(sampler: Sampler, params: Params, batch: Batch, seed: Array) -> Batch:
    return sampler(params, batch, seed)


@partial(jax.jit, static_argnames="greedy")
def _agreement(target: BoundModel, draft: BoundModel, batch: Batch, greedy: bool) -> tuple[Array, Array]:
    """Sums the acceptance probabilities over each row's output; returns the sums, float32 `[B]`, and lengths `[B]`."""
    # Training may spread parameters along the mesh axis `data`. They are gathered once here, for the whole pass.
    target, draft = (
        BoundModel(params=whole_rows(bound.model, bound.params), model=bound.model) for bound in (target, draft)
    )
    prompt: Prompt = prompt_of(target.model, batch)
    tokens, lengths = outputs_of(batch)
    drafted = along(draft, prompt, tokens)
    if greedy:
        # The target's most likely tokens are its own output, so a pass of the target is not needed.
        agreed = (argmax(drafted) == tokens).astype(jnp.float32)
    else:
        agreed = jnp.minimum(jax.nn.softmax(along(target, prompt, tokens)), jax.nn.softmax(drafted)).sum(-1)
    counted = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return jnp.where(counted, agreed, 0.0).sum(-1), lengths
