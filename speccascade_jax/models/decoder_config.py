"""Configurations of decoder-only models: Gemma 2, Llama 2 and 3.1 and Qwen 2.5 differ in this table only.

Sources of the sizes: the models' published `config.json` files and papers (Gemma Team, 2024; Touvron et al., 2023;
Llama Team, 2024; Qwen Team, 2024).
"""

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from speccascade_jax.core.checks import check_sizes

ACTIVATIONS = ("gelu", "silu")
PAIRINGS = ("halves", "adjacent")
KINDS = ("local", "global")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies: slow rotations are stretched (kind `llama3` in transformers).

    Wavelengths above `original_length / low` are stretched by `factor`, wavelengths below `original_length / high`
    stay unchanged, and wavelengths in between are blended.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the frequencies (radians per position) after stretching."""
        # The number of full turns within the original length; pairs that make few are the slow ones.
        turns = self.original_length * frequencies / (2 * math.pi)
        unstretched = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return frequencies * (unstretched + (1 - unstretched) / self.factor)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder-only model (hashable: it is a static argument of jit).

    Attributes:
        vocab_size: real vocabulary entries; num_embeddings: rows of the embedding, padding included.
        num_kv_heads: key-value heads; each serves `num_heads / num_kv_heads` query heads.
        activation: of the gate: "gelu" (tanh approximation: GeGLU) or "silu" (SwiGLU).
        tied: logits through the embedding; otherwise `decoder/logits_dense`.
        qkv_bias: biases on queries, keys and values (Qwen 2.5).
        post_norms: a norm after attention and after the feed-forward too, before the residual sum (Gemma 2).
        norm_offset: added to a norm's scale: 1 for Gemma, 0 elsewhere.
        norm_epsilon: added to the mean square.
        embedding_scale: factor of the embeddings, rounded to the computation's dtype (Gemma: √d_model).
        query_scale: factor of the queries; `None` means `head_dim ** -0.5`.
        attention_cap, output_cap: `cap · tanh(x / cap)` on the logits of attention and of the vocabulary; `None`: off.
        rope_base: base of the rotary frequencies; rope_pairs: the coordinates that rotate together: "halves" (i with
            i + head_dim / 2) or "adjacent" (2i with 2i + 1); rope_scaling: `None` or Llama 3's.
        window: number of positions that a local layer sees, its own included; pattern: kinds of layers, repeated
            ("local", "global").
        max_length: the longest sequence that the model was trained for.
        dtype: dtype of computation; norms, softmax and logits are always float32.
        missing_rows: ids at the end of the vocabulary without a row, which the model never draws.

    Raises:
        ValueError: the sizes do not fit together.
    """

    vocab_size: int
    num_embeddings: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    norm_epsilon: float = 1e-5
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_cap: float | None = None
    output_cap: float | None = None
    rope_base: float = 10_000.0
    rope_pairs: str = "halves"
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    pattern: tuple[str, ...] = ("global",)
    max_length: int = 8192
    dtype: str = "float32"
    missing_rows: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        # JSON has lists and objects; a static argument of jit needs hashable values.
        object.__setattr__(self, "pattern", tuple(self.pattern))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        check_sizes(self, "num_layers", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, but rotary embeddings rotate pairs: give an even number")
        for name, known in (("activation", ACTIVATIONS), ("rope_pairs", PAIRINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(known)}")
        # An empty pattern is reported as an unknown kind, because no layer could be built from it.
        if unknown := [kind for kind in self.pattern if kind not in KINDS] or (() if self.pattern else ("",)):
            raise ValueError(f"pattern contains {unknown[0]!r}: choose each layer's kind from {', '.join(KINDS)}")
        if "local" in self.pattern and (self.window is None or self.window < 1):
            raise ValueError(
                f"window is {self.window}, but there are local layers: give their number of visible positions"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of positions that each layer sees; `None` means all."""
        kinds = [self.pattern[i % len(self.pattern)] for i in range(self.num_layers)]
        return tuple(self.window if kind == "local" else None for kind in kinds)

    @property
    def scale(self) -> float:
        """Factor of the queries."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def frequencies(self) -> np.ndarray:
        """Returns float32 `[head_dim / 2]`, radians per position of each rotating pair."""
        # float32 throughout, as in the published code: double precision rounds to other frequencies.
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies = 1.0 / np.float32(self.rope_base) ** exponents
        return (self.rope_scaling(frequencies) if self.rope_scaling else frequencies).astype(np.float32)


def parameter_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns every parameter's shape by name: T5X's names for a decoder-only stack, plus biases and post-norms."""
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (c.num_embeddings, c.d_model)}
    layer = _layer_shapes(c)
    for i in range(c.num_layers):
        shapes |= {f"decoder/layers_{i}/{name}": shape for name, shape in layer.items()}
    shapes["decoder/decoder_norm/scale"] = (c.d_model,)
    return shapes if c.tied else shapes | {"decoder/logits_dense/kernel": (c.d_model, c.num_embeddings)}


def _layer_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    norms = ("pre_self_attention", "pre_mlp", *(("post_self_attention", "post_mlp") if c.post_norms else ()))
    shapes: dict[str, tuple[int, ...]] = {f"{norm}_layer_norm/scale": (c.d_model,) for norm in norms}
    for name, heads in (("query", c.num_heads), ("key", c.num_kv_heads), ("value", c.num_kv_heads)):
        shapes[f"self_attention/{name}/kernel"] = (c.d_model, heads * c.head_dim)
        if c.qkv_bias:
            shapes[f"self_attention/{name}/bias"] = (heads * c.head_dim,)
    shapes["self_attention/out/kernel"] = (c.num_heads * c.head_dim, c.d_model)
    shapes |= {f"mlp/{name}/kernel": (c.d_model, c.d_ff) for name in ("wi_0", "wi_1")}
    return shapes | {"mlp/wo/kernel": (c.d_ff, c.d_model)}


def _gemma2(layers: int, d: int, heads: int, kv: int, head_dim: int, d_ff: int, scale: float) -> DecoderConfig:
    # Gemma's norms store their scale minus 1, and its published weights need both soft caps.
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
    # 3.1 has 8 key-value heads at every size and stretches the rotations for its longer context.
    plain = _llama(layers, d, heads, 8, d_ff, 128_256)
    return dataclasses.replace(plain, rope_base=500_000.0, rope_scaling=RopeScaling(), max_length=131_072)


def _qwen25(layers: int, d: int, heads: int, kv: int, d_ff: int) -> DecoderConfig:
    plain = _llama(layers, d, heads, kv, d_ff, 152_064)
    return dataclasses.replace(plain, rope_base=1_000_000.0, norm_epsilon=1e-6, qkv_bias=True, max_length=32_768)


PRESETS: dict[str, DecoderConfig] = {
    "gemma2_2b": _gemma2(26, 2304, 8, 4, 256, 9216, 256),
    "gemma2_9b": _gemma2(42, 3584, 16, 8, 256, 14336, 256),
    "gemma2_27b": _gemma2(46, 4608, 32, 16, 128, 36864, 144),
    "llama2_7b": _llama(32, 4096, 32, 32, 11008, 32_000),
    "llama2_13b": _llama(40, 5120, 40, 40, 13824, 32_000),
    "llama2_70b": _llama(80, 8192, 64, 8, 28672, 32_000),
    "llama3.1_8b": _llama31(32, 4096, 32, 14336),
    "llama3.1_70b": _llama31(80, 8192, 64, 28672),
    "qwen2.5_7b": _qwen25(28, 3584, 28, 4, 18944),
    "qwen2.5_32b": _qwen25(64, 5120, 40, 8, 27648),
}
"""The published models, by name."""


def tiny(name: str, *, vocab_size: int = 97, window: int = 6) -> DecoderConfig:
    """Returns a preset shrunk for tests, with two query heads per key-value head if the preset groups heads.

    All options are the preset's except the sizes, the window and the length that rotary scaling starts from.
    """
    # Two key-value heads for four query heads: with one, a wrong order of grouped heads would go unnoticed.
    preset = PRESETS[name]
    grouped = preset.num_heads != preset.num_kv_heads
    scaling = preset.rope_scaling and dataclasses.replace(preset.rope_scaling, original_length=16)
    return dataclasses.replace(
        preset, vocab_size=vocab_size, num_embeddings=vocab_size, d_model=32, num_layers=2, num_heads=4,
        num_kv_heads=2 if grouped else 4, head_dim=8, d_ff=48, rope_scaling=scaling, max_length=512,
        window=window if preset.window else None,
        embedding_scale=math.sqrt(32) if preset.embedding_scale != 1 else 1.0,
        query_scale=None if preset.query_scale is None else 12**-0.5,
    )  # fmt: skip
