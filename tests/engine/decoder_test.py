"""Greedy speculative decoding with windows is greedy decoding of the target: no rollback may lose what is still seen.

Every output is held against the target's own teacher-forced logits, which know no cache: each token must be the argmax
behind its prefix, up to near-ties of float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.drafters.none import NoDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.models.decoder import DecoderLM, teacher_forced_logits, tiny
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed
from tests.support import tiny_decoders

WINDOW, GAP = 6, 1e-4
NEW = 4 * WINDOW + 8  # across four windows, wherever the prompt ends
LENGTHS = np.array([1, 3, 7, 14, 20])  # shorter and longer than the window
CONFIG = tiny("gemma2_2b", window=WINDOW)
LOSSLESS = Speculative(RULES["spec_decode"])

forced = jax.jit(teacher_forced_logits, static_argnums=0)


def models():
    """Target, a middle-sized deviation from it, and a larger one: their drafts are kept often, not always."""
    return (tiny_decoders.bound(CONFIG, seed=1, noise=noise) for noise in (0.0, 0.06, 0.12))


def prompts():
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (len(LENGTHS), LENGTHS.max()))
    return Prompt(jnp.asarray(np.where(np.arange(LENGTHS.max()) < LENGTHS[:, None], tokens, 0)), jnp.asarray(LENGTHS))


def run(engine, params, inner=None):
    controls = make_controls(len(LENGTHS), alpha=0.0, temperature=0.0)
    controls = controls if inner is None else dataclasses.replace(controls, inner=(controls,))
    out = generate(engine, params, prompts(), 0, controls=controls, max_new_tokens=NEW)
    assert (np.asarray(out.failed_at) < 0).all() and (np.asarray(out.lengths) == NEW).all()
    return out


def wrong(tokens) -> int:
    """How many tokens are not the target's argmax behind their prefix, near-ties forgiven."""
    target, prompt, count = next(iter(models())), prompts(), 0
    whole = np.zeros((len(LENGTHS), LENGTHS.max() + NEW), np.int32)
    for row, length in enumerate(LENGTHS):
        whole[row, :length], whole[row, length : length + NEW] = prompt.tokens[row, :length], tokens[row]
    logits = np.asarray(forced(target.model, target.params, whole))
    for row, length in enumerate(LENGTHS):
        at = logits[row, length - 1 : length - 1 + NEW]
        count += int((at.max(-1) - np.take_along_axis(at, tokens[row][:, None], axis=-1)[:, 0] > GAP).sum())
    return count


def two_models(block):
    target, draft, _ = models()
    engine = Engine(target=target.model, drafter=ModelDrafter(draft.model, Fixed(block)), verifier=LOSSLESS)
    return engine, {"target": target.params, "drafter": {"model": draft.params}}


def three_models(block, budget, middle_model=None):
    target, middle, small = models()
    inner = Engine(
        target=middle_model or middle.model, drafter=ModelDrafter(small.model, Fixed(block)), verifier=LOSSLESS
    )
    engine = Engine(target=target.model, drafter=NestedDrafter(inner, budget), verifier=LOSSLESS)
    below = {"target": middle.params, "drafter": {"model": small.params}}
    return engine, {"target": target.params, "drafter": below}


def test_plain_greedy_decoding_crosses_windows():
    target = next(iter(models()))
    engine = Engine(target=target.model, drafter=NoDrafter(), verifier=LOSSLESS, bonus="target")
    out = run(engine, {"target": target.params, "drafter": {}})
    assert wrong(np.asarray(out.tokens)) == 0
    # else nothing below could fail: outputs move, and what they see is their window
    assert np.median([len(set(row)) for row in np.asarray(out.tokens).tolist()]) > NEW // 3


@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.laws), 4, pytest.param(7, marks=pytest.mark.laws)])
def test_speculation_crosses_windows(block):
    out = run(*two_models(block))
    kept = np.asarray(out.stats.kept).sum() / np.asarray(out.stats.drafted).sum()
    assert wrong(np.asarray(out.tokens)) == 0 and 0.2 < kept < 0.95


@pytest.mark.laws
def test_a_hierarchy_crosses_windows():
    out = run(*three_models(block=3, budget=4), inner=True)
    kept = np.asarray(out.stats.kept).sum() / np.asarray(out.stats.drafted).sum()
    assert wrong(np.asarray(out.tokens)) == 0 and 0.2 < kept < 0.95


@dataclasses.dataclass(frozen=True)
class ForgetsTooEarly(DecoderLM):
    """Keeps what its own engine's blocks need, not what the engine above may take back."""

    def prefill(self, params, prompt, max_len, max_rollback=None):
        return super().prefill(params, prompt, max_len, 4)


@pytest.mark.laws
def test_a_ring_for_one_level_alone_spoils_a_hierarchy():
    """What the middle model then hands up is no longer its law; the target still writes the same, with fewer kept."""
    engine, params = three_models(block=3, budget=4)
    spoilt, _ = three_models(block=3, budget=4, middle_model=ForgetsTooEarly(CONFIG))
    right, other = (run(e, params, inner=True) for e in (engine, spoilt))
    assert wrong(np.asarray(other.tokens)) == 0
    assert (np.asarray(right.stats.kept) != np.asarray(other.stats.kept)).any()


@dataclasses.dataclass(frozen=True)
class KeepsItsWindowAlone(DecoderLM):
    """No slot to spare for a block."""

    def slots(self, max_len, max_rollback):
        return tuple(window or max_len for window in self.config.windows)


def test_a_ring_without_room_for_a_block_is_refused():
    engine, params = two_models(4)
    engine = dataclasses.replace(engine, target=KeepsItsWindowAlone(CONFIG))
    with pytest.raises(ValueError, match="a block of 5 tokens does not fit the ring of 6 slots"):
        run(engine, params)
