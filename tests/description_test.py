"""What models need, against sizes worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from flax.traverse_util import unflatten_dict

from experiments import describe
from speccascade_jax import checkpoints
from speccascade_jax.description import needs
from speccascade_jax.models.decoder import PRESETS, DecoderLM, tiny
from speccascade_jax.models.t5 import T5, T5Config
from tests import tiny_decoders


def test_a_windowed_cache_is_counted_ring_by_ring():
    config = dataclasses.replace(tiny("gemma2_2b", window=6), dtype="bfloat16")
    found = needs(DecoderLM(config), batch=3, length=50, block_size=5)
    # keys and values, two heads of eight; one layer keeps window + γ + 2 positions, the other all; lengths int32
    assert found.cache_bytes == 3 * 2 * 2 * 8 * (13 + 50) * 2 + 3 * 4
    assert found.laws_bytes == 2 * 3 * 6 * 97 * 4
    assert (
        found.parameter_bytes == 2 * found.parameters and found.call_bytes == found.parameter_bytes + found.cache_bytes
    )


@pytest.mark.parametrize("name", ["llama2_70b", "llama3.1_70b", "gemma2_27b", "qwen2.5_32b"])
def test_the_largest_presets_are_described_without_being_allocated(name):
    config = PRESETS[name]
    found = needs(DecoderLM(dataclasses.replace(config, dtype="bfloat16")), batch=2, length=1024, block_size=5)
    assert found.parameter_bytes == 2 * found.parameters > 5e10
    per_position = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert found.cache_bytes == 2 * 1024 * per_position + 8  # shorter than any window
    assert found.laws_bytes == 2 * 2 * 6 * config.vocab_size * 4


def test_an_encoder_decoder_counts_what_cross_attention_keeps():
    config = T5Config(29, 32, 16, 2, 8, 24, 1, 2)
    found = needs(T5(config), batch=1, length=10, block_size=2)
    assert found.laws_bytes == 2 * 3 * 29 * 4
    # two layers of own and of cross keys and values, ten positions each; masks and relative biases come on top
    assert found.cache_bytes > 2 * 2 * 2 * 2 * 8 * 10 * 4


def test_a_checkpoint_is_described_without_being_read(tmp_path, capsys):
    config = tiny("qwen2.5_7b")
    bound = tiny_decoders.bound(config)
    plain = unflatten_dict(tiny_decoders.flat_parameters(config), sep="/")
    checkpoints.save(tmp_path / "small", bound.model, plain)
    for file in (tmp_path / "small" / "params").rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000:
            file.write_bytes(b"")  # whoever reads an array would notice
    assert describe.main([str(tmp_path / "small"), "--dtype", "float32", "--length", "64"]) == 0
    assert f"{sum(v.size for v in tiny_decoders.flat_parameters(config).values()):,}" in capsys.readouterr().out


def test_the_command_prints_presets_and_refuses_others(capsys):
    assert describe.main(["gemma2_9b", "llama2_7b", "--batch", "1", "4", "--length", "8192"]) == 0
    said = capsys.readouterr().out
    assert "9,241,705,984" in said and "6,738,415,616" in said and "18.483" in said
    assert describe.main(["gemma2_8b"]) == 1
    assert "no preset and no checkpoint 'gemma2_8b': did you mean gemma2_9b" in capsys.readouterr().err
    assert describe.main(["gemma2_9b", "--block-size", "0"]) == 1
    assert "block-size" in capsys.readouterr().err
