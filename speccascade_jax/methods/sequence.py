"""Sequence-level cascades: the draft writes the whole output, and the target writes anew where its score is too low.

Nothing is drafted for a round here, so these methods are two generations of the one loop, in one program: the second
runs only where some row needs it (METHODS section 4; paper 1, eq. 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.types import Array, Controls, Params, Prompt, Round
from speccascade_jax.engine.counters import Counters
from speccascade_jax.engine.generate import Generation, generate, on_device
from speccascade_jax.engine.loop import Engine
from speccascade_jax.methods import oracle

Score = Callable[[Array, Array], Array]
"""`(log q of each token [B, L], which of them count [B, L]) -> score [B]`."""


def total(logs: Array, counted: Array) -> Array:
    """`Σ log q`: with `c = log(1 − α)` the threshold of paper 1's equation 1."""
    return jnp.where(counted, logs, 0.0).sum(-1)


def mean(logs: Array, counted: Array) -> Array:
    """`Σ log q` per token."""
    return total(logs, counted) / jnp.maximum(counted.sum(-1), 1)


def lowest_tenth(logs: Array, counted: Array) -> Array:
    """The 0.1-quantile of `log q` over the tokens, interpolated linearly: the draft's certainty where it is least."""
    ordered = jnp.sort(jnp.where(counted, logs, jnp.inf), axis=-1)
    at = 0.1 * jnp.maximum(counted.sum(-1) - 1, 0)
    low = jnp.floor(at).astype(jnp.int32)
    values = jnp.take_along_axis(ordered, jnp.stack([low, jnp.ceil(at).astype(jnp.int32)], axis=-1), axis=-1)
    return values[:, 0] + (at - low) * (values[:, 1] - values[:, 0])


SCORES: dict[str, Score | None] = {"sum": total, "mean": mean, "quantile": lowest_tenth, "random": None}
"""Name -> score; "random" has none: one model writes each output, the target with probability `c`, and which one is
decided before anything is written (paper 2's random allocation)."""


@dataclass(frozen=True, kw_only=True)
class SequenceCascade:
    """The draft alone, then the target alone where `score < α`; at random only one of them.

    Parameters are `{"target": …, "draft": …}`.

    Attributes:
        draft, target: engines in which one model writes alone; score: a name in `SCORES`.
    """

    draft: Engine
    target: Engine
    score: str

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}: choose one of {', '.join(SCORES)}")


Program = Engine | SequenceCascade | oracle.OracleStopping
"""What generates: the one loop, or a few of its generations in one program."""


def run(
    engine: Program,
    params: Params,
    prompt: Prompt,
    seed: int | Array = 0,
    **more: Any,
) -> Generation:
    """`generate` of an engine, of a sequence cascade or under an oracle; arguments and result as there."""
    if isinstance(engine, Engine):
        return generate(engine, params, prompt, seed, **more)
    rows = prompt.tokens.shape[0]
    ids = more.pop("example_ids", None)
    more["example_ids"] = on_device(np.arange(rows) if ids is None else ids, np.int32)
    several = oracle.run if isinstance(engine, oracle.OracleStopping) else _cascade
    return several(engine, params, prompt, on_device(seed, np.uint32), **more)


@partial(jax.jit, static_argnames=("cascade", "max_new_tokens"))
def _cascade(
    cascade: SequenceCascade,
    params: Params,
    prompt: Prompt,
    seed: Array,
    *,
    controls: Controls,
    example_ids: Array,
    max_new_tokens: int,
) -> Generation:
    # levels of their own: what the target draws, or chance decides, must not repeat the bits of the draft's draws
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "example_ids": example_ids}
    # the draft alone samples as the draft of the pair, under the target's name: it stands in its place
    own = replace(controls, target=controls.draft)
    key = jax.random.key(seed, impl="threefry2x32")
    zero = jnp.zeros(example_ids.shape, jnp.int32)
    uniform = rngs.RoundKeys(rngs.row_keys(key, example_ids, 2), zero, zero).uniform(zero, rngs.ACCEPT)

    def write() -> Generation:
        return generate(
            cascade.draft, params["draft"], prompt, seed, controls=own, record=log_likelihood, level=1, **given
        )

    scored = SCORES[cascade.score]
    if scored is None:
        anew = uniform < controls.alpha
        first = _only(~anew, write)
    else:
        first = write()
        counted = jnp.arange(max_new_tokens)[None] < first.lengths[:, None]
        score = scored(first.record.T, counted)
        anew = (score < controls.alpha) & (first.failed_at < 0).all(-1)
    first = replace(first, record=None)

    def write_anew(_: Generation) -> Generation:
        again = generate(cascade.target, params["target"], prompt, seed, controls=controls, **given)
        return _chosen(anew, again, first)

    return jax.lax.cond(anew.any(), write_anew, lambda first: _chosen(anew, first, first), first)


def _only(rows: Array, write: Callable[[], Generation]) -> Generation:
    """What `write` gives for `rows`, and nothing for the others, not even a cost; with others alone, no call."""
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(write))
    nothing = replace(nothing, failed_at=nothing.failed_at - 1)
    written = jax.lax.cond(rows.any(), write, lambda: nothing)
    aside = {"record": written.record, "num_rounds": written.num_rounds}  # all else lies row by row
    both = (replace(each, record=None, num_rounds=None) for each in (written, nothing))
    kept = jax.tree.map(lambda new, none: jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, none), *both)
    return replace(kept, **aside)


def log_likelihood(turn: Round) -> Array:
    """float32 `[B]`: the raw `log` of the token that a model writing alone has just committed."""
    chosen = jnp.take_along_axis(turn.pair.p[:, 0], turn.tokens[:, :1], axis=-1)[:, 0]
    return jnp.where(turn.num_new > 0, jnp.log(chosen), 0.0)


def _chosen(anew: Array, target: Generation, draft: Generation) -> Generation:
    """Row by row the target's output or the draft's, and what both cost."""

    def pick(ours: Array, theirs: Array) -> Array:
        return jnp.where(anew.reshape(-1, *(1,) * (ours.ndim - 1)), ours, theirs)

    stats, written = jax.tree.map(pick, target.stats, draft.stats), draft.stats.committed
    none = jnp.zeros_like(written)
    counts: dict[str, Any] = {
        "target_calls": jnp.where(anew, target.stats.target_calls, 0),
        "drafted": written,
        "discarded": jnp.where(anew, written, 0),
        "draft_steps": draft.stats.target_calls,
        "unverified": (~anew).astype(jnp.int32),
        "unverified_tokens": jnp.where(anew, 0, written),
        "deferred": anew.astype(jnp.float32),
        "decided": none + 1,
    }
    return replace(
        draft,
        tokens=pick(target.tokens, draft.tokens),
        lengths=pick(target.lengths, draft.lengths),
        stats=Counters(**{name: counts.get(name, getattr(stats, name)) for name in Counters.__dataclass_fields__}),
        # failures of the model that stands in the target's place: the draft's own are the draft's
        failed_at=pick(target.failed_at, draft.failed_at[:, ::-1]),
        num_rounds=draft.num_rounds + jnp.where(anew.any(), target.num_rounds, 0),
    )
