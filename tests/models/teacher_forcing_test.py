"""Tests of feeding models with known tokens: caches catch up, and computations on shared arrays run once.

Arrays that several models share are passed once, and XLA then merges their common computations.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Prompt
from speccascade_jax.models.early_exit import distinct, early_exit, restored
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.teacher_forcing import catch_up, continued
from tests.support import random_t5

TOKENS = np.random.default_rng(0).integers(0, 9, (4, 12), np.int32)


def test_only_active_rows_that_lag_behind_catch_up():
    model, begin, length = Fake(9), np.array([2, 1, 3, 6]), np.array([9, 9, 4, 6])
    prefill = jax.jit(model.prefill, static_argnums=2)
    extend = jax.jit(model.extend)
    for block in (1, 3):
        caught_up = jax.jit(partial(catch_up, model, block=block))
        active = np.array([True, False, True, True])
        cache = caught_up((), prefill((), Prompt(TOKENS, begin), 20), TOKENS, length, active)
        # The second row is inactive; the last row misses no token.
        assert model.consumed(cache).tolist() == [8, 0, 3, 5]
        fresh = prefill((), Prompt(TOKENS, length), 20)
        ours, theirs = (np.asarray(extend((), state, TOKENS[:, 8:9])[0].logits) for state in (cache, fresh))
        np.testing.assert_array_equal(ours[[0, 2, 3]], theirs[[0, 2, 3]])


CONFIG = T5Config(40, 40, 32, 4, 8, 64, 2, 3)


def test_parameter_trees_round_trip_with_each_array_once():
    shared, single = jnp.arange(3.0), jnp.ones(2)
    trees = [{"a": shared, "b": {"c": single}}, {"a": shared}, {"a": jnp.arange(3.0)}]
    arrays, places = distinct(trees)
    assert len(arrays) == 3 and hash(places) is not None
    jax.tree.map(np.testing.assert_array_equal, restored(arrays, places), trees)


def test_layers_below_exits_are_computed_once():
    """Compares the compiler's counts of operations; the same array in two arguments is computed with twice."""
    target = random_t5.bound(CONFIG)
    bound = [target, *(early_exit(target, layer) for layer in (1, 2))]
    prompt = Prompt(np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.arange(2, 34, dtype=np.int32)[None])
    tokens = np.arange(2, 18, dtype=np.int32)[None]

    def flops(kinds, once):
        params = [bound_model.params for bound_model in kinds]
        arrays, places = distinct(params)

        def run(given):
            trees = restored(given, places) if once else given
            return [
                continued(bound_model.model, tree, prompt, tokens).hidden
                for bound_model, tree in zip(kinds, trees, strict=True)
            ]

        return jax.jit(run).lower(arrays if once else params).compile().cost_analysis()["flops"]

    alone = flops(bound[:1], once=True)
    assert flops(bound, once=True) < 1.1 * alone and flops(bound, once=False) > 1.6 * alone
