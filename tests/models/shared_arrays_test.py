"""Arrays that several models hold are handed over once, and what they do alike is then computed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.types import Prompt
from speccascade_jax.models.early_exit import distinct, early_exit, restored
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.teacher_forcing import continued
from tests.support import random_t5

CONFIG = T5Config(40, 40, 32, 4, 8, 64, 2, 3)


def test_trees_come_back_and_arrays_are_there_once():
    shared, own = jnp.arange(3.0), jnp.ones(2)
    trees = [{"a": shared, "b": {"c": own}}, {"a": shared}, {"a": jnp.arange(3.0)}]
    arrays, places = distinct(trees)
    assert len(arrays) == 3 and hash(places) is not None
    jax.tree.map(np.testing.assert_array_equal, restored(arrays, places), trees)


@pytest.mark.parametrize("once", [True, False])
def test_layers_below_exits_are_computed_once(once):
    """By the compiler's own count; two arguments with one array in both are two to it."""
    target = random_t5.bound(CONFIG)
    bound = [target, *(early_exit(target, layer) for layer in (1, 2))]
    prompt = Prompt(np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.arange(2, 34, dtype=np.int32)[None])
    tokens = np.arange(2, 18, dtype=np.int32)[None]

    def flops(kinds):
        arrays, places = distinct([each.params for each in kinds])
        held = [each.params for each in kinds]

        def run(given):
            trees = restored(given, places) if once else given
            return [continued(each.model, own, prompt, tokens).hidden for each, own in zip(kinds, trees, strict=True)]

        return jax.jit(run).lower(arrays if once else held).compile().cost_analysis()["flops"]

    ratio = flops(bound) / flops(bound[:1])
    assert (ratio < 1.1) if once else (ratio > 1.6)
