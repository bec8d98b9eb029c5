"""No draft at all: the target alone through the same loop, which makes latencies comparable."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from speccascade_jax.core.protocols import Outcome, Request, Start
from speccascade_jax.core.types import Cache, Draft, Params, PyTree


@dataclass(frozen=True)
class NoDrafter:
    """Blocks of length 0; each round the target gives one token."""

    block: ClassVar[int] = 0
    adaptive: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False

    def init(self, params: Params, start: Start) -> PyTree:
        return ()

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """An empty block, without a law (laws that read `q` can't be used)."""
        zero = jnp.zeros_like(request.length)
        draft = Draft(
            tokens=zero[:, None][:, :0],
            length=zero,
            q=request.block.q,
            q_tilde=request.block.q_tilde,
            greedy=request.controls.draft.temperature <= 0,
            steps=zero,
            bad=jnp.zeros((len(zero), 1), bool),
        )
        return draft, state, request.target.cache

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        return state

    def stats(self, state: PyTree) -> Any:
        return None
