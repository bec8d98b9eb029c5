"""Products with weights in their stored form: plain matrices for XLA, packed ones for CPU code, 8 bits for both.

`pack` lays parameters out for decoding; `Dense` and `Embed` accept both forms under the same names.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.types import Array, Packed, Params
from speccascade_jax.runtime import products

_LARGEST = 127


def multiply(x: Array, kernel: Array | Packed, dtype: str) -> Array:
    """Multiplies `x` `[..., K]` by a kernel `[K, N]` with sums in float32; returns float32 `[..., N]`.

    `x` and a plain kernel are cast to `dtype`; a packed kernel is read in its stored form.
    """
    if not isinstance(kernel, Packed):
        return jnp.matmul(jnp.asarray(x, dtype), jnp.asarray(kernel, dtype), preferred_element_type=jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    if products.available():
        # The CPU code reads float32 activations whatever the weights are.
        out = products.call(rows.astype(jnp.float32), kernel.panels, kernel.scales)
    else:
        out = _by_xla(rows.astype(dtype), kernel)
    # The last panel may be padded with zero columns.
    return out[:, : kernel.columns].reshape(*x.shape[:-1], kernel.columns)


def _by_xla(rows: Array, kernel: Packed) -> Array:
    """Computes the product of `multiply` with XLA, which converts packed weights to the dtype of `rows`."""
    panels = kernel.panels.astype(rows.dtype)
    out = jnp.einsum("tk,nkp->tnp", rows, panels, preferred_element_type=jnp.float32).reshape(len(rows), -1)
    # A scale belongs to a whole column, so it may multiply the sum instead of every weight.
    return out if kernel.scales is None else out * kernel.scales


def _parameter(module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, int]) -> Any:
    """Returns a module's parameter, plain or packed, without a check of its shape; initializes a missing one."""
    # `module.param` would compare shapes, and a packed parameter has another structure than the plain one.
    exists = module.has_variable("params", name)
    return module.get_variable("params", name) if exists else module.param(name, init, shape)


class Dense(nn.Module):
    """The product `x @ kernel`, optionally with a bias; `kernel` is a parameter `[K, features]`, plain or packed.

    Attributes:
        dtype: dtype of the result, and of the product with a plain kernel.
        wide: whether the result is float32 instead (the output layer).
    """

    features: int
    dtype: str
    use_bias: bool = False
    wide: bool = False
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the product of `x` `[..., K]` with the kernel, `[..., features]`."""
        kernel = _parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features))
        y = multiply(x, kernel, self.dtype).astype(jnp.float32 if self.wide else self.dtype)
        if not self.use_bias:
            return y
        return y + self.param("bias", nn.initializers.zeros_init(), (self.features,)).astype(self.dtype)


class Embed(nn.Module):
    """A table of embeddings `[V, E]` for lookups and, if tied, for the output product; packed it is `[E, V]`."""

    num_embeddings: int
    features: int
    dtype: str
    embedding_init: Callable[..., Array] = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)

    def setup(self) -> None:
        """Creates the table."""
        shape = (self.num_embeddings, self.features)
        self.embedding = _parameter(self, "embedding", self.embedding_init, shape)

    def __call__(self, tokens: Array) -> Array:
        """Returns the table's rows `tokens` (int32, any shape), `[*tokens.shape, E]`."""
        if isinstance(self.embedding, Packed):
            return self.embedding.rows(tokens).astype(self.dtype)
        # An id without a row, which only a draft may lack (`missing_rows`), reads the last one, as with packed rows.
        return jnp.take(self.embedding, tokens, axis=0, mode="clip").astype(self.dtype)

    def attend(self, x: Array) -> Array:
        """Returns the float32 products of `x` `[B, T, E]` with all rows of the table, `[B, T, V]`."""
        if isinstance(self.embedding, Packed):
            return multiply(x, self.embedding, self.dtype)
        table = jnp.asarray(self.embedding, self.dtype)
        return jnp.einsum("bte,ve->btv", x, table, preferred_element_type=jnp.float32)


def real_entries(logits: Array, entries: int) -> Array:
    """Returns the logits `[B, T, rows]` of a vocabulary of `entries` ids, at least as wide, with all others at -inf."""
    # A draft may lack rows for the last ids of its target.
    if missing := max(0, entries - logits.shape[-1]):
        return jnp.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
    # Rows that pad the vocabulary for sharding must never be sampled.
    return (
        logits if logits.shape[-1] == entries else jnp.where(jnp.arange(logits.shape[-1]) < entries, logits, -jnp.inf)
    )


def pack(params: Params, config: Any, weights: str | None = None) -> Params:
    """Returns the parameters with each matrix in the form that decodes fastest (see `held`)."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({name: held(name, leaf, config, weights) for name, leaf in flat.items()}, sep="/")


def held(name: str, leaf: Any, config: Any, weights: str | None = None) -> Any:
    """Returns one parameter in the form that decodes fastest: kernels and tied embeddings packed.

    If XLA multiplies, only 8-bit weights change their form. On a CPU without `runtime.products`, 16-bit weights are
    widened here once: XLA would widen them at every call, which takes many times as long as the product.

    Args:
        name: the parameter's name, "a/b/kernel".
        leaf: the parameter; a packed one is returned unchanged.
        config: the model's configuration: whether its embedding is tied, the dtype of computation.
        weights: stored type of matrices, from `products.KINDS`; `None` keeps their type.
    """
    # An untied embedding is only looked up, so its rows stay plain; norms and biases are vectors.
    last = name.rsplit("/", 1)[-1]
    if isinstance(leaf, Packed) or not (last == "kernel" or (last == "embedding" and config.tied)):
        return leaf
    kind = weights or leaf.dtype.name
    in_panels = products.available() and kind in products.KINDS
    # Large models are slow without the CPU code; the warning names the extra that installs it.
    if not in_panels:
        products.suggest(leaf.size)
    if in_panels or kind == "int8":
        return panels(np.asarray(leaf), kind, products.width() if in_panels else None, turned=last == "embedding")
    return np.asarray(leaf, np.float32) if jax.default_backend() == "cpu" and config.dtype == "float32" else leaf


def panels(leaf: np.ndarray, kind: str, width: int | None, turned: bool = False) -> Packed:
    """Packs a parameter as a matrix `[K, N]` in panels of `width` columns (`None`: a single panel) of type `kind`.

    Args:
        leaf: the parameter, `[K, N]`, or `[N, K]` if `turned`.
        kind: dtype of the packed values; "int8" adds a scale per column.
        width: columns of a panel; `None`: a single panel.
        turned: whether the matrix is the parameter's transpose.
    """
    matrix = leaf.T if turned else leaf
    inputs, columns = matrix.shape
    width = width or columns
    scales = None
    if kind == "int8":
        matrix, scales = quantised(matrix)
    count = -(-columns // width)
    out = np.zeros((count, inputs, width), jnp.dtype(kind))
    # Panel by panel, because a reshape of the padded matrix would hold a second copy of it.
    for number in range(count):
        part = matrix[:, number * width : (number + 1) * width]
        out[number, :, : part.shape[1]] = part
    # Scales of padded columns are 1, so that no product with them is NaN or infinite.
    if scales is not None:
        scales = jax.device_put(np.pad(scales, (0, count * width - columns), constant_values=1.0))
    return Packed(jax.device_put(out), scales, columns, turned)


def quantised(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix as integers in [-127, 127] `[K, N]`, and the scale of each column, float32 `[N]`.

    Rounds symmetrically to the nearest integer: an entry's error is at most 1/254 of its column's largest magnitude.
    """
    matrix = np.asarray(matrix, np.float32)
    # A column of zeros gets a tiny scale instead of 0, which would divide 0 by 0.
    scales = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float32).tiny) / _LARGEST
    return np.rint(matrix / scales).astype(np.int8), scales.astype(np.float32)
