"""Greedy decoding with the engine, and the comparison with another implementation."""

from __future__ import annotations

import functools

import numpy as np

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.drafters.model import NoDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES

GAP = 2e-4


def tokens(model, params, prompt, count) -> np.ndarray:
    """Returns int `[B, count]`, the model's output at temperature 0."""
    engine = Engine(target=model, drafter=NoDrafter(), verifier=Speculative(RULES["spec_decode"]), bonus="target")
    controls = make_controls(prompt.tokens.shape[0], alpha=0.0, temperature=0.0)
    params = {"target": params, "drafter": {}}
    return np.asarray(generate(engine, params, prompt, 0, controls=controls, max_new_tokens=count).tokens)


def assert_equal_but_for_near_ties(found, wanted, logits) -> None:
    """Checks that rows are equal up to the first position at which their two best logits are closer than `GAP`.

    Args:
        found, wanted: `[B, T]`.
        logits: `[B, T + 1, V]` or longer; position `t` gives token `t`.
    """
    for row in range(len(wanted)):
        differs = np.flatnonzero(found[row] != wanted[row])
        if len(differs):
            best = np.sort(logits[row, differs[0]])[-2:]
            assert best[1] - best[0] < GAP, (
                f"row {row} differs at {differs[0]}: the best logits differ by {best[1] - best[0]}"
            )
    assert max(len(set(row)) for row in wanted.tolist()) > 8  # outputs that repeat one token would prove nothing


def once_per_kind(write, tmp_path_factory):
    """Returns a function of a kind of model that calls `write(kind, folder)` once per kind and caches the result."""

    @functools.cache
    def known(kind: str):
        return write(kind, tmp_path_factory.mktemp(kind))

    return known


def assert_decodes(pair, prompts, text, logits, **settings) -> None:
    """Checks that a pair decodes the reference's greedy output, and that some draft tokens are kept and some rejected.

    Args:
        pair: the models.
        prompts: token ids of each row.
        text: the reference's tokens, `[B, T]`.
        logits: as in `assert_equal_but_for_near_ties`.
        settings: those of `sc.decode`.
    """
    out = sc.decode(pair, prompts, temperature=0.0, max_new_tokens=text.shape[1], stop_ids=(), **settings)
    assert_equal_but_for_near_ties(out.tokens, text, logits)
    if settings.get("method") != "autoregressive":
        assert np.sum(out.stats["rejected"]) > 4 and np.sum(out.stats["kept"]) > 0
