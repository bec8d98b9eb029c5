"""What models need, against sizes worked out by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict

from experiments import describe
from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from speccascade_jax.models.decoder import PRESETS, DecoderLM, tiny
from speccascade_jax.models.memory_estimate import abstract, needs
from speccascade_jax.models.t5 import T5, T5Config
from tests.support import tiny_decoders


def test_a_windowed_cache_is_counted_ring_by_ring():
    config = dataclasses.replace(tiny("gemma2_2b", window=6), dtype="bfloat16")
    found = needs(DecoderLM(config), batch=3, length=50, block_size=5)
    # keys and values, two heads of eight; one layer keeps window + γ + 2 positions, the other all; lengths int32
    assert found.cache_bytes == 3 * 2 * 2 * 8 * (13 + 50) * 2 + 3 * 4
    assert found.laws_bytes == 2 * 3 * 6 * 97 * 4
    assert found.parameter_bytes == 2 * found.parameters
    assert found.call_bytes == found.parameter_bytes + found.cache_bytes  # tied: the table makes the logits


@pytest.mark.laws
@pytest.mark.parametrize("name", ["llama3.1_70b", "gemma2_27b"])
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


def test_a_call_of_an_untied_decoder_reads_rows_of_its_embedding_alone():
    config = dataclasses.replace(tiny("llama2_7b"), tied=False)  # d 32, two layers, four heads of eight, d_ff 48
    layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    read = 2 * layer + 32 + 32 * 97
    keys_and_values = 2 * 2 * 50 * 4 * 8
    found = needs(DecoderLM(config), batch=3, length=50, block_size=5)
    assert found.parameters == read + 97 * 32
    assert found.call_bytes == 4 * (read + 3 * keys_and_values + 3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_call_of_an_encoder_decoder_reads_nothing_that_the_prompt_alone_needs(tied):
    """No encoder, no keys and values of cross-attention (they lie in the cache), no relative biases."""
    config = T5Config(29, 32, 16, 2, 8, 24, 1, 2, tied=tied)
    layer = 4 * 16 * 16 + 2 * 16 * 16 + 3 * 16 * 24 + 3 * 16  # own attention, cross queries and out, gated, norms
    read = 2 * layer + 16 + 16 * 32  # the last: the table where it is tied, logits_dense elsewhere
    keys_and_values = 2 * 2 * 10 * 2 * 8
    found = needs(T5(config), batch=1, length=10, block_size=2)
    assert found.call_bytes == 4 * (read + 2 * keys_and_values + 10 + 1)  # the encoder's mask, the length


@pytest.mark.parametrize("model", [DecoderLM(tiny("qwen2.5_7b")), T5(T5Config(29, 32, 16, 2, 8, 24, 1, 2, tied=True))])
def test_what_a_call_reads_is_what_its_program_takes(model):
    params, block = abstract(model), jax.ShapeDtypeStruct((1, 3), jnp.int32)
    prompt = Prompt(jnp.ones((1, 1), int), jnp.ones(1, int), jnp.ones((1, 9), int) if isinstance(model, T5) else None)
    cache = jax.eval_shape(lambda p: model.prefill(p, prompt, 9, 3), params)  # block_size + 1
    program = jax.make_jaxpr(model.extend)(params, cache, block).jaxpr
    taken = {id(argument) for equation in program.eqns for argument in equation.invars}
    inputs = zip(jax.tree_util.tree_leaves_with_path((params, cache, block)), program.invars, strict=True)
    sizes = {jax.tree_util.keystr(path): 4 * leaf.size for (path, leaf), at in inputs if id(at) in taken}
    in_part = [name for name in sizes if ".bias" in name or ("embedding" in name and not model.config.tied)]
    wanted = sum(sizes.values()) - sum(sizes[name] for name in [*in_part, "[2]"])  # [2]: the tokens
    assert len(in_part) == 1 and needs(model, batch=1, length=9, block_size=2).call_bytes == wanted


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


@pytest.mark.laws
def test_the_command_prints_presets_and_refuses_others(capsys):
    assert describe.main(["gemma2_2b", "llama2_7b", "--batch", "4", "--length", "8192"]) == 0
    said = capsys.readouterr().out
    assert "2,614,341,888" in said and "6,738,415,616" in said and "5.229" in said
    told = " ".join(said.split())
    assert "8,192 positions are beyond the 4,096 that llama2_7b was made for" in told
    assert told.count("beyond") == 1  # gemma2_2b was made for 8,192
    assert describe.main(["gemma2_8b"]) == 1
    assert "no preset and no checkpoint 'gemma2_8b': did you mean gemma2_9b" in capsys.readouterr().err
    assert describe.main(["gemma2_9b", "--block-size", "0"]) == 1
    assert "block-size" in capsys.readouterr().err


@pytest.mark.laws
def test_what_each_device_holds_is_printed_and_what_it_has_no_room_for_refused(capsys):
    asked = ["gemma2_9b", "--batch", "8", "--length", "1024", "--mesh", "2", "4"]
    assert describe.main([*asked, "--memory", "16"]) == 0
    told = capsys.readouterr().out
    assert "on each of 2 × 4 devices" in told and "4.622" in told  # 9.24 billion parameters of 2 bytes, norms whole
    assert describe.main([*asked, "--memory", "4"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: gemma2_9b at batch 8 needs ") and "which has 4: spread the model over more" in said
    assert describe.main(["gemma2_2b", "--mesh", "1", "8"]) == 1
    assert "num_kv_heads=4 of the model does not divide by the 8 parts of mesh=(1, 8)" in capsys.readouterr().err
    assert describe.main(["gemma2_9b", "--batch", "3", "--mesh", "2", "1"]) == 1
    assert "a batch of 3 does not divide by the 2 parts" in capsys.readouterr().err
