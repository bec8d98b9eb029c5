"""Speculative cascades in JAX: one decoding engine in which a small model drafts and a large one verifies."""

from speccascade_jax import checkpoints, models, rules
from speccascade_jax.api import DecodeOutput, decode, target_law
from speccascade_jax.models.base import BoundModel
from speccascade_jax.models.fake import FakeLM
from speccascade_jax.models.table import TableLM
from speccascade_jax.pair import Pair, load_pair, shipped_pairs
from speccascade_jax.rules import RULES, Rule
from speccascade_jax.streaming import StreamedToken, stream

__version__ = "0.1.0"
__all__ = [
    "RULES",
    "BoundModel",
    "DecodeOutput",
    "FakeLM",
    "Pair",
    "Rule",
    "StreamedToken",
    "TableLM",
    "checkpoints",
    "decode",
    "load_pair",
    "models",
    "rules",
    "shipped_pairs",
    "stream",
    "target_law",
]
