"""Fused chains of matrix products: kernels that compute products together with norms, gates and residual sums.

A model describes a chain as a list of links (`product_chains.Link`). On TPUs, one kernel computes the whole chain
(`product_chains`). On GPUs, one kernel computes each link (`triton_products`). On a mesh, every device multiplies by
its columns or rows of the matrices. Where rows are split, the devices add up their partial sums between two kernels.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.types import Array, Packed, Params, is_packed
from speccascade_jax.models import product_chains, triton_products
from speccascade_jax.models.decode_attention import LANES
from speccascade_jax.models.product_chains import Link
from speccascade_jax.models.sharding import COLUMNS, P, local, summed, whole_mesh
from speccascade_jax.models.stacks import InStack
from speccascade_jax.runtime import platforms
from speccascade_jax.runtime.mesh import DATA, MODEL


def computes_around(params: Params, x: Array, sizes: tuple[int, ...]) -> bool:
    """Returns whether fused kernels can compute the matrix products of some layers (`chain`).

    Args:
        params: the layers' parameters.
        x: the input of the first product, `[..., K]`.
        sizes: for each product, the number of input features on one device.
    """
    mesh, on_tpu = whole_mesh(), platforms.uses_kernels()
    rows = x.size // x.shape[-1] // (1 if mesh is None else mesh.shape[DATA])
    if not (on_tpu or mesh is None) or not (product_chains if on_tpu else triton_products).fits(rows, sizes, x.dtype):
        return False
    # No kernel takes packed 8-bit matrices, so XLA multiplies by them. The TPU kernel converts no dtypes, so all its
    # matrices must have the dtype of `x`.
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, (Packed, InStack)))
    return all(isinstance(leaf, InStack) or _is_plain(leaf, x.dtype if on_tpu else None) for leaf in leaves)


def _is_plain(leaf: Any, dtype: Any) -> bool:
    """Returns whether a parameter is not packed and, if it is a matrix, has this dtype (`None`: any dtype)."""
    return not is_packed(leaf) and (dtype is None or leaf.ndim < 2 or leaf.dtype == dtype)


def chain(x: Array, links: Sequence[Link], dtype: str, state: Array | None = None) -> tuple[Array, Array]:
    """Computes a chain of products; returns the state after it `[B, T, E]`, and its last result `[B, T, N]`.

    The arguments are those of `product_chains.multiply`. `computes_around` must be true for the parameters. On GPUs,
    one kernel computes each link. On a mesh, the chain is divided where devices add up their partial sums.
    """
    if not platforms.uses_kernels():
        return _chain_of_kernels(x, links, dtype, state)
    if whole_mesh() is None:
        return product_chains.multiply(x, links, state, dtype)
    for segment in _segments(links):
        state, x = _on_mesh(x, segment, dtype, state)
    assert state is not None
    return state, x


def _chain_of_kernels(x: Array, links: Sequence[Link], dtype: str, state: Array | None) -> tuple[Array, Array]:
    """Computes a chain with a kernel for each link (on GPUs)."""
    # The links have no post-norms and no rotations, because on GPUs only T5s, which have neither, use chains.
    state = x if state is None else state
    for link in links:
        x = triton_products.multiply(
            x if link.norm is None else state, link.matrix, dtype, norm=link.norm, gate=link.gate,
            residual=state if link.adds else None,
        )  # fmt: skip
        state = x if link.adds else state
    return state, x


def _segments(links: Sequence[Link]) -> Iterator[list[Link]]:
    """Divides a chain after each product that gives partial sums; the next segment adds the total to the state."""
    # The sum over devices must be complete before it is added to the state, and before a norm reads the state.
    segment: list[Link] = []
    for link in links:
        if not link.summed:
            segment.append(link)
            continue
        yield [*segment, link._replace(adds=False, post=None)]
        segment = [Link(None, adds=True, post=link.post)] if link.adds else []
    if segment:
        yield segment


def _on_mesh(x: Array, links: list[Link], dtype: str, state: Array | None) -> tuple[Array, Array]:
    """Computes a segment of a chain on each device's rows and columns; returns the state and the last result."""
    first, last, rows = links[0], links[-1], P(DATA)
    before = x if state is None else state
    changes = any(link.adds for link in links)
    # The state is an input only of segments that read or change it.
    inputs = (x, state) if state is not None and (changes or any(link.norm for link in links)) else (x,)
    # A link also holds numbers and functions. They have no layout on the mesh, so only its arrays are arguments.
    leaves, tree = jax.tree.flatten(links, is_leaf=lambda leaf: leaf is None)
    layouts = jax.tree.leaves([_layout(link) for link in links], is_leaf=lambda leaf: leaf is None)
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def compute(arrays: list[Array], x: Array, state: Array | None = None) -> tuple[Array, ...]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        local_links = jax.tree.unflatten(tree, filled)
        after, y = product_chains.multiply(x, local_links, state, dtype, partial_sum=last.summed)
        # Partial sums have the activations' dtype, as without the kernel, so with bfloat16 devices send only 16 bits.
        y = summed(y) if last.summed else y
        return (after, y) if changes else (y,)

    spread = rows if first.norm is not None or first.matrix is None else COLUMNS
    results = (*[rows] * changes, rows if last.summed or last.adds else COLUMNS)
    specs: Any = ([layouts[place] for place in places], *(spread, rows)[: len(inputs)])
    outputs = local(compute, specs, results)([leaves[place] for place in places], *inputs)
    return (outputs[0] if len(outputs) > 1 else before), outputs[-1]


def _layout(link: Link) -> Link:
    """Returns a link with the layouts of its arrays on a mesh instead of the arrays."""
    spec = P(MODEL, None) if link.summed else P(None, MODEL)
    matrix = InStack(P(None, *spec), P()) if isinstance(link.matrix, InStack) else None if link.matrix is None else spec
    norm, post = (norm and norm._replace(scale=_whole(norm.scale)) for norm in (link.norm, link.post))
    rotation = link.rotation
    if rotation is not None:
        # If all rows share the angles, their first axis is 1 and cannot be split.
        rows: Any = P(DATA if rotation.cosine.shape[0] > 1 else None)
        rotation = rotation._replace(cosine=rows, sine=rows)
    return link._replace(matrix=matrix, norm=norm, post=post, rotation=rotation)


def _whole(scale: Any) -> Any:
    """Returns the layout of a norm's scale, which every device holds in full."""
    return InStack(P(), P()) if isinstance(scale, InStack) else P()


def in_stack(params: Params, stack: Params, number: Any) -> Params:
    """Returns a layer's parameters with its matrices and norm scales replaced by their places in a stack of layers.

    `chain` then reads them from the stack. `stack` is a result of `tiled_scales`; `number` is the layer's index.
    """
    # The replaced parameters are slices of the stack. Nothing reads them any more, so XLA never computes them.
    layer, flat = jnp.asarray(number, jnp.int32), flatten_dict(params, sep="/")
    parts = {name: InStack(leaf, layer) for name, leaf in flatten_dict(stack, sep="/").items() if _is_read(name)}
    out: Params = unflatten_dict(flat | parts, sep="/")
    return out


def tiled_scales(stack: Params) -> Params:
    """Returns stacked parameters with the norm scales reshaped to `[L, E / 128, 128]`, the tiles that kernels read."""
    flat = flatten_dict(stack, sep="/")
    scales = {name: leaf for name, leaf in flat.items() if name.endswith("/scale") and leaf.shape[-1] % LANES == 0}
    # The scales are reshaped here, once, because the loop over layers would do it in every iteration.
    tiles = {name: leaf.reshape(len(leaf), -1, LANES) for name, leaf in scales.items()}
    out: Params = unflatten_dict(flat | tiles, sep="/")
    return out


def _is_read(name: str) -> bool:
    """Returns whether kernels read a layer's parameter of this name."""
    return name.endswith(("/kernel", "/scale"))
