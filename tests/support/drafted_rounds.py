"""Greedy rounds of a pair, one by one, with everything that was drafted, for comparisons with a reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.types import Draft
from speccascade_jax.methods.build import assemble
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import engines


def drafted_rounds(pair: Any, prompts: Any, count: int, **settings: Any) -> Iterator[tuple[np.ndarray, Draft, Any]]:
    """Yields the committed tokens before each round, its whole draft as NumPy arrays, and the round.

    Args:
        pair: the models.
        prompts: token ids of each row.
        count: the number of tokens to generate.
        settings: those of `sc.decode`; draft trees too.
    """
    engine, params = assemble(pair, **settings)
    prompt, controls = make_prompt(pair, prompts), engines.controls(len(prompts))

    @jax.jit
    def step(state: Any) -> Any:
        after_round, turn = engine.step(params, state, controls)
        if engine.tree is None:
            return after_round, turn, turn.draft
        # A round returns only the kept path of a tree, so the tree is drafted again; the result is the same.
        drafted = engine.draft(params, state, controls, state.limit - state.length, engine.complete)
        return after_round, turn, drafted.draft

    state = jax.jit(engine.init, static_argnums=4)(params, prompt, rngs.root(0), np.arange(len(prompts)), count)
    while not np.all(state.done):
        after_round, turn, draft = step(state)
        yield np.asarray(state.tokens), jax.tree.map(np.asarray, draft), turn
        state = after_round
