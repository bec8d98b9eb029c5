"""Self-speculation: the target's own first layers draft for it, in its own cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from speccascade_jax.core.protocols import Outcome, Request, Start, StopPolicy
from speccascade_jax.core.types import Cache, Draft, Params, PyTree
from speccascade_jax.drafters.model import ModelDrafter, ModelDrafterState
from speccascade_jax.models.early_exit import HEAD, EarlyExit, exit_params


@dataclass(frozen=True)
class ExitDrafter:
    """Drafts with an early exit of the target under `stop`; parameters are `{}`, `{"head": …}`, and the policy's own.

    What the exit writes into the lower layers of the target's cache is what the target writes there anew when it scores
    the block: the same tokens at the same places. So the cache is handed on as it is, at the length that it had.

    Attributes:
        exit: of the very model that is drafted for; its parameters are read from the request.
        sits_out: as of `ModelDrafter`.
    """

    exit: EarlyExit
    stop: StopPolicy
    sits_out: bool = False
    reads_features: ClassVar[bool] = False

    @property
    def block(self) -> int:
        return self.stop.block

    @property
    def adaptive(self) -> bool:
        return self.stop.adaptive

    def init(self, params: Params, start: Start) -> PyTree:
        return self.stop.init(start.prompt.tokens.shape[0])

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """Draw a block as a model would, with the target's parameters and cache."""
        whole = request.target.cache
        own: dict[str, Any] = {"model": exit_params(request.target.params, self.exit.layer, params.get(HEAD))}
        if "stop" in params:
            own["stop"] = params["stop"]
        began = ModelDrafterState(cache=self.exit.view(whole), policy=state)
        draft, ended, _ = ModelDrafter(self.exit, self.stop, self.sits_out).propose(own, began, request)
        return draft, ended.policy, self.exit.put(whole, ended.cache)

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        """Nothing to take back: the target's cache is its own engine's."""
        return state

    def stats(self, state: PyTree) -> Any:
        return None
