"""The kernel of products for GPUs, interpreted on this machine: against NumPy, and in a T5."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.types import Prompt
from speccascade_jax.models import products, triton_products
from speccascade_jax.models.layers import fuse
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.triton_products import Norm
from speccascade_jax.runtime import platforms
from tests.models.decode_attention_test import T5_SIZES
from tests.support import random_t5
from tests.support.interpreted_kernels import interpreted


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def by_numpy(x, matrix, norm=None, gate=None, residual=None):
    x, matrix = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.epsilon) * (norm.offset + np.asarray(norm.scale))
    y = x @ matrix
    if gate is not None:
        first, second = np.split(y, 2, axis=-1)
        y = np.asarray(gate(jnp.asarray(first, jnp.float32))) * second
    return y if residual is None else y + np.asarray(residual)


CASES = {
    "plain": (1, 48, 37, {}),
    "norm": (3, 144, 64, {"norm": Norm(draw(144, seed=2), 1e-3, offset=1.0)}),
    "gate_norm": (17, 256, 90, {"norm": Norm(draw(256, seed=2), 1e-6), "gate": nn.gelu}),
    "residual": (6, 128, 40, {"residual": draw(6, 40, seed=3)}),
    "many_programs": (2, 16, 4200, {"norm": Norm(draw(16, seed=2), 1e-6), "residual": draw(2, 4200, seed=3)}),
}


@pytest.mark.parametrize("name", CASES)
def test_products_equal_those_of_numpy(name):
    rows, inputs, columns, around = CASES[name]
    x, matrix = draw(rows, inputs), draw(inputs, columns, seed=1) / np.sqrt(inputs)
    with interpreted("gpu"):
        result = triton_products.multiply(x[None], matrix, "float32", **around)[0]
    np.testing.assert_allclose(result, by_numpy(x, matrix, **around), atol=2e-5)


def test_rounding_is_that_of_the_path_by_xla():
    x, matrix, scale = draw(4, 64).astype("bfloat16"), draw(64, 16, seed=1).astype("bfloat16"), draw(64, seed=2)
    with interpreted("gpu"):
        result = triton_products.multiply(x, matrix, "bfloat16", norm=Norm(scale, 1e-6))
    x32 = x.astype(jnp.float32)
    normed = (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6) * scale).astype("bfloat16")
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, products.multiply(normed, matrix, "bfloat16"), atol=1e-2)


def test_only_gpus_and_few_rows_use_the_kernel():
    fits = partial(triton_products.fits, sizes=(64, 48), dtype="bfloat16")
    assert not fits(1)
    with platforms.traced_for("cuda"):
        assert fits(64) and not fits(65) and not fits(1, sizes=(64, 40)) and not fits(1, dtype="float16")


CONFIG = T5Config(num_encoder_layers=1, num_decoder_layers=2, **T5_SIZES)


BOUND = random_t5.bound(CONFIG)
FUSED = dataclasses.replace(BOUND, params=fuse(BOUND.params))
PROMPT = Prompt(jnp.ones((1, 1), jnp.int32), jnp.array([1]), jnp.ones((1, 4), jnp.int32))


def kernels(bound):
    """Returns the number of kernels in a step of a T5, traced for a GPU."""
    cache = jax.eval_shape(lambda: bound.model.prefill(bound.params, PROMPT, 12))
    with platforms.traced_for("cuda"):
        jax.clear_caches()
        step = jax.make_jaxpr(bound.model.extend)(bound.params, cache, jnp.ones((1, 1), jnp.int32))
    return str(step).count("pallas_call[")


def test_a_layer_has_eight_kernels_and_two_where_products_are_left_to_xla():
    narrow = products.pack(FUSED.params, CONFIG, "int8")
    assert kernels(FUSED) == 2 * 8
    assert kernels(BOUND) == kernels(dataclasses.replace(FUSED, params=narrow)) == 2 * 2


def logits(bound):
    """Returns the logits of a block of four tokens, and of one more token after a rollback that differs by row."""
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 1, 31)
    prompt = Prompt(tokens[:, :2], jnp.array([2, 1]), tokens[:, 2:11])

    @jax.jit
    def run():
        cache = bound.model.prefill(bound.params, prompt, 12)
        block, cache = bound.model.extend(bound.params, cache, tokens[:, 11:15])
        cache = bound.model.rollback(cache, cache.length - jnp.array([3, 0]))
        return block.logits, bound.model.extend(bound.params, cache, tokens[:, 15:])[0].logits

    return run()


@pytest.mark.laws
def test_a_scanned_t5_has_the_logits_of_the_path_by_xla():
    bound = random_t5.bound(dataclasses.replace(CONFIG, scan_layers=True))
    bound = dataclasses.replace(bound, params=fuse(bound.params))
    expected = logits(bound)
    with interpreted("gpu"):
        ours = logits(bound)
    for result, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(result, wanted, atol=2e-4, rtol=1e-5)
