"""Tests of layers as a scan: logits, gradients, caches and tokens equal those of separate layers with equal weights."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import speccascade_jax as sc
from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.models import fingerprints, memory_estimate, sharding, stacks
from speccascade_jax.models.cache import write_layer, write_ring
from speccascade_jax.models.decoder import DecoderConfig, DecoderLM, DecoderModule, tiny
from speccascade_jax.models.early_exit import EarlyExit, early_exit
from speccascade_jax.models.families import PRESETS
from speccascade_jax.models.t5 import T5, T5Config, T5Module
from speccascade_jax.pairs.pair import Pair
from tests.support import random_t5, tiny_decoders

# Five layers in groups of two leave one layer over; eight tokens of a window fill the ring buffers.
GEMMA = dataclasses.replace(tiny("gemma2_2b"), num_layers=5, scan_layers=False)
SMALL = T5Config(29, 32, 16, 2, 8, 24, 2, 3, scan_layers=False)
CONFIGS = {"t5": SMALL, "gemma": GEMMA}
UMT5 = dataclasses.replace(SMALL, layer_biases=True)
NEWER = [("umt5", True), ("t5gemma", True), ("t5gemma2", True)]
# Layers with other rotary frequencies and layers without any, and norms of queries and keys.
MIXED = dataclasses.replace(
    tiny("gemma3_4b"), pattern=("local", "unrotated", "global"), num_layers=5, scan_layers=False
)
EXPERTS = dataclasses.replace(tiny("qwen3_30b_a3b"), num_layers=3, scan_layers=False)
# Its encoder is wider and less deep.
T5GEMMA = dataclasses.replace(tiny("t5gemma_9b_2b"), d_model=24, num_layers=3, scan_layers=False)
SHALLOW = {"pattern": ("local", "global"), "num_layers": 3}
T5GEMMA2 = tiny("t5gemma2_1b_1b")
T5GEMMA2 = dataclasses.replace(
    T5GEMMA2, encoder=dataclasses.replace(T5GEMMA2.encoder, **SHALLOW), scan_layers=False, **SHALLOW
)
DEEPER = {"mixed": MIXED, "t5gemma": T5GEMMA, "t5gemma2": T5GEMMA2}
RNG = np.random.default_rng(0)
ENCODER, TOKENS = (RNG.integers(2, 29, (3, width)).astype(np.int32) for width in (7, 12))


@functools.cache
def both(config):
    """Returns a model with unrolled layers and the same model with a scan, as `BoundModel`s."""
    if isinstance(config, T5Config):
        model, params = T5(config), random_t5.parameters(config)
    else:
        model, params = DecoderLM(config), unflatten_dict(tiny_decoders.flat_parameters(config), sep="/")
    scanned = dataclasses.replace(model, config=dataclasses.replace(config, scan_layers=True))
    return BoundModel(params=params, model=model), BoundModel(params=stacks.stack_params(params), model=scanned)


def prompt(config, width=9):
    encoder = jnp.asarray(ENCODER) if config.num_encoder_layers else None
    return Prompt(jnp.asarray(TOKENS[:, :width]), jnp.asarray([width, 4, 1]), encoder)


def inputs(config):
    return (ENCODER, TOKENS) if config.num_encoder_layers else (TOKENS,)


def close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4), left, right)


@pytest.mark.sample(3)
@pytest.mark.laws
@pytest.mark.parametrize(("kind", "remat"), [*itertools.product(CONFIGS, (False, True)), *NEWER])
def test_gradients_and_logits_equal_those_of_unrolled_layers(kind, remat):
    """Compares those of training; `remat` changes nothing for either layout."""
    config = (CONFIGS | DEEPER | {"umt5": UMT5})[kind]
    module = T5Module if isinstance(config, T5Config) else DecoderModule

    def loss(params, config, again):
        logits = module(config, remat=again).apply({"params": params}, *inputs(config))
        return jnp.mean(jnp.tanh(logits[..., :29]))

    plain, scanned = both(config)
    value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    expected = value_and_grad(plain.params, plain.model.config, False)
    value, gradients = value_and_grad(scanned.params, scanned.model.config, remat)
    close((value, stacks.unstack_params(jax.tree.map(np.asarray, gradients))), expected)
    if remat:
        close(value_and_grad(plain.params, plain.model.config, True), expected)


def test_dropout_follows_the_key_and_leaves_out_the_last_layer_most():
    """A layer dropout of almost 1 leaves the last layer out in every row, and the first one in none."""
    scanned = both(SMALL)[1]

    def states(seed, **options):
        module = T5Module(dataclasses.replace(scanned.model.config, **options))
        rngs = {"dropout": jax.random.key(seed)}
        arguments = {"deterministic": False, "rngs": rngs, "mutable": ["exits"]}
        sown = jax.jit(lambda params: module.apply({"params": params}, ENCODER, TOKENS, **arguments)[1])(scanned.params)
        return [np.asarray(state) for state in sown["exits"]["decoder"]["hidden"]]

    first, second, last = states(0, layer_dropout=1 - 1e-6)
    assert not np.array_equal(second, states(1, layer_dropout=1 - 1e-6)[1])  # in other rows this layer is left out
    np.testing.assert_array_equal(second, last)
    close(first, states(0)[0])
    dropped = [states(seed, dropout_rate=0.5)[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert not np.allclose(dropped[0], dropped[2])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "room"), [("t5", None), ("gemma", 3), *(pytest.param(kind, 3, marks=pytest.mark.laws) for kind in DEEPER)]
)
def test_blocks_after_rollbacks_equal_those_of_unrolled_layers(kind, room):
    """Feeds blocks to caches of rows of different lengths; with `room`, local layers have ring buffers that wrap."""
    outputs = []
    for bound in both((CONFIGS | DEEPER)[kind]):
        model = bound.model
        feed = jax.jit(lambda params, cache, tokens, model=model: model.extend_layers(params, cache, tokens, (0, 2, 3)))
        cache = jax.jit(model.prefill, static_argnums=(2, 3))(bound.params, prompt(model.config), 40, room)
        outs = []
        for block in (1, 4, 3, 4, 1, 4, 4):
            out, cache = feed(bound.params, cache, TOKENS[:, :block])
            cache = model.rollback(cache, np.asarray(cache.length) - [block - 1, 0, block // 2])
            outs.append((np.asarray(out.logits)[..., :29], out.layer_states))
        outputs.append(outs)
    close(*outputs)


@pytest.mark.laws
@pytest.mark.parametrize("kind", CONFIGS)
def test_trees_are_fed_and_their_paths_kept(kind):
    tree, outputs = Tree((-1, -1, 0, 0, 1)), []
    for bound in both(CONFIGS[kind]):
        model, params = bound.model, bound.params

        @jax.jit
        def fed(params, model=model):
            cache = model.prefill(params, prompt(model.config), 40)
            start = cache.length
            out, cache = model.extend_branch(params, cache, TOKENS[:, :6], tree.branch(0, tree.size + 1))
            cache = model.keep(cache, start, jnp.asarray([[0, 1, 4], [0, 2, 5], [0, 1, 3]]))
            after = model.extend(params, model.rollback(cache, start + 3), TOKENS[:, :2])[0]
            return out.logits[..., :29], after.logits[..., :29]

        outputs.append(fed(params))
    close(*outputs)


@pytest.mark.parametrize("axis", [1, 2])
def test_a_write_changes_the_ring_buffers_of_one_layer_only(axis):
    stack, shape = RNG.normal(size=(3, 4, 6, 6)).astype(np.float32), [4, 6, 6]
    shape[axis] = 4
    block, start = RNG.normal(size=shape).astype(np.float32), jnp.asarray([4, 13])
    written = write_layer(jnp.asarray(stack), block, start, jnp.asarray(1), axis, ring=True)
    np.testing.assert_array_equal(written[1], write_ring(jnp.asarray(stack[1]), block, start, axis))
    np.testing.assert_array_equal(written[::2], stack[::2])


PROMPTS = [[3, 4, 5, 2, 9, 8, 7, 3], [7, 1], [2, 2, 6]]
SETTINGS = {
    "exit": {"block_size": 3},
    "sampled": {"block_size": 3, "temperature": 1.0, "rule": "spec_decode"},
    "cascade": {"block_size": 2, "temperature": 0.8, "rule": "token_v3", "alpha": 0.3},
    "tree": {"tree": (2, 2), "temperature": 1.0},
}
CASES = [("t5", "sampled"), ("t5", "cascade"), ("gemma", "sampled"), ("gemma", "exit"), ("gemma", "tree")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "name"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.laws) for case in CASES[1:])]
)
def test_tokens_and_counters_equal_those_of_unrolled_layers(kind, name):
    """An early exit writes into the target's own caches; otherwise the draft is another model, with a scan too."""
    decoded = []
    for layout in (0, 1):
        target = both(CONFIGS[kind])[layout]
        fewer = {"num_decoder_layers": 2} if kind == "t5" else {"num_layers": 2}
        other = dataclasses.replace(CONFIGS[kind], **fewer)
        draft = early_exit(target, 3) if name == "exit" else both(other)[layout]
        decoded.append(sc.decode(Pair(target=target, draft=draft), PROMPTS, max_new_tokens=16, **SETTINGS[name]))
    plain, scanned = decoded
    np.testing.assert_array_equal(plain.tokens, scanned.tokens)
    jax.tree.map(np.testing.assert_array_equal, plain.stats, scanned.stats)
    assert np.sum(plain.stats["kept"])


@pytest.mark.parametrize(
    ("config", "layer"),
    [(GEMMA, 0), (GEMMA, 1), (GEMMA, 4), *(pytest.param(c, 2, marks=pytest.mark.laws) for c in (MIXED, EXPERTS))],
)
def test_early_exits_share_the_stacks(config, layer):
    """An exit's arrays are the whole model's; its logits equal those of an exit of unrolled layers."""
    whole, outputs = both(config), []
    plain, scanned = (early_exit(bound, layer) for bound in whole)
    assert scanned.params["decoder"]["layers"] is whole[1].params["decoder"]["layers"]
    for bound in (plain, scanned):
        model: EarlyExit = bound.model

        @jax.jit
        def fed(params, model=model):
            return model.extend(params, model.prefill(params, prompt(config), 30), TOKENS[:, :4])[0].logits

        outputs.append(fed(bound.params))
    close(*outputs)


@pytest.mark.laws
def test_prefill_reads_layers_in_place_if_groups_leave_some_over():
    model = DecoderLM(dataclasses.replace(GEMMA, num_layers=9, d_ff=2048, scan_layers=True))
    params = memory_estimate.abstract(model)
    program = jax.jit(lambda params: model.prefill(params, prompt(model.config), 12, 3)).lower(params).compile()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert program.memory_analysis().temp_size_in_bytes < size / 2


@pytest.mark.parametrize("kind", [*CONFIGS, "umt5", "t5gemma", "experts"])
def test_names_shapes_layouts_and_fingerprints(kind):
    """Every stacked parameter has its layers first; weights have one fingerprint in both layouts, fused or not."""
    plain, scanned = both((CONFIGS | {"umt5": UMT5, "t5gemma": T5GEMMA, "experts": EXPERTS})[kind])
    abstract = flatten_dict(memory_estimate.abstract(scanned.model), sep="/")
    shapes = {name: leaf.shape for name, leaf in abstract.items()}
    assert shapes == {name: leaf.shape for name, leaf in flatten_dict(scanned.params, sep="/").items()}
    expected = {name: leaf.shape for name, leaf in flatten_dict(plain.params, sep="/").items()}
    assert stacks.separate_shapes(shapes) == expected and stacks.stacked_shapes(expected) == shapes
    for path, shape in shapes.items():
        assert len(sharding.spec_of(path)) == len(shape)
        if stacks.in_stack(path):
            assert sharding.spec_of(path) == sharding.P(None, *sharding.spec_of(stacks.layer_path(path, 0)))
    assert fingerprints.of_model(plain) == fingerprints.of_model(scanned)
    needs = [memory_estimate.needs(bound.model, batch=2, length=20, block_size=3) for bound in (plain, scanned)]
    assert needs[0] == needs[1]


def test_the_depth_determines_whether_layers_are_scanned_unless_the_option_is_set():
    shallow = {f"{family}_{size}" for family in ("t5_1_1", "umt5") for size in ("small", "base")}
    shallow |= {"gemma_2b", "gemma3_270m", "llama3.2_1b", "t5gemma_s_s", "t5gemma_b_b", "t5gemma2_270m_270m"}
    shallow |= {name for name in PRESETS if name.startswith("gemma4")}  # their layers differ in shapes
    assert {name for name, config in PRESETS.items() if not config.scanned} == shallow
    deep = dataclasses.replace(GEMMA, num_layers=stacks.SCAN_FROM, scan_layers=None)
    assert deep.scanned and not dataclasses.replace(deep, num_layers=stacks.SCAN_FROM - 1).scanned
    assert not dataclasses.replace(deep, scan_layers=False).scanned
    exit = EarlyExit(DecoderLM(deep), 2)
    assert isinstance(exit.config, DecoderConfig) and exit.config.scanned  # the exit's arrays are the deep model's
