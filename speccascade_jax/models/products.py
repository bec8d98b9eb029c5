"""Products with weights as they are held: plain matrices for XLA, packed ones for a CPU's own code, 8 bits anywhere.

`pack` lays parameters out for decoding; `Dense` and `Embed` understand both forms, under the same names.
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
    """`x` `[..., K]` times a kernel `[K, N]`, summed in float32: float32 `[..., N]`.

    A plain kernel is cast to `dtype`, as `x` is; a packed one is read as it is held.
    """
    if not isinstance(kernel, Packed):
        return jnp.matmul(jnp.asarray(x, dtype), jnp.asarray(kernel, dtype), preferred_element_type=jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    if products.available():
        out = products.call(rows.astype(jnp.float32), kernel.panels, kernel.scales)
    else:
        out = _by_xla(rows.astype(dtype), kernel)
    return out[:, : kernel.columns].reshape(*x.shape[:-1], kernel.columns)


def _by_xla(rows: Array, kernel: Packed) -> Array:
    """The same where XLA multiplies: it reads the weights as they are held and widens them on the way."""
    panels = kernel.panels.astype(rows.dtype)
    out = jnp.einsum("tk,nkp->tnp", rows, panels, preferred_element_type=jnp.float32).reshape(len(rows), -1)
    return out if kernel.scales is None else out * kernel.scales


def _parameter(module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, int]) -> Any:
    """A module's parameter, plain or packed, whose shape is not checked; where it has none yet, a fresh plain one."""
    exists = module.has_variable("params", name)
    return module.get_variable("params", name) if exists else module.param(name, init, shape)


class Dense(nn.Module):
    """`x @ kernel`, with a bias where asked; `kernel` is a parameter `[K, features]`, plain or packed.

    Attributes:
        dtype: that a plain kernel is multiplied in, and of the result.
        wide: whether the result is float32 (the output layer).
    """

    features: int
    dtype: str
    use_bias: bool = False
    wide: bool = False
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = _parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features))
        y = multiply(x, kernel, self.dtype).astype(jnp.float32 if self.wide else self.dtype)
        if not self.use_bias:
            return y
        return y + self.param("bias", nn.initializers.zeros_init(), (self.features,)).astype(self.dtype)


class Embed(nn.Module):
    """A table of embeddings `[V, E]`, looked up and, where it is tied, multiplied by; packed, it is `[E, V]`."""

    num_embeddings: int
    features: int
    dtype: str
    embedding_init: Callable[..., Array] = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)

    def setup(self) -> None:
        shape = (self.num_embeddings, self.features)
        self.embedding = _parameter(self, "embedding", self.embedding_init, shape)

    def __call__(self, tokens: Array) -> Array:
        """Rows `tokens` (int32, any shape) of the table, `[*tokens.shape, E]`."""
        if isinstance(self.embedding, Packed):
            return self.embedding.rows(tokens).astype(self.dtype)
        return jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)

    def attend(self, x: Array) -> Array:
        """float32 products of `x` `[B, T, E]` with all rows of the table, `[B, T, V]`."""
        if isinstance(self.embedding, Packed):
            return multiply(x, self.embedding, self.dtype)
        table = jnp.asarray(self.embedding, self.dtype)
        return jnp.einsum("bte,ve->btv", x, table, preferred_element_type=jnp.float32)


def pack(params: Params, config: Any, weights: str | None = None) -> Params:
    """Parameters with their matrices held as decoding reads them fastest (`held`)."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({name: held(name, leaf, config, weights) for name, leaf in flat.items()}, sep="/")


def held(name: str, leaf: Any, config: Any, weights: str | None = None) -> Any:
    """One parameter as decoding reads it fastest: kernels, and an embedding that makes the logits, packed.

    Where XLA multiplies, only 8 bits change a matrix's form. On a CPU without `runtime.products` 16 bits are widened,
    once: XLA would do it at every call, in many times the product's own time.

    Args:
        name: of the parameter, "a/b/kernel".
        leaf: plain or packed already, which is left as it is.
        config: of the model: whether its embedding is tied, the dtype of computation.
        weights: what matrices are held in, of `products.KINDS`; `None`: what they are in.
    """
    last = name.rsplit("/", 1)[-1]
    if isinstance(leaf, Packed) or not (last == "kernel" or (last == "embedding" and config.tied)):
        return leaf
    kind = weights or leaf.dtype.name
    in_panels = products.available() and kind in products.KINDS
    if not in_panels:
        products.suggest(leaf.size)
    if in_panels or kind == "int8":
        return panels(np.asarray(leaf), kind, products.width() if in_panels else None, turned=last == "embedding")
    return np.asarray(leaf, np.float32) if jax.default_backend() == "cpu" and config.dtype == "float32" else leaf


def panels(leaf: np.ndarray, kind: str, width: int | None, turned: bool = False) -> Packed:
    """A parameter as a matrix `[K, N]` in panels of `width` columns (`None`: a single one), held as `kind`.

    Args:
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
    for number in range(count):  # one after the other: no second copy of the matrix
        part = matrix[:, number * width : (number + 1) * width]
        out[number, :, : part.shape[1]] = part
    if scales is not None:
        scales = jax.device_put(np.pad(scales, (0, count * width - columns), constant_values=1.0))
    return Packed(jax.device_put(out), scales, columns, turned)


def quantised(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers in [-127, 127] `[K, N]`, and what each column is to be multiplied by, float32 `[N]`.

    Symmetric, to the nearest: an entry is off by at most half a 127th of the largest one of its column.
    """
    matrix = np.asarray(matrix, np.float32)
    scales = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float32).tiny) / _LARGEST
    return np.rint(matrix / scales).astype(np.int8), scales.astype(np.float32)
