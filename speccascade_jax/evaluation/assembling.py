"""From a point to what assembles it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.types import Controls
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.points import Method, Sampling
from speccascade_jax.methods.assemble import method_controls


def point_parts(method: Method, heads: Heads) -> dict[str, Any]:
    """What `assemble` and `build` are told of a point's method, beside the pair, whose heads are given, and stop ids.

    Raises:
        FileNotFoundError, CheckpointError, ValueError: as `Heads.of`.
    """
    return {
        "method": method.recipe.name,
        "rule": None if method.autoregressive else method.decides,
        "block_size": method.block_size,
        "bonus": method.bonus,
        "head": heads.of(method),
    }


def point_controls(method: Method, sampling: Sampling, alphas: Sequence[float | None]) -> Controls:
    """The numbers of a point's method and sampling for rows with one α each, `None` where the rule has none.

    Raises:
        ValueError: as `method_controls`.
    """
    return method_controls(
        method.recipe.name,
        None if method.autoregressive else method.decides,
        len(alphas),
        alpha=None if None in alphas else np.asarray(alphas, np.float32),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        draft_temperature=sampling.draft_temperature,
        stop_threshold=method.stop_threshold,
    )
