"""Checks of the shapes and types that a user's drafter returns, made while JAX traces a round, before it compiles."""

from typing import Any

import jax.numpy as jnp

from speccascade_jax.core.protocols import Drafter, Request
from speccascade_jax.core.types import Cache, Draft, Params, PyTree

_KINDS: dict[str, tuple[Any, str]] = {
    "tokens": (jnp.integer, "int32"),
    "length": (jnp.integer, "int32"),
    "q": (jnp.floating, "float32"),
    "q_tilde": (jnp.floating, "float32"),
    "greedy": (jnp.bool_, "bool"),
    "steps": (jnp.integer, "int32"),
    "bad": (jnp.bool_, "bool"),
}


def proposed(drafter: Drafter, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
    """Calls `drafter.propose`; raises a ValueError if a user's drafter returns wrong shapes or types."""
    result: Any = drafter.propose(params, state, request)
    kind = type(drafter)
    if kind.__module__.startswith("speccascade_jax.") or getattr(drafter, "tree", None) is not None:
        checked: tuple[Draft, PyTree, Cache] = result
        return checked
    name = f"drafter '{kind.__module__}.{kind.__qualname__}'"
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], Draft):
        raise ValueError(f"{name}: propose must return (Draft, state, request.target.cache)")
    _check(name, result[0], drafter.block, request)
    return result


def _check(name: str, draft: Draft, block: int, request: Request) -> None:
    rows, buffer = len(request.length), request.block.q.shape
    row, laws = ("[B]", (rows,)), ("[B, block + 1, V]", (rows, block + 1, buffer[-1]))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        **dict.fromkeys(("length", "greedy", "steps"), row),
        **dict.fromkeys(("q", "q_tilde"), laws),
        "tokens": ("[B, block]", (rows, block)),
        "bad": ("[B, block + 1]", (rows, block + 1)),
    }
    for field, (axes, expected) in shapes.items():
        value, (kind, dtype) = getattr(draft, field), _KINDS[field]
        shape = jnp.shape(value)
        # a drafter may return the round's buffers, which may have more positions than its own blocks
        in_buffer = (axes, shape) == (laws[0], buffer)
        if shape != expected and not in_buffer:
            raise ValueError(f"{name}: Draft.{field} has shape {shape}, expected {axes} = {expected}")
        if not jnp.issubdtype(jnp.result_type(value), kind):
            raise ValueError(f"{name}: Draft.{field} is {jnp.result_type(value)}, expected {dtype}")
