"""Tests of decoder-only models: parameter names, presets, and cached logits against teacher-forced ones."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import Prompt
from speccascade_jax.models import decoder_stack
from speccascade_jax.models.decoder import (
    PRESETS,
    DecoderLM,
    RopeScaling,
    parameter_shapes,
    teacher_forced_logits,
    tiny,
)
from speccascade_jax.models.decoder_stack import rotate, turns
from speccascade_jax.models.memory_estimate import abstract
from tests.support import tiny_decoders
from tests.support.tiny_decoders import KINDS, flat_parameters

forced = jax.jit(teacher_forced_logits, static_argnums=0)
prefill = jax.jit(DecoderLM.prefill, static_argnums=(0, 3, 4))
extend = jax.jit(DecoderLM.extend, static_argnums=0)

CONFIGS = {name: tiny(name) for name in KINDS} | {
    "llama2.c": dataclasses.replace(tiny("llama2_7b"), rope_pairs="adjacent", tied=True, num_kv_heads=2),
    "every layer local": dataclasses.replace(tiny("llama2_7b"), window=5, pattern=("local",)),
    # norms of queries and keys, two bases, and a layer without rotary positions
    "mixed": dataclasses.replace(tiny("gemma3_4b"), num_layers=3, pattern=("local", "unrotated", "global")),
    "experts": dataclasses.replace(tiny("qwen3_30b_a3b"), dense_layers=(0,)),
    # scores as small as those of trained norms of queries, because sharp ones amplify rounding
    "shared": dataclasses.replace(tiny_decoders.SHARED, query_scale=12**-0.5),
    "parallel": dataclasses.replace(tiny_decoders.PARALLEL, query_scale=12**-0.5),
}
NAMED = (*KINDS, "gemma2_27b", "qwen3_30b_a3b", "gemma4_26b_a4b")


@pytest.mark.parametrize("config", [*map(tiny, NAMED), tiny_decoders.SHARED])
def test_parameters_have_the_documented_names_and_shapes(config):
    model, leaves = DecoderLM(config), jax.tree_util.tree_leaves_with_path(abstract(DecoderLM(config)))
    assert isinstance(model, LanguageModel) and hash(model) == hash(DecoderLM(dataclasses.replace(config)))
    assert {"/".join(k.key for k in path): leaf.shape for path, leaf in leaves} == parameter_shapes(config)


# From the published config.json files and model cards: Gemma 1 to 4 (Google), Llama 2 to 3.2 (Meta), Mistral 0.1 and
# 0.3, Mixtral 0.1 (Mistral AI), Qwen 2.5 and 3 (Alibaba), SmolLM3 (Hugging Face).
COMMON: dict[str, object] = {
    "rope_base": 10_000, "norm_epsilon": 1e-5, "max_length": 4096, "tied": False, "qkv_bias": False,
    "activation": "silu", "rope_scaling": None, "window": None, "pattern": ("global",), "attention_cap": None,
    "output_cap": None, "post_norms": False, "norm_offset": 0, "rope_pairs": "halves", "qk_norm": False,
    "rope_factor": 1, "local_rope_base": None, "num_experts": 0, "dense_layers": (),
}  # fmt: skip
GEMMA = COMMON | {"norm_epsilon": 1e-6, "max_length": 8192, "tied": True, "activation": "gelu", "norm_offset": 1}
PUBLISHED = {
    "llama2": COMMON,
    "gemma": GEMMA,
    "gemma2": GEMMA | {
        "window": 4096, "pattern": ("local", "global"), "attention_cap": 50, "output_cap": 30, "post_norms": True,
    },
    "gemma3": GEMMA | {
        "window": 1024, "pattern": ("local",) * 5 + ("global",), "post_norms": True, "qk_norm": True,
        "rope_base": 1_000_000, "local_rope_base": 10_000, "rope_factor": 8, "max_length": 131_072,
    },
    "gemma4": GEMMA | {
        "window": 1024, "pattern": ("local",) * 5 + ("global",), "post_norms": True, "qk_norm": True, "norm_offset": 0,
        "rope_base": 1_000_000, "local_rope_base": 10_000, "rope_share": 0.25, "max_length": 262_144, "output_cap": 30,
        "value_norm": True, "output_scale": True, "global_head_dim": 512, "scanned": False,
    },
    "mistral0.1": COMMON | {"max_length": 32_768, "window": 4096, "pattern": ("local",)},
    "mistral0.3": COMMON | {"max_length": 32_768, "rope_base": 1_000_000},
    "mixtral0.1": COMMON | {
        "max_length": 32_768, "rope_base": 1_000_000, "num_experts": 8, "experts_per_token": 2, "expert_d_ff": 14336,
        "norm_expert_weights": True,
    },
    "qwen3": COMMON | {"rope_base": 1_000_000, "norm_epsilon": 1e-6, "max_length": 40_960, "qk_norm": True},
    "smollm3": COMMON | {
        "rope_base": 5_000_000, "norm_epsilon": 1e-6, "max_length": 65_536, "tied": True,
        "pattern": ("global", "global", "global", "unrotated"),
    },
    "t5gemma2": GEMMA | {
        "window": 512, "pattern": ("local",) * 5 + ("global",), "post_norms": True, "qk_norm": True,
        "rope_base": 1_000_000, "local_rope_base": 10_000, "rope_factor": 8, "max_length": 32_768, "start_id": 2,
        "merged_attention": True, "shared_embedding": True,
    },
    "llama3.1": COMMON | {
        "rope_base": 500_000, "max_length": 131_072,
        "rope_scaling": RopeScaling(factor=8, low=1, high=4, original_length=8192),
    },
    "llama3.2": COMMON | {
        "rope_base": 500_000, "max_length": 131_072, "tied": True,
        "rope_scaling": RopeScaling(factor=32, low=1, high=4, original_length=8192),
    },
    "qwen2.5": COMMON | {"rope_base": 1_000_000, "norm_epsilon": 1e-6, "max_length": 32_768, "qkv_bias": True},
}  # fmt: skip
EXCEPTIONS: dict[str, dict[str, object]] = {
    "gemma3_270m": {"window": 512, "rope_factor": 1, "max_length": 32_768},
    "gemma3_1b": {"window": 512, "rope_factor": 1, "max_length": 32_768},
    **{
        f"qwen3_{size}": {
            "num_experts": 128,
            "experts_per_token": 8,
            "expert_d_ff": units,
            "norm_expert_weights": True,
        }
        for size, units in (("30b_a3b", 768), ("235b_a22b", 1536))
    },
    "t5gemma2_4b_4b": {"window": 1024, "max_length": 131_072},
    "gemma4_e2b": {
        "window": 512,
        "pattern": ("local",) * 4 + ("global",),
        "max_length": 131_072,
        "num_caches": 15,
        "shared_d_ff": 12288,
        "layer_input": 256,
    },
    "gemma4_e4b": {"window": 512, "max_length": 131_072, "num_caches": 24, "shared_d_ff": None, "layer_input": 256},
    "gemma4_12b": {"global_kv_heads": 1, "keys_as_values": True, "num_caches": 48, "layer_input": None},
    "gemma4_26b_a4b": {"global_kv_heads": 2, "keys_as_values": True, "num_caches": 30, "layer_input": None}
    | {"num_experts": 128, "experts_per_token": 8, "expert_d_ff": 704, "norm_expert_weights": True}
    | {"parallel_experts": True},
    "gemma4_31b": {"global_kv_heads": 4, "keys_as_values": True, "num_caches": 60, "layer_input": None},
    **{f"qwen3_{size}": {"tied": True} for size in ("0.6b", "1.7b", "4b")},
}
SIZES = {
    "gemma_2b": (2_506_172_416, 8, 1, 256, 16384, 0.0625, 45.2548339959),
    "gemma_7b": (8_537_680_896, 16, 16, 256, 24576, 0.0625, 55.4256258422),
    "gemma3_270m": (268_098_176, 4, 1, 256, 2048, 0.0625, 25.2982212813),
    "gemma3_1b": (999_885_952, 4, 1, 256, 6912, 0.0625, 33.9411254970),
    "gemma3_4b": (3_880_263_168, 8, 4, 256, 10240, 0.0625, 50.5964425627),
    "gemma3_12b": (11_766_034_176, 16, 8, 256, 15360, 0.0625, 61.9677335393),
    "gemma3_27b": (27_009_346_304, 32, 16, 128, 21504, 0.0771516749810, 73.3212111193),
    "gemma4_e2b": (4_628_569_379, 8, 1, 256, 6144, 1.0, 39.1918358845),
    "gemma4_e4b": (7_463_013_418, 8, 2, 256, 10240, 1.0, 50.5964425627),
    "gemma4_12b": (11_907_350_320, 16, 8, 256, 15360, 1.0, 61.9677335393),
    "gemma4_26b_a4b": (25_233_141_790, 16, 8, 256, 2112, 1.0, 53.0659966457),
    "gemma4_31b": (30_697_345_340, 32, 16, 256, 21504, 1.0, 73.3212111193),
    "t5gemma2_270m_270m": (368_424_192, 4, 1, 256, 2048, 0.0625, 25.2982212813),
    "t5gemma2_1b_1b": (1_697_782_016, 4, 1, 256, 6912, 0.0625, 33.9411254970),
    "t5gemma2_4b_4b": (7_089_110_016, 8, 4, 256, 10240, 0.0625, 50.5964425627),
    "mistral0.1_7b": (7_241_732_096, 32, 8, 128, 14336, 0.0883883476, 1.0),
    "mistral0.3_7b": (7_248_023_552, 32, 8, 128, 14336, 0.0883883476, 1.0),
    "qwen3_0.6b": (596_049_920, 16, 8, 128, 3072, 0.0883883476, 1.0),
    "qwen3_1.7b": (1_720_574_976, 16, 8, 128, 6144, 0.0883883476, 1.0),
    "qwen3_4b": (4_022_468_096, 32, 8, 128, 9728, 0.0883883476, 1.0),
    "qwen3_8b": (8_190_735_360, 32, 8, 128, 12288, 0.0883883476, 1.0),
    "qwen3_14b": (14_768_307_200, 40, 8, 128, 17408, 0.0883883476, 1.0),
    "qwen3_32b": (32_762_123_264, 64, 8, 128, 25600, 0.0883883476, 1.0),
    "qwen3_30b_a3b": (30_532_122_624, 32, 4, 128, 6144, 0.0883883476, 1.0),
    "qwen3_235b_a22b": (235_093_634_560, 64, 4, 128, 12288, 0.0883883476, 1.0),
    "mixtral0.1_8x7b": (46_702_792_704, 32, 8, 128, 14336, 0.0883883476, 1.0),
    "smollm3_3b": (3_075_098_624, 16, 4, 128, 11008, 0.0883883476, 1.0),
    "gemma2_2b": (2_614_341_888, 8, 4, 256, 9216, 0.0625, 48.0),
    "gemma2_9b": (9_241_705_984, 16, 8, 256, 14336, 0.0625, 59.8665181884),
    "gemma2_27b": (27_227_128_320, 32, 16, 128, 36864, 0.0833333333, 67.8822509939),
    "llama2_7b": (6_738_415_616, 32, 32, 128, 11008, 0.0883883476, 1.0),
    "llama2_13b": (13_015_864_320, 40, 40, 128, 13824, 0.0883883476, 1.0),
    "llama2_70b": (68_976_648_192, 64, 8, 128, 28672, 0.0883883476, 1.0),
    "llama3.1_8b": (8_030_261_248, 32, 8, 128, 14336, 0.0883883476, 1.0),
    "llama3.1_70b": (70_553_706_496, 64, 8, 128, 28672, 0.0883883476, 1.0),
    "llama3.2_1b": (1_235_814_400, 32, 8, 64, 8192, 0.125, 1.0),
    "llama3.2_3b": (3_212_749_824, 24, 8, 128, 8192, 0.0883883476, 1.0),
    "qwen2.5_7b": (7_615_616_512, 28, 4, 128, 18944, 0.0883883476, 1.0),
    "qwen2.5_32b": (32_763_876_352, 40, 8, 128, 27648, 0.0883883476, 1.0),
}
"""Parameters, heads, key-value heads, head_dim, d_ff, factors of queries and of embeddings."""


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_published_sizes_and_options(name):
    config, options = PRESETS[name], PUBLISHED[name.split("_")[0]] | EXCEPTIONS.get(name, {})
    assert {option: getattr(config, option) for option in options} == options
    count = sum(map(math.prod, parameter_shapes(config).values()))
    heads = (config.num_heads, config.num_kv_heads, config.head_dim, config.d_ff)
    assert (count, *heads) == SIZES[name][:5]
    assert (config.scale, config.embedding_scale) == pytest.approx(SIZES[name][5:], rel=1e-9)


def test_a_layers_kind_decides_its_frequencies():
    """Compares with transformers' formulas: two bases, of which one is scaled, and none for layers without RoPE."""
    config = dataclasses.replace(tiny("gemma3_4b"), pattern=("local", "unrotated", "global"))
    assert config.rotations == ("local", "unrotated", "global") * 2
    exponents = np.arange(0, 8, 2) / 8
    angles = [np.arctan2(by.sine, by.cosine).ravel() for by in decoder_stack.turns_by_place(config, jnp.array([[1]]))]
    np.testing.assert_allclose(angles[0], 10_000**-exponents, rtol=1e-6)
    np.testing.assert_array_equal(angles[1], 0)
    np.testing.assert_allclose(angles[2], 1_000_000**-exponents / 8, rtol=1e-6)
    # Layers of Gemma 2 share one set, which is computed once.
    local, everywhere = decoder_stack.turns_by_place(tiny("gemma2_2b"), jnp.array([[1]]))
    assert local is everywhere


def test_a_share_of_the_coordinates_rotates_with_the_frequencies_of_a_whole_head():
    config = dataclasses.replace(tiny_decoders.SHARED, rope_share=0.25)
    np.testing.assert_allclose(config.frequencies("global"), [1, 1_000_000 ** (-1 / 8), *[0] * 6], rtol=1e-6)
    np.testing.assert_allclose(config.frequencies("local"), 10_000 ** -(np.arange(4) / 4), rtol=1e-6)


def test_layers_without_keys_and_values_attend_to_the_last_ones_of_their_kind():
    config = dataclasses.replace(tiny_decoders.SHARED, num_layers=9, pattern=("local", "local", "global"), kv_layers=5)
    assert config.sources == (0, 1, 2, 3, 4, 2, 4, 4, 2)
    assert [config.layer(i).projections for i in (1, 2, 5)] == [("query", "key", "value"), ("query", "key"), ("query",)]
    # An early exit has the first layers, with or without some that share.
    assert dataclasses.replace(config, num_layers=6).sources == (0, 1, 2, 3, 4, 2)
    assert dataclasses.replace(config, num_layers=2).num_caches == 2


@pytest.mark.parametrize(("change", "message"), [
    ({"kv_layers": 1}, "kv_layers is 1, but a later layer is 'global', and none of the first 1: give a larger number"),
    ({"scan_layers": True}, "scan_layers=True, but this model's layers have parameters of different shapes"),
    ({"global_kv_heads": 3}, "num_heads 4 is not a multiple of global_kv_heads 3"),
    ({"global_head_dim": 7}, "global_head_dim is 7, but rotary embeddings rotate pairs"),
    ({"layer_input": 0}, "layer_input is 0: give a number of at least 1, or leave it out"),
    ({"rope_share": 1.5}, "rope_share is 1.5: give a number above 0 and at most 1"),
    ({"local_rope_base": None}, "global_head_dim is 16, but local_rope_base is not set"),
    ({"merged_attention": True}, "merged_attention=True, but the encoder's d_model is None: give 32, as in the deco"),
])  # fmt: skip
def test_contradictions_between_layers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_decoders.SHARED, **change)


def test_attention_to_two_parts_is_one_softmax_over_both():
    config, draws = dataclasses.replace(tiny("gemma2_2b"), attention_cap=None), np.random.default_rng(6)
    queries = draws.normal(size=(2, 6, 8)).astype(np.float32)
    parts = [
        (draws.normal(size=(2, 8, slots)).astype(np.float32), draws.normal(size=(2, slots, 8)).astype(np.float32))
        for slots in (5, 3)
    ]
    joined = tuple(np.concatenate(pair, axis) for pair, axis in zip(zip(*parts, strict=True), (2, 1), strict=True))
    mask = jnp.asarray(draws.random((1, 3, 8)) < 0.7).at[:, 0, :5].set(False)
    outputs = [decoder_stack.attend(config, config.layer(0), queries, each, mask) for each in (tuple(parts), (joined,))]
    np.testing.assert_allclose(*outputs, atol=1e-6)
    np.testing.assert_allclose(outputs[0].sum(-1)[0, 0, 0, 0], _by_hand(queries[0, 0], *joined, mask[0, 0]), atol=1e-5)


def _by_hand(query, keys, values, seen):
    weights = np.where(seen, np.exp(query @ keys[0]), 0.0)
    return (weights / weights.sum() @ values[0]).sum()


@pytest.mark.parametrize(("window", "centered", "behind", "ahead"), [
    (4, True, 1, 2), (5, True, 2, 2), (1, True, 0, 0), (2, False, 2, 2), (None, True, 9, 9),
])  # fmt: skip
def test_an_encoders_window_counts_tokens_on_each_side_or_on_both(window, centered, behind, ahead):
    config = dataclasses.replace(tiny("t5gemma2_1b_1b").encoder, centered_window=centered)
    back = np.subtract.outer(np.arange(7), np.arange(7))
    seen = decoder_stack.near(config, jnp.arange(7), window)
    np.testing.assert_array_equal(seen, (back <= behind) & (back >= -ahead))


def test_heads_are_normalised_before_they_rotate():
    """Recomputes one head's query and key with NumPy; the scales differ by coordinate, and Gemma's offset is added."""
    config = dataclasses.replace(tiny("gemma3_4b"), num_layers=1)
    bound, x = tiny_decoders.bound(config), np.random.default_rng(5).normal(size=(1, 3, 32)).astype(np.float32)
    flat = {name.rsplit("self_attention/")[-1]: value for name, value in flat_parameters(config).items()}
    by = turns(config, jnp.arange(3)[None], "local")
    attention = decoder_stack.Attention(config)
    params = {"params": bound.params["decoder"]["layers_0"]["self_attention"]}
    query, (key, _) = jax.jit(partial(attention.apply, method="project"))(params, x, by)

    def head(name: str, factor: float) -> np.ndarray:
        states = (x @ flat[f"{name}/kernel"])[0, :, :8]
        states = states / np.sqrt((states**2).mean(-1, keepdims=True) + 1e-6) * (1 + flat[f"{name}_norm/scale"])
        return rotate(jnp.asarray(states[None, :, None] * factor), by, "halves")[0, :, 0]

    np.testing.assert_allclose(query[0, :3], head("query", 12**-0.5), atol=1e-5)
    np.testing.assert_allclose(key[0].T, head("key", 1.0), atol=1e-5)


def test_options_of_newer_families_change_no_older_text():
    """Fingerprints hash a configuration's text, and stores are keyed by them."""
    assert repr(PRESETS["qwen3_30b_a3b"]).endswith("experts_per_token=8, expert_d_ff=768, norm_expert_weights=True)")
    assert "qk_norm" not in repr(PRESETS["llama2_7b"]) and "rope" in repr(PRESETS["llama2_7b"])
    assert repr(PRESETS["qwen3_8b"]).endswith("max_length=40960, dtype='float32', qk_norm=True)")
    assert "share" not in repr(PRESETS["gemma3_4b"]) and "kv_layers=24" in repr(PRESETS["gemma4_e4b"])


QUICK = ("gemma2_2b", "llama3.1_8b", "every layer local", "mixed", "shared")
CACHED = [pytest.param(name, 5, marks=() if name in QUICK else pytest.mark.laws) for name in CONFIGS]
CACHED += [pytest.param("gemma2_2b", None, marks=pytest.mark.laws)]


@pytest.mark.parametrize(("name", "back"), CACHED)
def test_cached_logits_equal_teacher_forced_logits(name, back):
    """Feeds blocks of several lengths at a different position in each row, across the window's edge, with rollbacks."""
    config = CONFIGS[name]
    bound = tiny_decoders.bound(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (4, 44))
    flat = unflatten_dict({n: jnp.asarray(v) for n, v in flat_parameters(config).items()}, sep="/")
    wanted = np.asarray(forced(DecoderLM(config), flat, tokens))
    start = np.array([19, 12, 5, 0])
    prompt = Prompt(jnp.asarray(tokens[:, :20]), jnp.asarray(start + 1))
    cache = prefill(bound.model, bound.params, prompt, 48, back)
    rings = config.places if back else [None] * config.num_caches
    assert [v.shape[1] for v in cache.values] == [48 if window is None else window + back + 1 for window in rings]
    for length, kept in ((1, 1), (6, 6), (6, 1), (4, 4), (6, 2), (1, 1), (6, 6)):
        block = np.stack([row[offset : offset + length] for row, offset in zip(tokens, start, strict=True)])
        out, cache = extend(bound.model, bound.params, cache, jnp.asarray(block))
        expected = np.stack([row[offset : offset + length] for row, offset in zip(wanted, start, strict=True)])
        np.testing.assert_allclose(out.logits, expected, atol=2e-4, rtol=2e-4)
        start = start + np.minimum(length, kept + np.arange(4) % 2)  # Rows roll back by different numbers of tokens.
        cache = bound.model.rollback(cache, jnp.asarray(start))


@pytest.mark.parametrize("name", ["gemma2_2b", "llama2_7b"])
def test_long_prompts_attend_in_chunks(name, monkeypatch):
    bound = tiny_decoders.bound(tiny(name))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 97, (2, 64)))
    programs, hidden = [], []
    for size in (64, 6):  # 6 does not divide 64.
        monkeypatch.setattr(decoder_stack, "CHUNK", size)
        programs.append(jax.jit(partial(bound.model._apply, method="states")).lower(bound.params, tokens).compile())
        hidden.append(programs[-1](bound.params, tokens)[0])
    np.testing.assert_allclose(*hidden, atol=2e-5, rtol=2e-5)
    whole, chunked = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert chunked < whole / 2, (chunked, whole)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_sees_only_its_window_and_nothing_ahead(name):
    config = dataclasses.replace(CONFIGS[name], num_layers=1)
    bound = tiny_decoders.bound(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, 20))
    base = np.asarray(forced(bound.model, bound.params, tokens))
    changed = tokens.copy()
    changed[0, 8] = (changed[0, 8] + 1) % config.vocab_size
    moved = np.abs(np.asarray(forced(bound.model, bound.params, changed)) - base).max(-1)[0] > 1e-6
    window = config.windows[0] or 20
    assert moved.tolist() == [8 <= position < 8 + window for position in range(20)]


@pytest.mark.parametrize("name", ["gemma2_2b", "qwen2.5_7b"])
def test_padded_vocabulary_entries_have_probability_zero(name):
    config = dataclasses.replace(tiny(name), vocab_size=90)
    bound = tiny_decoders.bound(config)
    logits = forced(bound.model, bound.params, np.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 97) and bool((logits[..., 90:] == -jnp.inf).all())
    assert bound.model.vocab_size == 90 and bool(jnp.isfinite(logits[..., :90]).all())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 5000), st.integers(0, 5000), st.sampled_from(["halves", "adjacent"]), st.booleans())
def test_rotation_makes_products_depend_only_on_distance(at, shift, pairs, scaled):
    config = tiny("llama3.1_8b" if scaled else "llama2_7b")
    rng = np.random.default_rng(at)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, config.head_dim)), jnp.float32) for _ in range(2))

    def product(of_query: int, of_key: int) -> float:
        turned = [rotate(x, turns(config, jnp.array([[p]])), pairs) for x, p in ((query, of_query), (key, of_key))]
        assert float(jnp.linalg.norm(turned[0])) == pytest.approx(float(jnp.linalg.norm(query)), rel=1e-5)
        return float(jnp.vdot(*turned))

    assert product(at + 3, at) == pytest.approx(product(at + shift + 3, at + shift), abs=0.02)


def test_the_two_pairings_are_one_rotation_of_permuted_coordinates():
    config = tiny("llama2_7b")
    x, by = jnp.arange(1.0, 9.0).reshape(1, 1, 1, 8), turns(config, jnp.array([[7]]))
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    np.testing.assert_allclose(rotate(x[..., order], by, "adjacent"), rotate(x, by, "halves")[..., order], rtol=1e-6)


def test_stretched_frequencies_keep_fast_turns_and_slow_the_others():
    scaling = RopeScaling(factor=8, low=1, high=4, original_length=8192)
    wavelengths = np.array([10.0, 2047.0, 4096.0, 8193.0, 1e6])
    stretch = (2 * math.pi / wavelengths) / scaling(2 * math.pi / wavelengths)
    # transformers' formula at wavelength 4096: smooth = (8192 / 4096 − 1) / (4 − 1) = 1/3.
    np.testing.assert_allclose(stretch, [1, 1, 1 / (1 / 3 + (2 / 3) / 8), 8, 8], rtol=1e-9)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope_factor": 0.0}, "rope_factor is 0.0: give a number above 0"),
    ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"activation": "relu"}, "activation is 'relu': choose one of gelu, silu"),
    ({"rope_pairs": "thirds"}, "rope_pairs is 'thirds'"),
    ({"pattern": ("local", "distant")}, "pattern contains 'distant'"),
    ({"pattern": ()}, "pattern contains ''"),
    ({"window": None}, "window is None, but there are local layers"),
    ({"num_embeddings": 96}, "num_embeddings is 96, below vocab_size 97"),
    ({"d_ff": 0}, "d_ff is 0"),
])  # fmt: skip
def test_inconsistent_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        dataclasses.replace(tiny("gemma2_2b"), **changes)


def test_prompts_and_blocks_that_do_not_fit_are_refused():
    bound, tokens = tiny_decoders.bound(tiny("gemma2_2b")), jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="max_len is 3, but the prompt has 4 tokens"):
        bound.model.prefill(bound.params, Prompt(tokens, jnp.array([4])), 3)
    with pytest.raises(ValueError, match="has encoder_tokens, but a decoder-only model"):
        bound.model.prefill(bound.params, Prompt(tokens, jnp.array([4]), tokens), 8)
    cache = jax.eval_shape(lambda: bound.model.prefill(bound.params, Prompt(tokens, jnp.array([4])), 40, 2))
    with pytest.raises(ValueError, match="block of 5 tokens does not fit the ring of 9 slots .* max_rollback=4"):
        jax.eval_shape(bound.model.extend, bound.params, cache, jnp.ones((1, 5), jnp.int32))


def test_half_precision_is_close_and_halves_the_cache():
    config = tiny("gemma2_2b")
    exact, tokens = tiny_decoders.bound(config), np.random.default_rng(2).integers(0, 97, (2, 12))
    half = DecoderLM(dataclasses.replace(config, dtype="bfloat16"))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact.params)
    half_logits, exact_logits = forced(half, rounded, tokens), forced(exact.model, exact.params, tokens)
    assert half_logits.dtype == jnp.float32 and float(jnp.abs(half_logits - exact_logits).mean()) < 0.15
    cache = prefill(half, rounded, Prompt(jnp.asarray(tokens), jnp.array([12, 3])), 16, None)
    assert {k.dtype.name for k in (*cache.keys, *cache.values)} == {"bfloat16"}
