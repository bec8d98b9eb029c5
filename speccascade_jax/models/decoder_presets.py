"""Configurations of published decoder-only models and of T5Gemma, by name.

Sources of the sizes: the models' published `config.json` files and papers (Gemma Team, 2024 to 2026; Touvron et al.,
2023; Llama Team, 2024; Jiang et al., 2023 and 2024; Qwen Team, 2024 and 2025; Hugging Face, 2025). Those of T5Gemma are
in google-deepmind/gemma, gemma/research/t5gemma/config.py (Zhang et al., 2025).
"""

import dataclasses
import math
from typing import Any

from speccascade_jax.models.decoder_config import DecoderConfig, RopeScaling


def _gemma2(layers: int, d: int, heads: int, kv: int, head_dim: int, d_ff: int, scale: float) -> DecoderConfig:
    # Gemma's checkpoints store a norm's scale minus 1, hence the offset. Its weights were trained with both soft caps.
    return DecoderConfig(
        vocab_size=256_000, num_embeddings=256_000, d_model=d, num_layers=layers, num_heads=heads, num_kv_heads=kv,
        head_dim=head_dim, d_ff=d_ff, activation="gelu", tied=True, post_norms=True, norm_offset=1.0, norm_epsilon=1e-6,
        embedding_scale=math.sqrt(d), query_scale=scale**-0.5, attention_cap=50.0, output_cap=30.0, window=4096,
        pattern=("local", "global"), max_length=8192,
    )  # fmt: skip


def _llama(layers: int, d: int, heads: int, kv: int, d_ff: int, v: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=v, num_embeddings=v, d_model=d, num_layers=layers, num_heads=heads, num_kv_heads=kv,
        head_dim=d // heads, d_ff=d_ff, max_length=4096,
    )  # fmt: skip


def _llama31(layers: int, d: int, heads: int, d_ff: int) -> DecoderConfig:
    # Llama 3.1 has 8 key-value heads at every size, and scales the rotary frequencies for its longer context.
    plain = _llama(layers, d, heads, 8, d_ff, 128_256)
    return dataclasses.replace(plain, rope_base=500_000.0, rope_scaling=RopeScaling(), max_length=131_072)


def _llama32(layers: int, d: int, heads: int, d_ff: int) -> DecoderConfig:
    plain = _llama31(layers, d, heads, d_ff)
    return dataclasses.replace(plain, tied=True, rope_scaling=RopeScaling(factor=32.0))


def _qwen25(layers: int, d: int, heads: int, kv: int, d_ff: int) -> DecoderConfig:
    plain = _llama(layers, d, heads, kv, d_ff, 152_064)
    return dataclasses.replace(plain, rope_base=1_000_000.0, norm_epsilon=1e-6, qkv_bias=True, max_length=32_768)


def _gemma1(layers: int, d: int, heads: int, kv: int, d_ff: int) -> DecoderConfig:
    # Gemma 1 has none of Gemma 2's windows, soft caps and post-norms.
    base = _gemma2(layers, d, heads, kv, 256, d_ff, 256)
    return dataclasses.replace(
        base, post_norms=False, query_scale=None, attention_cap=None, output_cap=None, window=None, pattern=("global",)
    )


def _t5gemma(encoder: DecoderConfig, decoder: DecoderConfig | None = None) -> DecoderConfig:
    # T5Gemma's decoder starts from BOS, which is id 2.
    return dataclasses.replace(decoder or encoder, encoder=encoder, start_id=2)


def _t5gemma2(*sizes: int, **options: Any) -> DecoderConfig:
    # T5Gemma 2 divides the rotary frequencies of global layers at every size, Gemma 3 only at the larger sizes.
    base = _gemma3(*sizes, rope_factor=8.0, **options)
    pair = _t5gemma(dataclasses.replace(base, centered_window=True), base)
    return dataclasses.replace(pair, merged_attention=True, shared_embedding=True)


def _gemma3(layers: int, d: int, heads: int, kv: int, d_ff: int, window: int, **options: Any) -> DecoderConfig:
    base = _gemma2(layers, d, heads, kv, 256, d_ff, 256)
    family: dict[str, Any] = {
        "vocab_size": 262_144, "num_embeddings": 262_144, "attention_cap": None, "output_cap": None, "qk_norm": True,
        "pattern": ("local",) * 5 + ("global",), "rope_base": 1_000_000.0, "local_rope_base": 10_000.0,
        "max_length": 32_768, "window": window,
    }  # fmt: skip
    return dataclasses.replace(base, **family | options)


# Gemma 3's larger sizes also read images, so their embeddings have 64 more rows. They also divide the rotary
# frequencies of global layers.
_GEMMA3_LARGE = {"vocab_size": 262_208, "num_embeddings": 262_208, "rope_factor": 8.0, "max_length": 131_072}


def _gemma4(layers: int, d: int, heads: int, kv: int, d_ff: int, window: int, **options: Any) -> DecoderConfig:
    # Gemma 4's norms multiply by the stored scale, without an offset. Its queries have a norm instead of a factor.
    family: dict[str, Any] = {
        "norm_offset": 0.0, "query_scale": 1.0, "output_cap": 30.0, "max_length": 262_144, "rope_share": 0.25,
        "value_norm": True, "global_head_dim": 512, "output_scale": True,
    }  # fmt: skip
    return _gemma3(layers, d, heads, kv, d_ff, window, **family | options)


# In Gemma 4's small sizes, each layer reads a separate embedding of the token, and later layers share keys and values.
_GEMMA4_SMALL = {"layer_input": 256, "max_length": 131_072}
_GEMMA4_EXPERTS = {
    "num_experts": 128, "experts_per_token": 8, "expert_d_ff": 704, "norm_expert_weights": True,
    "parallel_experts": True,
}  # fmt: skip
"""Options of the Gemma 4 size that has a mixture of experts beside each dense feed-forward."""


def _qwen3(layers: int, d: int, heads: int, d_ff: int, tied: bool = False) -> DecoderConfig:
    # A head has 128 coordinates at every size, so all heads together may be wider than the model.
    plain = _llama(layers, d, heads, 8, d_ff, 151_936)
    return dataclasses.replace(
        plain, head_dim=128, tied=tied, qk_norm=True, rope_base=1_000_000.0, norm_epsilon=1e-6, max_length=40_960
    )


def _qwen3_moe(layers: int, d: int, heads: int, d_ff: int, expert_d_ff: int) -> DecoderConfig:
    # No layer has a dense feed-forward, so d_ff is not used.
    experts: dict[str, Any] = {"num_experts": 128, "experts_per_token": 8}
    experts |= {"expert_d_ff": expert_d_ff, "norm_expert_weights": True}
    return dataclasses.replace(_qwen3(layers, d, heads, d_ff), num_kv_heads=4, **experts)


def _mistral(vocabulary: int, **options: Any) -> DecoderConfig:
    return dataclasses.replace(_llama(32, 4096, 32, 8, 14336, vocabulary), max_length=32_768, **options)


_2B, _9B = _gemma2(26, 2304, 8, 4, 256, 9216, 256), _gemma2(42, 3584, 16, 8, 256, 14336, 256)

PRESETS: dict[str, DecoderConfig] = {
    "gemma_2b": _gemma1(18, 2048, 8, 1, 16384),
    "gemma_7b": _gemma1(28, 3072, 16, 16, 24576),
    "gemma2_2b": _2B,
    "gemma2_9b": _9B,
    "gemma2_27b": _gemma2(46, 4608, 32, 16, 128, 36864, 144),
    "gemma3_270m": _gemma3(18, 640, 4, 1, 2048, 512),
    "gemma3_1b": _gemma3(26, 1152, 4, 1, 6912, 512),
    "gemma3_4b": _gemma3(34, 2560, 8, 4, 10240, 1024, **_GEMMA3_LARGE),
    "gemma3_12b": _gemma3(48, 3840, 16, 8, 15360, 1024, **_GEMMA3_LARGE),
    "gemma3_27b": _gemma3(62, 5376, 32, 16, 21504, 1024, **_GEMMA3_LARGE, head_dim=128, query_scale=168**-0.5),
    # The config.json files of google/gemma-4-E2B, -E4B, -12B, -26B-A4B and -31B, as public readers quote them.
    "gemma4_e2b": _gemma4(
        35,
        1536,
        8,
        1,
        6144,
        512,
        **_GEMMA4_SMALL,
        pattern=("local",) * 4 + ("global",),
        kv_layers=15,
        shared_d_ff=12288,
    ),
    "gemma4_e4b": _gemma4(42, 2560, 8, 2, 10240, 512, **_GEMMA4_SMALL, kv_layers=24),
    "gemma4_12b": _gemma4(48, 3840, 16, 8, 15360, 1024, global_kv_heads=1, keys_as_values=True),
    "gemma4_26b_a4b": _gemma4(30, 2816, 16, 8, 2112, 1024, global_kv_heads=2, keys_as_values=True, **_GEMMA4_EXPERTS),
    "gemma4_31b": _gemma4(60, 5376, 32, 16, 21504, 1024, global_kv_heads=4, keys_as_values=True),
    "llama2_7b": _llama(32, 4096, 32, 32, 11008, 32_000),
    "llama2_13b": _llama(40, 5120, 40, 40, 13824, 32_000),
    "llama2_70b": _llama(80, 8192, 64, 8, 28672, 32_000),
    "llama3.1_8b": _llama31(32, 4096, 32, 14336),
    "llama3.1_70b": _llama31(80, 8192, 64, 28672),
    "llama3.2_1b": _llama32(16, 2048, 32, 8192),
    "llama3.2_3b": _llama32(28, 3072, 24, 8192),
    "mistral0.1_7b": _mistral(32_000, pattern=("local",), window=4096),
    "mistral0.3_7b": _mistral(32_768, rope_base=1_000_000.0),
    "mixtral0.1_8x7b": _mistral(
        32_000, rope_base=1_000_000.0, num_experts=8, experts_per_token=2, expert_d_ff=14336, norm_expert_weights=True
    ),
    "qwen2.5_7b": _qwen25(28, 3584, 28, 4, 18944),
    "qwen2.5_32b": _qwen25(64, 5120, 40, 8, 27648),
    "qwen3_0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3_1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3_4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3_8b": _qwen3(36, 4096, 32, 12288),
    "qwen3_14b": _qwen3(40, 5120, 40, 17408),
    "qwen3_32b": _qwen3(64, 5120, 64, 25600),
    "qwen3_30b_a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3_235b_a22b": _qwen3_moe(94, 4096, 64, 12288, 1536),
    "smollm3_3b": dataclasses.replace(
        _llama(36, 2048, 16, 4, 11008, 128_256),
        tied=True,
        norm_epsilon=1e-6,
        rope_base=5_000_000.0,
        pattern=("global", "global", "global", "unrotated"),
        max_length=65_536,
    ),
    "t5gemma_s_s": _t5gemma(_gemma2(8, 512, 8, 8, 64, 1024, 64)),
    "t5gemma_b_b": _t5gemma(_gemma2(12, 768, 12, 12, 64, 2048, 64)),
    "t5gemma_l_l": _t5gemma(_gemma2(24, 1024, 16, 16, 64, 2816, 64)),
    "t5gemma_ml_ml": _t5gemma(_gemma2(26, 1152, 4, 4, 256, 6912, 256)),
    "t5gemma_xl_xl": _t5gemma(_gemma2(24, 2048, 32, 32, 64, 5120, 64)),
    "t5gemma_2b_2b": _t5gemma(_2B),
    "t5gemma_9b_2b": _t5gemma(_9B, _2B),
    "t5gemma_9b_9b": _t5gemma(_9B),
    # The first is the config.json of google/t5gemma-2-270m-270m, as a public listing quotes it. The larger ones have
    # its options and the sizes of Gemma 3.
    "t5gemma2_270m_270m": _t5gemma2(18, 640, 4, 1, 2048, 512),
    "t5gemma2_1b_1b": _t5gemma2(26, 1152, 4, 1, 6912, 512),
    "t5gemma2_4b_4b": _t5gemma2(34, 2560, 8, 4, 10240, 1024, max_length=131_072),
}
"""The configurations of published models, by name."""


def tiny(name: str, *, vocab_size: int = 97, window: int = 6) -> DecoderConfig:
    """Returns a preset's configuration with small sizes, for tests.

    If several of the preset's query heads share a key-value head, two do so in the result. Sizes, scales, the window
    and the original length of rotary scaling change; all other options stay as in the preset. There are two layers, or
    as many as the pattern needs, and as many again without keys and values if the preset has such layers.
    """
    return _tiny(PRESETS[name], vocab_size, window)


def _tiny(preset: DecoderConfig, vocab_size: int, window: int) -> DecoderConfig:
    # Two key-value heads instead of one, because with one a wrong order of the query heads would change nothing.
    grouped = preset.num_heads != preset.num_kv_heads
    scaling = preset.rope_scaling and dataclasses.replace(preset.rope_scaling, original_length=16)
    return dataclasses.replace(
        preset, vocab_size=vocab_size, num_embeddings=vocab_size, d_model=32,
        num_layers=max(2, len(preset.pattern) * (2 if preset.kv_layers else 1)), num_heads=4,
        num_kv_heads=2 if grouped else 4, head_dim=8, d_ff=48, rope_scaling=scaling, max_length=512,
        num_experts=min(8, preset.num_experts), experts_per_token=min(3, preset.experts_per_token),
        expert_d_ff=min(16, preset.expert_d_ff),
        window=window if preset.window else None,
        embedding_scale=math.sqrt(32) if preset.embedding_scale != 1 else 1.0,
        query_scale=preset.query_scale if preset.query_scale in (None, 1.0) else 12**-0.5,
        global_head_dim=preset.global_head_dim and 16, global_kv_heads=preset.global_kv_heads and 1,
        kv_layers=preset.kv_layers and len(preset.pattern), shared_d_ff=preset.shared_d_ff and 96,
        layer_input=preset.layer_input and 6,
        encoder=preset.encoder and _tiny(preset.encoder, vocab_size, window),
    )  # fmt: skip
