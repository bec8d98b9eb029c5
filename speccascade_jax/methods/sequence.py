"""★ Sequence-level cascades: the draft writes the whole output, and the target writes anew where its score is too low.

Nothing is drafted for a round here, so these methods are two generations of the one loop, in one program: the second
runs only where some row needs it (METHODS section 4; paper 1, eq. 1).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import expand
from speccascade_jax.core.types import Array, Controls, Params, Prompt, Round
from speccascade_jax.engine.counters import Counters
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, argument, generate, row_ids
from speccascade_jax.methods.autoregressive import engine_of
from speccascade_jax.methods.method import Decoder, Method
from speccascade_jax.methods.settings import Settings, meant
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.rule import Alpha, checked_alpha

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
    share = at - low
    # not the difference of the two: that of infinities is no number
    return jnp.where(share > 0, (1.0 - share) * values[:, 0] + share * values[:, 1], values[:, 0])


SCORES: dict[str, Score | None] = {"sum": total, "mean": mean, "quantile": lowest_tenth, "random": None}
"""Name -> score; "random" has none: one model writes each output, the target with probability `c`, and which one is
decided before anything is written (paper 2's random allocation)."""


@dataclass(frozen=True, kw_only=True)
class SequenceMethod(Method):
    """The draft writes whole outputs, and the target writes anew those whose score is below α; no rule decides.

    Attributes:
        score: a name in `SCORES`; trade_off: what α may be.
    """

    score: str
    trade_off: Alpha

    def alpha(self, settings: Settings) -> Alpha | None:
        return self.trade_off

    def resolved(self, settings: Settings) -> Settings:
        """As they are; parts of a speculation are refused."""
        parts = ("rule", "accept", "verify", "block_size", "bonus", "stop", "tree")
        for name, given in meant(settings, *parts, "drafters", "choose", "policy", "lossy_arms", "tail"):
            why = "it decides by a score" if name == "rule" else "the draft writes whole outputs"
            raise ValueError(f"method {self.name!r} has no {name}, got {given!r}: {why}; leave it out")
        return settings

    def controls(self, settings: Settings, rows: int) -> Controls:
        """α, and the sampling of both models."""
        if settings.stop_threshold is not None:
            why = "nothing compares with one"
            raise ValueError(f"method {self.name!r} has no stop_threshold ({settings.stop_threshold}): {why}")
        return make_controls(
            rows, alpha=checked_alpha(self.trade_off, f"method {self.name!r}", settings.alpha, rows),
            temperature=settings.temperature, draft_temperature=settings.draft_temperature, top_p=settings.top_p,
            top_k=settings.top_k,
        )  # fmt: skip

    def build(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...] = (), head: Head | None = None
    ) -> Decoder:
        """Two engines in which one model writes alone."""
        self.resolved(settings)
        draft, target = (engine_of(bound.model, stop_ids) for bound in (pair.draft, pair.target))
        params = {name: {"target": pair.model(name).params, "drafter": {}} for name in ("draft", "target")}
        return Decoder(self, settings, pair, SequenceCascade(draft=draft, target=target, score=self.score), params)


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

    def generate(
        self, params: Params, prompt: Prompt, seed: int | Array = 0, *, example_ids: Any = None, **more: Any
    ) -> Generation:
        """Two generations as one; a `record` would be of rounds of either: a ValueError."""
        if more.pop("record", None) is not None:
            raise ValueError("a sequence cascade has no rounds of its own to record: record one of its models alone")
        ids = row_ids(example_ids, prompt)
        generation: Generation = _cascade(self, params, prompt, argument(seed, np.uint32), example_ids=ids, **more)
        return generation


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
    # stages of their own (`rngs.STAGES`): what the target draws, or chance decides, must not repeat the draft's bits
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "example_ids": example_ids}
    # the draft alone samples as the draft of the pair, under the target's name: it stands in its place
    own = replace(controls, target=controls.draft)
    key = rngs.root(seed)
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

    written: Generation = jax.lax.cond(anew.any(), write_anew, lambda first: _chosen(anew, first, first), first)
    return written


def _only(rows: Array, write: Callable[[], Generation]) -> Generation:
    """What `write` gives for `rows`, and nothing for the others, not even a cost; with others alone, no call."""
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(write))
    nothing = replace(nothing, failed_at=nothing.failed_at - 1)
    written = jax.lax.cond(rows.any(), write, lambda: nothing)
    aside = {"record": written.record, "num_rounds": written.num_rounds}  # all else lies row by row
    both = (replace(each, record=None, num_rounds=None) for each in (written, nothing))
    kept = jax.tree.map(lambda new, none: jnp.where(expand(rows, new.ndim), new, none), *both)
    rows_written: Generation = replace(kept, **aside)
    return rows_written


def log_likelihood(turn: Round) -> Array:
    """float32 `[B]`: the raw `log` of the token that a model writing alone has just committed."""
    chosen = jnp.take_along_axis(turn.pair.log("p")[:, 0], turn.tokens[:, :1], axis=-1)[:, 0]
    return jnp.where(turn.num_new > 0, chosen, 0.0)


def _chosen(anew: Array, target: Generation, draft: Generation) -> Generation:
    """Row by row the target's output or the draft's, and what both cost."""

    def pick(ours: Array, theirs: Array) -> Array:
        return jnp.where(expand(anew, ours.ndim), ours, theirs)

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
