"""Verdicts and rounds without what is not to count: blocks that nobody verified, rows whose logits failed."""

from dataclasses import replace

import jax.numpy as jnp

from speccascade_jax.core.types import Array, Draft, Round
from speccascade_jax.rules.verification import Verdict


def kept_whole(verdict: Verdict, draft: Draft, as_it_is: Array) -> Verdict:
    """The verdict with the blocks of rows `as_it_is` kept whole: their tokens' law is what they were drawn from."""
    return verdict._replace(
        num_kept=jnp.where(as_it_is, draft.length, verdict.num_kept),
        rejected=verdict.rejected & ~as_it_is,
        law=jnp.where(as_it_is[:, None, None], draft.q_tilde, verdict.law),
    )


def without_failed(turn: Round, failed: Array) -> Round:
    """The round without the rows whose logits failed: they commit nothing and are not counted."""
    return replace(
        turn,
        active=turn.active & ~failed,
        num_kept=jnp.where(failed, 0, turn.num_kept),
        rejected=turn.rejected & ~failed,
        examined=jnp.where(failed, 0, turn.examined),
        num_new=jnp.where(failed, 0, turn.num_new),
    )
