"""Entries of a tree fed at once, or level by level: each node's logits are those of its own path fed alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import Prompt
from speccascade_jax.models.decoder import DecoderConfig, tiny
from speccascade_jax.models.fake import FakeLM
from speccascade_jax.models.t5 import T5Config
from tests.support import random_t5, tiny_decoders

TREE = Tree((-1, -1, 0, 0, 1, 2, 4))  # two paths of three tokens, and two of two
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
    """A model, a cache with prompts of different lengths in it, its pending tokens and a tree's."""
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
    return model, params, cache, pending, drafted


@partial(jax.jit, static_argnums=0)
def _extended(model, params, cache, tokens):
    return model.extend(params, cache, tokens)[0].logits


def extended(*fed):
    return np.asarray(_extended(*fed))


def extend_branch(model, params, cache, tokens, branch):
    run = jax.jit(lambda cache, tokens: model.extend_branch(params, cache, tokens, branch))
    out, cache = run(cache, tokens)
    return np.asarray(out.logits), cache


def test_every_node_sees_its_own_path_alone(fed):
    model, params, cache, pending, drafted = fed
    entries = jnp.concatenate([pending, drafted], axis=1)
    found, _ = extend_branch(model, params, cache, entries, TREE.branch(0, TREE.size + 1))
    for entry, path in PATHS.items():
        alone = extended(model, params, cache, jnp.concatenate([pending, drafted[:, list(path)]], axis=1))
        at = [0, *(node + 1 for node in path)]
        assert at[-1] == entry
        np.testing.assert_allclose(found[:, at], alone, rtol=1e-4, atol=1e-4)


def test_level_by_level_it_is_the_same(fed):
    model, params, cache, pending, drafted = fed
    entries = jnp.concatenate([pending, drafted], axis=1)
    whole, _ = extend_branch(model, params, cache, entries, TREE.branch(0, TREE.size + 1))
    for depth in range(TREE.depth + 1):
        first, end = TREE.level(depth)
        found, cache = extend_branch(model, params, cache, entries[:, first:end], TREE.branch(first, end))
        np.testing.assert_allclose(found, whole[:, first:end], rtol=1e-4, atol=1e-4)


def test_a_path_that_is_kept_is_as_if_it_alone_had_been_fed(fed):
    """Each row keeps another path, of another length."""
    model, params, cache, pending, drafted = fed
    start = model.consumed(cache)
    _, tree = extend_branch(
        model, params, cache, jnp.concatenate([pending, drafted], axis=1), TREE.branch(0, TREE.size + 1)
    )
    kept = [(1, 4, 6), (0, 3), ()]
    entries = np.zeros((3, TREE.depth + 1), np.int32)
    for row, path in enumerate(kept):
        entries[row, 1 : len(path) + 1] = [node + 1 for node in path]
    tree = jax.jit(model.keep)(tree, start, jnp.asarray(entries))
    tree = model.rollback(tree, start + 1 + jnp.array([len(path) for path in kept]))
    behind = jnp.array([[5, 7]] * 3)
    found = extended(model, params, tree, behind)
    for row, path in enumerate(kept):
        fed_alone = jnp.concatenate([pending, drafted[:, list(path)], behind], axis=1)
        alone = extended(model, params, cache, fed_alone)
        np.testing.assert_allclose(found[row], alone[row, -2:], rtol=1e-4, atol=1e-4)


def test_a_ring_is_refused():
    config: DecoderConfig = tiny("gemma2_2b")
    bound = tiny_decoders.bound(config)
    prompt = Prompt(jnp.ones((1, 3), jnp.int32), jnp.array([3]))
    cache = bound.model.prefill(bound.params, prompt, 200, 4)
    with pytest.raises(ValueError, match="prefill with max_rollback=None"):
        bound.model.extend_branch(bound.params, cache, jnp.ones((1, 2), jnp.int32), TREE.branch(0, 2))


@pytest.mark.parametrize(
    ("parents", "said"), [((0,), "node 0 of the tree follows 0"), ((-1, 0, -1), "shallower"), ((), "without nodes")]
)
def test_what_is_no_tree_is_refused(parents, said):
    with pytest.raises(ValueError, match=said):
        Tree(parents)


def test_trees_by_branching():
    tree = Tree.of_branching((3, 2))
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2) and tree.depth == 2 and tree.level(2) == (4, 10)
    assert tree.children[0].tolist() == [1, 2, 3] and tree.children[2].tolist() == [6, 7, 0]
