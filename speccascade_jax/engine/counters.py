"""Counting inside the loop, and the measures that every experiment reports of it (METHODS section 9).

Counters are integers and short sums per row, nothing the size of the vocabulary.
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
        rounds, target_calls: rounds the row took part in; each is one call of the target, but for those whose block
            was `unverified`: committed as it was drafted, because it ended the row (`Engine.verify_final`).
        drafted: draft tokens handed over; examined: those up to and including the first rejection, or the whole block
            where it is verified as one (`Verifier.joint`).
        kept, rejected: of the examined ones. committed: tokens of the output; discarded: sampled tokens, the
            target's own included, that were not committed.
        draft_steps: forward passes of the draft this row needed.
        unverified_tokens: the tokens of such blocks; neither kept nor examined.
        deferred: float32, Σ of `η` over the committed positions of a deferral rule; decided: how many those are. `η` is
            1 where the target wrote a token whatever the rule says (a bonus that is its own), and 0 in a block that was
            committed unverified.
        examined_at, kept_at: `[B, G]` by position in the block; deferred_at: float32, `Σ r(x)` over the
            examined drafts; kept_although_deferred_at: float32, the same over the kept ones.
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
        """int32 `[B]`, drafts up to the first that is not kept: `examined`, where blocks are not examined as a whole.

        There it is what their positions tell: each is tried where the one before it was kept. Exact where blocks are of
        one length, and a few too many where stop ids or little room make some shorter.
        """
        # entry `j` was tried in as many rounds as entry `j - 1` was kept; the first one wherever it was examined
        before = jnp.concatenate([self.examined_at[:, :1], self.kept_at[:, :-1]], axis=1)
        return jnp.minimum(before, self.examined_at).sum(-1)


_AT = ("examined_at", "kept_at")
_REAL_AT = ("deferred_at", "kept_although_deferred_at")
_WHOLE = tuple(name for name in Counters.__dataclass_fields__ if name != "deferred" and not name.endswith("_at"))
COUNTS = tuple(name for name in _WHOLE if name != "decided")
"""Counters that are reported as they are."""


@flax.struct.dataclass
class Tally:
    """`Counters` as the loop carries them: in two arrays, not in seventeen.

    XLA:CPU hands instructions that become ready together to other threads, and to wake one takes ten times as long as
    to count a round.

    Attributes:
        whole: int32 `[B, 12 + 2 G]`; real: float32 `[B, 1 + 2 G]`: the counters of each type side by side.
    """

    whole: Array
    real: Array

    @classmethod
    def zeros(cls, rows: int, block: int) -> Tally:
        """Nothing counted yet."""
        whole, real = (rows, len(_WHOLE) + 2 * block), (rows, 1 + 2 * block)
        return cls(jnp.zeros(whole, jnp.int32), jnp.zeros(real, jnp.float32))

    @classmethod
    def of(cls, counters: Counters) -> Tally:
        # one order of fields in `of` and `counters`: both are by place alone
        whole = [getattr(counters, name)[:, None] for name in _WHOLE] + [getattr(counters, name) for name in _AT]
        real = [counters.deferred[:, None], *(getattr(counters, name) for name in _REAL_AT)]
        return cls(jnp.concatenate(whole, axis=1, dtype=jnp.int32), jnp.concatenate(real, axis=1, dtype=jnp.float32))

    @property
    def counters(self) -> Counters:
        (whole, at), (real, real_at) = jnp.split(self.whole, [len(_WHOLE)], 1), jnp.split(self.real, [1], 1)
        single = {name: whole[:, place] for place, name in enumerate(_WHOLE)}
        pairs = zip(_AT + _REAL_AT, (*jnp.split(at, 2, 1), *jnp.split(real_at, 2, 1)), strict=True)
        return Counters(**single, deferred=real[:, 0], **dict(pairs))

    def plus(self, counters: Counters) -> Tally:
        """With what was counted elsewhere, in blocks no longer than these."""
        block = self.real.shape[1] // 2  # `1 + 2 G` columns

        def wide(name: str) -> Array:
            held: Array = getattr(counters, name)
            return jnp.pad(held, [(0, 0), (0, block - held.shape[1])])

        other = Tally.of(replace(counters, **{name: wide(name) for name in _AT + _REAL_AT}))
        total: Tally = jax.tree.map(jnp.add, self, other)
        return total


def count_round(old: Tally, turn: Round, defers: bool, bonus: str) -> Tally:
    """Add one round's counts; inactive rows add nothing. `defers`: whether `turn.eta` says anything."""
    # int32 factors, not selects: what is multiplied by 0 is a row that sat the round out
    active = turn.active.astype(jnp.int32)
    block = turn.draft.tokens.shape[1]
    slots = jnp.arange(block)[None]
    verified = (turn.active & ~turn.unverified).astype(jnp.int32)
    examined = verified[:, None] * turn.examined[:, None] > slots
    kept = verified[:, None] * turn.num_kept[:, None] > slots
    # of committed positions alone: rates are over the output, not over what was thrown away
    decided = defers & (jnp.arange(block + 1)[None] < turn.num_new[:, None])
    # did the target draw a token itself?
    own = (turn.rejected | (bonus != "none") | (turn.draft.length == 0)) & ~turn.unverified
    # a tree hands over more tokens than its path has, and each cost a place in the target's call
    spent = turn.draft.length if turn.draft.spent is None else turn.draft.spent
    new = Counters(
        rounds=active,
        target_calls=verified,
        drafted=active * spent,
        examined=verified * turn.examined,
        kept=verified * turn.num_kept,
        rejected=verified * (turn.examined - turn.num_kept),
        committed=turn.num_new,
        discarded=active * (spent + own - turn.num_new),
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
    """float32 `[B, G + 1]`: the chance that a token drafted at a position is handed to the target."""
    # behind the block no draft was there to defer: the target writes by itself, or the rule's law is asked
    behind = jnp.arange(turn.tokens.shape[1])[None] >= turn.draft.length[:, None]
    theirs = behind & (bonus == "target")
    if turn.draft.lawful is not None:
        theirs |= behind & ~turn.draft.lawful[:, None]
    # no law of the target was asked for an unverified block; what stands there belongs to other rows' calls
    return jnp.where(turn.unverified[:, None], 0.0, jnp.where(theirs, 1.0, turn.eta))


# --- measures, on the host


def summarise(stats: Counters, lengths: Any = None, *, rows: Any = None, draft_alone: bool = False) -> dict[str, Any]:
    """The measures over a batch.

    Args:
        stats: counters per row, from a `Generation`.
        lengths: checked against `committed` when given.
        rows: bool or index array choosing rows (padding rows of a last batch, one α of several).
        draft_alone: the draft wrote alone, in the target's place in the engine: its passes are draft steps.

    Returns:
        counts, ratios (`None` where the denominator is 0), `by_position` lists, and `inconclusive`: nothing was
        drafted, so the run says nothing about acceptance.
    """
    chosen = None if rows is None else np.asarray(rows)
    totals = {name: _total(getattr(stats, name), chosen) for name in Counters.__dataclass_fields__}
    if lengths is not None and _total(lengths, chosen) != totals["committed"]:
        raise ValueError("the counters belong to another generation: committed tokens and lengths disagree")
    if draft_alone:  # in the engine's target sits the draft: its calls are no calls of the target
        totals |= {"draft_steps": totals["target_calls"], "target_calls": 0}
    return _measures(totals) | ({"draft_share": 1.0} if draft_alone else {})


def level_counters(inner: Any) -> list[Counters]:
    """Counters of the engines that draft for an engine, from the one right below it down (`Generation.inner`)."""
    return [level["counters"] for level in _levels(inner)[:-1]]


def tail_steps(inner: Any) -> list[Any]:
    """Draft steps that a tail took, `[B]`, for each engine from the target's down; `None` where it has no tail."""
    return [level.get("tail_steps") for level in _levels(inner)]


def _levels(inner: Any) -> list[Mapping[str, Any]]:
    """Statistics of the drafters in each other, from the target's down to the last one, which is no engine."""
    level = inner if isinstance(inner, Mapping) else {}
    return [level, *_levels(level.get("inner"))] if isinstance(level.get("counters"), Counters) else [level]


def _total(counts: Any, chosen: np.ndarray | None) -> Any:
    """The sum over all rows or the chosen ones: a number, or a list of one for each position."""
    rows = np.asarray(counts) if chosen is None else np.asarray(counts)[chosen]
    total = rows[0] if len(rows) == 1 else np.add.reduce(rows)  # one row is its own sum: most of what this takes
    return total.tolist()


def per_example(stats: Counters, *, draft_alone: bool = False) -> dict[str, list[int]]:
    """`PER_EXAMPLE` name -> counts, one per row; `draft_alone` as in `summarise`."""
    counts = {name: np.asarray(getattr(stats, name)).tolist() for name in PER_EXAMPLE}
    if draft_alone:
        counts |= {"draft_steps": counts["target_calls"], "target_calls": [0] * len(counts["committed"])}
    return counts


def _measures(totals: dict[str, Any]) -> dict[str, Any]:
    """The measures of METHODS section 9, and section 6's verification and discard rates, from summed counters."""
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
