"""Lemma 2.1's oracle: greedy speculative decoding that knows beforehand which drafts will not be kept (paper 3).

The target writes alone; one pass of the draft along its output finds where the two disagree; then the engine decodes
with blocks that end just there. `N_discarded = 0` and, as long as no block is cut at its cap, `N_target = |S ∪ {N}|`:
no stop policy does better. It is an upper bound, not a method: its time would count the output twice.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.sampling import argmax
from speccascade_jax.core.types import Array, BoundModel, Controls, Params, Prompt
from speccascade_jax.drafters.exits import ExitDrafter
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, argument, generate, row_ids
from speccascade_jax.methods.autoregressive import engine_of
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import Settings
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.models.early_exit import HEAD, exit_params
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.stopping.policies import Oracle


@dataclass(frozen=True, kw_only=True)
class OracleMethod(Speculation):
    """Greedy, lossless speculation by one of the pair's models under the oracle; it is not timed."""

    timed: ClassVar[bool] = False

    def resolved(self, settings: Settings) -> Settings:
        """As of any speculation; refuses a tail, which the oracle would not end."""
        if settings.tail is not None:
            raise ValueError(f"{self.called} ends blocks where a draft is wrong: leave tail={settings.tail!r} out")
        return super().resolved(settings)

    def controls(self, settings: Settings, rows: int) -> Controls:
        """As of any speculation; refuses temperatures above 0."""
        for name in ("temperature", "draft_temperature"):
            value = getattr(settings, name)
            if value is not None and np.max(np.asarray(value)) > 0:
                raise ValueError(f"{self.called} is an oracle of greedy decoding, got {name}={value}: set it to 0")
        return super().controls(settings, rows)

    def build(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...] = (), head: Head | None = None
    ) -> Decoder:
        """The engine, told where to stop."""
        engine, params = self.engine(pair, settings, stop_ids)
        return Decoder(self, settings, pair, OracleStopping(engine), params)


@dataclass(frozen=True)
class OracleStopping:
    """`engine`, lossless and drafting under `Oracle`, told where to stop; its parameters are the engine's."""

    engine: Engine

    def __post_init__(self) -> None:
        drafter = self.engine.drafter
        if not (isinstance(drafter, ModelDrafter | ExitDrafter) and isinstance(drafter.stop, Oracle)):
            called = type(drafter).__name__
            raise ValueError(f"the oracle tells a model's drafts when to stop; {called} does not ask it")

    def generate(
        self, params: Params, prompt: Prompt, seed: int | Array = 0, *, example_ids: Any = None, **more: Any
    ) -> Generation:
        """`generate` under the oracle; `controls` are greedy."""
        ids = row_ids(example_ids, prompt)
        generation: Generation = _generate(self, params, prompt, argument(seed, np.uint32), example_ids=ids, **more)
        return generation


@partial(jax.jit, static_argnames=("oracle", "max_new_tokens", "record"))
def _generate(
    oracle: OracleStopping,
    params: Params,
    prompt: Prompt,
    seed: Array,
    *,
    controls: Controls,
    example_ids: Array,
    max_new_tokens: int,
    record: Any = None,
) -> Generation:
    engine: Any = oracle.engine
    alone = engine_of(engine.target, engine.stop_ids)
    given: dict[str, Any] = {"controls": controls, "max_new_tokens": max_new_tokens, "example_ids": example_ids}
    first = generate(alone, {"target": params["target"], "drafter": {}}, prompt, seed, **given)
    stops = stop_positions(_draft(engine.drafter, params), prompt, first.tokens, first.lengths)
    told = {**params, "drafter": {**params["drafter"], "stop": stops}}
    return generate(engine, told, prompt, seed, record=record, **given)


def _draft(drafter: Any, params: Params) -> BoundModel:
    """The model that drafts; an early exit has the target's parameters."""
    if isinstance(drafter, ModelDrafter):
        return BoundModel(params=params["drafter"]["model"], model=drafter.model)
    shared = exit_params(params["target"], drafter.exit.layer, params["drafter"].get(HEAD))
    return BoundModel(params=shared, model=drafter.exit)


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
