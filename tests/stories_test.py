"""Tests of two trained decoder-only models: the published text, with and without a draft, and the acceptance rate."""

from __future__ import annotations

import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import softmax
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.decoder import teacher_forced_logits
from speccascade_jax.pairs.prompts import make_prompt

# SHA-256 of stories260K's expected text at temperature 0 in 200 steps (llama2.c, test_all.py, commit 350e04f)
PUBLISHED = "beeb5cb46785efee81a8545300b31e396b595e5ce6f3b77db201545501981d14"


@pytest.fixture(scope="module")
def pair() -> sc.Pair:
    try:
        return sc.load_pair("stories")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_the_target_alone_writes_the_published_text(pair):
    out = sc.decode(pair, [""], method="autoregressive", max_new_tokens=200)
    assert out.lengths.tolist() == [200]
    assert hashlib.sha256(out.texts[0].encode()).hexdigest() == PUBLISHED, out.texts[0]


def test_the_target_with_a_draft_writes_the_same_text(pair):
    out = sc.decode(pair, [""], max_new_tokens=200, block_size=7)
    assert hashlib.sha256(out.texts[0].encode()).hexdigest() == PUBLISHED, out.texts[0]
    assert 0.6 < out.stats["acceptance_rate"] < 0.9 and out.stats["block_efficiency"] > 2


@pytest.mark.laws
def test_a_prompt_as_text_is_continued(pair):
    out = sc.decode(pair, ["Once upon a time", "The dog was"], max_new_tokens=24)
    assert out.texts[0].startswith(", there was a little") and out.texts[1].startswith(" ")
    among_its_like = sc.decode(pair, ["The dog was"] * 2, max_new_tokens=24)
    assert among_its_like.texts == [out.texts[1]] * 2


def begins(turn):
    """Returns each round's start, and whether it examined a draft."""
    return turn.start, turn.active & (turn.draft.length > 0)


@partial(jax.jit, static_argnums=0)
def law(model, params, tokens):
    return softmax(teacher_forced_logits(model, params, tokens))


@pytest.mark.laws
def test_acceptance_equals_the_overlap_of_the_distributions(pair):
    """T = 1, γ = 1: kept / examined against E Σ min(p, q) at the examined positions, computed without a cache."""
    rows, new = 224, 160
    engine, params = assemble(pair, block_size=1, stop_ids=())
    prompt = make_prompt(pair, [""] * rows)
    controls = make_controls(rows, temperature=1.0)
    out = generate(engine, params, prompt, 5, controls=controls, max_new_tokens=new, record=begins)
    kept, examined = (int(np.asarray(x).sum()) for x in (out.stats.kept, out.stats.drafted))
    tokens = np.concatenate([np.asarray(prompt.tokens)[:, :1], np.asarray(out.tokens)], axis=1)
    overlap = np.concatenate([_overlap(pair, part) for part in np.array_split(tokens, 4)])
    starts, active = (np.asarray(x)[: int(out.num_rounds)] for x in out.record)
    # the draft of a round that began at length n follows token n - 1
    examined_overlap = np.take_along_axis(overlap, np.where(active, starts - 1, 0).T, axis=1).T[active]
    assert examined == len(examined_overlap) >= 20_000
    # given its prefix a draft is kept with probability Σ min(p, q), so the sum of a(1 − a) is the variance
    error = np.sqrt((examined_overlap * (1 - examined_overlap)).sum()) / examined
    assert abs(kept / examined - examined_overlap.mean()) < 3 * error, (kept / examined, examined_overlap.mean(), error)
    assert 0.5 < examined_overlap.mean() < 0.8 and error < 0.005


def _overlap(pair, tokens):
    p, q = (law(bound.model, bound.params, jnp.asarray(tokens)) for bound in (pair.target, pair.draft))
    return np.asarray(jnp.minimum(p, q).sum(-1))
