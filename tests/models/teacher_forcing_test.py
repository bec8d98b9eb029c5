"""Caches that have fallen behind catch up, and the others are left alone."""

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Prompt
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.teacher_forcing import catch_up

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 9, (4, 12)), jnp.int32)


def test_rows_catch_up_where_they_are_active_and_behind():
    model, begin, length = Fake(9), jnp.array([2, 1, 3, 6]), jnp.array([9, 9, 4, 6])
    active = jnp.array([True, False, True, True])
    for block in (1, 3):
        cache = model.prefill((), Prompt(TOKENS, begin), 20)
        cache = catch_up(model, (), cache, TOKENS, length, active, block)
        # the second sits out; the last has nothing to catch up with
        assert model.consumed(cache).tolist() == [8, 0, 3, 5]
        fresh = model.prefill((), Prompt(TOKENS, length), 20)
        ours, theirs = (model.extend((), each, TOKENS[:, 8:9])[0].logits for each in (cache, fresh))
        np.testing.assert_array_equal(np.asarray(ours)[[0, 2, 3]], np.asarray(theirs)[[0, 2, 3]])
