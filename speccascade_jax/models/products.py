"""Matrix products with weights in three forms: plain, packed for this package's CPU code, or packed in 8 bits.

XLA multiplies plain matrices and 8-bit ones; the CPU code (`runtime.products`) multiplies every packed matrix. `pack`
converts parameters to the form for decoding. `Dense` and `Embed` accept plain and packed parameters of the same names.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.types import Array, Packed, Params
from speccascade_jax.models.product_chains import Link
from speccascade_jax.models.sharding import gathered, spec_of
from speccascade_jax.runtime import products
from speccascade_jax.runtime.mesh import MODEL

_LARGEST = 127


def multiply(x: Array, kernel: Array | Packed, dtype: str) -> Array:
    """Multiplies `x` `[..., K]` by a kernel `[K, N]` with sums in float32; returns float32 `[..., N]`.

    With a plain kernel, `x` and the kernel are first cast to `dtype`. A packed kernel is read in its stored dtype.
    """
    if not isinstance(kernel, Packed):
        return jnp.matmul(jnp.asarray(x, dtype), jnp.asarray(kernel, dtype), preferred_element_type=jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    if products.available():
        # The CPU code needs float32 activations, whatever the dtype of the weights.
        out = products.call(rows.astype(jnp.float32), kernel.panels, kernel.scales)
    else:
        out = by_xla(rows.astype(dtype), kernel)
    # The last panel may be padded with zero columns, which are removed here.
    return out[:, : kernel.columns].reshape(*x.shape[:-1], kernel.columns)


def by_xla(rows: Array, kernel: Packed) -> Array:
    """Multiplies `rows` `[R, K]` by a packed kernel with XLA, after it converts the weights to the dtype of `rows`."""
    panels = kernel.panels.astype(rows.dtype)
    out = jnp.einsum("tk,nkp->tnp", rows, panels, preferred_element_type=jnp.float32).reshape(len(rows), -1)
    # All weights of a column have the same scale, so it can multiply the column's sum instead of every weight.
    return out if kernel.scales is None else out * kernel.scales


def parameter(module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, ...]) -> Any:
    """Returns a module's parameter without checking its shape; initializes the parameter if it does not exist."""
    # `module.param` would raise an error for a packed parameter, whose structure differs from that of the plain one.
    exists = module.has_variable("params", name)
    return module.get_variable("params", name) if exists else module.param(name, init, shape)


class Dense(nn.Module):
    """Linear layer `x @ kernel`, optionally with a bias; the parameter `kernel` `[K, features]` is plain or packed.

    Attributes:
        features: width of the result.
        dtype: dtype of the result, and of the product with a plain kernel.
        use_bias: whether a bias is added.
        wide: whether the result is float32 instead of `dtype`, as for the output layer.
        kernel_init: function that initializes the kernel.
    """

    features: int
    dtype: str
    use_bias: bool = False
    wide: bool = False
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array, wide: bool = False) -> Array:
        """Returns the product of `x` `[..., K]` with the kernel, plus the bias if there is one, `[..., features]`.

        If `wide` is true, the result is float32, and the caller rounds it.
        """
        kernel = parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features))
        kernel = gathered(kernel, self.dtype, self.path, "kernel")
        y = multiply(x, kernel, self.dtype).astype(jnp.float32 if self.wide or wide else self.dtype)
        if not self.use_bias:
            return y
        return y + self.param("bias", nn.initializers.zeros_init(), (self.features,)).astype(self.dtype)

    def link(self, **around: Any) -> Link:
        """Returns the product, without its bias, as a link of a fused chain.

        `around` holds the other fields of `Link`, such as the norm before the product.
        """
        split = spec_of("/".join((*self.path, "kernel")))
        return Link(self.get_variable("params", "kernel"), summed=split[0] == MODEL, **around)


class Embed(nn.Module):
    """Table of embeddings `[V, E]` for lookups and, if it is tied, for the output layer.

    A packed table is stored as the matrix `[E, V]`.
    """

    num_embeddings: int
    features: int
    dtype: str
    embedding_init: Callable[..., Array] = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)

    def setup(self) -> None:
        """Creates the table of embeddings."""
        shape = (self.num_embeddings, self.features)
        self.embedding = parameter(self, "embedding", self.embedding_init, shape)

    def __call__(self, tokens: Array) -> Array:
        """Returns the embeddings of `tokens` (int32, any shape), `[*tokens.shape, E]`."""
        if isinstance(self.embedding, Packed):
            return self.embedding.rows(tokens).astype(self.dtype)
        # A draft's table may lack rows for the last ids (`missing_rows`). Such an id reads the last row, as it does in
        # a packed table.
        table = gathered(self.embedding, self.dtype, self.path, "embedding")
        return jnp.take(table, tokens, axis=0, mode="clip").astype(self.dtype)

    def attend(self, x: Array) -> Array:
        """Returns the products of `x` `[B, T, E]` with all rows of the table, float32 `[B, T, V]`."""
        if isinstance(self.embedding, Packed):
            return multiply(x, self.embedding, self.dtype)
        table = jnp.asarray(gathered(self.embedding, self.dtype, self.path, "embedding"), self.dtype)
        return jnp.einsum("bte,ve->btv", x, table, preferred_element_type=jnp.float32)


def real_entries(logits: Array, entries: int) -> Array:
    """Returns logits `[B, T, M]` with -inf for every id that is not one of the vocabulary's first `entries` ids.

    `M` is the number of rows of the embedding table. If `M` is below `entries`, columns of -inf are appended.
    """
    # A draft's table may lack rows for the last ids of the target's vocabulary.
    if missing := max(0, entries - logits.shape[-1]):
        return jnp.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
    # Rows beyond the vocabulary only pad the table for sharding, so they must never be sampled.
    return (
        logits if logits.shape[-1] == entries else jnp.where(jnp.arange(logits.shape[-1]) < entries, logits, -jnp.inf)
    )


def pack(params: Params, config: Any, weights: str | None = None) -> Params:
    """Returns the parameters with each matrix in the form that decodes fastest (see `held`)."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({name: held(name, leaf, config, weights) for name, leaf in flat.items()}, sep="/")


def held(name: str, leaf: Any, config: Any, weights: str | None = None) -> Any:
    """Returns one parameter in the form that decodes fastest; kernels and tied embeddings become packed.

    If the CPU code of `runtime.products` is not available, only 8-bit weights become packed. Weights of 16 bits are
    then converted to float32 here on a CPU. XLA would otherwise convert them at every call, which takes many times as
    long as the product.

    Args:
        name: the parameter's name, such as "a/b/kernel".
        leaf: the parameter; a packed parameter is returned unchanged.
        config: the model's configuration; only `tied` and `dtype` matter.
        weights: dtype to store matrices in, from `products.KINDS`; `None` keeps their dtype.
    """
    # Other embeddings are only used for lookups, so they stay plain. Norms and biases are vectors and stay plain too.
    last = name.rsplit("/", 1)[-1]
    if isinstance(leaf, Packed) or not (last == "kernel" or (name == "token_embedder/embedding" and config.tied)):
        return leaf
    kind = weights or leaf.dtype.name
    if leaf.ndim == 3 and kind == "int8":
        return _narrow_experts(np.asarray(leaf))
    # Experts' kernels `[X, K, N]` are not packed for the CPU code, because the loop over experts slices them.
    in_panels = products.available() and kind in products.KINDS and leaf.ndim == 2
    # Large models are slow without the CPU code, so a warning names the extra of the package that installs it.
    if not in_panels and leaf.ndim == 2:
        products.suggest(leaf.size)
    if in_panels or kind == "int8":
        return panels(np.asarray(leaf), kind, products.width() if in_panels else None, turned=last == "embedding")
    return np.asarray(leaf, np.float32) if jax.default_backend() == "cpu" and config.dtype == "float32" else leaf


def _narrow_experts(leaf: np.ndarray) -> Packed:
    """Returns the kernels of a layer's experts, `[X, K, N]`, in 8 bits with a scale per column of each expert."""
    numbers, scales = quantised(leaf)
    return Packed(jax.device_put(numbers), jax.device_put(scales.reshape(-1)), scales.size, stacked=True)


def panels(leaf: np.ndarray, kind: str, width: int | None, turned: bool = False) -> Packed:
    """Returns a parameter packed as a matrix `[K, N]`, which is split into panels of `width` columns.

    Args:
        leaf: the parameter, `[K, N]`, or `[N, K]` if `turned`.
        kind: dtype of the packed values; "int8" adds a scale per column.
        width: number of columns in a panel; `None` makes a single panel.
        turned: whether the packed matrix is the parameter's transpose.
    """
    matrix = leaf.T if turned else leaf
    inputs, columns = matrix.shape
    width = width or columns
    scales = None
    if kind == "int8":
        matrix, scales = quantised(matrix)
    count = -(-columns // width)
    out = np.zeros((count, inputs, width), jnp.dtype(kind))
    # Panels are copied one by one, because padding and reshaping the matrix would need a second copy of it in memory.
    for number in range(count):
        part = matrix[:, number * width : (number + 1) * width]
        out[number, :, : part.shape[1]] = part
    # Scales of padded columns are 1, so that products with these columns are neither NaN nor infinite.
    if scales is not None:
        scales = jax.device_put(np.pad(scales, (0, count * width - columns), constant_values=1.0))
    return Packed(jax.device_put(out), scales, columns, turned)


def quantised(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes a matrix to integers from -127 to 127, int8 `[K, N]`, with one scale per column, float32 `[N]`.

    Several matrices `[X, K, N]` are quantized one by one, with scales `[X, N]`.

    Each entry is divided by its column's scale and rounded to the nearest integer. The error of an entry is therefore
    at most 1/254 of the largest magnitude in its column.
    """
    matrix = np.asarray(matrix, np.float32)
    # A column of zeros gets a tiny scale, because a scale of 0 would divide 0 by 0.
    scales = np.maximum(np.abs(matrix).max(axis=-2), np.finfo(np.float32).tiny) / _LARGEST
    return np.rint(matrix / scales[..., None, :]).astype(np.int8), scales.astype(np.float32)
