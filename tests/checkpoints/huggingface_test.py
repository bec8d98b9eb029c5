"""Tests of folders saved by transformers: configurations, tensor names, shards, damage, checksums."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.checkpoints import CheckpointError, describe, load, model_of, save, write_checksums
from speccascade_jax.checkpoints.array_plan import stream
from speccascade_jax.checkpoints.huggingface_config import read_config
from speccascade_jax.checkpoints.reading import find
from speccascade_jax.models.decoder_config import RopeScaling

pytest.importorskip("safetensors", reason="writing test files needs safetensors")


from tests.support import damage, memory
from tests.support import huggingface_files as hf
from tests.support.checkpoint_arrays import flat, same

MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16}
GATE = "model.layers.2.mlp.gate_proj.weight"


def read(kind, change, absent=()):
    """Returns the configuration of a kind's `config.json` with changed entries."""
    entries = {k: v for k, v in (hf.entries(kind) | change).items() if k not in absent}
    return read_config(Path("config.json"), entries)


@pytest.fixture
def written(tmp_path):
    """Returns a function that writes a directory with changes to its configuration and tensors."""

    def write(kind="llama2", change=None, arrays=None, shards=1, absent=()):
        entries = {k: v for k, v in (hf.entries(kind) | (change or {})).items() if k not in absent}
        stored = hf.tensors(kind, hf.random_parameters(kind)) | (arrays or {})
        return hf.write(tmp_path / "theirs", entries, {n: a for n, a in stored.items() if a is not None}, shards)

    return write


@pytest.mark.parametrize(("weights", "remedy"), [
    ("flax_model.msgpack", r"from_flax=True\) and save_pretrained"), ("pytorch_model.bin", "and save_pretrained"),
    ("tf_model.h5", "and save_pretrained"), ("model-00001-of-00002.safetensors", "incomplete: .* copy"),
])  # fmt: skip
def test_an_error_for_other_weight_files_says_how_to_convert_them(written, weights, remedy):
    path = written()
    (path / "model.safetensors").rename(path / weights)
    with pytest.raises(CheckpointError, match=remedy) as error:
        load(path)
    assert weights in str(error.value)


@pytest.mark.parametrize(("name", "content", "remedy"), [
    ("model.Q4_K_M.gguf", b"GGUF", "give the model's safetensors"), ("adapter_config.json", b"{}", "merge_and_unload"),
    ("model.safetensors", b"", "no config.json with a model_type"),
])  # fmt: skip
def test_an_error_for_a_folder_of_another_format_names_the_remedy(tmp_path, name, content, remedy):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} .*{remedy}"):
        load(tmp_path)
    with pytest.raises(CheckpointError):
        load(tmp_path / name)


def test_a_pointer_of_git_lfs_is_named(written):
    path = written()
    (path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="run git lfs pull"):
        load(path)


def test_without_the_library_of_the_hub_both_remedies_for_a_name_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    download = "run  hf download google/t5-x --revision v2 --local-dir models/t5-x  and give models/t5-x"
    with pytest.raises(FileNotFoundError, match=rf"does not exist here; .*'speccascade_jax\[hub\]', or {download}$"):
        load("google/t5-x@v2")


def test_an_error_for_the_root_of_a_cache_names_its_snapshot(written, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0f1e2d"
    snapshot.parent.mkdir(parents=True)
    written().rename(snapshot)
    for folder in (snapshot.parents[1], snapshot.parent):
        with pytest.raises(CheckpointError, match=f"cache .*: give {snapshot}$"):
            load(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", list(hf.KINDS))
def test_every_kind_is_read_with_all_its_tensors(written, kind, shards):
    path = written(kind, shards=shards)
    model, params = load(path)
    assert model.config == hf.KINDS[kind]
    assert same(params, hf.random_parameters(kind))
    assert f"format: Hugging Face, {hf.entries(kind)['model_type']}" in describe(path)


@pytest.mark.parametrize("kind", ["t5_1.0", "t5_1.1", "qwen2.5", "gemma2"])
def test_loading_prepared_equals_preparing_after_loading(written, kind):
    path = written(kind)
    model, params = load(path)
    _, prepared = load(path, prepared=True)
    fused = flat(model.prepare(params))
    assert any("/qkv/" in name for name in fused)
    assert same(prepared, fused)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_every_stored_dtype_loads_as_every_dtype(written, stored):
    original = hf.tensors("llama2", hf.random_parameters("llama2"))
    path = written(arrays={n: a.astype(jnp.dtype(stored)) for n, a in original.items()})
    for asked, expected in {"float32": "float32", "bfloat16": "bfloat16", None: stored, "float16": "float16"}.items():
        model, params = load(path, dtype=asked)
        assert {str(array.dtype) for array in flat(params).values()} == {expected}
        assert model.config.dtype == ("bfloat16" if asked == "bfloat16" else "float32")
    kernel = flat(load(path)[1])["decoder/layers_2/mlp/wi_0/kernel"]
    np.testing.assert_array_equal(kernel, original[GATE].T.astype(jnp.dtype(stored)).astype(np.float32))


def test_rope_parameters_of_release_5_are_read(written):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    rope |= {"original_max_position_embeddings": 64}
    config = load(written("llama2", {"rope_parameters": rope}, absent=["rope_theta", "rope_scaling"]))[0].config
    assert (config.rope_base, config.rope_scaling) == (5e5, RopeScaling(4.0, 1.0, 2.0, 64))
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}
    config = load(written("llama2", plain, absent=["rope_theta", "rope_scaling"]))[0].config
    assert (config.rope_base, config.rope_scaling) == (7e4, None)


def test_absent_entries_have_the_librarys_defaults(written):
    absent = ["head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings", "hidden_act"]
    assert load(written("llama2", absent=absent))[0].config == hf.KINDS["llama2"]
    absent = ["tie_word_embeddings", "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"]
    assert load(written("gemma2", absent=absent))[0].config == hf.KINDS["gemma2"]
    off = load(written("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}))[0].config
    assert (off.attention_cap, off.output_cap) == (None, None)
    assert load(written("t5_1.0", absent=["tie_word_embeddings", "feed_forward_proj"]))[0].config == hf.KINDS["t5_1.0"]


def test_window_layers_are_read(written):
    kinds = ["full_attention", "sliding_attention"] * 2
    windows = {"use_sliding_window": True, "sliding_window": 9}
    config = load(written("qwen2.5", {"layer_types": kinds} | windows))[0].config
    assert (config.pattern, config.window) == (("global", "local"), 9)
    config = load(written("qwen2.5", {"use_sliding_window": True, "max_window_layers": 3}))[0].config
    assert (config.pattern, config.window) == (("global", "global", "global", "local"), 131072)
    for kind in ("qwen2.5", "qwen3"):
        config = read(kind, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0})
        assert (config.pattern, config.window) == (("global",), None)


@pytest.mark.parametrize(("kind", "default"), [("qwen2.5", 32), ("qwen3", 32), ("smollm3", 4), ("mistral", 8)])
def test_null_key_value_heads_are_as_many_as_query_heads(kind, default):
    heads = {"num_attention_heads": 64, "head_dim": 2}
    assert read(kind, heads | {"num_key_value_heads": None}).num_kv_heads == 64
    assert read(kind, heads, absent=["num_key_value_heads"]).num_kv_heads == default


def test_rope_scaling_comes_before_rope_parameters():
    scaling = {"rope_type": "linear", "factor": 4.0}
    plain = {"rope_type": "default", "rope_theta": 7e4}
    config = read("qwen3", {"rope_scaling": scaling, "rope_parameters": plain, "rope_theta": 3e4})
    assert (config.rope_factor, config.rope_base) == (4.0, 3e4)
    by_kind = {"full_attention": plain, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    config = read("gemma3", {"rope_scaling": scaling, "rope_parameters": by_kind})
    assert (config.rope_factor, config.rope_base, config.local_rope_base) == (4.0, 7e4, 2e4)


def test_layers_that_rotate_otherwise_or_not_at_all_are_read(written):
    config = load(written("smollm3", absent=["no_rope_layers"]))[0].config
    assert (config.pattern, config.kinds[3]) == (("global", "global", "global", "unrotated"), "unrotated")
    assert load(written("mistral", {"sliding_window": None}))[0].config.pattern == ("global",)
    base = load(written("smollm3", absent=["rope_theta"]))[0].config.rope_base
    assert base == 2_000_000  # its class has another default than Llama's
    by_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    absent = ["rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"]
    config = load(written("gemma3", {"rope_parameters": by_kind}, absent=absent))[0].config
    assert config == hf.KINDS["gemma3"]
    assert load(written("gemma3", absent=["rope_theta", "rope_local_base_freq"]))[0].config == config
    unscaled = load(written("gemma3", {"rope_scaling": None}))[0].config
    assert unscaled.rope_factor == 1 and "rope_factor" not in repr(unscaled) and "rope_factor=8.0" in repr(config)


def test_gemma_4_is_read_as_published_and_as_release_5_writes_it(written):
    absent = ["global_head_dim", "num_global_key_value_heads"]
    assert read("gemma4", {}) == hf.KINDS["gemma4"]
    for keys in (("1", "3"), ("01", "03")):  # a model of more than ten layers has zeros before small numbers
        by_layer = dict.fromkeys(keys, {"head_dim": 16, "num_key_value_heads": 1})
        assert read("gemma4", {"per_layer_config": by_layer}, absent) == hf.KINDS["gemma4"]
    equal = read("gemma4", {"per_layer_config": {}}, absent)  # release 5, if global layers are as large as local ones
    assert equal.global_head_dim is None and equal.global_kv_heads is None
    # A count of global heads only matters where values are keys, and the last layer is global whatever the file says.
    assert read("gemma4", {"attention_k_eq_v": False}).global_kv_heads is None
    assert (
        read("gemma4", {"layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2}).kinds[3]
        == "global"
    )
    # Published files also hold keys and values of layers that share those of others.
    unused = {
        f"model.layers.{i}.self_attn.{k}.weight": np.zeros(3, np.float32) for i in (2, 3) for k in ("k_proj", "v_norm")
    }
    model, params = load(written("gemma4", arrays=unused))
    assert (model.config, same(params, hf.random_parameters("gemma4"))) == (hf.KINDS["gemma4"], True)
    with pytest.raises(
        CheckpointError, match=r"the configuration has no place for 1 array \(model.layers.1.self_attn.v_pro"
    ):
        load(written("gemma4", arrays={"model.layers.1.self_attn.v_proj.weight": np.zeros(3, np.float32)}))


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model.", "language_model."])
def test_the_text_model_inside_a_model_of_images_is_read(written, root):
    """Reads the names of both releases of transformers, and the few entries of a published file."""
    expected = hf.random_parameters("gemma3")
    stored = hf.tensors("gemma3", expected)
    renamed = {name.replace("model.", root, 1): array for name, array in stored.items()}
    outside = "model." if root.startswith("model.") else ""
    renamed[f"{outside}vision_tower.head.weight"] = renamed["multi_modal_projector.x"] = np.zeros(3, np.float32)
    absent = dict.fromkeys(hf.tensors("gemma3_images", expected))
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    kept += (
        "num_key_value_heads",
        "rope_scaling",
        "sliding_window",
        "query_pre_attn_scalar",
        "max_position_embeddings",
    )
    text = {key: hf.entries("gemma3")[key] for key in kept}
    path = written("gemma3_images", {"text_config": text}, arrays=absent | renamed)
    model, params = load(path)
    assert (model.config, same(params, expected)) == (hf.KINDS["gemma3"], True)
    head = np.roll(expected["token_embedder/embedding"], 1, axis=0)
    name = "language_model.lm_head.weight" if root == "language_model.model." else "lm_head.weight"
    with pytest.warns(UserWarning, match=f"a different {name} is stored"):
        untied = load(written("gemma3_images", {"text_config": text}, arrays=absent | renamed | {name: head}))[1]
    assert same(untied, expected | {"decoder/logits_dense/kernel": head.T})


def test_tied_output_layers_are_read_with_or_without_copies(written):
    expected = hf.random_parameters("gemma2")
    embedding = expected["token_embedder/embedding"]
    assert same(load(written("gemma2", arrays={"lm_head.weight": embedding}))[1], expected)
    alone = {"lm_head.weight": embedding, "model.embed_tokens.weight": None}
    assert same(load(written("gemma2", arrays=alone))[1], expected)


@pytest.mark.parametrize("kind", ["gemma2", "t5_1.0"])
def test_another_output_layer_than_the_tied_embedding_is_read_as_stored(written, kind):
    """Checks the values that transformers 5 computes with: its T5 scales the states before this layer too."""
    expected, factor = hf.random_parameters(kind), 8**-0.5 if kind == "t5_1.0" else 1
    head = np.roll(expected["token_embedder/embedding"], 1, axis=0)
    path = written(kind, arrays={"lm_head.weight": head})
    with pytest.warns(UserWarning, match="config.json ties the output layer .* a different lm_head.weight is stored"):
        model, params = load(path)
    assert not model.config.tied
    assert same(params, expected | {"decoder/logits_dense/kernel": head.T * np.float32(factor)})


def test_mt5_is_t5_1_1_and_never_scaled(written):
    expected = hf.random_parameters("t5_1.1")
    model, params = load(
        written("t5_1.1", {"model_type": "mt5", "tie_word_embeddings": True}, absent=["feed_forward_proj"])
    )
    assert (model.config, same(params, expected)) == (hf.KINDS["t5_1.1"], True)
    # release 5 writes a tied model without this array
    path = written("t5_1.1", {"model_type": "mt5"}, arrays={"lm_head.weight": None})
    logits = {"decoder/logits_dense/kernel": expected["token_embedder/embedding"].T}
    assert same(load(path)[1], expected | logits)


def test_t5gemma_starts_with_bos_and_may_have_an_output_layer_of_its_own(written, tmp_path):
    config = read("t5gemma", {"pad_token_id": 3})
    assert (config.start_id, config.pad_id) == (2, 3)
    assert read("t5gemma", {"decoder_start_token_id": 4}).start_id == 4
    expected = hf.random_parameters("t5gemma")
    head = np.roll(expected["token_embedder/embedding"], 1, axis=0)
    path = written("t5gemma", {"tie_word_embeddings": False}, arrays={"lm_head.out_proj.weight": head})
    model, params = load(path)
    assert same(params, expected | {"decoder/logits_dense/kernel": head.T}) and not model.config.tied
    save(tmp_path / "ours", model, params)
    assert model_of(tmp_path / "ours") == model
    odd = {"encoder": hf.entries("t5gemma")["encoder"] | {"attention_bias": True}}
    with pytest.raises(CheckpointError, match="encoder.attention_bias is True, but only False is supported"):
        read("t5gemma", odd)


def test_t5gemma2_leaves_out_images_and_has_one_embedding(written):
    tower = "model.encoder.vision_tower.vision_model.head.weight"
    names = (tower, "model.encoder.multi_modal_projector.x", "model.encoder.embed_tokens.eoi_embedding")
    images = dict.fromkeys(names, np.zeros(3, np.float32))
    model, params = load(written("t5gemma2", arrays=images))
    assert same(params, hf.random_parameters("t5gemma2"))
    assert (model.config.start_id, model.config.pad_id, model.config.encoder.centered_window) == (2, 0, True)
    with pytest.raises(CheckpointError, match=r"no place for 1 array \(model.decoder.vision_tower.x\)"):
        load(written("t5gemma2", arrays={"model.decoder.vision_tower.x": np.zeros(3, np.float32)}))


def test_umt5_is_scaled_only_if_its_file_ties_the_output_layer(written):
    """Google's files do not tie it; release 5 of transformers always ties and scales."""
    assert not read("umt5", {}).tied and read("umt5", {}, absent=["feed_forward_proj"]).gated
    expected = hf.random_parameters("umt5")
    expected.pop("decoder/logits_dense/kernel")
    model, params = load(written("umt5", {"tie_word_embeddings": True}, arrays={"lm_head.weight": None}))
    assert model.config.tied and same(params, expected)
    assert repr(model.config).endswith("layer_biases=True)") and "layer_biases" not in repr(hf.KINDS["t5_1.1"])


@pytest.mark.parametrize(("config", "generation", "start"), [
    ({"decoder_start_token_id": 3, "pad_token_id": 1}, {}, 3),
    ({"decoder_start_token_id": 3}, {"decoder_start_token_id": 5}, 5),
    ({"bos_token_id": 4, "pad_token_id": 1}, {"pad_token_id": 2}, 4),
    ({"pad_token_id": 1}, {}, 1),
    ({}, {}, 0),
])  # fmt: skip
def test_a_t5_starts_where_transformers_starts_it(written, tmp_path, config, generation, start):
    path = written("t5_1.1", config)
    (path / "generation_config.json").write_text(json.dumps(generation))
    loaded = model_of(path).config
    assert (loaded.start_id, loaded.pad_id) == (start, config.get("pad_token_id", 0))
    # fingerprints, and with them records, are of this text
    assert repr(loaded) == repr(hf.KINDS["t5_1.1"])[:-1] + (f", start_id={start})" if start else ")")
    save(tmp_path / "ours", *load(path))
    assert model_of(tmp_path / "ours").config == loaded


def test_an_error_names_a_start_id_that_is_no_id(written):
    for odd, message in (
        ([3, 4], r"decoder_start_token_id is \[3, 4\]: give one id"),
        (99, "start_id is 99: give an id from 0 to "),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(written("t5_1.1", {"decoder_start_token_id": odd}))


def test_a_stack_without_its_output_layer_has_no_prefix(written):
    stored = hf.tensors("gemma2", hf.random_parameters("gemma2"))
    bare = {name.removeprefix("model."): array for name, array in stored.items()}
    path = written("gemma2", arrays=dict.fromkeys(stored) | bare)
    assert same(load(path)[1], hf.random_parameters("gemma2"))


def test_copies_and_buffers_are_ignored(written):
    expected = hf.random_parameters("t5_1.0")
    embedding = expected["token_embedder/embedding"]
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = {"encoder.embed_tokens.weight": embedding, "lm_head.weight": embedding, bias: np.zeros((32, 2), np.float32)}
    assert same(load(written("t5_1.0", arrays=more))[1], expected)
    assert same(load(written("t5_1.0", arrays=more | {"shared.weight": None}))[1], expected)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert same(load(written("llama2", arrays=buffer))[1], hf.random_parameters("llama2"))


def test_t5_of_release_5_is_always_tied_and_maybe_scaled(written):
    expected = hf.random_parameters("t5_1.1")
    said = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    model, params = load(written("t5_1.1", said, arrays={"lm_head.weight": None}))
    assert not model.config.tied
    logits = {"decoder/logits_dense/kernel": expected["token_embedder/embedding"].T}
    assert same(params, expected | logits)


def test_t5_vocabulary_is_padded(tmp_path):
    config = hf.entries("t5_1.0") | {"vocab_size": 32128}
    stored = hf.tensors("t5_1.0", hf.random_parameters("t5_1.0"))
    stored["shared.weight"] = np.zeros((32128, 8), np.float32)
    loaded = load(hf.write(tmp_path / "theirs", config, stored))[0].config
    assert (loaded.vocab_size, loaded.num_embeddings) == (32100, 32128)


@pytest.mark.parametrize(("kind", "change", "said"), [
    ("llama2", {"model_type": "gemma5"}, r"model_type 'gemma5' is an unknown .*; known: t5, mt5, umt5, llama, mistral"),
    ("llama2", {"hidden_act": "gelu"}, r"hidden_act is 'gelu', but only 'silu' or 'swish' is supported"),
    ("llama2", {"attention_bias": True}, r"attention_bias is True, but only False"),
    ("llama2", {"mlp_bias": True}, r"mlp_bias is True, but only False"),
    ("llama2", {"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\}, but only None"),
    ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling.type is 'dynamic'"),
    ("llama2", {"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters.rope_type is 'yarn'"),
    ("llama2", {"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling.factor is None: give a number above 0"),
    ("llama2", {"rope_parameters": {"a": {}, "b": {}}}, r".*one set of RoPE parameters, shared by all"),
    ("llama2", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5, but only 1.0"),
    ("llama2", {"hidden_size": "32"}, r"hidden_size is '32': give a whole number"),
    ("llama2", {"intermediate_size": None}, r"intermediate_size is None: give a whole number"),
    ("llama2", {"head_dim": 7}, r"head_dim is 7, but rotary embeddings rotate pairs"),
    ("gemma2", {"hidden_activation": "gelu"}, r"hidden_activation is 'gelu', but only 'gelu_pytorch_tanh'"),
    ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True"),
    ("t5_1.1", {"feed_forward_proj": "gated-silu"}, r"feed_forward_proj is 'gated-silu', but only 'relu' or"),
    ("t5_1.1", {"dense_act_fn": "relu"}, r"dense_act_fn is 'relu', but only 'gelu_new'"),
    ("gemma2", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': give true or false"),
    ("gemma2", {"model_type": ["llama"]}, r"model_type \['llama'\] is an unknown architecture"),
    ("gemma2", {"rms_norm_eps": 10**400}, ".*too large"),
    ("gemma2", {"layer_types": 3}, "layer_types is 3: give 4 entries of"),
    ("gemma2", {"layer_types": [[], [], [], []]}, "unhashable"),
    ("qwen2.5", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\]: give 4 entries"),
    ("qwen2.5", {"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention, but there is no wind"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True, but only False"),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type is 'yarn', but only 'default' or 'lin"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, r"layer_types is \['full.*, but only None"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True, but only False"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: give 5 entries of 0 or 1"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 5}, "layer_types has sliding_attention, but only full_atten"),
    ("gemma1", {"hidden_act": "relu"}, "hidden_act is 'relu', but only 'gelu_pytorch_tanh' or 'gelu'"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, but only False"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, but only None"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*: give one set for each of"),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention is scaled",
    ),
    ("gemma4", {"enable_moe_block": "yes"}, "enable_moe_block is 'yes': give true or false"),
    ("gemma4", {"enable_moe_block": True}, "num_experts is None: give a whole number of at least 1"),
    ("gemma4", MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size is 0: give a whole number of at least 1"),
    ("gemma4", MOE | {"top_k_experts": 9}, "experts_per_token is 9: give a number from 1 to num_experts=8"),
    ("gemma4", MOE | {"model_type": "gemma4_unified_text"}, "enable_moe_block is True, but only False"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', but only None or "),
    ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4: give a number from 0 to 3"),
    ("gemma4", {"num_kv_shared_layers": 3}, "kv_layers is 1, but a later layer is 'global'"),
    ("gemma4", {"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input is 90, but only 97"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config is .*: give equal sizes for the laye"),
    ("gemma4", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config is .*: give equal sizes for the layer"),
    ("gemma4", {"per_layer_config": {"1": {}, "x": {}}}, "per_layer_config is .*for the layers 1, 3 of full_attention"),
    ("gemma4", {"per_layer_config": dict.fromkeys("13", {"d": 4})}, "per_layer_config has d, but only head_dim, num_"),
    ("t5gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings is False, but only True is supported"),
    ("t5gemma2", {"encoder": {"text_config": {}, "model_type": "gemma3"}}, "encoder.model_type is 'gemma3', but only"),
    ("t5gemma2", {"decoder": hf.entries("t5gemma2")["decoder"] | {"attn_logit_softcapping": 50.0}},
     "decoder.attn_logit_softcapping is 50.0, but only None"),
    ("t5gemma2", {"decoder": hf.entries("t5gemma2")["decoder"] | {"hidden_size": 40}},
     "merged_attention=True, but the encoder's d_model is 32: give 40, as in the decoder"),
    ("t5gemma2", {"decoder": hf.entries("t5gemma2")["decoder"] | {"vocab_size": 98}},
     "shared_embedding=True, but the encoder's num_embeddings is 97"),
    ("gemma3_images", {"text_config": None}, "text_config is None: give the entries of a gemma3_text"),
    ("gemma3_images", {"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama', but only 'gemma3_"),
    ("gemma3_images", {"text_config": {"attention_bias": True}}, "text_config.attention_bias is True, but only False"),
])  # fmt: skip
def test_unsupported_options_are_refused(written, kind, change, said):
    with pytest.raises(CheckpointError, match=rf"config.json: {said}"):
        model_of(written(kind, change))


def full(value, shape=(48, 32), dtype=np.float32):
    return np.full(shape, value, dtype)


@pytest.mark.parametrize(("arrays", "said"), [
    ({GATE: None}, rf"theirs is incomplete: 1 of 39 arrays are missing \({GATE}\)"),
    ({"lm_head.weight": None}, r"1 of \d+ arrays are missing \(lm_head.weight\)"),
    ({"model.adapter": full(0, (3,))}, r"no place for 1 array \(model.adapter\), in model.safetensors"),
    ({GATE: full(0, (48, 31))}, rf"model.safetensors: {GATE} has shape \[48, 31\].* needs \[48, 32\]"),
    ({GATE: full(0, dtype=np.int8)}, rf"model.safetensors: {GATE} has dtype int8, .*quantised"),
    ({GATE: full(np.nan)}, rf"not finite \(.*{GATE}: 1,536 of 1,536 values"),
    ({GATE: full(7e4)}, r"not finite \(decoder/layers_2/mlp/wi_0/kernel: as float16, 1,536 of"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(written, arrays, said):
    with pytest.raises(CheckpointError, match=said):
        load(written(arrays=arrays), dtype="float16")


def test_missing_shards_are_named(written, tmp_path):
    path = written(shards=3)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    lost = [name for name, file in index.items() if file.startswith("model-00002")]
    (path / "model-00002-of-00003.safetensors").rename(tmp_path / "away")
    said = rf"1 of 3 shards are missing \(model-00002-of-00003.safetensors\), and with them {len(lost)} tensors \(\w+"
    with pytest.raises(CheckpointError, match=said):
        load(path)
    (path / "model-00003-of-00003.safetensors").replace(path / "model-00002-of-00003.safetensors")
    (tmp_path / "away").rename(path / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors lacks 13 tensors that model.safe"):
        load(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere"}}')
    with pytest.raises(CheckpointError, match=r"index.json is damaged: its weight_map names no files"):
        load(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: it has neither model.safetensors nor .*found config.json"):
        load(path)


def test_shards_truncated_before_or_after_opening_are_named(written):
    path = written(shards=3)
    file = path / "model-00002-of-00003.safetensors"
    stored = find(path)
    file.write_bytes(file.read_bytes()[:-100])
    said = r"model-00002-of-00003.safetensors is truncated: 100 of .* bytes .* 1 of 13 tensors \(model.norm.weight"
    with pytest.raises(CheckpointError, match=said):
        load(path)
    said = r"1 array can't be read \(model.*\n.*model-00002-of-00003.safetensors ends 100 bytes before"
    with pytest.raises(CheckpointError, match=said):
        list(stream(stored, stored.plan, None))


def test_checksums_detect_a_flipped_bit(written):
    path = written(shards=3)
    written_to = write_checksums(path)
    assert written_to == path / "checksums.json"
    assert same(load(path)[1], hf.random_parameters("llama2"))
    damage.flip(path / "model-00003-of-00003.safetensors", -7)
    said = r"1 array can't be read \((\S+)\).*\n  \1: model-00003-of-00003.safetensors: its bytes do not match"
    with pytest.raises(CheckpointError, match=said):
        load(path)
    write_checksums(path)
    load(path)


@pytest.mark.parametrize(("change", "said"), [
    (lambda r: r["files"]["model.safetensors"].pop(GATE), rf"does not list tensor {GATE} of model.safetensors"),
    (
        lambda r: r["files"]["model.safetensors"][GATE].update(shape=[48]),
        rf"tensor {GATE} is float32 \[48, 32\], but .* says float32 \[48\]",
    ),
    (lambda r: r.update(format=2), r"checksums.json has format 2"),
    (lambda r: r.pop("files"), r"checksums.json is damaged"),
])  # fmt: skip
def test_checksums_that_do_not_fit_are_refused(written, change, said):
    path = written()
    damage.edit_json(write_checksums(path), lambda r: r.pop("bytes"))  # files of earlier versions have no entry "bytes"
    load(path)
    damage.edit_json(path / "checksums.json", change)
    with pytest.raises(CheckpointError, match=said):
        load(path)


def test_checksums_detect_every_flipped_bit_of_a_configuration(written):
    path = written()
    write_checksums(path)
    for _ in damage.flips(path / "config.json", 100):
        with pytest.raises(CheckpointError, match=r"config.json is damaged: .* checksums.json|no config.json"):
            model_of(path)
    model_of(path)


def test_a_single_safetensors_file_is_refused(written):
    with pytest.raises(CheckpointError, match=r"model.safetensors holds no configuration: give its directory"):
        load(written() / "model.safetensors")


@pytest.mark.parametrize("kind", ["llama2", "qwen2.5", "gemma2", "t5_1.1"])
def test_implausible_numbers_of_layers_are_refused(written, kind):
    name = "num_layers" if kind.startswith("t5") else "num_hidden_layers"
    for count, said in (
        (2 * 10**7, r"is 20,000,000: at most 10,000 are supported"),
        (9_000, r"90?,?0\d+ layers exceed"),
    ):
        path = written(kind, {name: count})

        def refused(path=path, said=said):
            with pytest.raises(CheckpointError, match=said):
                model_of(path)

        assert memory.peak(refused) < 5_000_000
