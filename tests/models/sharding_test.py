"""Tests of the layouts of models on a mesh, and of their memory against sizes computed by hand.

Every parameter has a layout, and fusing and splitting kernels are inverse. `tests/models/on_devices_test.py` tests the
outputs of eight devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from experiments import describe
from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from speccascade_jax.models import sharding
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.memory_estimate import abstract, needs
from speccascade_jax.models.t5 import T5, T5Config
from tests.support import tiny_decoders

SMALL = T5Config(29, 32, 16, 4, 8, 24, 1, 2, tied=False)
MODELS = {
    "t5": T5(SMALL),
    **{
        name: DecoderLM(tiny(name))
        for name in ("gemma2_2b", "qwen2.5_7b", "qwen3_8b", "qwen3_30b_a3b", "t5gemma_b_b", "gemma4_e2b")
    },
    "gemma4_26b_a4b": DecoderLM(tiny_decoders.PARALLEL),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_matches_a_row_of_the_table(name):
    model = MODELS[name]
    leaves = flatten_dict(abstract(model), sep="/")
    places = {path: sharding.spec_of(path) for path in leaves}
    assert all(len(place) == len(leaves[path].shape) for path, place in places.items())
    split = {path.rsplit("/", 2)[-2] for path, place in places.items() if "model" in place}
    assert {"query", "key", "value", "out", "wi_0", "wi_1", "wo"} <= split
    whole = {path.rsplit("/", 1)[-1] for path, place in places.items() if "model" not in place}
    # Gemma 4's kernels of the layers' own inputs are small, and a router is.
    more = {"gemma4_e2b": {"kernel"}, **dict.fromkeys(("qwen3_30b_a3b", "gemma4_26b_a4b"), {"weight"})}
    assert whole == {"scale"} | more.get(name, set())


def test_fused_kernels_are_split_so_that_the_next_product_needs_no_exchange():
    """Checks that kernels that make heads and units are split by columns and the next ones by rows.

    Each pair of products then needs a single sum over devices.
    """
    layer, grouped = "decoder/layers_0", dataclasses.replace(tiny("gemma2_2b"), num_heads=8, num_kv_heads=2)
    size = grouped.head_dim
    for name, spec, columns, widths in (
        ("mlp/wi_01/kernel", P(None, "model"), 10, (5, 5)),
        ("mlp/wo/kernel", P("model", None), 10, None),
        ("mlp/experts/wi_01/kernel", P(None, None, "model"), 10, (5, 5)),
        ("mlp/experts/wo/kernel", P(None, "model", None), 10, None),
        ("self_attention/qkv/bias", P("model"), 12 * size, (8 * size, 2 * size, 2 * size)),
        ("self_attention/out/kernel", P("model", None), 10, None),
    ):
        assert sharding.spec_of(f"{layer}/{name}") == spec
        assert sharding.fused_widths(f"{layer}/{name}", columns, grouped) == widths


def test_a_parameter_without_a_row_is_refused():
    with pytest.raises(
        ValueError, match="no row of sharding.LOGICAL_AXES says how to shard the parameter 'decoder/adapter/kernel'"
    ):
        sharding.spec_of("decoder/adapter/kernel")


@given(shards=st.integers(1, 4), columns=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_interleaving_and_splitting_are_inverse(shards, columns):
    kernels = [np.random.default_rng(n).normal(size=(2, width * shards)) for n, width in enumerate(columns)]
    joined = sharding.interleave_fused(kernels, shards)
    back = sharding.split_fused(joined, [kernel.shape[-1] for kernel in kernels], shards)
    assert all(np.array_equal(original, restored) for original, restored in zip(kernels, back, strict=True))
    first = np.split(joined, shards, axis=-1)[0]  # The first device holds its share of each kernel.
    assert np.array_equal(first, np.concatenate([np.split(kernel, shards, axis=-1)[0] for kernel in kernels], axis=-1))


def test_an_error_names_the_size_that_the_mesh_does_not_divide():
    grouped = dataclasses.replace(tiny("gemma2_2b"), num_heads=8, num_kv_heads=2, num_embeddings=128, d_ff=64)
    with pytest.raises(
        ValueError, match=r"num_kv_heads=2 of m is not divisible by the 4 parts of mesh=\(1, 4\): .* 2, or"
    ):
        sharding.check(grouped, (1, 4), "m")
    sharding.check(grouped, (4, 2), "m")


def test_memory_per_device_is_its_shard_plus_replicated_arrays():
    """Compares with sizes computed by hand: every device holds all norms and a share of kernels and caches."""
    model, sizes = T5(SMALL), {"batch": 4, "length": 10, "block_size": 2}
    single, spread = needs(model, **sizes), needs(model, **sizes, mesh=(2, 4))
    norms = 4 * sum(
        leaf.size for path, leaf in flatten_dict(abstract(model), sep="/").items() if path.endswith("scale")
    )
    assert spread.parameter_bytes == norms + (single.parameter_bytes - norms) // 4
    by_rows = 4 * 4 + 4 * 4 * 10  # Lengths and the encoder's padding mask have no heads.
    assert spread.cache_bytes == by_rows // 2 + (single.cache_bytes - by_rows) // 8
    assert spread.laws_bytes == single.laws_bytes // 8
    assert spread.parameters == single.parameters and spread.call_bytes < single.call_bytes / 4 + norms
    with pytest.raises(ValueError, match=r"a batch of 3 is not divisible by the 2 parts that mesh=\(2, 4\)"):
        needs(model, **sizes | {"batch": 3}, mesh=(2, 4))


# --- memory


def test_memory_of_a_windowed_cache_is_the_sum_of_its_rings():
    config = dataclasses.replace(tiny("gemma2_2b", window=6), dtype="bfloat16")
    memory = needs(DecoderLM(config), batch=3, length=50, block_size=5)
    # Keys and values of two heads of size 8; one layer keeps window + γ + 2 positions, the other all; int32 lengths.
    assert memory.cache_bytes == 3 * 2 * 2 * 8 * (13 + 50) * 2 + 3 * 4
    assert memory.laws_bytes == 2 * 3 * 6 * 97 * 4
    assert memory.parameter_bytes == 2 * memory.parameters
    # Tied: a call reads the whole embedding for the logits.
    assert memory.call_bytes == memory.parameter_bytes + memory.cache_bytes


def test_layers_without_keys_and_values_have_no_cache_and_layers_read_rows_of_their_embeddings():
    memory = needs(DecoderLM(tiny_decoders.SHARED), batch=3, length=50, block_size=5)
    # Two of four layers: two heads of size 8 in a ring of window + γ + 2 positions, and one of size 16; int32 lengths.
    assert memory.cache_bytes == 4 * 3 * 2 * (2 * 8 * 13 + 16 * 50) + 3 * 4
    embeddings = 4 * 97 * 4 * 6  # of 6 numbers for each layer and token
    assert memory.call_bytes == memory.parameter_bytes - embeddings + memory.cache_bytes


def test_a_call_of_an_untied_decoder_reads_only_rows_of_its_embedding():
    # d_model 32, two layers, four heads of size eight, d_ff 48.
    config = dataclasses.replace(tiny("llama2_7b"), tied=False)
    layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    read = 2 * layer + 32 + 32 * 97
    keys_and_values = 2 * 2 * 50 * 4 * 8
    memory = needs(DecoderLM(config), batch=3, length=50, block_size=5)
    assert memory.parameters == read + 97 * 32
    assert memory.call_bytes == 4 * (read + 3 * keys_and_values + 3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_call_of_an_encoder_decoder_reads_no_encoder_weights(tied):
    """Excludes the encoder, relative biases, and cross-attention's key and value kernels."""
    config = T5Config(29, 32, 16, 2, 8, 24, 1, 2, tied=tied)
    # Self-attention, cross-attention's queries and output, gated feed-forward, norms.
    layer = 4 * 16 * 16 + 2 * 16 * 16 + 3 * 16 * 24 + 3 * 16
    read = 2 * layer + 16 + 16 * 32  # The last term is the tied embedding or logits_dense.
    keys_and_values = 2 * 2 * 10 * 2 * 8
    memory = needs(T5(config), batch=1, length=10, block_size=2)
    assert memory.call_bytes == 4 * (read + 2 * keys_and_values + 10 + 1)  # Plus the encoder's mask and the length.


@pytest.mark.parametrize("model", [DecoderLM(tiny("qwen2.5_7b")), T5(T5Config(29, 32, 16, 2, 8, 24, 1, 2, tied=True))])
def test_the_estimate_of_bytes_read_equals_the_programs_arguments(model):
    params, block = abstract(model), jax.ShapeDtypeStruct((1, 3), jnp.int32)
    prompt = Prompt(jnp.ones((1, 1), int), jnp.ones(1, int), jnp.ones((1, 9), int) if isinstance(model, T5) else None)
    cache = jax.eval_shape(lambda p: model.prefill(p, prompt, 9, 3), params)  # max_rollback is block_size + 1.
    program = jax.make_jaxpr(model.extend)(params, cache, block).jaxpr
    taken = {id(argument) for equation in program.eqns for argument in equation.invars}
    inputs = zip(jax.tree_util.tree_leaves_with_path((params, cache, block)), program.invars, strict=True)
    sizes = {jax.tree_util.keystr(path): 4 * leaf.size for (path, leaf), variable in inputs if id(variable) in taken}
    in_part = [name for name in sizes if ".bias" in name or ("embedding" in name and not model.config.tied)]
    wanted = sum(sizes.values()) - sum(sizes[name] for name in [*in_part, "[2]"])  # the entry "[2]" contains the tokens
    assert len(in_part) == 1 and needs(model, batch=1, length=9, block_size=2).call_bytes == wanted


def test_the_command_describes_a_checkpoint_without_reading_its_arrays(tmp_path, capsys):
    config = tiny("qwen2.5_7b")
    bound = tiny_decoders.bound(config)
    plain = unflatten_dict(tiny_decoders.flat_parameters(config), sep="/")
    checkpoints.save(tmp_path / "small", bound.model, plain)
    for file in (tmp_path / "small" / "params").rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000:
            content = file.read_bytes()
            half = len(content) // 2
            file.write_bytes(bytes(half) + content[half:])  # Arrays are before the nodes; reading one would fail.
    with pytest.raises(checkpoints.CheckpointError, match="can't be read"):
        checkpoints.load(tmp_path / "small")
    assert describe.main([str(tmp_path / "small"), "--dtype", "float32", "--length", "64"]) == 0
    assert f"{sum(v.size for v in tiny_decoders.flat_parameters(config).values()):,}" in capsys.readouterr().out


@pytest.mark.laws
def test_the_command_describes_presets_and_memory_per_device(capsys):
    assert describe.main(["gemma2_2b", "llama2_7b", "--batch", "4", "--length", "8192"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2,614,341,888" in said and "6,738,415,616" in said and "5.229" in said
    assert "8,192 positions exceed the 4,096 that llama2_7b supports" in said
    assert said.count("exceed") == 1  # gemma2_2b supports 8,192 positions.
    assert describe.main(["gemma2_9b", "--batch", "8", "--length", "1024", "--mesh", "2", "4", "--memory", "16"]) == 0
    said = capsys.readouterr().out
    # 9.24 billion parameters of 2 bytes, split over 4 devices except the norms.
    assert "on each of 2 × 4 devices" in said and "4.622" in said


@pytest.mark.laws
@pytest.mark.parametrize(("arguments", "message"), [
    ("gemma2_8b", "'gemma2_8b' is neither a preset nor a checkpoint: did you mean gemma2_9b"),
    ("gemma2_9b --block-size 0", "block-size"),
    ("gemma2_9b --batch 8 --length 1024 --mesh 2 4 --memory 4", "which has 4: spread the model over more"),
    ("gemma2_2b --mesh 1 8", "num_kv_heads=4 of the model is not divisible by the 8 parts of mesh=(1, 8)"),
    ("gemma2_9b --batch 3 --mesh 2 1", "a batch of 3 is not divisible by the 2 parts"),
])  # fmt: skip
def test_the_command_refuses_in_one_line(arguments, message, capsys):
    assert describe.main(arguments.split()) == 1
    assert message in capsys.readouterr().err
