"""Lemma 2.1's oracle: greedy speculative decoding that knows beforehand which drafts will not be kept (paper 3).

The target writes alone; one pass of the draft along its output finds where the two disagree; then the engine decodes
with blocks that end just there. `N_discarded = 0` and, as long as no block is cut at its cap, `N_target = |S ∪ {N}|`:
no stop policy does better. It is an upper bound, not a method: its time would count the output twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.sampling import argmax
from speccascade_jax.core.types import Array, BoundModel, Controls, Params, Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.none import NoDrafter
from speccascade_jax.engine.generate import Generation, generate
from speccascade_jax.engine.loop import Engine
from speccascade_jax.models.along import along
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Oracle


@dataclass(frozen=True)
class OracleStopping:
    """`engine`, lossless and drafting under `Oracle`, told where to stop; its parameters are the engine's."""

    engine: Engine

    def __post_init__(self) -> None:
        drafter = self.engine.drafter
        if not (isinstance(drafter, ModelDrafter) and isinstance(drafter.stop, Oracle)):
            raise ValueError(f"the oracle tells a model's drafts when to stop; {drafter} does not ask it")


@partial(jax.jit, static_argnames=("oracle", "max_new_tokens"))
def run(
    oracle: OracleStopping,
    params: Params,
    prompt: Prompt,
    seed: Array,
    *,
    controls: Controls,
    example_ids: Array,
    max_new_tokens: int,
) -> Generation:
    """`generate` under the oracle, seed and ids on the device; `controls` are greedy (`method_controls` sees to it)."""
    engine: Any = oracle.engine
    alone = Engine(
        target=engine.target, drafter=NoDrafter(), accept=Speculative(RULES["spec_decode"]), stop_ids=engine.stop_ids
    )
    given: dict[str, Any] = {"controls": controls, "max_new_tokens": max_new_tokens, "example_ids": example_ids}
    first = generate(alone, {"target": params["target"], "drafter": {}}, prompt, seed, **given)
    draft = BoundModel(params=params["drafter"]["model"], model=engine.drafter.model)
    stops = stop_positions(draft, prompt, first.tokens, first.lengths)
    return generate(engine, {**params, "drafter": {**params["drafter"], "stop": stops}}, prompt, seed, **given)


def stop_positions(draft: BoundModel, prompt: Prompt, tokens: Array, lengths: Array) -> Array:
    """Where the oracle ends a block: bool `[B, P + L + 1]` over a row's positions, prompt included.

    True before every token of `tokens` `[B, L]` that is not the draft's first choice, and before the last of `lengths`
    `[B]`, which the target writes itself: a bonus behind it would be thrown away.
    """
    place = jnp.arange(tokens.shape[1])[None]
    disagree = argmax(along(draft, prompt, tokens)) != tokens
    before = disagree | (place >= lengths[:, None] - 1)
    everywhere = jnp.ones((tokens.shape[0], prompt.tokens.shape[1] + tokens.shape[1] + 1), bool)
    return write_slots(everywhere, before, prompt.length, axis=1)
