"""Speculative cascades in JAX: one decoding engine in which a small model drafts and a large one verifies."""

import importlib
from typing import Any

from speccascade_jax.runtime import moved

__version__ = "0.3.0"

_HOMES = {
    "api": ("DecodeOutput", "decode", "target_law"),
    "streaming": ("StreamedToken", "stream"),
    "core.types": ("BoundModel",),
    "models.fake": ("FakeLM", "TableLM"),
    "pairs.pair": ("Pair", "load_pair", "shipped_pairs"),
    "rules.rule": ("Rule",),
    "rules.deferral": ("RULES", "fuzzy", "lossy"),
    "methods.checking": ("check_rule",),
    "methods.settings": ("Arm", "Level"),
    "methods.table": ("METHODS",),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_NAMES, "checkpoints"])
moved.install()


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562), so that importing the package alone does not load JAX."""
    if name == "checkpoints":
        return importlib.import_module("speccascade_jax.checkpoints")
    if name not in _NAMES:
        raise AttributeError(f"module 'speccascade_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"speccascade_jax.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    """Returns the names that `__getattr__` knows, for completion."""
    return [*globals(), *__all__]
