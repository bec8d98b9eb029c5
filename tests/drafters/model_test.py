"""Tests of drafts in one call of the model, and of the pass of two tokens with which a drafter for GPUs begins."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.protocols import DraftedBlock
from speccascade_jax.core.sampling import laws_and_token
from speccascade_jax.core.types import Sampling
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.models.fake import Fake
from speccascade_jax.runtime import platforms
from speccascade_jax.stopping.policies import Fixed
from tests.support import engines


def run():
    """Returns a generation by fake models, whose tokens depend on the whole prefix; a prompt has a single token."""
    small, large = Fake(16, noise=0.3, seed=1), Fake(16, seed=2)
    built = engines.engine(large, engines.drafting(small, 3), "spec_decode")
    return engines.generated(built, engines.FAKE, length=16, numbers={"temperature": 1.0})


@pytest.mark.laws
def test_blocks_that_begin_with_two_tokens_have_the_same_tokens_in_fewer_steps():
    expected = run()
    jax.clear_caches()
    with platforms.traced_for("cuda"):
        out = run()
    jax.clear_caches()
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.stats.kept, expected.stats.kept)
    assert (out.stats.draft_steps < expected.stats.draft_steps).all()


def test_only_single_drafters_with_a_cache_of_their_own_begin_with_two_tokens():
    drafter, shared = ModelDrafter(Fake(16), Fixed(3)), ModelDrafter(Fake(16), Fixed(3), sits_out=True)
    assert not drafter.feeds_two(complete=False)
    with platforms.traced_for("cuda"):
        assert drafter.feeds_two(complete=False)
        assert not drafter.feeds_two(complete=True) and not shared.feeds_two(complete=False)


@dataclass(frozen=True)
class BlockFake(Fake):
    """A fake model that drafts whole blocks, as a kernel does: it feeds each row at most one missed token."""

    def can_draft(self, params, cache, turns):
        return True

    def draft(self, params, cache, tokens, missed, uniforms, temperature, turns):
        before, ones = self.consumed(cache), jnp.ones_like(temperature)
        _, cache = self.extend(params, cache, tokens[:, :1])
        cache, current, logits, drawn = self.rollback(cache, before + missed), tokens[:, 1], [], []
        for turn in range(turns):
            out, cache = self.extend(params, cache, current[:, None])
            logits.append(out.logits[:, 0])
            uniform = uniforms[:, min(turn, uniforms.shape[1] - 1)]
            _, current = laws_and_token(logits[-1], Sampling(temperature, ones, 0 * ones), uniform)
            drawn.append(current)
        return DraftedBlock(jnp.stack(logits, 1), jnp.stack(drawn, 1), self.rollback(cache, before))


def alone(small):
    return engines.drafting(small, 3), engines.FAKE


def below_two(small):
    """A drafter at the bottom may miss two tokens: its own last one, and the bonus token of the engine above it."""
    return engines.stacked([small, Fake(16, noise=0.2, seed=3)], [2, 4])


def generation(build, model, numbers):
    drafter, params = build(model(16, noise=0.1, seed=1))
    built = engines.engine(Fake(16, seed=2), drafter, "spec_decode", stop_ids=(5,))
    return engines.generated(built, params, length=17, numbers=engines.controls(3, levels=1, **numbers))


@pytest.mark.parametrize("build", [alone, below_two])
@pytest.mark.parametrize("numbers", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.9, "top_k": 3.0}])
def test_blocks_drafted_at_once_equal_those_of_single_steps(build, numbers):
    expected, out = generation(build, Fake, numbers), generation(build, BlockFake, numbers)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.stats.draft_steps, expected.stats.draft_steps)
