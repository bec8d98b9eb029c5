"""Tests of the files for transformers: they are read back unchanged."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from benchmarks.peers import exporting
from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.models import decoder, t5
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5Config

T5S = {
    "t5": T5Config(61, 61, 24, 3, 6, 40, 1, 2),
    "t5_tied_relu": T5Config(61, 61, 24, 3, 8, 40, 2, 2, gated=False, tied=True),
    "t5_padded": T5Config(32_100, 32_128, 8, 1, 8, 8, 1, 1),
}
LLAMA = DecoderConfig(
    vocab_size=61, num_embeddings=61, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=40,
    max_length=64,
)  # fmt: skip


def _random(config):
    draws = np.random.default_rng(0)
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in expected_shapes(config).items()}


@pytest.mark.parametrize("config", [*T5S.values(), LLAMA, dataclasses.replace(LLAMA, tied=True)])
def test_configuration_and_weights_are_read_back_unchanged(config, tmp_path):
    flat = _random(config)
    exporting.write(config, flat, tmp_path)
    config_read, weights = exporting.read(tmp_path)
    assert config_read == config
    assert weights.keys() == flat.keys()
    for name, values in flat.items():
        np.testing.assert_array_equal(weights[name], values, err_msg=name)


def test_rotary_pairs_are_reordered_to_halves_of_a_head(tmp_path):
    """Checks that the logits stay the same although the rotation pairs other coordinates."""
    theirs = dataclasses.replace(LLAMA, rope_pairs="adjacent")
    flat = _random(theirs)
    exporting.write(theirs, flat, tmp_path)
    model, params = checkpoints.load(tmp_path)
    assert model.config == LLAMA
    tokens = np.random.default_rng(1).integers(0, 61, (2, 9))
    nested, tokens = unflatten_dict(flat, sep="/"), jnp.asarray(tokens)
    wanted = decoder.teacher_forced_logits(decoder.DecoderLM(theirs), nested, tokens)
    logits = decoder.teacher_forced_logits(model, params, tokens)
    np.testing.assert_allclose(logits, wanted, rtol=2e-4, atol=2e-4)
    unturned = decoder.teacher_forced_logits(decoder.DecoderLM(LLAMA), nested, tokens)
    assert np.abs(unturned - wanted).max() > 0.1  # the logits differ, so the order of coordinates matters


def test_another_model_family_is_rejected(tmp_path):
    biased = dataclasses.replace(LLAMA, qkv_bias=True)
    with pytest.raises(ValueError, match="is not a plain Llama, the only decoder-only family that can be exported"):
        exporting.write(biased, _random(biased), tmp_path)


def test_a_t5_is_read_back_unchanged(tmp_path):
    config = T5S["t5"]
    flat = _random(config)
    exporting.write(config, flat, tmp_path)
    model, params = checkpoints.load(tmp_path)
    tokens = jnp.asarray(np.random.default_rng(1).integers(2, 61, (2, 5)))
    wanted = t5.teacher_forced_logits(t5.T5(config), unflatten_dict(flat, sep="/"), tokens, tokens)
    logits = t5.teacher_forced_logits(model, params, tokens, tokens)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-4)
