"""Tests of early exits: their logits, and that drafting in the target's own cache changes only the use of memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.drafters.model import ExitDrafter, ModelDrafter
from speccascade_jax.engine.generate import compiled_for
from speccascade_jax.methods import build_drafter
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Settings
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.early_exit import EarlyExit, early_exit
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.teacher_forcing import continued
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.stopping.policies import Fixed
from tests.support import random_t5, tiny_decoders

T5_CONFIG = T5Config(290, 292, 16, 2, 8, 24, 1, 3)
WINDOWED = dataclasses.replace(tiny("gemma2_2b", vocab_size=290), num_layers=4)
run = jax.jit(continued, static_argnums=0)


def _t5():
    bound = random_t5.bound(T5_CONFIG)
    return BoundModel(bound.model.prepare(bound.params), bound.model)


@pytest.fixture(scope="module", params=["t5", pytest.param("windowed decoder", marks=pytest.mark.laws)])
def target(request):
    return _t5() if request.param == "t5" else tiny_decoders.bound(WINDOWED)


PROMPTS = [[7, 30, 200, 5, 9, 1], [12, 9, 1]]


def _prompt(bound):
    tokens = np.array([PROMPTS[0], [*PROMPTS[1], 3, 3, 3]], np.int32)
    if bound.model.is_encoder_decoder:
        return Prompt(np.zeros((2, 1), np.int32), np.ones(2, np.int32), tokens)
    return Prompt(tokens, np.full(2, 6, np.int32))


def test_an_exit_equals_the_model_with_zeroed_upper_layers(target):
    prompt, tokens = _prompt(target), np.array([[3, 8, 91, 270], [4, 77, 102, 6]], np.int32)
    layers = sum(name.startswith("layers_") for name in target.params["decoder"])
    for layer in range(layers + 1):  # the last exit is the model itself
        muted = dict(target.params["decoder"])
        for name in list(muted):
            if name.startswith("layers_") and int(name[7:]) >= layer:
                muted[name] = jax.tree.map(lambda leaf: leaf * 0, muted[name])
        expected = run(target.model, {**target.params, "decoder": muted}, prompt, tokens).logits
        bound = early_exit(target, layer)
        logits = run(bound.model, bound.params, prompt, tokens).logits
        np.testing.assert_allclose(logits[..., :290], expected[..., :290], atol=2e-5)


def test_an_exit_can_have_its_own_head(target):
    config = target.model.config
    head = jnp.asarray(np.random.default_rng(0).normal(size=(config.d_model, config.num_embeddings)), jnp.float32)
    bound = early_exit(target, 1, head)
    prompt, tokens = _prompt(target), np.array([[3, 8], [4, 77]], np.int32)
    output = run(bound.model, bound.params, prompt, tokens)
    wanted = np.asarray(output.hidden) @ np.asarray(head)
    if getattr(config, "output_cap", None):
        wanted = config.output_cap * np.tanh(wanted / config.output_cap)
    np.testing.assert_allclose(output.logits[..., :290], wanted[..., :290], atol=2e-4)


def _pairs(target, layer):
    """Returns two pairs whose draft is an exit of the target: one shares the target's arrays, one has copies."""
    copied = BoundModel(jax.tree.map(jnp.array, target.params), target.model)
    return Pair(target, early_exit(target, layer)), Pair(target, early_exit(copied, layer))


@pytest.mark.sample(3)
# odd layers have attention windows
@pytest.mark.parametrize(
    ("layer", "temperature"),
    [(2, 1.0), *(pytest.param(*case, marks=pytest.mark.laws) for case in ((0, 1.0), (1, 1.0), (3, 1.0), (3, 0.0)))],
)
def test_drafting_in_the_targets_cache_equals_a_separate_draft(target, layer, temperature):
    """Compares tokens and acceptance with those of a separate draft; the greedy output must be the target's."""
    shared, copied = _pairs(target, layer)
    assert isinstance(_drafter(shared), ExitDrafter) and isinstance(_drafter(copied), ModelDrafter)
    settings = {"temperature": temperature, "max_new_tokens": 20, "seed": 5, "stop_ids": (1,)}
    outs = [sc.decode(pair, PROMPTS, block_size=3, **settings) for pair in (shared, copied)]
    np.testing.assert_array_equal(outs[0].tokens, outs[1].tokens)
    assert outs[0].stats["acceptance_rate"] == outs[1].stats["acceptance_rate"]
    if temperature == 0:
        alone = sc.decode(shared, PROMPTS, method="autoregressive", **settings)
        np.testing.assert_array_equal(outs[0].tokens, alone.tokens)


def _drafter(pair):
    return build_drafter.drafter_of(pair, Settings(), Fixed(3), "test")[0]


@pytest.mark.laws
def test_exits_can_be_stacked(target):
    """Lets exit 1 draft for exit 2 in its cache, and exit 2 for the target; expects the target's greedy output."""
    pair = Pair(target, early_exit(target, 1), others={"middle": early_exit(target, 2)})
    level = sc.Level(model="middle", budget=3, block_size=2)
    engine, _ = build_drafter.level_engine(pair, level)
    assert isinstance(engine.drafter, ExitDrafter)
    settings = {"max_new_tokens": 16, "stop_ids": (1,)}
    out = sc.decode(pair, PROMPTS, drafters=(level,), **settings)
    alone = sc.decode(pair, PROMPTS, method="autoregressive", **settings)
    np.testing.assert_array_equal(out.tokens, alone.tokens)


def _memory(pair, method, block_size=3):
    """Returns the memory of the program of a generation in bytes: for its arguments, and for temporary arrays."""
    engine, params = assemble(pair, method=method, block_size=block_size)
    compiled = compiled_for(engine, params, make_prompt(pair, PROMPTS), make_controls(2), max_new_tokens=400)
    analysis = compiled.memory_analysis()
    return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


@pytest.mark.laws
def test_self_drafting_needs_no_second_weights_or_cache():
    target = _t5()
    config, layer = target.model.config, 2
    shared, copied = _pairs(target, layer)
    alone, own_exit, copied_exit = (
        _memory(pair, method)
        for pair, method in ((shared, "autoregressive"), (shared, "spec_decode"), (copied, "spec_decode"))
    )
    # the arguments differ only by the draft's sampling settings
    assert abs(own_exit[0] - alone[0]) < 100 and own_exit[0] < 0.7 * copied_exit[0], (alone, own_exit, copied_exit)
    cache = layer * 2 * 2 * config.num_heads * config.head_dim * 400 * 4  # bytes of the keys and values of two rows
    laws = 2 * 2 * 4 * config.num_embeddings * 4  # q and its scaled form, for a block and its bonus position
    assert copied_exit[1] - own_exit[1] > 0.9 * cache, (alone, own_exit, copied_exit)
    # the exit has no cache of its own, and its writes into the target's cache make no copy of it
    assert own_exit[1] - alone[1] < 6 * laws < 0.6 * cache, (alone, own_exit, copied_exit)


def test_invalid_exits_are_refused(target):
    depth = 3 if target.model.is_encoder_decoder else 4
    with pytest.raises(ValueError, match=f"no exit at layer {depth + 1}: the model's decoder has layers 0 to {depth}"):
        early_exit(target, depth + 1)
    with pytest.raises(ValueError, match=r"has shape \(2, 2\)"):
        early_exit(target, 1, jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match="Table has no early exits"):
        EarlyExit(sc.TableLM(np.zeros((3, 3))).model, 0)
