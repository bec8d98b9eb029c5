"""Tests of the count of bytes that a call must read, computed from its program."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.traffic import bytes_read
from speccascade_jax.core.types import Prompt
from speccascade_jax.models.t5 import T5, T5Config, T5Module

VECTOR, MATRIX, INDEX = jnp.ones((1, 8)), jnp.ones((8, 16)), jnp.zeros((1,), jnp.int32)


def test_products_read_whole_arrays_and_unused_arrays_are_not_read():
    assert bytes_read(lambda used, x, unused: x @ used, MATRIX, VECTOR, jnp.ones((50, 50))) == 4 * (8 * 16 + 8)


def test_an_array_used_twice_is_read_once():
    assert bytes_read(lambda w, x: (x @ w, x @ (w + 1.0)), MATRIX, VECTOR) == 4 * (8 * 16 + 8)


def test_a_lookup_reads_only_the_rows():
    assert bytes_read(lambda table, index: jnp.take(table, index, axis=0), jnp.ones((1000, 8)), INDEX) == 4 * 8 + 4


def test_a_table_used_in_a_lookup_and_a_product_is_read_whole():
    def tied(table, at):
        return jnp.take(table, at, axis=0) @ table.T

    assert bytes_read(tied, jnp.ones((1000, 8)), INDEX) == 4 * 8 * 1000 + 4


def test_inner_calls_are_counted():
    assert bytes_read(jax.jit(lambda w, x, unused: jax.jit(jnp.dot)(x, w)), MATRIX, VECTOR, MATRIX) == 4 * (8 * 16 + 8)


def _step_bytes(**sizes) -> int:
    config = T5Config(**({"vocab_size": 64, "num_embeddings": 64, "d_model": 16, "num_heads": 2, "head_dim": 8,
                          "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1} | sizes))  # fmt: skip
    model, token = T5(config), jnp.ones((1, 2), jnp.int32)
    params = jax.eval_shape(T5Module(config).init, jax.random.key(0), token, token)["params"]
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), jnp.ones((1, 8), jnp.int32))
    cache = jax.eval_shape(lambda params: model.prefill(params, prompt, 10), params)
    return bytes_read(model.extend, params, cache, prompt.tokens)


def test_a_decoding_step_reads_neither_the_encoder_nor_the_embedding_table():
    plain = _step_bytes()
    assert _step_bytes(num_encoder_layers=3) == plain
    # the output matrix is read as a whole
    assert _step_bytes(vocab_size=164, num_embeddings=164) - plain == 4 * 16 * 100


def test_a_decoder_layer_is_read_without_the_cross_attention_kernels_of_prefill():
    self_attention, cross, feed_forward, norms = 4 * 16 * 16, 2 * 16 * 16, 3 * 16 * 32, 3 * 16
    caches = 2 * 10 * 16 + 2 * 8 * 16
    layer = _step_bytes(num_decoder_layers=2) - _step_bytes()
    assert layer == pytest.approx(4 * (self_attention + cross + feed_forward + norms + caches), rel=0.01)
