"""Kernels of a layer's experts in transformers' files: a tensor for each expert, or for all experts of the layer.

Files on the hub, and those that transformers writes by default, have `mlp.experts.N.gate_proj.weight`, `up_proj` and
`down_proj` (Mixtral: `block_sparse_moe.experts.N.w1`, `w3` and `w2`). Release 5 can also write
`mlp.experts.gate_up_proj` `[X, 2 F, E]` and `mlp.experts.down_proj` `[X, E, F]`. `X` is the number of experts, `F` that
of an expert's hidden units, and `E` is d_model.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from speccascade_jax.checkpoints.array_plan import Piece, Pieces, Tensor, Tensors, whole
from speccascade_jax.checkpoints.byte_ranges import Part, shape_of_part
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError

_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_ALL = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked(tensors: Mapping[str, Tensor]) -> Tensors:
    """Returns tensors, not yet read, in which those of a layer's experts are stacked; other tensors are unchanged.

    Tensors of each expert become `mlp.experts.gate_proj.weight` `[X, F, E]` and so on, and `gate_up_proj` becomes
    `[X, 2, F, E]`.

    Raises:
        CheckpointError: the tensor of an expert is missing, or has another shape or dtype than those of the layer's
            other experts; the message names the expert.
    """
    out: Tensors = {}
    groups: dict[str, dict[int, str]] = {}
    for name, tensor in tensors.items():
        if one := _ONE.fullmatch(name):
            layer, number, part = one[1], int(one[2]), _MIXTRAL.get(one[3], one[3])
            groups.setdefault(_of_model(f"{layer}.{part}.weight"), {})[number] = name
        elif every := _ALL.fullmatch(name):
            out |= {name: _halves(tensor)} if every[2] == "gate_up_proj" else {f"{name}.weight": tensor}
        else:
            out[_of_model(name)] = tensor
    for name, group in groups.items():
        out[name] = _stack(_alike(group, tensors))
    return out


def _alike(group: Mapping[int, str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the tensors of a layer's experts in the order of their numbers.

    Args:
        group: an expert's number -> the name of its tensor.
        tensors: the stored tensors.

    Raises:
        CheckpointError: as in `stacked`.
    """
    numbers = sorted(group)
    first = tensors[group[numbers[0]]]
    for number in range(len(numbers)):
        if number not in group:
            near = group[numbers[-1]]
            raise CheckpointError(
                f"{first.file}: {near} is stored, but the tensor of expert {number} is missing: {COPY_AGAIN}"
            )
        tensor = tensors[group[number]]
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{tensor.file}: {group[number]} is {tensor.dtype} {list(tensor.shape)}, but that of expert 0 is "
                f"{first.dtype} {list(first.shape)}: {COPY_AGAIN}"
            )
    return [tensors[group[number]] for number in numbers]


def _of_model(name: str) -> str:
    """Returns the name that transformers 5 gives a tensor of Mixtral's files; returns other names unchanged."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def _stack(parts: list[Tensor]) -> Tensor:
    """Returns one tensor `[X, …]` that stacks `X` tensors of the same shape when it is read."""

    def read() -> np.ndarray:
        return np.stack([part.read() for part in parts])

    def read_part(part: Part) -> np.ndarray:
        return np.stack([_part(tensor, part[1:]) for tensor in parts[part[0]]])

    addressable = all(part.read_part is not None for part in parts)
    return replace(
        parts[0], shape=(len(parts), *parts[0].shape), read=read, read_part=read_part if addressable else None
    )


def _halves(tensor: Tensor) -> Tensor:
    """Returns `gate_up_proj` as `[X, 2, F, E]`, so that each half is a stored array that stacks two parameters."""
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        return tensor
    experts, both, width = tensor.shape
    units, read, read_part = both // 2, tensor.read, tensor.read_part
    shape = (experts, 2, units, width)

    def part_of(part: Part) -> np.ndarray:
        # A part has units of one half, or all units of both, so its rows are consecutive.
        expert, half, unit, column = part
        rows = slice(half.start * units + unit.start, (half.stop - 1) * units + unit.stop)
        return _part(tensor, (expert, rows, column)).reshape(shape_of_part(part))

    return replace(
        tensor, shape=shape, read=lambda: read().reshape(shape), read_part=None if read_part is None else part_of
    )


def _part(tensor: Tensor, part: Part) -> np.ndarray:
    return tensor.read()[part] if tensor.read_part is None else tensor.read_part(part)


def pieces(source: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Pieces:
    """Returns the pieces of a parameter of `shape` `[X, inputs, outputs]`.

    Args:
        source: the name of the parameter's tensor in the form with a tensor for each expert.
        shape: the parameter's shape.
        tensors: tensors that `stacked` returned.
    """
    layer, part, _ = source.rsplit(".", 2)
    if part == "down_proj" or (both := f"{layer}.gate_up_proj") not in tensors:
        return whole(source, shape, transposed=True)
    experts, width, units = shape
    half = int(part == "up_proj")
    return (Piece(both, (experts, 2, units, width), shape, order=(0, 2, 1), take=(1, half)),)
