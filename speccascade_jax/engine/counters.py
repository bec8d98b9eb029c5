"""Counters that the decoding loop updates, and the measures that experiments compute from them.

The measures are defined in docs/methods.md, section 9. Counters are integers and short sums per row; none is an array
of the vocabulary's size.
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
    """Statistics per row; `[B]` int32 unless said otherwise (docs/methods.md, section 9).

    Attributes:
        rounds: rounds that the row took part in.
        target_calls: `rounds` without those whose block was `unverified`, that is, committed as drafted because it
            ended the row (`Engine.verify_final`).
        drafted: draft tokens that the drafter proposed.
        examined: draft tokens up to and including the first rejected one, or the whole block if verification is joint
            (`Verifier.joint`).
        kept, rejected: how many examined draft tokens were kept and rejected.
        committed: tokens of the output.
        discarded: sampled tokens that were not committed, including those that the target sampled.
        draft_steps: forward passes of the draft that this row needed.
        unverified: rounds whose block was committed unverified.
        unverified_tokens: the tokens of such blocks; they are neither kept nor examined.
        deferred: float32, the sum of `η` over committed positions, if the rule has a deferral. `η` is the probability
            that a drafted token is deferred. It counts as 1 where the token came from the target whatever the rule says
            (a bonus from `p̃`), and as 0 in a block that was committed unverified.
        decided: number of positions that `deferred` sums over.
        examined_at, kept_at: `[B, G]`, `examined` and `kept` by position in the block.
        deferred_at: float32 `[B, G]`, the sum of the deferral `r(x)` over the examined draft tokens, by position.
        kept_although_deferred_at: float32 `[B, G]`, the sum of `r(x)` over the kept draft tokens, by position.
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
        """The number of draft tokens up to and including the first rejected one, int32 `[B]`.

        It equals `examined`, except in joint verification, which examines whole blocks. There it is estimated from the
        counts by position: a draft token was tried if the one before it was kept. The estimate is exact if all blocks
        have the same length, and a little too large if stop ids or the length limit shorten some blocks.
        """
        # draft token `j` was tried as often as `j - 1` was kept; token 0 was tried whenever it was examined
        before = jnp.concatenate([self.examined_at[:, :1], self.kept_at[:, :-1]], axis=1)
        return jnp.minimum(before, self.examined_at).sum(-1)


_AT = ("examined_at", "kept_at")
_REAL_AT = ("deferred_at", "kept_although_deferred_at")
_WHOLE = tuple(name for name in Counters.__dataclass_fields__ if name != "deferred" and not name.endswith("_at"))
COUNTS = tuple(name for name in _WHOLE if name != "decided")
"""The names of the counters that are reported without further computation."""


@flax.struct.dataclass
class Tally:
    """The `Counters` packed into two arrays instead of seventeen, as the decoding loop carries them.

    On a CPU, XLA runs instructions that are ready at the same time on several threads. Waking a thread takes ten times
    as long as counting a round, so two instructions are faster than seventeen.

    Attributes:
        whole: int32 `[B, 12 + 2 G]`, the integer counters, concatenated.
        real: float32 `[B, 1 + 2 G]`, the float counters, concatenated.
    """

    whole: Array
    real: Array

    @classmethod
    def zeros(cls, rows: int, block: int) -> Tally:
        """Returns a tally in which all counters are zero."""
        whole, real = (rows, len(_WHOLE) + 2 * block), (rows, 1 + 2 * block)
        return cls(jnp.zeros(whole, jnp.int32), jnp.zeros(real, jnp.float32))

    @classmethod
    def of(cls, counters: Counters) -> Tally:
        """Packs counters into the two arrays."""
        # `of` and `counters` must use the same order of fields, because columns have no names
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
        """Returns the sum of the tally and `counters`; these may have fewer positions, if their blocks are shorter."""
        block = self.real.shape[1] // 2  # `real` has `1 + 2 G` columns

        def wide(name: str) -> Array:
            counts: Array = getattr(counters, name)
            return jnp.pad(counts, [(0, 0), (0, block - counts.shape[1])])

        wide_tally = Tally.of(replace(counters, **{name: wide(name) for name in _AT + _REAL_AT}))
        total: Tally = jax.tree.map(jnp.add, self, wide_tally)
        return total


def count_round(old: Tally, turn: Round, defers: bool, bonus: str) -> Tally:
    """Returns the tally with the counts of one round added; rows that did not take part add nothing.

    Args:
        old: the tally before the round.
        turn: the record of the round.
        defers: whether the rule has a deferral; otherwise `turn.eta` is not counted.
        bonus: the engine's setting for the token after a fully kept block ("rule", "target" or "none").
    """
    # factors of 0 or 1 remove the counts of rows that did not take part, without a select per counter
    active = turn.active.astype(jnp.int32)
    block = turn.draft.tokens.shape[1]
    slots = jnp.arange(block)[None]
    verified = (turn.active & ~turn.unverified).astype(jnp.int32)
    examined = verified[:, None] * turn.examined[:, None] > slots
    kept = verified[:, None] * turn.num_kept[:, None] > slots
    # only committed positions count, because rates describe the output and not tokens that were cut off
    decided = defers & (jnp.arange(block + 1)[None] < turn.num_new[:, None])
    # whether the target itself drew a token
    target_drew = (turn.rejected | (bonus != "none") | (turn.draft.length == 0)) & ~turn.unverified
    # all tokens of a draft tree count, not only those on the kept path, because the target scored all of them
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
    # the token after the block was not drafted; if it comes from `p̃`, it counts as deferred (1), otherwise as `eta`
    after_block = jnp.arange(turn.tokens.shape[1])[None] >= turn.draft.length[:, None]
    theirs = after_block & (bonus == "target")
    if turn.draft.lawful is not None:
        theirs |= after_block & ~turn.draft.lawful[:, None]
    # an unverified block counts as 0, because its `eta` comes from a target call that only other rows needed
    return jnp.where(turn.unverified[:, None], 0.0, jnp.where(theirs, 1.0, turn.eta))


# --- measures, computed on the host


def summarise(stats: Counters, lengths: Any = None, *, rows: Any = None, draft_alone: bool = False) -> dict[str, Any]:
    """Computes the measures of a batch from its counters: counts, rates, and lists by position in the block.

    Args:
        stats: counters per row, from a `Generation`.
        lengths: the output lengths; if they are given, their sum must equal `committed`.
        rows: a bool or index array that selects rows, for example to leave out the padding rows of the last batch.
        draft_alone: whether the draft model decoded alone. The engine then ran it in the target's place, so its calls
            were counted as target calls, and are reported as draft steps.

    Returns:
        Counts, ratios (`None` if the denominator is 0), `by_position` lists, and `inconclusive`, which is true if
            nothing was drafted: the run then says nothing about acceptance.

    Raises:
        ValueError: `lengths` and the counters belong to different generations.
    """
    chosen = None if rows is None else np.asarray(rows)
    totals = {name: _total(getattr(stats, name), chosen) for name in Counters.__dataclass_fields__}
    if lengths is not None and _total(lengths, chosen) != totals["committed"]:
        raise ValueError("the counters and the lengths belong to different generations: give those of the same one")
    if draft_alone:  # the engine's target was the draft model, so its calls are draft steps
        totals |= {"draft_steps": totals["target_calls"], "target_calls": 0}
    return _measures(totals) | ({"draft_share": 1.0} if draft_alone else {})


def level_counters(inner: Any) -> list[Counters]:
    """Returns the counters of the engines inside a drafter, outermost first; `inner` is `Generation.inner`."""
    return [level["counters"] for level in _levels(inner)[:-1]]


def tail_steps(inner: Any) -> list[Any]:
    """Returns the draft steps `[B]` of each tail, a model that appends tokens to a drafter's block (`AppendedDrafter`).

    In a hierarchy of engines, there is one entry for each engine's drafter, the outermost engine first. The entry of a
    drafter without a tail is `None`.
    """
    return [level.get("tail_steps") for level in _levels(inner)]


def _levels(inner: Any) -> list[Mapping[str, Any]]:
    """Returns the statistics of nested drafters, outermost first; the last drafter contains no engine."""
    level = inner if isinstance(inner, Mapping) else {}
    return [level, *_levels(level.get("inner"))] if isinstance(level.get("counters"), Counters) else [level]


def _total(counts: Any, chosen: np.ndarray | None) -> Any:
    """Returns the sum over all rows or the chosen ones: a number, or a list with one number per position."""
    rows = np.asarray(counts) if chosen is None else np.asarray(counts)[chosen]
    # with a single row there is nothing to sum, and skipping the reduction saves most of the time
    total = rows[0] if len(rows) == 1 else np.add.reduce(rows)
    return total.tolist()


def per_example(stats: Counters, *, draft_alone: bool = False) -> dict[str, list[int]]:
    """Returns the counts that results store for every example (`PER_EXAMPLE`): one list of a number per row for each.

    For `draft_alone` see `summarise`.
    """
    counts = {name: np.asarray(getattr(stats, name)).tolist() for name in PER_EXAMPLE}
    if draft_alone:
        counts |= {"draft_steps": counts["target_calls"], "target_calls": [0] * len(counts["committed"])}
    return counts


def _measures(totals: dict[str, Any]) -> dict[str, Any]:
    """Computes the measures of docs/methods.md, section 9 and the rates of section 6 from summed counters."""
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
