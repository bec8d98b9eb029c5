"""No draft at all: the target alone through the same loop, which makes latencies comparable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from speccascade_jax.core.protocols import DraftRequest
from speccascade_jax.core.types import Array, Cache, Controls, Draft, Params, Prompt, PyTree


@dataclass(frozen=True)
class NoDrafter:
    """Blocks of length 0; each round the target gives one token."""

    block: int = 0

    def init(
        self,
        params: Params,
        prompt: Prompt,
        max_len: int,
        max_rollback: int,
        rng: Array,
        example_ids: Array,
        level: int,
    ) -> PyTree:
        """No state."""
        return ()

    def propose(
        self,
        params: Params,
        state: PyTree,
        request: DraftRequest,
        target_cache: Cache,
        controls: Controls,
        *,
        complete: bool,
        stop_ids: tuple[int, ...],
    ) -> tuple[Draft, PyTree, Cache]:
        """An empty block, without a law (laws that read `q` can't be used)."""
        rows = request.length.shape[0]
        nothing = jnp.zeros((rows, 1, 1), jnp.float32)
        zero = jnp.zeros((rows,), jnp.int32)
        draft = Draft(
            tokens=jnp.zeros((rows, 0), jnp.int32),
            length=zero,
            q=nothing,
            q_tilde=nothing,
            greedy=controls.draft.temperature <= 0,
            steps=zero,
            bad=jnp.zeros((rows, 1), bool),
        )
        return draft, state, target_cache

    def commit(self, state: PyTree, draft: Draft, num_kept: Array, length: Array) -> PyTree:
        """Nothing to do."""
        return state

    def stats(self, state: PyTree) -> Any:
        """None."""
        return None
