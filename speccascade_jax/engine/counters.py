"""Counters inside the loop, and the measures that every experiment reports from them (METHODS section 9).

Counters are integers and short sums per row. None has the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.names import PER_EXAMPLE
from speccascade_jax.core.types import Array, Round


@flax.struct.dataclass
class Counters:
    """Statistics per row; `[B]` int32 unless said otherwise (METHODS section 9).

    Attributes:
        rounds: rounds that the row took part in.
        target_calls: `rounds` without those whose block was `unverified`, that is, committed as drafted because it
            ended the row (`Engine.verify_final`).
        drafted: draft tokens handed over.
        examined: drafts up to and including the first rejected one, or the whole block if it is verified as one
            (`Verifier.joint`).
        kept, rejected: the examined drafts by outcome.
        committed: tokens of the output.
        discarded: sampled tokens, the target's own included, that were not committed.
        draft_steps: forward passes of the draft that this row needed.
        unverified: rounds whose block was committed unverified.
        unverified_tokens: the tokens of such blocks; they are neither kept nor examined.
        deferred: float32, sum of `η` over the committed positions of a deferral rule. `η` is 1 if the target wrote the
            token whatever the rule says (a bonus of its own), and 0 in a block that was committed unverified.
        decided: number of positions that `deferred` sums over.
        examined_at, kept_at: `[B, G]`, by position in the block.
        deferred_at: float32 `[B, G]`, sum of `r(x)` over the examined drafts.
        kept_although_deferred_at: float32 `[B, G]`, sum of `r(x)` over the kept drafts.
    """

    rounds: Array
    target_calls: Array
    drafted: Array
    examined: Array
    kept: Array
    rejected: Array
    committed: Array
    discarded: Array
    draft_steps: Array
    unverified: Array
    unverified_tokens: Array
    deferred: Array
    decided: Array
    examined_at: Array
    kept_at: Array
    deferred_at: Array
    kept_although_deferred_at: Array

    @property
    def tried(self) -> Array:
        """The number of drafts up to the first that is not kept, int32 `[B]`: `examined`, except in joint verification.

        For whole blocks it is estimated from the counts by position: a draft was tried if the draft before it was kept.
        This is exact if all blocks have one length, and a few too many if stop ids or little room shorten some.
        """
        # entry `j` was tried as often as entry `j - 1` was kept; the first one whenever it was examined
        before = jnp.concatenate([self.examined_at[:, :1], self.kept_at[:, :-1]], axis=1)
        return jnp.minimum(before, self.examined_at).sum(-1)


_AT = ("examined_at", "kept_at")
_REAL_AT = ("deferred_at", "kept_although_deferred_at")
_WHOLE = tuple(name for name in Counters.__dataclass_fields__ if name != "deferred" and not name.endswith("_at"))
COUNTS = tuple(name for name in _WHOLE if name != "decided")
"""Counters that are reported as they are."""


@flax.struct.dataclass
class Tally:
    """`Counters` as the loop carries them: in two arrays instead of seventeen.

    XLA:CPU hands instructions that become ready together to other threads, and waking a thread takes ten times as long
    as counting a round.

    Attributes:
        whole: int32 `[B, 12 + 2 G]`, the integer counters next to each other.
        real: float32 `[B, 1 + 2 G]`, the float counters next to each other.
    """

    whole: Array
    real: Array

    @classmethod
    def zeros(cls, rows: int, block: int) -> Tally:
        """Returns a tally in which nothing is counted yet."""
        whole, real = (rows, len(_WHOLE) + 2 * block), (rows, 1 + 2 * block)
        return cls(jnp.zeros(whole, jnp.int32), jnp.zeros(real, jnp.float32))

    @classmethod
    def of(cls, counters: Counters) -> Tally:
        """Packs counters into the two arrays."""
        # `of` and `counters` must use the same order of fields: columns are known by position only
        whole = [getattr(counters, name)[:, None] for name in _WHOLE] + [getattr(counters, name) for name in _AT]
        real = [counters.deferred[:, None], *(getattr(counters, name) for name in _REAL_AT)]
        return cls(jnp.concatenate(whole, axis=1, dtype=jnp.int32), jnp.concatenate(real, axis=1, dtype=jnp.float32))

    @property
    def counters(self) -> Counters:
        """The counters, unpacked from the two arrays."""
        (whole, by_position), (real, real_by_position) = (
            jnp.split(self.whole, [len(_WHOLE)], 1),
            jnp.split(self.real, [1], 1),
        )
        single = {name: whole[:, place] for place, name in enumerate(_WHOLE)}
        pairs = zip(_AT + _REAL_AT, (*jnp.split(by_position, 2, 1), *jnp.split(real_by_position, 2, 1)), strict=True)
        return Counters(**single, deferred=real[:, 0], **dict(pairs))

    def plus(self, counters: Counters) -> Tally:
        """Returns the tally plus `counters`, which may come from an engine with shorter blocks."""
        block = self.real.shape[1] // 2  # `1 + 2 G` columns

        def wide(name: str) -> Array:
            counts: Array = getattr(counters, name)
            return jnp.pad(counts, [(0, 0), (0, block - counts.shape[1])])

        wide_tally = Tally.of(replace(counters, **{name: wide(name) for name in _AT + _REAL_AT}))
        total: Tally = jax.tree.map(jnp.add, self, wide_tally)
        return total


def count_round(old: Tally, turn: Round, defers: bool, bonus: str) -> Tally:
    """Returns the tally with one round added; `defers` tells whether `turn.eta` is meaningful.

    Inactive rows add nothing.
    """
    # int32 factors instead of selects: a row that sat the round out is multiplied by 0
    active = turn.active.astype(jnp.int32)
    block = turn.draft.tokens.shape[1]
    slots = jnp.arange(block)[None]
    verified = (turn.active & ~turn.unverified).astype(jnp.int32)
    examined = verified[:, None] * turn.examined[:, None] > slots
    kept = verified[:, None] * turn.num_kept[:, None] > slots
    # committed positions only: rates describe the output, not the tokens that were cut away
    decided = defers & (jnp.arange(block + 1)[None] < turn.num_new[:, None])
    # whether the target itself drew a token
    target_drew = (turn.rejected | (bonus != "none") | (turn.draft.length == 0)) & ~turn.unverified
    # a tree drafts more tokens than its path has, and each of them took a position in the target's call
    spent = turn.draft.length if turn.draft.spent is None else turn.draft.spent
    new = Counters(
        rounds=active,
        target_calls=verified,
        drafted=active * spent,
        examined=verified * turn.examined,
        kept=verified * turn.num_kept,
        rejected=verified * (turn.examined - turn.num_kept),
        committed=turn.num_new,
        discarded=active * (spent + target_drew - turn.num_new),
        draft_steps=active * turn.draft.steps,
        unverified=active - verified,
        unverified_tokens=(active - verified) * turn.num_new,
        deferred=jnp.where(decided, _deferral(turn, bonus), 0.0).sum(-1),
        decided=decided.sum(-1),
        examined_at=examined,
        kept_at=kept,
        deferred_at=jnp.where(examined, turn.deferred, 0.0),
        kept_although_deferred_at=jnp.where(kept, turn.deferred, 0.0),
    )
    total: Tally = jax.tree.map(jnp.add, old, Tally.of(new))
    return total


def _deferral(turn: Round, bonus: str) -> Array:
    """Returns float32 `[B, G + 1]`, the probability that a token drafted at a position is deferred to the target."""
    # after the block there is no draft to defer: the target writes by itself, or the rule's distribution is used
    after_block = jnp.arange(turn.tokens.shape[1])[None] >= turn.draft.length[:, None]
    theirs = after_block & (bonus == "target")
    if turn.draft.lawful is not None:
        theirs |= after_block & ~turn.draft.lawful[:, None]
    # the target did not score an unverified block; the values there belong to other rows' calls
    return jnp.where(turn.unverified[:, None], 0.0, jnp.where(theirs, 1.0, turn.eta))


# --- measures, on the host


def summarise(stats: Counters, lengths: Any = None, *, rows: Any = None, draft_alone: bool = False) -> dict[str, Any]:
    """Computes the measures of a batch from its counters: counts, rates, and lists by position in the block.

    Args:
        stats: counters per row, from a `Generation`.
        lengths: checked against `committed` when given.
        rows: bool or index array choosing rows (without the padding rows of a last batch; one α of several).
        draft_alone: whether the draft wrote alone, in the target's place in the engine. Its passes are then draft
            steps.

    Returns:
        Counts, ratios (`None` if the denominator is 0), `by_position` lists, and `inconclusive`, which is true if
            nothing was drafted: the run then says nothing about acceptance.

    Raises:
        ValueError: `lengths` and the counters belong to different generations.
    """
    chosen = None if rows is None else np.asarray(rows)
    totals = {name: _total(getattr(stats, name), chosen) for name in Counters.__dataclass_fields__}
    if lengths is not None and _total(lengths, chosen) != totals["committed"]:
        raise ValueError("the counters belong to another generation: committed tokens and lengths disagree")
    if draft_alone:  # the engine's target was the draft model, so its calls are draft steps
        totals |= {"draft_steps": totals["target_calls"], "target_calls": 0}
    return _measures(totals) | ({"draft_share": 1.0} if draft_alone else {})


def level_counters(inner: Any) -> list[Counters]:
    """Returns the counters of the engines that draft for an engine, outermost first (`Generation.inner`)."""
    return [level["counters"] for level in _levels(inner)[:-1]]


def tail_steps(inner: Any) -> list[Any]:
    """Returns the draft steps `[B]` of the tail of each engine's drafter (`AppendedDrafter`), outermost engine first.

    Without a tail the entry is `None`.
    """
    return [level.get("tail_steps") for level in _levels(inner)]


def _levels(inner: Any) -> list[Mapping[str, Any]]:
    """Returns the statistics of nested drafters, outermost first; the last drafter is not an engine."""
    level = inner if isinstance(inner, Mapping) else {}
    return [level, *_levels(level.get("inner"))] if isinstance(level.get("counters"), Counters) else [level]


def _total(counts: Any, chosen: np.ndarray | None) -> Any:
    """Returns the sum over all rows or the chosen ones: a number, or a list with one number per position."""
    rows = np.asarray(counts) if chosen is None else np.asarray(counts)[chosen]
    # one row is its own sum, and skipping the reduction saves most of the time
    total = rows[0] if len(rows) == 1 else np.add.reduce(rows)
    return total.tolist()


def per_example(stats: Counters, *, draft_alone: bool = False) -> dict[str, list[int]]:
    """Returns the counts per row for each name in `PER_EXAMPLE`; for `draft_alone` see `summarise`."""
    counts = {name: np.asarray(getattr(stats, name)).tolist() for name in PER_EXAMPLE}
    if draft_alone:
        counts |= {"draft_steps": counts["target_calls"], "target_calls": [0] * len(counts["committed"])}
    return counts


def _measures(totals: dict[str, Any]) -> dict[str, Any]:
    """Computes the measures of METHODS section 9 and the rates of section 6 from summed counters."""
    counts = {name: totals[name] for name in COUNTS}
    return {
        **counts,
        "acceptance_rate": _ratio(counts["kept"], counts["examined"]),
        "rejection_rate": _ratio(counts["rejected"], counts["examined"]),
        "draft_utilisation": _ratio(counts["kept"], counts["drafted"]),
        "rejections_per_token": _ratio(counts["rejected"], counts["committed"]),
        "deferral_rate": _ratio(totals["deferred"], totals["decided"]),
        "block_efficiency": _ratio(counts["committed"], counts["target_calls"]),
        "average_accepted_length": _ratio(counts["kept"], counts["target_calls"]),
        "verification_rate": _ratio(counts["target_calls"], counts["committed"]),
        "discard_rate": _ratio(counts["discarded"], counts["committed"]),
        "draft_share": _ratio(counts["kept"] + counts["unverified_tokens"], counts["committed"]),
        "by_position": {name.removesuffix("_at"): totals[name] for name in _AT + _REAL_AT},
        "inconclusive": counts["drafted"] == 0,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
