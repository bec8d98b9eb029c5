"""Mixture-of-experts layers: every way of computing them against a sum for each token, gradients, reads in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.types import Prompt
from speccascade_jax.models import experts, memory_estimate
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.experts import Blocks, Experts, MixtureOfExperts
from speccascade_jax.models.operations import token_costs
from speccascade_jax.models.products import pack

CONFIG = dataclasses.replace(tiny("qwen3_30b_a3b"), d_model=16, expert_d_ff=8)
RNG = np.random.default_rng(0)
FEW, MANY = (RNG.normal(size=(2, tokens, 16)).astype(np.float32) for tokens in (6, experts.FEW // 2 + 10))
PARAMS = jax.tree.map(
    lambda leaf: RNG.normal(size=leaf.shape).astype(np.float32) / 2,
    jax.eval_shape(MixtureOfExperts(CONFIG).init, jax.random.key(0), FEW)["params"],
)


def mixed(params, x, fixed):
    return jax.jit(MixtureOfExperts(CONFIG).apply, static_argnums=2)({"params": params}, x, fixed)


def by_token(params, x):
    """Computes every token's sum of its three most probable experts, without any grouping."""
    logits = x @ params["router"]["weight"]
    chosen = jax.lax.stop_gradient(jnp.argsort(-logits, -1)[..., :3])
    weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, -1))  # normed, so other experts don't matter
    gate, linear, out = (params["experts"][name]["kernel"][chosen] for name in ("wi_0", "wi_1", "wo"))
    units = jax.nn.silu(jnp.einsum("bte,btkef->btkf", x, gate)) * jnp.einsum("bte,btkef->btkf", x, linear)
    return jnp.einsum("btk,btkf,btkfe->bte", weights, units, out)


@pytest.mark.parametrize(("x", "fixed"), [(FEW, True), (MANY, True), (MANY, False)], ids=["few", "many", "training"])
def test_every_way_gives_each_tokens_sum(x, fixed):
    np.testing.assert_allclose(mixed(PARAMS, x, fixed), by_token(PARAMS, x), atol=2e-5)


def test_gemma_4_routes_by_a_norm_of_another_state_and_multiplies_normed_weights_by_factors():
    """The experts' norm afterwards hides a common factor of all weights from the model's logits."""
    config = dataclasses.replace(CONFIG, parallel_experts=True, activation="gelu")
    shapes = jax.eval_shape(MixtureOfExperts(config).init, jax.random.key(0), FEW)["params"]
    params = jax.tree.map(lambda leaf: RNG.normal(size=leaf.shape).astype(np.float32) / 2, shapes)
    state, router = RNG.normal(size=FEW.shape).astype(np.float32) * 3, params["router"]
    normed = state / np.sqrt((state**2).mean(-1, keepdims=True) + config.norm_epsilon) * router["norm"]["scale"] / 4
    logits = normed @ router["weight"]
    chosen = np.argsort(-logits, -1)[..., :3]
    weights = np.exp(np.take_along_axis(logits, chosen, -1))
    weights *= params["factors"]["scale"][chosen] / weights.sum(-1, keepdims=True)
    output = jax.jit(MixtureOfExperts(config).apply, static_argnums=2)({"params": params}, FEW, True, state)
    run = jax.jit(Experts(config).apply, static_argnums=4)
    expected = run({"params": params["experts"]}, FEW, weights, chosen, True)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    assert np.abs(output).max() > 0.1


@pytest.mark.parametrize("x", [FEW, MANY], ids=["few", "many"])
def test_no_expert_has_a_capacity(x):
    """All tokens choose the same experts, which fills several blocks of each and leaves the others unused."""
    chosen = jnp.broadcast_to(jnp.array([5, 2, 7]), (*x.shape[:2], 3))
    weights = jnp.broadcast_to(jnp.array([0.5, 0.25, 1.0]), chosen.shape)
    run = jax.jit(Experts(CONFIG).apply, static_argnums=4)
    kernels = {"params": PARAMS["experts"]}
    expected = sum(
        weight * run(kernels, x, jnp.ones_like(weights[..., :1]), chosen[..., i : i + 1], True)
        for i, weight in enumerate((0.5, 0.25, 1.0))
    )
    np.testing.assert_allclose(run(kernels, x, weights, chosen, True), expected, atol=2e-5)
    assert np.abs(expected).min(-1).max() > 0.01
    # An expert that no token chose is never read.
    unread = jax.tree.map(
        lambda leaf: leaf * np.where(np.isin(np.arange(8), [2, 5, 7]), 1, np.nan)[:, None, None], kernels
    )
    assert np.isfinite(run(unread, x, weights, chosen, True)).all()


def test_an_experts_blocks_follow_each_other_and_empty_ones_come_last():
    blocks = Blocks.of(jnp.array([[1, 3], [1, 3], [1, 0]]), 4, 2)
    assert blocks.tokens.tolist() == [[2, 3], [0, 1], [2, 3], [0, 1], [3, 3], [3, 3], [3, 3]]
    assert (blocks.experts[:4].tolist(), int(blocks.filled)) == ([0, 1, 1, 3], 4)


def test_the_router_and_the_experts_get_gradients():
    def loss(compute):
        return jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.tanh(compute(params, x))), (0, 1)))(PARAMS, MANY)

    ours, expected = (loss(compute) for compute in (lambda params, x: mixed(params, x, False), by_token))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, expected)
    assert np.abs(ours[0]["router"]["weight"]).max() > 0.1


def test_experts_of_8_bits_have_a_scale_per_column_of_each_expert():
    packed = pack(PARAMS, CONFIG, "int8")
    plain = jax.tree.map(np.asarray, packed, is_leaf=lambda leaf: hasattr(leaf, "panels"))
    kernel, scale = PARAMS["experts"]["wo"]["kernel"], np.abs(PARAMS["experts"]["wo"]["kernel"]).max(1, keepdims=True)
    assert np.abs(plain["experts"]["wo"]["kernel"] - kernel).max() <= (scale / 254).max() * 1.001
    assert (np.abs(plain["experts"]["wo"]["kernel"] - kernel) <= scale / 254 * 1.001).all()
    assert plain["router"]["weight"] is PARAMS["router"]["weight"]  # in 8 bits, it would choose other experts
    for x in (FEW, MANY):
        np.testing.assert_allclose(mixed(packed, x, True), mixed(plain, x, True), atol=2e-5)


@pytest.mark.parametrize(("parallel", "part"), [(False, "mlp"), (True, "mixture")])
def test_a_scan_reads_the_chosen_experts_in_place(parallel, part):
    """A slice of a layer's experts would be a copy of all of them at every call."""
    config = dataclasses.replace(CONFIG, expert_d_ff=4096, num_layers=3, scan_layers=True, parallel_experts=parallel)
    model = DecoderLM(config)
    params = memory_estimate.abstract(model)
    prompt = Prompt(jnp.ones((2, 9), jnp.int32), jnp.array([9, 3]))

    def run(params):
        return model.extend(params, model.prefill(params, prompt, 20, 3), jnp.ones((2, 4), jnp.int32))[0].logits

    layer = sum(leaf.size for leaf in jax.tree.leaves(params["decoder"]["layers"][part])) * 4 / 3
    assert jax.jit(run).lower(params).compile().memory_analysis().temp_size_in_bytes < layer / 2


def test_a_call_reads_the_experts_that_its_tokens_choose():
    config = dataclasses.replace(CONFIG, num_layers=2, dense_layers=(0,))
    needs = [memory_estimate.needs(DecoderLM(config), batch=1, length=20, block_size=size) for size in (1, 5)]
    expert = 3 * 16 * 8
    assert needs[0].parameters - needs[0].active == 5 * expert
    cache = 2 * 2 * 20 * 2 * 8 + 1
    read = [needs[i].call_bytes / 4 - (needs[i].parameters - 97 * 16 - 8 * expert) - cache for i in range(2)]
    assert read == pytest.approx([8 * expert * (1 - (5 / 8) ** tokens) for tokens in (2, 6)], abs=1)
    dense, sparse = (token_costs(config, number).layer for number in (0, 1))
    assert dense - sparse == 2 * (3 * 16 * 48 - 16 * 8 - 3 * expert)
    both = token_costs(dataclasses.replace(config, parallel_experts=True), 1).layer
    assert both - sparse == 2 * 3 * 16 * 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token is 9: give a number from 1 to num_experts=8"),
        ({"expert_d_ff": 0}, "expert_d_ff is 0: give the number of hidden units"),
        ({"num_experts": 0, "parallel_experts": True}, "parallel_experts is True, but num_experts is 0: give"),
        ({"dense_layers": (1,), "scan_layers": True}, r"different shapes \(layers \(1,\) have no experts\)"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
