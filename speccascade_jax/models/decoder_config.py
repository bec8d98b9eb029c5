"""Configurations of decoder-only models. Gemma, Llama, Mistral, Mixtral, Qwen and SmolLM3 differ only in them.

T5Gemma is an encoder-decoder of the same layers. Published sizes are in `models.decoder_presets`.
"""

import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.core.checks import check_sizes
from speccascade_jax.models.stacks import is_scanned

ACTIVATIONS = ("gelu", "silu")
PAIRINGS = ("halves", "adjacent")
KINDS = ("local", "global", "unrotated")
LATER = {"later": True}
"""Metadata of options that were added after models had been stored. A configuration's text and hash contain such an
option only if it differs from its default, so the hashes of stored models stay valid."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies, which slows down low frequencies (`llama3` in transformers).

    Wavelengths above `original_length / low` are stretched by `factor`, wavelengths below `original_length / high`
    stay unchanged, and wavelengths in between are blended.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the frequencies (radians per position) after scaling."""
        # Each pair's number of full turns within the original length: pairs with few turns have long wavelengths.
        turns = self.original_length * frequencies / (2 * math.pi)
        unstretched = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return frequencies * (unstretched + (1 - unstretched) / self.factor)


class LayerSizes(NamedTuple):
    """Sizes of one layer (`DecoderConfig.layer`).

    Attributes:
        head_dim, kv_heads: width of a head, and number of key-value heads.
        d_ff: width of the feed-forward.
        projections: names of the kernels that read the layer's input: "query", and "key" and "value" if it has them.
    """

    head_dim: int
    kv_heads: int
    d_ff: int
    projections: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder-only model, or of an encoder-decoder with the same layers (T5Gemma).

    It is hashable, because jit takes it as a static argument.

    Attributes:
        vocab_size: number of real vocabulary entries; num_embeddings: number of rows of the embedding, which also has
            rows of padding.
        num_kv_heads: number of key-value heads; each serves `num_heads / num_kv_heads` query heads.
        activation: activation of the gate in the feed-forward: "gelu" (tanh approximation, GeGLU) or "silu" (SwiGLU).
        tied: whether the embedding computes the logits too; otherwise `decoder/logits_dense` computes them.
        qkv_bias: whether queries, keys and values have biases (Qwen 2.5).
        post_norms: whether attention and feed-forward also have a norm after them, before the residual sum (Gemma 2).
        norm_offset: number added to a norm's scale: 1 for Gemma, otherwise 0.
        norm_epsilon: number added to the mean square in a norm.
        embedding_scale: factor of the embeddings, rounded to the dtype of computation (Gemma: √d_model).
        query_scale: factor of the queries; `None` means `head_dim ** -0.5`.
        attention_cap, output_cap: caps of the logits of attention and of the vocabulary, `cap · tanh(x / cap)`; `None`
            means no cap.
        rope_base: base of the rotary frequencies; rope_pairs: the coordinates that rotate together, "halves" (i with
            i + head_dim / 2) or "adjacent" (2i with 2i + 1); rope_scaling: Llama 3's scaling, or `None`.
        rope_factor: number that the rotary frequencies are divided by (linear scaling; Chen et al., 2023).
        local_rope_base: base of local layers, whose frequencies are not scaled (Gemma 3); `None`: all layers have the
            same frequencies.
        num_experts: number of experts of a mixture-of-experts layer (`models.experts`); 0: every feed-forward is dense.
        experts_per_token: number of experts that each token chooses; expert_d_ff: number of hidden units of an expert.
        norm_expert_weights: whether the weights of a token's experts are divided by their sum (Qwen 3, Mixtral).
        dense_layers: indices, from 0, of the layers that have a dense feed-forward although the model has experts.
        parallel_experts: whether layers of experts also have a dense feed-forward, whose output is added to that of the
            experts; the router then has a norm, and each expert a stored factor (Gemma 4).
        rope_share: in layers that are not local, only this share of the coordinate pairs rotates, the first ones. They
            have the frequencies that they would have if all pairs rotated (Gemma 4).
        qk_norm: whether each head's queries and keys have a norm before they rotate (Qwen 3, Gemma 3); value_norm:
            whether its values have a norm without a scale (Gemma 4).
        global_head_dim, global_kv_heads: sizes of layers that are not local; `None` means those of local layers.
        keys_as_values: whether layers that are not local have no value projection: their values are their keys before
            norm and rotation.
        kv_layers: only the first `kv_layers` layers have keys, values and a cache. Each later layer attends to the keys
            and values of the last of these layers that has the same kind. `None` means that all layers have them.
        shared_d_ff: width of the feed-forward of these later layers; `None` means `d_ff`.
        layer_input: width of a further embedding of each token that each layer reads (Gemma 4's small sizes); `None`
            means that there is none.
        output_scale: whether each layer's output is multiplied by a stored number, which training does not change.
        window: number of positions that a local layer sees, including the current one.
        pattern: kinds of successive layers, repeated over all layers: "local", "global", or "unrotated" (sees all
            positions and does not rotate its queries and keys; SmolLM3).
        max_length: the longest sequence that the model was trained for.
        dtype: dtype of computation; norms, softmax and logits are always float32.
        missing_rows: number of ids at the end of the vocabulary that have no row; the model never draws these ids.
        scan_layers: whether the layers run in a scan over stacked parameters (`models.stacks`), in groups of the
            `pattern`; `None` means only in deep models.
        encoder: the configuration of an encoder, whose output the layers' cross-attention reads; `None` for a
            decoder-only model. Its `dtype` and `scan_layers` follow the decoder's.
        merged_attention: whether self-attention reads the encoder's output beside its own keys and values, with one
            softmax over both and the same kernels, in place of a cross-attention (T5Gemma 2).
        shared_embedding: whether the encoder has the decoder's embedding instead of a separate one.
        centered_window: whether an encoder's window counts the tokens on both sides together, not those on each side.
        start_id, pad_id: with an encoder, the id that decoding starts from, and the id that pads the encoder's input.

    Raises:
        ValueError: an option is unknown, or sizes contradict each other.
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
    scan_layers: bool | None = field(default=None, repr=False)
    qk_norm: bool = field(default=False, repr=False, metadata=LATER)
    rope_factor: float = field(default=1.0, repr=False, metadata=LATER)
    local_rope_base: float | None = field(default=None, repr=False, metadata=LATER)
    num_experts: int = field(default=0, repr=False, metadata=LATER)
    experts_per_token: int = field(default=0, repr=False, metadata=LATER)
    expert_d_ff: int = field(default=0, repr=False, metadata=LATER)
    norm_expert_weights: bool = field(default=False, repr=False, metadata=LATER)
    dense_layers: tuple[int, ...] = field(default=(), repr=False, metadata=LATER)
    encoder: "DecoderConfig | None" = field(default=None, repr=False, metadata=LATER)
    start_id: int = field(default=0, repr=False, metadata=LATER)
    pad_id: int = field(default=0, repr=False, metadata=LATER)
    merged_attention: bool = field(default=False, repr=False, metadata=LATER)
    shared_embedding: bool = field(default=False, repr=False, metadata=LATER)
    centered_window: bool = field(default=False, repr=False, metadata=LATER)
    rope_share: float = field(default=1.0, repr=False, metadata=LATER)
    value_norm: bool = field(default=False, repr=False, metadata=LATER)
    global_head_dim: int | None = field(default=None, repr=False, metadata=LATER)
    global_kv_heads: int | None = field(default=None, repr=False, metadata=LATER)
    keys_as_values: bool = field(default=False, repr=False, metadata=LATER)
    kv_layers: int | None = field(default=None, repr=False, metadata=LATER)
    shared_d_ff: int | None = field(default=None, repr=False, metadata=LATER)
    layer_input: int | None = field(default=None, repr=False, metadata=LATER)
    output_scale: bool = field(default=False, repr=False, metadata=LATER)
    parallel_experts: bool = field(default=False, repr=False, metadata=LATER)

    def __repr__(self) -> str:
        # Fingerprints hash this text, so it must not change for existing models.
        shown = [f.name for f in fields(self) if f.repr or self.is_later_option(f)]
        return f"DecoderConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def is_later_option(self, option: Any) -> bool:
        """Returns whether a dataclass field is a newer option that has another value than its default."""
        return bool(option.metadata.get("later")) and getattr(self, option.name) != option.default

    def __post_init__(self) -> None:
        # A configuration from JSON holds lists and dicts, but a static argument of jit must be hashable.
        object.__setattr__(self, "pattern", tuple(self.pattern))
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.encoder, dict):
            object.__setattr__(self, "encoder", DecoderConfig(**self.encoder))
        if self.encoder is not None:
            # A caller changes the outer configuration only, as `checkpoints.load` does with the dtype.
            follows = dataclasses.replace(self.encoder, dtype=self.dtype, scan_layers=self.scanned)
            object.__setattr__(self, "encoder", follows)
        check_sizes(self, "num_layers", "num_kv_heads")
        for name in ("num_kv_heads", "global_kv_heads"):
            if (heads := getattr(self, name)) and self.num_heads % heads:
                raise ValueError(
                    f"num_heads {self.num_heads} is not a multiple of {name} {heads}: give a divisor of num_heads"
                )
        for name in ("head_dim", "global_head_dim"):
            if (width := getattr(self, name)) and width % 2:
                raise ValueError(f"{name} is {width}, but rotary embeddings rotate pairs: give an even number")
        for name, known in (("activation", ACTIVATIONS), ("rope_pairs", PAIRINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(known)}")
        # An empty pattern is an error too, because it gives no layer a kind.
        if unknown := [kind for kind in self.pattern if kind not in KINDS] or (() if self.pattern else ("",)):
            raise ValueError(f"pattern contains {unknown[0]!r}: choose each layer's kind from {', '.join(KINDS)}")
        if "local" in self.pattern and (self.window is None or self.window < 1):
            raise ValueError(
                f"window is {self.window}, but there are local layers: give their number of visible positions"
            )
        for name in ("rope_factor", "local_rope_base"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is {value}: give a number above 0")
        for name in ("start_id", "pad_id"):
            if not 0 <= getattr(self, name) < self.num_embeddings:
                raise ValueError(f"{name} is {getattr(self, name)}: give an id from 0 to {self.num_embeddings - 1}")
        self._check_experts()
        self._check_layers()
        self._check_encoder()

    def _check_experts(self) -> None:
        if not self.num_experts:
            if self.parallel_experts:
                raise ValueError("parallel_experts is True, but num_experts is 0: give the number of experts")
            return
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}: give a number from 1 to num_experts={self.num_experts}"
            )
        if self.expert_d_ff < 1:
            raise ValueError(f"expert_d_ff is {self.expert_d_ff}: give the number of hidden units of an expert")

    def _check_encoder(self) -> None:
        """Checks the sizes that an encoder must have because it shares parameters with the decoder."""
        shared = {"merged_attention": "d_model", "shared_embedding": "num_embeddings"}
        for option, size in shared.items():
            if getattr(self, option) and getattr(self.encoder, size, None) != getattr(self, size):
                raise ValueError(
                    f"{option}=True, but the encoder's {size} is {getattr(self.encoder, size, None)}: "
                    f"give {getattr(self, size)}, as in the decoder"
                )

    def _check_layers(self) -> None:
        """Checks the options by which layers differ in their parameters."""
        for name in ("global_head_dim", "global_kv_heads", "kv_layers", "shared_d_ff", "layer_input"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} is {size}: give a number of at least 1, or leave it out")
        if not 0 < self.rope_share <= 1:
            raise ValueError(f"rope_share is {self.rope_share}: give a number above 0 and at most 1")
        for name in ("local_rope_base", "query_scale") if self.global_head_dim and "local" in self.pattern else ():
            if getattr(self, name) is None:
                raise ValueError(
                    f"global_head_dim is {self.global_head_dim}, but {name} is not set, and its default is meant for "
                    f"layers of one head_dim: give {name}"
                )
        # A layer without keys reads those of an earlier layer with the same window and rotation, so its kind must occur
        # among the first `kv_layers` layers. The kinds of all layers are listed only for this check, because a damaged
        # file may claim 2³¹ layers.
        listed = self.kinds if self.kv_layers else ()
        if lost := set(listed[self.num_caches :]) - set(listed[: self.num_caches]):
            raise ValueError(
                f"kv_layers is {self.kv_layers}, but a later layer is {min(lost)!r}, and none of the first "
                f"{self.kv_layers}: give a larger number"
            )
        if self.scan_layers and not self.alike:
            mixed = f" (layers {self.dense_layers} have no experts)" if self.dense_layers else ""
            raise ValueError(
                f"scan_layers=True, but this model's layers have parameters of different shapes{mixed}: leave "
                "scan_layers out"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, one of `KINDS`."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of positions that each layer sees; `None` means all."""
        return tuple(self.window if kind == "local" else None for kind in self.kinds)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer's feed-forward is a mixture of experts."""
        return tuple(self.num_experts > 0 and i not in self.dense_layers for i in range(self.num_layers))

    def parallel(self, number: int) -> bool:
        """Returns whether a layer has a mixture of experts in parallel to a dense feed-forward."""
        return self.parallel_experts and self.sparse[number]

    @property
    def alike(self) -> bool:
        """Whether all layers have parameters of equal shapes, which a scan needs."""
        # `shared_d_ff` is not tested, because it changes layers only if `kv_layers` is set.
        unlike = (self.global_head_dim, self.global_kv_heads, self.keys_as_values, self.kv_layers, self.layer_input)
        return not any(unlike) and (not self.dense_layers or len(set(self.sparse)) < 2)

    @property
    def scanned(self) -> bool:
        """Whether the layers, and those of an encoder, run in a scan over stacked parameters."""
        return self.alike and is_scanned(self.scan_layers, max(self.num_layers, self.num_encoder_layers))

    @property
    def has_cross_attention(self) -> bool:
        """Whether each layer has an attention to the encoder's output besides self-attention."""
        return self.encoder is not None and not self.merged_attention

    @property
    def num_encoder_layers(self) -> int:
        """The number of layers of the encoder; 0 without one."""
        return 0 if self.encoder is None else self.encoder.num_layers

    def layer(self, number: int) -> LayerSizes:
        """Returns the sizes of a layer."""
        local, shares = self.pattern[number % len(self.pattern)] == "local", number >= (self.kv_layers or math.inf)
        return LayerSizes(
            head_dim=self.head_dim if local else self.global_head_dim or self.head_dim,
            kv_heads=self.num_kv_heads if local else self.global_kv_heads or self.num_kv_heads,
            d_ff=(self.shared_d_ff if shares else None) or self.d_ff,
            projections=("query", "key", "value")[: 1 if shares else 2 if self.keys_as_values and not local else 3],
        )

    @property
    def num_caches(self) -> int:
        """The number of layers that have keys and values, and therefore a cache."""
        return min(self.num_layers, self.kv_layers or self.num_layers)

    @property
    def sources(self) -> tuple[int, ...]:
        """For each layer, the index of the layer whose keys and values it attends to."""
        last: dict[str, int] = {}
        for number, kind in enumerate(self.kinds[: self.num_caches]):
            last[kind] = number
        return (*range(self.num_caches), *(last[kind] for kind in self.kinds[self.num_caches :]))

    @property
    def period(self) -> int:
        """Number of layers in a group of the scan: one repetition of `pattern`."""
        return max(1, min(len(self.pattern), self.num_layers))

    @property
    def places(self) -> tuple[int | None, ...]:
        """The window of each layer with a cache or, if the layers run in a scan, of each layer of one group."""
        return self.windows[: self.period if self.scanned else self.num_caches]

    @property
    def rotations(self) -> tuple[str, ...]:
        """For each of `places`, the kind for which `frequencies` returns the rotary frequencies of its layers."""
        kinds = self.kinds[: self.period if self.scanned else self.num_caches]
        # Kinds with equal frequencies get one name, so that their angles are computed once (`turns_by_place`).
        return tuple("global" if kind == "local" and self.local_rope_base is None else kind for kind in kinds)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of layers at each place of a group (`models.stacks`)."""
        return tuple(-(-(self.num_layers - place) // self.period) for place in range(min(self.period, self.num_layers)))

    @property
    def scale(self) -> float:
        """The factor that queries are multiplied by."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def frequencies(self, rotation: str = "global") -> np.ndarray:
        """Returns each coordinate pair's rotary frequency, in radians per position, float32 `[head_dim / 2]`.

        They are zero, which rotates nothing, if `rotation` (one of `rotations`) is "unrotated". `head_dim` is that of
        the layers with this rotation.
        """
        # All steps are in float32, as in the published code, because double precision would give other frequencies.
        head_dim = self.head_dim if rotation == "local" else self.global_head_dim or self.head_dim
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        if rotation == "unrotated":
            return np.zeros_like(exponents)
        # The scaling for longer sequences does not apply to local layers, because their window does not grow.
        if rotation == "local":
            return 1.0 / np.float32(self.local_rope_base) ** exponents
        frequencies = 1.0 / np.float32(self.rope_base) ** exponents / np.float32(self.rope_factor)
        # A frequency of zero leaves a pair of coordinates as it is.
        frequencies[int(self.rope_share * head_dim) // 2 :] = 0.0
        return (self.rope_scaling(frequencies) if self.rope_scaling else frequencies).astype(np.float32)


def parameter_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its name, with separate parameters for each layer.

    The names are those of T5X's decoder-only models, with further names for biases and post-norms.
    """
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (c.num_embeddings, c.d_model)}
    if c.layer_input:
        # A row of the table holds a token's embeddings for all layers, so one lookup serves all layers.
        width = c.num_layers * c.layer_input
        shapes |= {"layer_inputs/embedder/embedding": (c.num_embeddings, width)}
        shapes |= {"layer_inputs/projection/kernel": (c.d_model, width), "layer_inputs/norm/scale": (c.layer_input,)}
    if c.encoder is not None:
        if not c.shared_embedding:
            shapes["encoder/token_embedder/embedding"] = (c.encoder.num_embeddings, c.encoder.d_model)
        shapes |= _stack_shapes(c.encoder, "encoder")
    shapes |= _stack_shapes(c, "decoder")
    return shapes if c.tied else shapes | {"decoder/logits_dense/kernel": (c.d_model, c.num_embeddings)}


def _stack_shapes(c: DecoderConfig, stack: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(c.num_layers):
        shapes |= {f"{stack}/layers_{i}/{name}": shape for name, shape in _layer_shapes(c, i).items()}
    return shapes | {f"{stack}/{stack}_norm/scale": (c.d_model,)}


def _layer_shapes(c: DecoderConfig, number: int) -> dict[str, tuple[int, ...]]:
    layer, parts = c.layer(number), ("self_attention", *(("cross_attention",) if c.has_cross_attention else ()), "mlp")
    norms = [f"{time}_{part}" for time in (("pre", "post") if c.post_norms else ("pre",)) for part in parts]
    norms += ["post_layer_input"] if c.layer_input else []
    norms += ["post_dense", "pre_mixture", "post_mixture"] if c.parallel(number) else []
    shapes: dict[str, tuple[int, ...]] = {f"{norm}_layer_norm/scale": (c.d_model,) for norm in norms}
    shapes |= _attention_shapes(c, layer, "self_attention", c.d_model)
    if c.encoder is not None and c.has_cross_attention:
        shapes |= _attention_shapes(c, layer, "encoder_decoder_attention", c.encoder.d_model)
    if c.layer_input:
        shapes |= {"layer_input_gate/kernel": (c.d_model, c.layer_input)}
        shapes |= {"layer_input_out/kernel": (c.layer_input, c.d_model)}
    if c.output_scale:
        shapes["output/scale"] = (1,)
    return shapes | _feed_forward_shapes(c, number)


def _feed_forward_shapes(c: DecoderConfig, number: int) -> dict[str, tuple[int, ...]]:
    if c.sparse[number] and not c.parallel(number):
        return _mixture_shapes(c, "mlp")
    units = c.layer(number).d_ff
    shapes: dict[str, tuple[int, ...]] = {f"mlp/{name}/kernel": (c.d_model, units) for name in ("wi_0", "wi_1")}
    shapes |= {"mlp/wo/kernel": (units, c.d_model)}
    if not c.parallel(number):
        return shapes
    shapes |= {"mixture/router/norm/scale": (c.d_model,), "mixture/factors/scale": (c.num_experts,)}
    return shapes | _mixture_shapes(c, "mixture")


def _mixture_shapes(c: DecoderConfig, part: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{part}/router/weight": (c.d_model, c.num_experts)}
    inward_of_each = (c.num_experts, c.d_model, c.expert_d_ff)
    shapes |= {f"{part}/experts/{name}/kernel": inward_of_each for name in ("wi_0", "wi_1")}
    return shapes | {f"{part}/experts/wo/kernel": (c.num_experts, c.expert_d_ff, c.d_model)}


def _attention_shapes(c: DecoderConfig, layer: LayerSizes, part: str, source: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an attention's parameters; keys and values are made from states of width `source`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in layer.projections:
        heads, width = (c.num_heads, c.d_model) if name == "query" else (layer.kv_heads, source)
        shapes[f"{part}/{name}/kernel"] = (width, heads * layer.head_dim)
        if c.qkv_bias:
            shapes[f"{part}/{name}/bias"] = (heads * layer.head_dim,)
    # The norm of values has no scale, so it has no parameter.
    if c.qk_norm:
        shapes |= {f"{part}/{name}_norm/scale": (layer.head_dim,) for name in layer.projections[:2]}
    return shapes | {f"{part}/out/kernel": (c.num_heads * layer.head_dim, c.d_model)}
