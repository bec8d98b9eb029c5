"""T5's configuration, the shapes of its parameters, and inference of the configuration from such shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from speccascade_jax.core.checks import check_sizes
from speccascade_jax.models.decoder_config import LATER
from speccascade_jax.models.stacks import is_scanned
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, incomplete

Shapes = Mapping[str, tuple[int, ...]]

# Maps the number of rows of an embedding to the number of rows that are tokens. T5's 32,000 pieces and 100 sentinels
# are padded to 32,128 rows for sharding.
PADDED_VOCABULARIES = {32128: 32100}
EMBEDDING = "token_embedder/embedding"
_BIAS = "relpos_bias/rel_embedding"
_QUERY = "encoder/layers_0/attention/query/kernel"
_STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class T5Config:
    """Sizes and options of a T5 model; hashable, because jit takes it as a static argument.

    Attributes:
        vocab_size: number of real vocabulary entries; num_embeddings: number of rows of the embedding, which also has
            rows of padding.
        relative_buckets, relative_max_distance: number of buckets of the relative position bias, and the distance from
            which all keys share the last bucket.
        gated: whether the feed-forward has `wi_0` and `wi_1` with tanh-approximate GELU (T5 1.1); otherwise it has one
            `wi` with ReLU (T5 1.0).
        tied: whether the embedding computes the logits too, from states scaled by `d_model ** -0.5`; otherwise
            `logits_dense` computes them.
        layer_dropout: probability that training skips the last decoder layer for a row; lower layers are skipped less
            often (`t5.Decoder`). Decoding ignores this option and `dropout_rate`. The model's fingerprint, a hash of
            the `repr` and the weights, does not depend on it.
        dtype: dtype of computation; parameters of another dtype are cast when they are used. Norms, softmax and logits
            are always float32.
        start_id: id of the token that decoding starts from.
        missing_rows: number of ids at the end of the vocabulary that have no row; the model never draws these ids.
        pad_id: id that tokenizers pad the encoder's input with; `pairs.prompts` removes it from both ends.
        scan_layers: whether the layers run in a scan over stacked parameters (`models.stacks`); `None` means only
            in deep models.
        layer_biases: whether each layer has a relative position bias of its own (UMT5); otherwise the encoder's layers
            share one, and the decoder's layers another.
    """

    vocab_size: int
    num_embeddings: int
    d_model: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_encoder_layers: int
    num_decoder_layers: int
    relative_buckets: int = 32
    relative_max_distance: int = 128
    gated: bool = True
    tied: bool = False
    dropout_rate: float = 0.0
    layer_dropout: float = field(default=0.0, repr=False, kw_only=True)
    layer_norm_epsilon: float = 1e-6
    dtype: str = "float32"
    start_id: int = field(default=0, repr=False, kw_only=True)
    pad_id: int = field(default=0, repr=False, kw_only=True)
    missing_rows: int = field(default=0, repr=False, kw_only=True)
    scan_layers: bool | None = field(default=None, repr=False, kw_only=True)
    layer_biases: bool = field(default=False, repr=False, kw_only=True, metadata=LATER)

    def __repr__(self) -> str:
        # Fingerprints hash this text, so it must not change for existing models. Newer options are shown only if they
        # are not the default.
        shown = [f.name for f in fields(self) if f.repr] + ["start_id"] * (self.start_id != 0)
        shown += ["layer_biases"] * self.layer_biases
        return f"T5Config({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __post_init__(self) -> None:
        check_sizes(self, "num_decoder_layers", "num_encoder_layers")
        for name in ("start_id", "pad_id"):
            if not 0 <= getattr(self, name) < self.num_embeddings:
                raise ValueError(f"{name} is {getattr(self, name)}: give an id from 0 to {self.num_embeddings - 1}")
        if not 0 <= self.layer_dropout < 1:
            raise ValueError(f"layer_dropout is {self.layer_dropout}: give a probability of at least 0 and below 1")

    @property
    def scanned(self) -> bool:
        """Whether the layers of encoder and decoder run in scans over stacked parameters."""
        return is_scanned(self.scan_layers, max(self.num_encoder_layers, self.num_decoder_layers))


def _t5_1_1(d: int, heads: int, head_dim: int, d_ff: int, layers: int) -> T5Config:
    return T5Config(
        vocab_size=32_100, num_embeddings=32_128, d_model=d, num_heads=heads, head_dim=head_dim, d_ff=d_ff,
        num_encoder_layers=layers, num_decoder_layers=layers,
    )  # fmt: skip


_T5_1_1 = {
    "t5_1_1_small": _t5_1_1(512, 6, 64, 1024, 8),
    "t5_1_1_base": _t5_1_1(768, 12, 64, 2048, 12),
    "t5_1_1_large": _t5_1_1(1024, 16, 64, 2816, 24),
    "t5_1_1_xl": _t5_1_1(2048, 32, 64, 5120, 24),
    "t5_1_1_xxl": _t5_1_1(4096, 64, 64, 10240, 24),
}
_UMT5 = {
    f"umt5_{size}": replace(_T5_1_1[f"t5_1_1_{size}"], vocab_size=256_384, num_embeddings=256_384, layer_biases=True)
    for size in ("small", "base", "xl", "xxl")
}
T5_PRESETS = _T5_1_1 | _UMT5
"""The published T5 1.1 and UMT5 models, by name.

Sources of the sizes: the gin files of T5 1.1 (google-research/t5x, examples/t5/t5_1_1), and UMT5's published
`config.json` files (Chung et al., 2023), which differ from T5 1.1 in the vocabulary and the biases only.
"""


def t5_shapes(c: T5Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of `T5Module(c)` by name, with separate parameters for each layer.

    The shapes are computed without tracing the module, which would take longer than reading a small model's weights.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.num_embeddings, c.d_model)}
    for stack, layers in zip(_STACKS, (c.num_encoder_layers, c.num_decoder_layers), strict=True):
        if not c.layer_biases:
            shapes[f"{stack}/{_BIAS}"] = (c.num_heads, c.relative_buckets)
        shapes[f"{stack}/{stack}_norm/scale"] = (c.d_model,)
        layer = _layer_shapes(c, stack)
        shapes |= {f"{stack}/layers_{i}/{name}": shape for i in range(layers) for name, shape in layer.items()}
    return shapes if c.tied else shapes | {"decoder/logits_dense/kernel": (c.d_model, c.num_embeddings)}


def _layer_shapes(c: T5Config, stack: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one layer's parameters by name: attention, feed-forward, and a norm before each of them."""
    parts = {"attention": "attention"}
    if stack == "decoder":
        parts = {"self_attention": "self_attention", "encoder_decoder_attention": "cross_attention"}
    width, inner = c.num_heads * c.head_dim, ("wi_0", "wi_1") if c.gated else ("wi",)
    shapes: dict[str, tuple[int, ...]] = {
        f"pre_{norm}_layer_norm/scale": (c.d_model,) for norm in (*parts.values(), "mlp")
    }
    for part in parts:
        shapes |= {f"{part}/{name}/kernel": (c.d_model, width) for name in ("query", "key", "value")}
        shapes[f"{part}/out/kernel"] = (width, c.d_model)
    shapes |= {f"mlp/{name}/kernel": (c.d_model, c.d_ff) for name in inner}
    if c.layer_biases:
        shapes[_BIAS] = (c.num_heads, c.relative_buckets)
    return shapes | {"mlp/wo/kernel": (c.d_ff, c.d_model)}


def infer_t5(path: Path, shapes: Shapes) -> T5Config | None:
    """Returns the T5 configuration that the names and shapes of parameters imply; `None` if they are not a T5's.

    Options that names and shapes do not determine get T5's values: relative distances up to 128, epsilon 1e-6, GELU for
    gated feed-forwards and ReLU for others.

    Args:
        path: the checkpoint's path, for errors.
        shapes: the shape of each parameter by name; layers are not stacked.

    Raises:
        CheckpointError: an array that determines a size is missing or has an unexpected shape.
    """
    if EMBEDDING not in shapes or not all(_layers(shapes, stack) for stack in _STACKS):
        return None
    # Each size comes from one array that determines it. The caller then checks all arrays against `t5_shapes`.
    rows, d_model = _sizes(path, shapes, EMBEDDING)
    layer_biases = f"encoder/layers_0/{_BIAS}" in shapes
    bias = f"encoder/layers_0/{_BIAS}" if layer_biases else f"encoder/{_BIAS}"
    heads, buckets = _sizes(path, shapes, bias)
    _, joined = _sizes(path, shapes, _QUERY)
    d_ff, _ = _sizes(path, shapes, "encoder/layers_0/mlp/wo/kernel")
    if joined % heads:
        raise CheckpointError(
            f"{path}: array {_QUERY} has {joined} columns, not a multiple of the {heads} heads of {bias}: files of "
            f"two models are mixed; {COPY_AGAIN}"
        )
    return T5Config(
        # No array shows how many rows are padding, so only the padding of published T5 models is recognized.
        vocab_size=PADDED_VOCABULARIES.get(rows, rows),
        num_embeddings=rows,
        d_model=d_model,
        num_heads=heads,
        head_dim=joined // heads,
        d_ff=d_ff,
        num_encoder_layers=_layers(shapes, "encoder"),
        num_decoder_layers=_layers(shapes, "decoder"),
        relative_buckets=buckets,
        gated=any("/mlp/wi_0/" in name for name in shapes),
        tied=not any(name.startswith("decoder/logits_dense/") for name in shapes),
        layer_biases=layer_biases,
    )


def _sizes(path: Path, shapes: Shapes, name: str) -> tuple[int, int]:
    """Returns the shape of the matrix `name`; raises a `CheckpointError` if it is missing or not a matrix."""
    if name not in shapes:
        raise incomplete(path, [name], len(shapes) + 1)
    if len(shapes[name]) != 2:
        raise CheckpointError(
            f"{path}: array {name} has shape {list(shapes[name])}, but a T5 has a matrix there: {COPY_AGAIN}"
        )
    first, second = shapes[name]
    return first, second


def _layers(shapes: Shapes, stack: str) -> int:
    """Returns the number of layers of the encoder or decoder: one more than the highest layer number in the names."""
    # The layers are not counted, because a count would hide a missing layer. With the highest number, the missing
    # layer's arrays are reported.
    prefix = f"{stack}/layers_"
    numbers = [name[len(prefix) :].split("/")[0] for name in shapes if name.startswith(prefix)]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
