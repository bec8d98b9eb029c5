"""Tests of greedy speculative decoding with attention windows: no rollback may lose a token that is still visible.

Every output is compared with the target's teacher-forced logits, which use no cache. Each token must be the argmax of
the logits after its prefix, up to near-ties in float32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from speccascade_jax.core.arrays import right_pad
from speccascade_jax.drafters.model import NoDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.models.decoder import DecoderLM, teacher_forced_logits, tiny
from tests.support import engines, tiny_decoders

WINDOW, GAP = 6, 1e-4
NEW = 4 * WINDOW + 8  # outputs extend over four windows, wherever the prompt ends
LENGTHS = np.array([1, 3, 7, 14, 20])  # prompts shorter and longer than the window
WIDTH = LENGTHS.max() + NEW
CONFIG = tiny("gemma2_2b", window=WINDOW)
TOKENS = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (len(LENGTHS), LENGTHS.max()))
PROMPTS = engines.prompts(*(row[:length] for row, length in zip(TOKENS, LENGTHS, strict=True)))

forced = jax.jit(teacher_forced_logits, static_argnums=0)


@functools.cache
def bound(noise=0.0):
    """Returns the target; with noise, a model that deviates from the target, so that some of its drafts are kept."""
    return tiny_decoders.bound(CONFIG, seed=1, noise=noise)


def run(drafter, params, levels=0, **more):
    engine = engines.engine(bound().model, drafter, **more)
    out = engines.generated(engine, params, PROMPTS, NEW, target=bound().params, numbers={"levels": levels})
    assert (np.asarray(out.failed_at) < 0).all() and (np.asarray(out.lengths) == NEW).all()
    return out


def wrong(tokens) -> int:
    """Returns how many tokens are not the target's argmax after their prefix; near-ties are not counted."""
    tokens = np.asarray(tokens)
    whole = right_pad([[*read[:n], *new] for read, n, new in zip(TOKENS, LENGTHS, tokens, strict=True)], WIDTH)
    logits = np.asarray(forced(bound().model, bound().params, whole))
    next_logits = np.take_along_axis(logits, (LENGTHS[:, None] - 1 + np.arange(NEW))[..., None], axis=1)
    written = np.take_along_axis(next_logits, tokens[..., None], axis=-1)[..., 0]
    return int((next_logits.max(-1) - written > GAP).sum())


def one_draft(block):
    return engines.drafting(bound(0.12).model, block), {"model": bound(0.12).params}


def hierarchy(middle_model=None):
    """Returns a drafter in which a small model drafts 3 tokens for a middle model, which drafts 4 for the target."""
    drafter, params = one_draft(3)
    inner = engines.engine(middle_model or bound(0.06).model, drafter)
    return NestedDrafter(inner, 4), {"target": bound(0.06).params, "drafter": params}


def test_plain_greedy_decoding_crosses_windows():
    out = run(NoDrafter(), {}, bonus="target")
    assert wrong(out.tokens) == 0
    # outputs must vary, or the tests below could not fail
    assert np.median([len(set(row)) for row in np.asarray(out.tokens).tolist()]) > NEW // 3


@pytest.mark.parametrize("block", [4, *(pytest.param(block, marks=pytest.mark.laws) for block in (1, 7, "hierarchy"))])
def test_speculation_crosses_windows(block):
    out = run(*hierarchy(), levels=1) if block == "hierarchy" else run(*one_draft(block))
    kept = np.asarray(out.stats.kept).sum() / np.asarray(out.stats.drafted).sum()
    assert wrong(out.tokens) == 0 and 0.2 < kept < 0.95


@dataclasses.dataclass(frozen=True)
class ForgetsTooEarly(DecoderLM):
    """A planted bug: the cache keeps too few entries for rollbacks by the outer engine."""

    def prefill(self, params, prompt, max_len, max_rollback=None):
        return super().prefill(params, prompt, max_len, 4)


@pytest.mark.laws
def test_a_ring_that_is_too_small_for_the_hierarchy_changes_acceptance():
    """Expects other counts of kept tokens, but the same output, because the target verifies every token."""
    right, wrong_size = (run(*hierarchy(middle), levels=1) for middle in (None, ForgetsTooEarly(CONFIG)))
    assert wrong(wrong_size.tokens) == 0
    assert (np.asarray(right.stats.kept) != np.asarray(wrong_size.stats.kept)).any()


@dataclasses.dataclass(frozen=True)
class KeepsItsWindowAlone(DecoderLM):
    """A model whose cache has as many slots as the attention window, so none to spare for a block."""

    def slots(self, max_len, max_rollback):
        return tuple(window or max_len for window in self.config.windows)


def test_a_ring_without_room_for_a_block_is_refused():
    drafter, params = one_draft(4)
    engine = engines.engine(KeepsItsWindowAlone(CONFIG), drafter)
    with pytest.raises(ValueError, match="a block of 5 tokens does not fit the ring of 6 slots"):
        engines.generated(engine, params, PROMPTS, NEW, target=bound().params)
