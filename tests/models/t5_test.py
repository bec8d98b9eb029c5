"""Tests of T5: parameter names, relative positions, and cached logits against teacher-forced ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import Prompt, real_tokens
from speccascade_jax.models import t5
from speccascade_jax.models.t5 import T5, T5Config, T5Module, relative_buckets, teacher_forced_logits
from tests.support.random_t5 import parameters

forced = jax.jit(teacher_forced_logits, static_argnums=0)
prefill = jax.jit(T5.prefill, static_argnums=(0, 3))
extend = jax.jit(T5.extend, static_argnums=0)

TINY = T5Config(29, 32, 16, 2, 8, 24, 1, 2)
CONFIGS = {
    "gated_untied": TINY,
    "relu_tied": T5Config(31, 31, 12, 3, 6, 20, 2, 1, gated=False, tied=True),
    "gated_tied": dataclasses.replace(TINY, tied=True, num_decoder_layers=1),
    "relu_untied": dataclasses.replace(TINY, gated=False, num_heads=1, relative_buckets=8, relative_max_distance=16),
}


def encoder_rows(config: T5Config, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Returns random tokens with different amounts of right padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, config.vocab_size, (rows, width), dtype=np.int32)
    lengths = rng.integers(1, width + 1, rows)
    return np.where(np.arange(width) < lengths[:, None], tokens, 0)


def decoder_rows(config: T5Config, rows: int, width: int, seed: int = 1) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, config.vocab_size, (rows, width), dtype=np.int32)
    tokens[:, 0] = 0
    return tokens


def start(config: T5Config, encoder: np.ndarray, slots: int):
    rows = len(encoder)
    prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32), jnp.asarray(encoder))
    return prefill(T5(config), parameters(config), prompt, slots)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_have_t5x_names_and_shapes(name):
    leaves = jax.tree_util.tree_leaves_with_path(parameters(CONFIGS[name]))
    shapes = {"/".join(k.key for k in path): leaf.shape for path, leaf in leaves}
    assert shapes == expected_shapes(CONFIGS[name])
    model = T5(CONFIGS[name])
    assert isinstance(model, LanguageModel) and hash(model) == hash(T5(dataclasses.replace(CONFIGS[name])))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_buckets_match_integer_arithmetic(bidirectional):
    """Computes the edges of the logarithmic buckets with integers only."""
    per_side = 16 if bidirectional else 32
    exact, large = per_side // 2, per_side - per_side // 2
    ratio = 128 // exact

    def one(away: int) -> int:
        if away < exact:
            return away
        step = max(k for k in range(large + 1) if away**large >= exact**large * ratio**k)
        return min(exact + step, per_side - 1)

    distance = range(-600, 601)
    causal = [one(max(-d, 0)) for d in distance]
    two_sided = [16 + one(d) if d > 0 else one(-d) for d in distance]
    buckets = relative_buckets(np.array(distance), bidirectional, 32, 128)
    np.testing.assert_array_equal(buckets, two_sided if bidirectional else causal)


@pytest.mark.parametrize("name", ["gated_untied", "relu_tied"])
def test_blocks_after_rollbacks_equal_teacher_forcing(name):
    """Feeds blocks of up to 8 tokens at different row lengths; a rollback drops the wrong tokens at their ends."""
    config, rows, width = CONFIGS[name], 3, 24
    model, params = T5(config), parameters(CONFIGS[name])
    encoder, tokens = encoder_rows(config, rows, 7), decoder_rows(config, rows, width)
    full = np.asarray(forced(model, params, encoder, tokens))
    cache = start(config, encoder, width + 8)
    rng = np.random.default_rng(2)
    for block in rng.permutation([1, 2, 3, 8] * 4):
        length = np.asarray(model.consumed(cache))
        right = rng.integers(0, block + 1, rows)
        right = np.minimum(right, width - length)
        places = np.minimum(length[:, None] + np.arange(block), width - 1)
        true = np.arange(block) < right[:, None]
        wrong = rng.integers(2, config.vocab_size, (rows, block))
        fed = np.where(true, np.take_along_axis(tokens, places, 1), wrong).astype(np.int32)
        out, cache = extend(model, params, cache, fed)
        assert out.logits.shape == (rows, block, config.num_embeddings)
        assert out.hidden.shape == (rows, block, config.d_model)
        np.testing.assert_array_equal(model.consumed(cache), length + block)
        wanted = np.take_along_axis(full, places[..., None], 1)
        np.testing.assert_allclose(out.logits[true], wanted[true], atol=1e-4, rtol=1e-4)
        cache = model.rollback(cache, np.maximum(length + right - rng.integers(0, 2, rows), 0))
    assert model.consumed(cache).max() > 8


def test_longer_decoder_context_is_consumed_per_row():
    encoder, tokens = encoder_rows(TINY, 3, 5), decoder_rows(TINY, 3, 6)
    lengths = np.array([1, 4, 6])
    model, params = T5(TINY), parameters(TINY)
    cache = prefill(model, params, Prompt(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(encoder)), 8)
    np.testing.assert_array_equal(model.consumed(cache), lengths - 1)
    out, _ = extend(model, params, cache, np.take_along_axis(tokens, lengths[:, None] - 1, 1))
    full = forced(model, params, encoder, tokens)
    np.testing.assert_allclose(out.logits[:, 0], full[np.arange(3), lengths - 1], atol=1e-4, rtol=1e-4)


def test_padding_of_the_encoder_changes_nothing():
    encoder, tokens = encoder_rows(TINY, 4, 6), decoder_rows(TINY, 4, 5)
    padded = np.pad(encoder, ((0, 0), (0, 5)))
    model, params = T5(TINY), parameters(TINY)
    narrow = forced(model, params, encoder, tokens)
    np.testing.assert_allclose(forced(model, params, padded, tokens), narrow, atol=1e-5)
    out, _ = extend(model, params, start(TINY, padded, 8), tokens)
    np.testing.assert_allclose(out.logits, narrow, atol=1e-5)


def test_padding_is_masked_by_length_whatever_the_ids():
    """Compares rows that hold and end with id 0, padded with another id, with the same rows alone."""
    encoder, tokens = encoder_rows(TINY, 2, 5), decoder_rows(TINY, 2, 4)
    encoder[:, [1, 3, 4]] = 0
    padded = np.pad(encoder, ((0, 0), (0, 4)), constant_values=7)
    wanted = forced_by_length(encoder, [5, 5], tokens)
    np.testing.assert_allclose(forced_by_length(padded, [5, 5], tokens), wanted, atol=1e-5)
    without = forced_by_length(encoder, [3, 3], tokens)
    # the tokens with id 0 are read: without them the logits differ
    assert np.abs((without - wanted)[..., : TINY.vocab_size]).max() > 0.01


def forced_by_length(encoder: np.ndarray, lengths, tokens: np.ndarray):
    rows = len(encoder)
    prompt = Prompt(
        jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32), jnp.asarray(encoder), jnp.asarray(lengths)
    )
    return extend(T5(TINY), parameters(TINY), prefill(T5(TINY), parameters(TINY), prompt, 8), tokens)[0].logits


@pytest.mark.parametrize("tied", [False, True])
def test_ids_without_a_row_are_never_drawn_and_read_without_a_fault(tied):
    whole = dataclasses.replace(TINY, tied=tied)
    lacking = dataclasses.replace(whole, vocab_size=40, missing_rows=8)
    encoder, tokens = encoder_rows(TINY, 2, 4), np.full((2, 2), 39)
    logits = forced(T5(lacking), parameters(whole), encoder, tokens)
    assert logits.shape[-1] == 40 and np.isneginf(logits[..., 32:]).all() and np.isfinite(logits[..., :32]).all()
    with pytest.raises(ValueError, match="num_embeddings is 32, below vocab_size 40"):
        dataclasses.replace(whole, vocab_size=40)


def test_logits_are_float32_finite_and_minus_infinity_beyond_the_vocabulary():
    """Checks cached and teacher-forced logits, in float32 and bfloat16, with an empty encoder input too."""
    encoder, tokens = encoder_rows(TINY, 2, 4), decoder_rows(TINY, 2, 3)
    encoder[1] = 0
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters(TINY))
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), stored)
    full, cast, rounded = (forced(T5(TINY), p, encoder, tokens) for p in (parameters(TINY), stored, widened))
    half = T5(dataclasses.replace(TINY, dtype="bfloat16"))
    np.testing.assert_allclose(cast, rounded, atol=1e-6)
    out, cache = extend(half, parameters(TINY), start(half.config, encoder, 8), tokens)
    assert cache.keys[0].dtype == jnp.bfloat16
    real = slice(0, TINY.vocab_size)
    np.testing.assert_allclose(out.logits[..., real], full[..., real], atol=0.3)
    for logits in (full, cast, out.logits):
        assert logits.dtype == jnp.float32 and np.isfinite(logits[..., real]).all()
        assert np.isneginf(logits[..., TINY.vocab_size :]).all()


def test_permuting_rows_permutes_every_bit():
    encoder, tokens = encoder_rows(TINY, 4, 6), decoder_rows(TINY, 4, 10)
    order = np.array([2, 0, 3, 1])
    model, params = T5(TINY), parameters(TINY)

    def run(rows: np.ndarray) -> np.ndarray:
        cache = start(TINY, encoder[rows], 16)
        first, cache = extend(model, params, cache, tokens[rows, :5])
        cache = model.rollback(cache, np.array([1, 5, 3, 2])[rows])
        second, _ = extend(model, params, cache, tokens[rows, 5:])
        return np.concatenate([first.logits, second.logits], 1)

    np.testing.assert_array_equal(run(np.arange(4))[order], run(order))


def test_dropout_is_random_only_if_not_deterministic():
    encoder, tokens = encoder_rows(TINY, 2, 4), decoder_rows(TINY, 2, 3)
    apply = jax.jit(T5Module(dataclasses.replace(TINY, dropout_rate=0.5)).apply, static_argnames="deterministic")

    def logits(seed: int, deterministic: bool) -> jax.Array:
        rngs = {"dropout": jax.random.key(seed)}
        return apply({"params": parameters(TINY)}, encoder, tokens, deterministic=deterministic, rngs=rngs)

    still = forced(T5(TINY), parameters(TINY), encoder, tokens)
    np.testing.assert_allclose(logits(0, True), still, atol=1e-6)
    assert not np.allclose(logits(0, False), logits(1, False))


def test_an_error_names_bad_input():
    with pytest.raises(ValueError, match="num_embeddings is 20"):
        dataclasses.replace(TINY, num_embeddings=20)
    with pytest.raises(ValueError, match="d_ff is 0"):
        dataclasses.replace(TINY, d_ff=0)
    tokens = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="encoder_tokens"):
        T5(TINY).prefill(parameters(TINY), Prompt(tokens, jnp.ones((1,), jnp.int32)), 8)
    with pytest.raises(ValueError, match="max_len is 3"):
        T5(TINY).prefill(parameters(TINY), Prompt(tokens, jnp.ones((1,), jnp.int32), tokens), 3)


def test_encoding_a_long_prompt_in_chunks_changes_no_bit(monkeypatch):
    """Compares bit for bit, at a length that is not a multiple of the chunk."""
    config = T5Config(32, 32, 16, 2, 8, 16, 2, 1)
    model = T5(config)
    tokens = jax.random.randint(jax.random.key(0), (3, 2 * t5.CHUNK + 7), 1, 32).at[1, -300:].set(0)
    params = parameters(config)

    def compiled():
        def encode(params, tokens):
            return model.module.apply({"params": params}, tokens, real_tokens(tokens), method="encode")

        program = jax.jit(encode).lower(params, tokens).compile()
        return np.asarray(program(params, tokens)), program.memory_analysis().temp_size_in_bytes

    in_chunks, less = compiled()
    monkeypatch.setattr(t5, "CHUNK", 10**6)
    at_once, more = compiled()
    np.testing.assert_array_equal(in_chunks, at_once)
    logits = 4 * 3 * 2 * tokens.shape[1] ** 2
    assert more > logits and less < more - logits / 2
