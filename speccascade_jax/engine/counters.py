"""Counting inside the loop: integers and short sums per row, nothing the size of the vocabulary kept."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Round


@flax.struct.dataclass
class Counters:
    """Statistics per row; `[B]` int32 unless said otherwise (METHODS section 9).

    Attributes:
        rounds, target_calls: rounds the row took part in; each is one call of the target, but for those whose block
            was `unverified`: committed as it was drafted, because it ended the row (`Engine.verify_final`).
        drafted: draft tokens handed over; examined: those up to and including the first rejection.
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

    @classmethod
    def zeros(cls, rows: int, block: int) -> Counters:
        """Nothing counted yet."""
        real = {"deferred", "deferred_at", "kept_although_deferred_at"}

        def zeros(name: str) -> Array:
            shape = (rows, block) if name.endswith("_at") else (rows,)
            return jnp.zeros(shape, jnp.float32 if name in real else jnp.int32)

        return cls(**{name: zeros(name) for name in cls.__dataclass_fields__})


def count_round(old: Counters, turn: Round, defers: bool, bonus: str) -> Counters:
    """Add one round's counts; inactive rows add nothing. `defers`: whether `turn.eta` says anything."""
    active = turn.active.astype(jnp.int32)
    block = turn.draft.tokens.shape[1]
    slots = jnp.arange(block)[None]
    verified = (turn.active & ~turn.unverified).astype(jnp.int32)
    examined = verified[:, None] * (turn.num_kept + turn.rejected)[:, None] > slots
    kept = verified[:, None] * turn.num_kept[:, None] > slots
    decided = defers & (jnp.arange(block + 1)[None] < turn.num_new[:, None])
    # did the target draw a token itself?
    own = (turn.rejected | (bonus != "none") | (turn.draft.length == 0)) & ~turn.unverified
    return Counters(
        rounds=old.rounds + active,
        target_calls=old.target_calls + verified,
        drafted=old.drafted + active * turn.draft.length,
        examined=old.examined + verified * (turn.num_kept + turn.rejected),
        kept=old.kept + verified * turn.num_kept,
        rejected=old.rejected + turn.rejected,
        committed=old.committed + turn.num_new,
        discarded=old.discarded + active * (turn.draft.length + own - turn.num_new),
        draft_steps=old.draft_steps + active * turn.draft.steps,
        unverified=old.unverified + active - verified,
        unverified_tokens=old.unverified_tokens + (active - verified) * turn.num_new,
        deferred=old.deferred + jnp.where(decided, _deferral(turn, bonus), 0.0).sum(-1),
        decided=old.decided + decided.sum(-1),
        examined_at=old.examined_at + examined,
        kept_at=old.kept_at + kept,
        deferred_at=old.deferred_at + jnp.where(examined, turn.deferred, 0.0),
        kept_although_deferred_at=old.kept_although_deferred_at + jnp.where(kept, turn.deferred, 0.0),
    )


def _deferral(turn: Round, bonus: str) -> Array:
    """float32 `[B, G + 1]`: the chance that a token drafted at a position is handed to the target."""
    behind = jnp.arange(turn.tokens.shape[1])[None] >= turn.draft.length[:, None]
    theirs = behind & (bonus == "target")
    if turn.draft.lawful is not None:
        theirs |= behind & ~turn.draft.lawful[:, None]
    # no law of the target was asked for an unverified block; what stands there belongs to other rows' calls
    return jnp.where(turn.unverified[:, None], 0.0, jnp.where(theirs, 1.0, turn.eta))
