"""Tests of stored forms of weights: equal logits for every implementation of products; close ones in fewer bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.core.types import BoundModel, Packed, Prompt, is_packed
from speccascade_jax.models import fingerprints, products
from speccascade_jax.models.decoder import DecoderConfig, DecoderLM
from speccascade_jax.models.layers import fuse
from speccascade_jax.models.t5 import T5, T5Config

V = 50
T5_CONFIG = T5Config(V, V, 32, 2, 16, 48, 2, 2)
TIED = T5Config(V, V, 32, 2, 16, 48, 2, 2, tied=True, gated=False)
DECODER = DecoderConfig(
    vocab_size=V, num_embeddings=V + 6, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48,
    max_length=64, tied=False, qkv_bias=True,
)  # fmt: skip
MODELS = {"t5": T5(T5_CONFIG), "t5 tied": T5(TIED), "decoder": DecoderLM(DECODER)}
TOKENS = jnp.array([[3, 7, 11, 5], [9, 2, 4, 8]], jnp.int32)


def parameters(model):
    shapes = jax.eval_shape(model.module.init, jax.random.key(0), *[TOKENS] * (1 + model.is_encoder_decoder))["params"]
    random = np.random.default_rng(0)
    return fuse(jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32) / 4, shapes))


@partial(jax.jit, static_argnums=(0, 1))
def run(model, own_products, params):
    encoder = TOKENS if model.is_encoder_decoder else None
    prompt = Prompt(TOKENS[:, :1], jnp.ones((2,), jnp.int32), encoder)
    return model.extend(params, model.prefill(params, prompt, 8), TOKENS)[0].logits


def logits(model, params):
    return np.asarray(run(model, products.products.available(), params))[..., :V]


@pytest.fixture(params=MODELS, scope="module")
def case(request):
    model = MODELS[request.param]
    params = parameters(model)
    return model, params, logits(model, params)


def test_packed_weights_give_the_same_logits(case):
    model, params, expected = case
    packed = products.pack(params, model.config)
    assert any(map(is_packed, jax.tree.leaves(packed, is_leaf=is_packed))) == products.products.available()
    np.testing.assert_allclose(logits(model, packed), expected, atol=2e-5)
    assert jax.tree.structure(products.pack(packed, model.config)) == jax.tree.structure(packed)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8"])
def test_logits_in_fewer_bits_equal_those_of_the_rounded_weights(case, kind):
    model, params, expected = case
    packed = products.pack(params, model.config, kind)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), packed, is_leaf=is_packed)
    packed_logits = logits(model, packed)
    np.testing.assert_allclose(packed_logits, logits(model, rounded), atol=2e-5)
    error = np.abs(packed_logits - expected).max() / np.abs(expected).max()
    assert 1e-6 < error < {"float16": 0.003, "bfloat16": 0.03, "int8": 0.06}[kind]


def test_xla_gives_the_same_products_of_8_bit_weights(case, monkeypatch):
    """Checks an accelerator's way of multiplying: matrices of one panel that XLA widens on the way."""
    model, params, _ = case
    expected = logits(model, products.pack(params, model.config, "int8"))
    monkeypatch.setattr(products.products, "available", lambda: False)
    packed = products.pack(params, model.config, "int8")
    kernels = [leaf for leaf in jax.tree.leaves(packed, is_leaf=is_packed) if is_packed(leaf)]
    assert kernels and all(leaf.panels.shape[0] == 1 for leaf in kernels)
    np.testing.assert_allclose(logits(model, packed), expected, atol=2e-5)


def test_without_the_packages_kernels_a_cpu_widens_16_bit_weights(case, monkeypatch):
    model, params, _ = case
    monkeypatch.setattr(products.products, "available", lambda: False)
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    packed = products.pack(half, model.config)
    kernel = packed["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert kernel.dtype == np.float32 and packed["decoder"]["decoder_norm"]["scale"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel, np.asarray(half["decoder"]["layers_0"]["mlp"]["wo"]["kernel"], np.float32))


def test_a_fingerprint_does_not_depend_on_the_layout(case):
    model, params, _ = case
    plain = fingerprints.of_model(BoundModel(params, model))
    assert fingerprints.of_model(BoundModel(products.pack(params, model.config), model)) == plain
    eight = products.pack(params, model.config, "int8")
    prints = {fingerprints.of_model(BoundModel(eight, model)), plain}

    def louder(leaf):
        return leaf.replace(scales=leaf.scales * 2) if isinstance(leaf, Packed) else leaf

    prints.add(fingerprints.of_model(BoundModel(jax.tree.map(louder, eight, is_leaf=is_packed), model)))
    assert len(prints) == 3


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 999), columns=st.integers(1, 8), scale=st.floats(1e-30, 1e30))
def test_quantisation_is_off_by_half_a_step_at_most(seed, columns, scale):
    matrix = (np.random.default_rng(seed).normal(size=(17, columns)) * scale).astype(np.float32)
    whole, scales = products.quantised(matrix)
    step = np.abs(matrix).max(0) / 127
    assert np.abs(whole).max(0).min() == 127  # The largest entry of a column maps to 127.
    assert np.all(np.abs(whole * scales.astype(np.float64) - matrix) <= step * 0.5001)


def test_a_column_of_zeros_stays_zero():
    whole, scales = products.quantised(np.zeros((4, 2), np.float32))
    assert not whole.any() and np.isfinite(scales).all()
