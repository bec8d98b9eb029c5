"""Blocks as the engine really drafts them, with every token's probability of being kept and the draft's hidden state.

In training data every proposal stands behind the target's own words. In a block it stands behind other proposals, the
longer the block the more of them; so heads are judged here, on fixed blocks of a real run over held-out prompts.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array, Prompt, Round
from speccascade_jax.engine.generate import Generation, raise_on_failure
from speccascade_jax.evaluation.points import Point
from speccascade_jax.evaluation.session import Session
from speccascade_jax.models.teacher_forcing import states
from speccascade_jax.rules import deferral
from speccascade_jax.stopping.acceptance_head import with_law
from speccascade_jax.training.heads.make_data import judged

_ROWS = 64


@dataclass(frozen=True)
class Blocks:
    """`M` blocks of at most `G` tokens; entries at or beyond a block's length mean nothing.

    Attributes:
        lengths: int32 `[M]`; rows: int32 `[M]`, the example each belongs to.
        tokens: int32 `[M, G]`; kept, max_q, entropy_q, q_of_proposal: float32 `[M, G]`, as in `shards`, at the
            token's own prefix: the committed tokens and the block before it.
        hidden: float32 `[M, G, D]`, the draft's state behind each token.
    """

    lengths: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    kept: np.ndarray
    max_q: np.ndarray
    entropy_q: np.ndarray
    q_of_proposal: np.ndarray
    hidden: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        """float32 `[M, G, D + 2]`: what a head reads of each token."""
        return np.asarray(with_law(jnp.asarray(self.hidden), jnp.asarray(self.max_q), jnp.asarray(self.q_of_proposal)))

    @property
    def counted(self) -> np.ndarray:
        """bool `[M, G]`: the tokens there are."""
        return np.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


@dataclass(frozen=True)
class Recorder:
    """What `generate` records of a round: its block, and what is known of the block's tokens under a rule."""

    rule: str
    alpha: float

    def __call__(self, turn: Round) -> dict[str, Array]:
        """`start`, `length` (0 in rows that sat out) int32 `[B]`; `tokens` and `judged`'s `[B, G]`."""
        pair = jax.tree.map(lambda x: x[:, :-1], turn.pair)  # the last entry is the bonus position's
        alpha = jnp.full(turn.start.shape, self.alpha, jnp.float32)
        length = jnp.where(turn.active, turn.draft.length, 0)
        known = judged(pair, turn.draft.tokens, alpha, deferral.get(self.rule))
        return {"start": turn.start, "length": length, "tokens": turn.draft.tokens} | known


def collect(session: Session, point: Point) -> Blocks:
    """The blocks of a run over the evaluation's examples for quality.

    Args:
        point: its method is "speculative" with the rule, the α and the block size.
    """
    parts = []
    recorder = Recorder(point.method.rule(point.settings).name, point.settings.alpha or 0.0)
    for rows, real in session.batches(point.evaluation):
        generation = session.prepare(point, rows)(point.seed, record=recorder)
        raise_on_failure(generation)
        prompt = jax.tree.map(lambda x, rows=rows: x[rows], session.prompts)
        parts.append(_blocks(session, prompt, generation, rows, real))
    return Blocks(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Blocks)))


def _blocks(session: Session, prompt: Prompt, generation: Generation, rows: np.ndarray, real: int) -> Blocks:
    record = {name: np.asarray(value) for name, value in generation.record.items()}
    turn, row = np.nonzero(record["length"] > 0)
    turn, row = turn[row < real], row[row < real]
    found = {name: value[turn, row] for name, value in record.items()}
    before = found["start"] - np.asarray(prompt.length)[row]
    sequences = behind(np.asarray(generation.tokens)[row], before, found["tokens"])
    prompts = jax.tree.map(lambda x: np.asarray(x)[row], prompt)
    hidden = _states(session, prompts, sequences, before, found["tokens"].shape[1])
    known = {name: found[name] for name in ("tokens", "kept", "max_q", "entropy_q", "q_of_proposal")}
    return Blocks(lengths=found["length"], rows=rows[row].astype(np.int32), hidden=hidden, **known)


def behind(committed: np.ndarray, before: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Each row's first `before` `[M]` tokens of `committed` `[M, L]`, then its block `[M, G]`: int32 `[M, L + G]`."""
    size = blocks.shape[1]
    out = np.pad(committed, [(0, 0), (0, size)])
    np.put_along_axis(out, before[:, None] + np.arange(size)[None], blocks, axis=1)
    return out


def _states(session: Session, prompts: Prompt, sequences: np.ndarray, before: np.ndarray, size: int) -> np.ndarray:
    """The hidden states of the blocks' tokens, float32 `[M, G, D]`, in passes of one shape."""
    draft, parts = session.pair.draft, []
    for start in range(0, len(sequences), _ROWS):
        chosen = np.resize(np.arange(start, min(start + _ROWS, len(sequences))), _ROWS)
        some: Any = jax.tree.map(lambda x, chosen=chosen: x[chosen], (prompts, sequences, before))
        parts.append(np.asarray(_pass(draft.model, draft.params, *some, size))[: len(sequences) - start])
    return np.concatenate(parts)


@partial(jax.jit, static_argnames=("model", "size"))
def _pass(model: Any, params: Any, prompt: Prompt, tokens: Array, before: Array, size: int) -> Array:
    hidden = states(model, params, prompt, tokens).astype(jnp.float32)
    return jnp.take_along_axis(hidden, (before[:, None] + jnp.arange(size)[None])[..., None], axis=1)
