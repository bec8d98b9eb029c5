"""Tests of scoring trees, at once or level by level: a node's logits equal those after its own path."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import Prompt
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.fake import FakeLM
from speccascade_jax.models.t5 import T5Config
from tests.support import random_t5, tiny_decoders

TREE = Tree((-1, -1, 0, 0, 1, 2, 4))  # Two paths of three tokens and two of two.
PATHS = {6: (0, 2, 5), 7: (1, 4, 6), 4: (0, 3), 3: (0, 2)}
"""Entry -> the nodes on its path."""


def t5():
    bound = random_t5.bound(T5Config(29, 32, 16, 2, 8, 24, 1, 2, relative_buckets=8, relative_max_distance=16))
    return bound.model, bound.model.prepare(bound.params)


def decoder(kind):
    bound = tiny_decoders.bound(tiny(kind))
    return bound.model, bound.params


MODELS = {
    "t5": t5,
    "gemma2, with windows": partial(decoder, "gemma2_2b"),
    "llama3.1": partial(decoder, "llama3.1_8b"),
    "fake": lambda: (FakeLM(17).model, ()),
}


QUICK = ("t5", "fake")


@pytest.fixture(scope="module", params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.laws) for n in MODELS])
def fed(request):
    """Returns a model, its cache with prompts of different lengths, and its outputs for a tree of drafted tokens."""
    model, params = MODELS[request.param]()
    rng, rows, width = np.random.default_rng(0), 3, 9
    tokens = rng.integers(2, model.vocab_size, (rows, width)).astype(np.int32)
    encoder = None
    if getattr(model, "is_encoder_decoder", False):
        encoder = jnp.asarray(rng.integers(2, model.vocab_size, (rows, 7)).astype(np.int32))
        tokens[:, 0] = 0
    length = jnp.array([9, 4, 6])
    prompt = Prompt(jnp.asarray(tokens), length, encoder)
    cache = jax.jit(model.prefill, static_argnums=(2,))(params, prompt, 24)
    pending = jnp.take_along_axis(prompt.tokens, length[:, None] - 1, axis=1)
    drafted = jnp.asarray(rng.integers(2, model.vocab_size, (rows, TREE.size)).astype(np.int32))
    entries = jnp.concatenate([pending, drafted], axis=1)
    feed = jax.jit(model.extend_branch, static_argnums=3)
    out, tree = feed(params, cache, entries, TREE.branch(0, TREE.size + 1))

    @jax.jit
    def alone(cache, tokens):
        return model.extend(params, cache, tokens)[0].logits

    return SimpleNamespace(
        model=model, params=params, cache=cache, entries=entries, feed=feed, logits=out.logits, tree=tree, alone=alone
    )


def test_every_node_sees_only_its_own_path(fed):
    for entry, path in PATHS.items():
        path_entries = [0, *(node + 1 for node in path)]
        assert path_entries[-1] == entry
        alone = fed.alone(fed.cache, fed.entries[:, path_entries])
        np.testing.assert_allclose(fed.logits[:, path_entries], alone, rtol=1e-4, atol=1e-4)


def test_feeding_level_by_level_gives_the_same_logits(fed):
    cache = fed.cache
    for depth in range(TREE.depth + 1):
        first, end = TREE.level(depth)
        out, cache = fed.feed(fed.params, cache, fed.entries[:, first:end], TREE.branch(first, end))
        np.testing.assert_allclose(out.logits, fed.logits[:, first:end], rtol=1e-4, atol=1e-4)


def test_after_accepting_a_path_the_cache_holds_only_that_path(fed):
    """Keeps a different path, of a different length, in each row."""
    start = fed.model.consumed(fed.cache)
    kept = [(0, 2, 5, 7), (0, 1, 4), (0,)]  # Entry 0 is the pending token; node n is entry n + 1.
    entries = np.zeros((3, TREE.depth + 1), np.int32)
    for row, path in enumerate(kept):
        entries[row, : len(path)] = path
    tree = jax.jit(fed.model.keep)(fed.tree, start, jnp.asarray(entries))
    tree = fed.model.rollback(tree, start + jnp.array([len(path) for path in kept]))
    next_tokens = jnp.array([[5, 7]] * 3)
    logits = fed.alone(tree, next_tokens)
    for row, path in enumerate(kept):
        alone = fed.alone(fed.cache, jnp.concatenate([fed.entries[:, list(path)], next_tokens], axis=1))
        np.testing.assert_allclose(logits[row], alone[row, -2:], rtol=1e-4, atol=1e-4)


def test_a_ring_cache_is_refused():
    model, params = decoder("gemma2_2b")
    prompt = Prompt(jnp.ones((1, 3), jnp.int32), jnp.array([3]))
    cache = jax.eval_shape(lambda: model.prefill(params, prompt, 200, 4))
    with pytest.raises(ValueError, match="prefill with max_rollback=None"):
        jax.eval_shape(lambda cache: model.extend_branch(params, cache, prompt.tokens[:, :2], TREE.branch(0, 2)), cache)


@pytest.mark.parametrize(
    ("parents", "said"), [((0,), "node 0 of the tree follows 0"), ((-1, 0, -1), "shallower"), ((), "without nodes")]
)
def test_invalid_trees_are_refused(parents, said):
    with pytest.raises(ValueError, match=said):
        Tree(parents)


def test_branching_factors_give_the_right_tree():
    tree = Tree.of_branching((3, 2))
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2) and tree.depth == 2 and tree.level(2) == (4, 10)
    assert tree.children[0].tolist() == [1, 2, 3] and tree.children[2].tolist() == [6, 7, 0]
