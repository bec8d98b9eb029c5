"""The kernel that computes chains of products, interpreted on this machine: against XLA, and in a T5."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.models import product_chains, products
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.decoder_stack import rotate_columns
from speccascade_jax.models.layers import RMSNorm, fuse
from speccascade_jax.models.product_chains import Link, Rotation
from speccascade_jax.models.stacks import InStack, stack_params
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.triton_products import Norm
from speccascade_jax.runtime import platforms
from tests.models.triton_products_test import PROMPT
from tests.support import random_t5, tiny_decoders
from tests.support.interpreted_kernels import interpreted


def draw(*shape, seed=0, scale=1.0):
    return np.float32(np.random.default_rng(seed).standard_normal(shape) * scale)


def matrix(inputs, columns, seed=1):
    return draw(inputs, columns, seed=seed, scale=inputs**-0.5)


def norm(width, offset=0.0):
    return Norm(draw(width, seed=7, scale=0.3) + 1.0 - offset, 1e-6, offset)


def by_xla(x, links, state, dtype):
    """Computes the chain in the steps of the layers that XLA compiles."""

    def normed(x, norm):
        return RMSNorm(norm.epsilon, dtype, norm.offset).normalized(x, norm.scale)

    state = x if state is None else state
    for link in links:
        x = x if link.norm is None else normed(state, link.norm)
        x = x if link.matrix is None else products.multiply(x, link.matrix, dtype)
        if link.gate is not None:
            first, second = jnp.split(x.astype(dtype), 2, axis=-1)
            # on a TPU, XLA computes the steps of a gate in float32
            x = link.gate(first.astype(jnp.float32)).astype(dtype) * second
        if link.rotation is not None:
            cosine, sine, size, scale, queries = link.rotation
            factor = jnp.where(jnp.arange(x.shape[-1]) < queries, jnp.asarray(scale, dtype), jnp.ones((), dtype))
            x = rotate_columns(x.astype(dtype) * factor, cosine, sine, size)
        if link.adds:
            y = x.astype(dtype)
            x = state = state + (y if link.post is None else normed(y, link.post))
    return state, x


def turned(rows, tokens, columns):
    angles = draw(rows, tokens, columns, seed=9)
    return Rotation(np.cos(angles), np.sin(angles), size=64, scale=0.37, queries=128)


FEED_FORWARD = (
    Link(matrix(128, 256), adds=True),
    Link(matrix(256, 768, seed=2), norm(256), nn.gelu),
    Link(matrix(384, 256, seed=3), adds=True),
)
WITH_POST_NORMS = (
    FEED_FORWARD[0]._replace(post=norm(256, offset=1.0)),
    FEED_FORWARD[1],
    FEED_FORWARD[2]._replace(post=norm(256, offset=1.0)),
)
CASES = {
    "product_alone": ((1, 3, 256), None, (Link(matrix(256, 128)),)),
    "norm": ((1, 1, 256), None, (Link(matrix(256, 384), norm(256, offset=1.0)),)),
    "feed_forward": ((3, 1, 128), 256, FEED_FORWARD),
    "post_norms": ((2, 3, 128), 256, WITH_POST_NORMS),
    "rows_of_tokens": ((2, 5, 128), 256, (FEED_FORWARD[0], Link(matrix(256, 128, seed=2), norm(256)))),
    "rotation": ((2, 3, 256), None, (Link(matrix(256, 384), norm(256), rotation=turned(2, 3, 384)),)),
    "same_angles": ((2, 3, 256), None, (Link(matrix(256, 384), norm(256), rotation=turned(1, 3, 384)),)),
    # on a mesh, what follows a sum over devices
    "sum_alone": ((2, 3, 256), 256, (Link(None, adds=True, post=norm(256)),)),
    # four or five blocks for three buffers, and two or four blocks of gated halves
    "many_blocks": ((1, 2, 1024), None, (Link(matrix(1024, 2560), norm(1024)),)),
    "gated_blocks": ((1, 1, 1024), None, (Link(matrix(1024, 2048), norm(1024), jax.nn.silu),)),
}


ROUNDING = {"xla_allow_excess_precision": False}
"""Keeps the roundings to 16 bits between steps, which XLA would leave out on both sides."""


def in_stack(link):
    """Returns a link whose matrix and norms are layer 1 of stacks; other layers are not numbers."""

    def stacked(x):
        return None if x is None else InStack(np.stack([np.full_like(x, np.nan), x]), np.int32(1))

    def norms(norm):
        return None if norm is None else norm._replace(scale=stacked(norm.scale.reshape(-1, 128)))

    return link._replace(matrix=stacked(link.matrix), norm=norms(link.norm), post=norms(link.post))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_chain_equals_the_steps_by_xla(name, stacked):
    # Matrices are in VMEM, or their blocks are copied there.
    dtype = "bfloat16" if stacked == ("blocks" in name) else "float32"
    shape, width, links = CASES[name]
    x, state = draw(*shape).astype(dtype), None if width is None else draw(*shape[:2], width, seed=5).astype(dtype)
    links = [link if link.matrix is None else link._replace(matrix=link.matrix.astype(dtype)) for link in links]
    expected = jax.jit(partial(by_xla, dtype=dtype, links=links), compiler_options=ROUNDING)(x, state=state)
    links = list(map(in_stack, links)) if stacked else links
    with interpreted():
        multiply = partial(product_chains.multiply, dtype=dtype, links=links)
        ours = jax.jit(multiply, compiler_options=ROUNDING)(x, state=state)
    for result, wanted in zip(ours, expected, strict=True):
        assert result.dtype == wanted.dtype
        # sums in another order round to neighbours, which are up to 1/128 apart in 16 bits
        atol = 2e-5 if dtype == "float32" else 4e-2
        np.testing.assert_allclose(np.float32(result), np.float32(wanted), atol=atol, rtol=atol)
        # a step that is not rounded where XLA rounds changes a tenth of the numbers or more
        assert result.dtype == jnp.float32 or np.mean(result == wanted) > 0.98


def test_only_tpus_few_rows_and_whole_tiles_use_the_kernel():
    fits = partial(product_chains.fits, sizes=(256, 128), dtype="bfloat16")
    assert not fits(1)
    with platforms.traced_for("tpu"):
        assert fits(64) and not fits(65) and not fits(1, sizes=(256, 64)) and not fits(1, dtype="float16")
        assert not fits(1, sizes=(256, 2**15))


SIZES = {"vocab_size": 31, "num_embeddings": 32, "num_heads": 2, "head_dim": 64, "d_model": 128, "d_ff": 256}
CONFIG = T5Config(num_encoder_layers=1, num_decoder_layers=2, **SIZES)


def fused(**changes):
    bound = random_t5.bound(dataclasses.replace(CONFIG, **changes))
    return dataclasses.replace(bound, params=fuse(bound.params))


def kernels(bound):
    """Returns the number of kernels in a step of a T5, traced for a TPU."""
    with platforms.traced_for("tpu"):
        jax.clear_caches()
        cache = jax.eval_shape(lambda: bound.model.prefill(bound.params, PROMPT, 12))
        step = jax.make_jaxpr(bound.model.extend)(bound.params, cache, jnp.ones((1, 1), jnp.int32))
    return str(step).count("pallas_call[")


def test_a_layer_has_five_kernels_and_two_where_products_are_left_to_xla():
    bound = fused()
    half = jax.tree.map(lambda x: x.astype("bfloat16"), bound.params)
    assert kernels(bound) == 2 * 5
    # XLA would convert the parameters at every call
    assert kernels(dataclasses.replace(bound, params=half)) == 2 * 2
    assert kernels(fused(scan_layers=True)) == 5
    assert kernels(fused(d_ff=192)) == 2 * 2


def same_logits(bound, prompt, block):
    """Checks that the kernels compute the logits of a block that XLA computes."""
    cache = bound.model.prefill(bound.params, prompt, 128)
    expected = jax.jit(bound.model.extend)(bound.params, cache, block)[0].logits
    with interpreted():
        step = jax.jit(bound.model.extend).trace(bound.params, cache, block)
        ours = step.lower().compile()(bound.params, cache, block)[0].logits
    assert "product_chain" in str(step.jaxpr)
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=1e-4)


def test_a_t5_has_the_logits_of_the_path_by_xla():
    drawn = np.random.default_rng(0)
    prompt = Prompt(np.ones((2, 1), np.int32), np.array([1, 1]), encoder_tokens=drawn.integers(1, 31, (2, 7)))
    same_logits(fused(num_decoder_layers=1), prompt, drawn.integers(1, 31, (2, 3)))


@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.laws), True])
def test_a_gemma_2_has_the_logits_of_the_path_by_xla(scanned):
    sizes = {"d_model": 128, "head_dim": 64, "d_ff": 256, "num_layers": 2}
    config = dataclasses.replace(tiny("gemma2_2b"), **sizes)
    # `prepare` would pack the matrices for this machine's CPU
    params = fuse(unflatten_dict(tiny_decoders.flat_parameters(config), sep="/"))
    bound = BoundModel(jax.device_put(params), DecoderLM(config))
    if scanned:
        bound = BoundModel(stack_params(bound.params), DecoderLM(dataclasses.replace(config, scan_layers=True)))
    tokens = np.random.default_rng(0).integers(1, 31, (2, 8))
    same_logits(bound, Prompt(tokens[:, :5], np.array([5, 4])), tokens[:, 5:])
