"""Tests of the pass that feeds two tokens, with which a drafter for GPUs begins a block."""

import jax
import numpy as np
import pytest

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
