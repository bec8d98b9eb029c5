"""Model folders in transformers' format, with random weights and the tensor names of its documentation.

The names are written here a second time on purpose, so that an error in the package's tables is not repeated here.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.decoder_presets import tiny
from speccascade_jax.models.t5 import T5Config
from tests.support import tiny_decoders

T5_11 = T5Config(
    vocab_size=24, num_embeddings=24, d_model=8, num_heads=2, head_dim=3, d_ff=10, num_encoder_layers=2,
    num_decoder_layers=3,
)  # fmt: skip
KINDS: dict[str, T5Config | DecoderConfig] = {
    "t5_1.0": dataclasses.replace(T5_11, gated=False, tied=True),
    "t5_1.1": T5_11,
    "umt5": dataclasses.replace(T5_11, layer_biases=True),
    "llama2": dataclasses.replace(tiny("llama2_7b"), num_layers=4),
    "llama3.1": dataclasses.replace(tiny("llama3.1_8b"), num_layers=4),
    "qwen2.5": dataclasses.replace(tiny("qwen2.5_7b"), num_layers=4),
    "qwen3": tiny("qwen3_8b"),
    "qwen3_moe": dataclasses.replace(tiny("qwen3_30b_a3b"), num_layers=3, dense_layers=(1,)),
    "mixtral": dataclasses.replace(tiny("mixtral0.1_8x7b"), d_ff=16),
    "mistral": tiny("mistral0.1_7b"),
    "smollm3": dataclasses.replace(tiny("smollm3_3b"), num_layers=5),
    "gemma1": tiny("gemma_2b"),
    "gemma2": dataclasses.replace(tiny("gemma2_2b"), num_layers=4),
    "gemma3": dataclasses.replace(tiny("gemma3_4b"), num_layers=7),
    "gemma3_images": dataclasses.replace(tiny("gemma3_4b"), num_layers=7),
    # the encoder and the decoder differ in width and depth
    "t5gemma": dataclasses.replace(tiny("t5gemma_9b_2b"), d_model=24, num_layers=4, embedding_scale=24**0.5),
    "t5gemma2": dataclasses.replace(tiny("t5gemma2_4b_4b"), num_layers=7),
    "gemma4": dataclasses.replace(tiny_decoders.SHARED, global_kv_heads=1),
    "gemma4_experts": tiny_decoders.PARALLEL,
}
ROOTS = {"gemma3_images": "language_model.", "gemma4_experts": "model.language_model."}
"""Prefixes of a decoder's names, inside a model that also reads images."""


def _common(c: DecoderConfig) -> dict:
    return {
        "vocab_size": c.num_embeddings, "hidden_size": c.d_model, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "intermediate_size": c.d_ff, "max_position_embeddings": c.max_length, "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rope_base, "tie_word_embeddings": c.tied,
    }  # fmt: skip


def entries(kind: str) -> dict:
    """Returns `config.json` of a kind, as release 4 of transformers wrote it."""
    c = KINDS[kind]
    if isinstance(c, T5Config):
        return {
            "model_type": "umt5" if c.layer_biases else "t5", "vocab_size": c.num_embeddings,
            "d_model": c.d_model, "d_kv": c.head_dim, "d_ff": c.d_ff, "num_layers": c.num_encoder_layers,
            "num_decoder_layers": c.num_decoder_layers, "num_heads": c.num_heads,
            "feed_forward_proj": "gated-gelu" if c.gated else "relu", "tie_word_embeddings": c.tied,
        }  # fmt: skip
    if kind == "t5gemma":
        windows = {"query_pre_attn_scalar": 12, "sliding_window": 6, "model_type": "t5_gemma_module"}
        windows |= {"bos_token_id": 2, "pad_token_id": 0}
        stacks = {"encoder": _common(c.encoder) | windows, "decoder": _common(c) | windows}
        return {"model_type": "t5gemma", "eos_token_id": [1], **stacks}
    if kind == "t5gemma2":
        # as release 5 wrote it; no entry names the tokens, as in the published files' stacks
        ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": c.rope_base}}
        ropes |= {"sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope_base}}
        options = {"query_pre_attn_scalar": 12, "sliding_window": 6, "rope_parameters": ropes}
        text, decoder = (
            {name: value for name, value in _common(stack).items() if name != "rope_theta"} | options
            for stack in (c.encoder, c)
        )
        encoder = {"text_config": text | {"model_type": "t5gemma2_text"}, "vision_config": {"hidden_size": 4}}
        return {
            "model_type": "t5gemma2", "bos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
            "encoder": encoder | {"model_type": "t5gemma2_encoder"},
            "decoder": decoder | {"model_type": "t5gemma2_decoder"},
        }  # fmt: skip
    if kind == "gemma4":
        whole = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": c.rope_base}
        return {name: value for name, value in _common(c).items() if name != "rope_theta"} | {
            "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16,
            "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 30.0, "enable_moe_block": False, "use_bidirectional_attention": None,
            "rope_parameters": {"full_attention": whole, "sliding_attention": {"rope_theta": c.local_rope_base}},
        }  # fmt: skip
    if kind == "gemma4_experts":
        text = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        text |= {"layer_types": ["sliding_attention", "full_attention"], "use_double_wide_mlp": False}
        text |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16}
        return {"model_type": "gemma4", "text_config": entries("gemma4") | text, "vision_config": {"hidden_size": 4}}
    if kind == "gemma3_images":
        return {"model_type": "gemma3", "text_config": entries("gemma3"), "vision_config": {"hidden_size": 4}}
    if kind == "gemma3":
        return _common(c) | {
            "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12,
            "sliding_window": 6, "sliding_window_pattern": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_local_base_freq": 10_000.0, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        }  # fmt: skip
    if kind == "gemma1":
        return _common(c) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}
    if kind == "mistral":
        return _common(c) | {"model_type": "mistral", "hidden_act": "silu", "sliding_window": 6}
    if kind == "mixtral":
        return _common(c) | {
            "model_type": "mixtral", "hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2,
            "sliding_window": None,
        }  # fmt: skip
    if kind == "qwen3_moe":
        return _common(c) | {
            "model_type": "qwen3_moe", "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1],
            "use_sliding_window": False, "sliding_window": None,
        }  # fmt: skip
    if kind == "smollm3":
        layers = {"no_rope_layers": [1, 1, 1, 0, 1], "no_rope_layer_interval": 4, "use_sliding_window": False}
        return _common(c) | layers | {"model_type": "smollm3", "hidden_act": "silu", "sliding_window": None}
    if kind == "gemma2":
        return _common(c) | {
            "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 6,
        }  # fmt: skip
    if kind in ("qwen2.5", "qwen3"):
        windows = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}
        return _common(c) | windows | {"model_type": f"qwen{kind[4]}", "hidden_act": "silu"}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    llama = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    return _common(c) | llama | {"rope_scaling": scaling if kind == "llama3.1" else None}


def names(kind: str) -> dict[str, str]:
    """Returns tensor names by parameter."""
    c = KINDS[kind]
    if isinstance(c, T5Config):
        return _t5_names(c)
    if kind.startswith("t5gemma"):
        return _t5gemma_names(c)
    root = ROOTS.get(kind, "")
    if root.startswith("model."):
        return {ours: root + theirs.removeprefix("model.") for ours, theirs in _decoder_names(c).items()}
    return {ours: root + theirs for ours, theirs in _decoder_names(c).items()}


def _t5_names(c: T5Config) -> dict[str, str]:
    tensor_names = {"token_embedder/embedding": "shared.weight"}
    if not c.tied:
        tensor_names["decoder/logits_dense/kernel"] = "lm_head.weight"
    inner = ("wi_0", "wi_1", "wo") if c.gated else ("wi", "wo")
    heads = {"query": "q", "key": "k", "value": "v", "out": "o"}
    for stack, layers, attention, last in (("encoder", 2, "attention", 1), ("decoder", 3, "self_attention", 2)):
        for i in range(layers if c.layer_biases else 1):
            owner = f"{stack}/layers_{i}" if c.layer_biases else stack
            block = f"{stack}.block.{i}.layer.0.SelfAttention"
            tensor_names[f"{owner}/relpos_bias/rel_embedding"] = f"{block}.relative_attention_bias.weight"
        tensor_names[f"{stack}/{stack}_norm/scale"] = f"{stack}.final_layer_norm.weight"
        for i in range(layers):
            ours, theirs = f"{stack}/layers_{i}", f"{stack}.block.{i}.layer"
            tensor_names[f"{ours}/pre_{attention}_layer_norm/scale"] = f"{theirs}.0.layer_norm.weight"
            tensor_names[f"{ours}/pre_mlp_layer_norm/scale"] = f"{theirs}.{last}.layer_norm.weight"
            for ours_k, k in heads.items():
                tensor_names[f"{ours}/{attention}/{ours_k}/kernel"] = f"{theirs}.0.SelfAttention.{k}.weight"
                if stack == "decoder":
                    cross = f"{ours}/encoder_decoder_attention/{ours_k}/kernel"
                    tensor_names[cross] = f"{theirs}.1.EncDecAttention.{k}.weight"
            if stack == "decoder":
                tensor_names[f"{ours}/pre_cross_attention_layer_norm/scale"] = f"{theirs}.1.layer_norm.weight"
            tensor_names |= {f"{ours}/mlp/{k}/kernel": f"{theirs}.{last}.DenseReluDense.{k}.weight" for k in inner}
    return tensor_names


def _t5gemma_names(c: DecoderConfig) -> dict[str, str]:
    tensor_names = {"token_embedder/embedding": "model.encoder.embed_tokens.weight"}
    if not c.shared_embedding:
        tensor_names = {
            "token_embedder/embedding": "model.decoder.embed_tokens.weight",
            "encoder/token_embedder/embedding": "model.encoder.embed_tokens.weight",
        }
    for stack, config in (("encoder", c.encoder), ("decoder", c)):
        tensor_names[f"{stack}/{stack}_norm/scale"] = f"model.{stack}.norm.weight"
        parts = {"self_attention": "self_attn"}
        parts |= {"encoder_decoder_attention": "cross_attn"} if stack == "decoder" and not c.merged_attention else {}
        for i in range(config.num_layers):
            ours, theirs = f"{stack}/layers_{i}", f"model.{stack}.layers.{i}"
            for a, b in (*parts.items(), ("mlp", "feedforward")):
                a = a.replace("encoder_decoder", "cross")
                for when in ("pre", "post"):
                    tensor_names[f"{ours}/{when}_{a}_layer_norm/scale"] = f"{theirs}.{when}_{b}_layernorm.weight"
            for a, b in parts.items():
                for x, y in {"query": "q", "key": "k", "value": "v", "out": "o"}.items():
                    tensor_names[f"{ours}/{a}/{x}/kernel"] = f"{theirs}.{b}.{y}_proj.weight"
            for x in "qk" if c.qk_norm else "":
                name = {"q": "query", "k": "key"}[x]
                tensor_names[f"{ours}/self_attention/{name}_norm/scale"] = f"{theirs}.self_attn.{x}_norm.weight"
            for x, y in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items():
                tensor_names[f"{ours}/mlp/{x}/kernel"] = f"{theirs}.mlp.{y}_proj.weight"
    return tensor_names


def _decoder_names(c: DecoderConfig) -> dict[str, str]:
    tensor_names = {
        "token_embedder/embedding": "model.embed_tokens.weight",
        "decoder/decoder_norm/scale": "model.norm.weight",
    }
    if not c.tied:
        tensor_names["decoder/logits_dense/kernel"] = "lm_head.weight"
    norms = {"pre_self_attention": "input", "pre_mlp": "post_attention"}
    if c.post_norms:
        norms = {"pre_self_attention": "input", "post_self_attention": "post_attention"}
        norms |= {"pre_mlp": "pre_feedforward", "post_mlp": "post_feedforward"}
    parts = {"query": "q", "key": "k", "value": "v", "out": "o"}
    if c.layer_input:
        tensor_names |= {
            "layer_inputs/embedder/embedding": "model.embed_tokens_per_layer.weight",
            "layer_inputs/projection/kernel": "model.per_layer_model_projection.weight",
            "layer_inputs/norm/scale": "model.per_layer_projection_norm.weight",
        }
    for i in range(c.num_layers):
        ours, theirs = f"decoder/layers_{i}", f"model.layers.{i}"
        if c.layer_input:
            tensor_names |= {
                f"{ours}/layer_input_gate/kernel": f"{theirs}.per_layer_input_gate.weight",
                f"{ours}/layer_input_out/kernel": f"{theirs}.per_layer_projection.weight",
                f"{ours}/post_layer_input_layer_norm/scale": f"{theirs}.post_per_layer_input_norm.weight",
            }
        if c.output_scale:
            tensor_names[f"{ours}/output/scale"] = f"{theirs}.layer_scalar"
        if c.parallel_experts:
            tensor_names |= {
                f"{ours}/post_dense_layer_norm/scale": f"{theirs}.post_feedforward_layernorm_1.weight",
                f"{ours}/pre_mixture_layer_norm/scale": f"{theirs}.pre_feedforward_layernorm_2.weight",
                f"{ours}/post_mixture_layer_norm/scale": f"{theirs}.post_feedforward_layernorm_2.weight",
                f"{ours}/mixture/router/weight": f"{theirs}.router.proj.weight",
                f"{ours}/mixture/router/norm/scale": f"{theirs}.router.scale",
                f"{ours}/mixture/factors/scale": f"{theirs}.router.per_expert_scale",
                f"{ours}/mixture/experts/wi_0/kernel": f"{theirs}.experts.gate_up_proj",
                f"{ours}/mixture/experts/wi_1/kernel": f"{theirs}.experts.gate_up_proj",
                f"{ours}/mixture/experts/wo/kernel": f"{theirs}.experts.down_proj",
            }
        # for the only kind with shared keys and values: layers 2 and 3 use those of others, and layer 1 has no values
        absent = () if not c.keys_as_values else ((), ("value",), ("key", "value"), ("key", "value"))[i]
        for a, b in norms.items():
            tensor_names[f"{ours}/{a}_layer_norm/scale"] = f"{theirs}.{b}_layernorm.weight"
        for a, b in parts.items():
            if a in absent:
                continue
            tensor_names[f"{ours}/self_attention/{a}/kernel"] = f"{theirs}.self_attn.{b}_proj.weight"
            if c.qkv_bias and a != "out":
                tensor_names[f"{ours}/self_attention/{a}/bias"] = f"{theirs}.self_attn.{b}_proj.bias"
        for a, b in {"query": "q", "key": "k"}.items() - {(a, parts[a]) for a in absent} if c.qk_norm else ():
            tensor_names[f"{ours}/self_attention/{a}_norm/scale"] = f"{theirs}.self_attn.{b}_norm.weight"
        part = ".mlp" if c.qk_norm else ".block_sparse_moe"
        if c.sparse[i] and not c.parallel_experts:
            tensor_names[f"{ours}/mlp/router/weight"] = f"{theirs}{part}.gate.weight"
        for a, b in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items():
            if not c.sparse[i] or c.parallel_experts:
                tensor_names[f"{ours}/mlp/{a}/kernel"] = f"{theirs}.mlp.{b}_proj.weight"
                continue
            projection = f"{b}_proj" if c.qk_norm else {"gate": "w1", "up": "w3", "down": "w2"}[b]
            tensor_names[f"{ours}/mlp/experts/{a}/kernel"] = f"{theirs}{part}.experts.{{}}.{projection}.weight"
    return tensor_names


def random_parameters(kind: str, dtype="float32", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in expected_shapes(KINDS[kind]).items()}


def tensors(kind: str, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors that transformers would store."""
    stored = {}
    for ours, theirs in names(kind).items():
        array = parameters[ours]
        if "{}" in theirs:  # a tensor for each expert
            stored |= {theirs.format(i): np.ascontiguousarray(kernel.T) for i, kernel in enumerate(array)}
            continue
        if ours.endswith("router/weight"):
            array = np.ascontiguousarray(array.T)
        if "mixture/experts" in ours:  # one tensor for all experts, of gate and units
            turned = np.ascontiguousarray(array.swapaxes(1, 2))
            stored[theirs] = np.concatenate([stored[theirs], turned], axis=1) if theirs in stored else turned
            continue
        stored[theirs] = np.ascontiguousarray(array.T) if ours.endswith(("kernel", "rel_embedding")) else array
    return stored


def write(path: Path, config: dict, arrays: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Writes a directory with one file or several."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(arrays, path / "model.safetensors")
        return path
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(arrays.items())[number::shards])
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path
